"""The sampler: prompts are read, then segments of `buffer` tokens are drawn and read, with a compression after each.

    prefill ─► compress ─► [draw, read] × buffer ─► compress ─► [draw, read] × buffer ─► compress ─► …
               evicted_at = P                        evicted_at = P + buffer            evicted_at = P + 2 buffer

A step draws a token from the newest hidden state of every row, writes its key, attends to every live key, and so comes
to the next hidden state. After a segment each layer and KV head keeps its `budget` best keys. All rows of a cache write
the same slot at the same step, but each counts its own columns: between two segments another prompt may take a row.

Here is what does not change from rollout to rollout; the parts are pure functions of it, of parameters and of a state:

    smd_jax.sampler.prefill     prompts ─► Prefilled
    smd_jax.sampler.seats       Prefilled ─► rows of a SamplerState
    smd_jax.sampler.segment     SamplerState ─► SamplerState, SegmentRecord
    smd_jax.sampler.records     records of all segments ─► Trajectory

`smd_jax.sampler.fixed_batch` runs them as one program for a fixed batch, `smd_jax.sampler.engine` segment by segment,
with rows that come and go.
"""

from __future__ import annotations

from dataclasses import dataclass

from smd_jax.cache.compression import Compression
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.model.protocol import LanguageModel
from smd_jax.sampler.config import RolloutConfig, plan


@dataclass(frozen=True)
class Sampler:
    """What does not change from rollout to rollout; static.

    Attributes:
      prompt_width: P, columns of the prompt; the response begins at column P.

    Raises:
      ValueError: if the budget cannot hold what the policy protects, prompt and response exceed the model's context, or
        the tokens that end and pad a response are not in its vocabulary.
    """

    model: LanguageModel
    policy: EvictionPolicy
    config: RolloutConfig
    prompt_width: int

    def __post_init__(self) -> None:
        plan(self.policy, self.config, self.model.shape.num_layers, self.prompt_width)
        if self.prompt_width + self.config.max_new_tokens > self.model.shape.max_positions:
            raise ValueError(
                f"expected prompt + response within the model's context of {self.model.shape.max_positions} tokens; "
                f"got {self.prompt_width} + {self.config.max_new_tokens}"
            )

        vocab_size = self.model.shape.vocab_size
        for name, token in (("eos_token_id", self.config.eos_token_id), ("pad_token_id", self.config.pad_token_id)):
            if token is not None and not 0 <= token < vocab_size:
                raise ValueError(f"expected {name} from 0 to {vocab_size - 1}, the model's vocabulary; got {token}")

    @property
    def columns(self) -> int:
        """T, of prompt and response."""
        return self.prompt_width + self.config.max_new_tokens

    @property
    def compresses(self) -> bool:
        """Whether anything happens to the cache between segments."""
        return self.policy.evicts or self.config.quant is not None

    @property
    def budgets(self) -> tuple[int, ...]:
        """Slots of each layer at the left of the buffer."""
        return plan(self.policy, self.config, self.model.shape.num_layers, self.prompt_width)[0]

    def compressions(self, buffer: int) -> tuple[Compression, ...]:
        """Of every layer, to so many empty slots beside the budget."""
        quant = self.config.quant
        record_parity = quant is not None and quant.record_parity
        window = self.model.shape.window
        return tuple(
            Compression(self.policy, budget, buffer, layer, record_parity, window(layer))
            for layer, budget in enumerate(self.budgets)
        )

    @property
    def row_buffer(self) -> int:
        """Slots of each layer at the right of the budget."""
        return plan(self.policy, self.config, self.model.shape.num_layers, self.prompt_width)[1]
