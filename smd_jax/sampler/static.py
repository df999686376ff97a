"""The sampler: prefill, then segments of `buffer` sampled tokens, with a compression after each.

    prefill ─► compress ─► [draw, read] × buffer ─► compress ─► [draw, read] × buffer ─► compress ─► …
               evicted_at = P                        evicted_at = P + buffer            evicted_at = P + 2 buffer

A step samples a token from the newest hidden state of every row, writes its key, attends to every live key, and
computes the next hidden state. After a segment each layer and KV head keeps its `budget` best keys. All rows of a cache
write the same slot at the same step, but each row has its own columns, because another prompt may take a row between
two segments.

The timeline has four counters. Prompts of P columns, a buffer of 4, a budget of b keys; row B is seated after the first
segment, at cache step four. (A row's first token is sampled from the prompt's last hidden state, and enters the cache
in the same step.)

    cache_steps + segment_step    0     1     2     3   │  4     5     6     7   │  8  …     one for all rows of a cache
    segment_step                  0     1     2     3   │  0     1     2     3   │  0  …     restarts every segment
    query_number                 P+0   P+1   P+2   P+3  │ P+4   P+5   P+6   P+7  │ P+8 …     P + the first line
    slot, with compression        b     b+1   b+2   b+3 │  b     b+1   b+2   b+3 │  b  …     b + segment_step
    row A   drawn before          0     1     2     3   │  4     5     6     7   │  8  …     each row its own
            column               P+0   P+1   P+2   P+3  │ P+4   P+5   P+6   P+7  │ P+8 …     P + drawn before
    row B   drawn before                        seated ►│  0     1     2     3   │  4  …
            column                                      │ P+0   P+1   P+2   P+3  │ P+4 …

Masks and positions in the learner use columns. Slots and query numbers exist only in the cache.

Without compression (Dense), a cache is a ring of P + R slots, and a token's slot is `query_number % (P + R)`. When a
row is seated late, its prompt is rotated by as many slots as the cache has steps, so that its response follows its
prompt. P = 2, R = 4, row B seated at cache_steps 3, where query_number is 5:

    slot       0    1    2    3    4    5
    row A     p0   p1   r0   r1   r2   r3        r0 is written to slot 2, when query_number is 2
    row B     r1   r2   r3   p0   p1   r0        r0 to slot 5, then round the ring

`Sampler` holds the static parts, and `sampler_params` converts the parameters once. The rest are pure functions of both
and a state, in `smd_jax.sampler.prefill`, `seats`, `segment` and `records`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax

from smd_jax.cache.compression import Compression
from smd_jax.devices.sharding import constrain_tree
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.model.layer_runs import equal_runs
from smd_jax.model.lora import check_reads_lora
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.sampler.config import RolloutConfig, plan


@dataclass(frozen=True)
class Sampler:
    """The static parts of a rollout: model, policy, config, prompt width.

    Attributes:
      prompt_width: P, columns of the prompt; the response begins at column P.

    Raises:
      ValueError: if the budget cannot hold what the policy protects, prompt and response exceed the model's context,
        the tokens that end and pad a response are not in its vocabulary, the value_group of a quantised cache does
        not divide head_dim, or draws of a gate could not be recomputed from the record.
    """

    model: LanguageModel
    policy: EvictionPolicy
    config: RolloutConfig
    prompt_width: int

    def __post_init__(self) -> None:
        # Called only for its checks of the policy and the budgets, before anything reads the policy.
        plan(self.policy, self.config, self.model.shape.num_layers, self.prompt_width)
        shape, config, gate, spans = self.model.shape, self.config, self.policy.gate, self.policy.spans
        if self.columns > shape.max_positions:
            raise ValueError(
                f"expected prompt_width + max_new_tokens within the model's context of {shape.max_positions} tokens; "
                f"got {self.prompt_width} + {config.max_new_tokens}"
            )
        if gate is not None:
            rest = f"with {type(self.policy).__name__}, whose draws the learner recomputes"
            if config.quant is not None:
                raise ValueError(f"expected quant None {rest} from precise keys; got {config.quant}")
            if config.prefill_chunk is not None:
                raise ValueError(f"expected prefill_chunk None {rest} after whole prompts; got {config.prefill_chunk}")
        if spans is not None:
            if max(spans.ids) >= shape.vocab_size:
                raise ValueError(f"expected token ids below {shape.vocab_size}, the model's vocabulary; got {spans}")
            if gate is not None:
                raise ValueError(f"expected a policy without draws with token spans; got {self.policy}")
            if config.quant is not None:
                # The range of a group needs all its columns, and some are evicted here before the group is full.
                raise ValueError(f"expected quant None with token spans; got {config.quant}")
        if config.quant is not None:
            config.quant.channels(shape.head_dim)  # called for its error
        ends = config.eos_token_id
        named = [("eos_token_id", end) for end in (ends if isinstance(ends, tuple) else (ends,))]
        for name, token in (*named, ("pad_token_id", config.pad_token_id)):
            if token is not None and not 0 <= token < shape.vocab_size:
                raise ValueError(
                    f"expected {name} from 0 to {shape.vocab_size - 1}, the model's vocabulary; got {token}"
                )

    @property
    def columns(self) -> int:
        """T, the columns of prompt and response."""
        return self.prompt_width + self.config.max_new_tokens

    @property
    def compresses(self) -> bool:
        """Whether the cache changes between segments."""
        return self.policy.evicts or self.config.quant is not None

    @property
    def layer_budgets(self) -> tuple[int, ...]:
        """Slots of each layer, without the buffer."""
        return plan(self.policy, self.config, self.model.shape.num_layers, self.prompt_width)[0]

    @property
    def runs(self) -> tuple[range, ...]:
        """Layers that share a LayerCache: those over which the model loops, if they have the same budget; see
        `ModelShape.runs`."""
        budgets = self.layer_budgets
        runs = self.model.shape.layer_runs
        alike = [equal_runs([budgets[layer] for layer in run], first=run.start) for run in runs]
        return tuple(run for parts in alike for run in parts)

    @property
    def budgets(self) -> tuple[int, ...]:
        """Slots of each layer of each run, without the buffer."""
        budgets = self.layer_budgets
        return tuple(budgets[layers[0]] for layers in self.runs)

    def compressions(self, buffer: int) -> tuple[Compression, ...]:
        """The compression of every run, which appends `buffer` empty slots to the budget."""
        window = self.model.shape.window
        return tuple(
            Compression(self.policy, budget, buffer, window(layers[0]))
            for layers, budget in zip(self.runs, self.budgets, strict=True)
        )

    @property
    def row_buffer(self) -> int:
        """Slots of each layer's buffer."""
        return plan(self.policy, self.config, self.model.shape.num_layers, self.prompt_width)[1]


def sampler_params(model: LanguageModel, params: Params) -> Params:
    """`model.compute_params`, with barriers that keep the conversion outside a decode loop.

    Raises:
      TypeError: as `check_reads_lora`.
    """
    check_reads_lora(model, params)
    # A leaf that is the same object was not converted, and needs no barrier.
    given = {id(leaf) for leaf in jax.tree.leaves(params)}

    def converted_here(leaf: jax.Array) -> jax.Array:
        # The compiler must not move the conversion into the decode loop.
        return leaf if id(leaf) in given else jax.lax.optimization_barrier(leaf)

    return jax.tree.map(converted_here, model.compute_params(params))


@partial(jax.jit, static_argnames=("model", "gathered"))
def converted(model: LanguageModel, params: Params, gathered: bool = False) -> Params:
    """`sampler_params` in a separate program, for a sampler in another program.

    Args:
      gathered: whether the parameters are gathered from fsdp: here, and not in every step of a segment.
    """
    return constrain_tree(sampler_params(model, params), gathered)
