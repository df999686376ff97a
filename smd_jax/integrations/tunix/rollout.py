"""The rollout engine for Tunix' RLCluster: samples with a cache of fixed size and keeps the trajectories."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key, PyTree
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout import base_rollout

from smd_jax.eviction.base import EvictionPolicy
from smd_jax.integrations.tunix.actor import Actor
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.sampling import SamplingConfig
from smd_jax.message.trajectory import Trajectory
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.fixed_batch import rollout
from smd_jax.sampler.static import Sampler
from smd_jax.text.prompts import PromptBatch, Tokenizer, check_vocabulary, pad_left


class SmdRollout(base_rollout.BaseRollout):
    """Samples under a budget. `ClusterConfig.rollout_engine` takes a partial of it:

        functools.partial(SmdRollout, policy=smd.eviction.H2O(), budget=128, buffer=32)

    Lengths, temperature, filters, end tokens and seed are those of Tunix' RolloutConfig. Each `generate` samples one
    batch, whose rows `rollout_micro_batch_size` limits. Equal prompts in a row are read once.

    Tunix keeps tokens, text and log-probabilities. Trajectories stay here from `start_record` until `take_record`.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: TokenizerAdapter,
        mesh: jax.sharding.Mesh,
        rollout_config: base_rollout.RolloutConfig,
        *,
        policy: EvictionPolicy,
        budget: int,
        buffer: int,
        prefill_chunk: int | None = None,
        quant: QuantConfig | None = None,
    ) -> None:
        """
        Args:
          rollout_actor, tokenizer, mesh, rollout_config: RLCluster's.
          policy, budget, buffer, prefill_chunk, quant: as in `smd_jax.rollout` and `smd_jax.RolloutConfig`.

        Raises:
          TypeError: `rollout_actor` is not an Actor, or `policy` not an eviction policy.
          ValueError: the tokenizer belongs to another model, or sizes don't fit together.
        """
        if not isinstance(rollout_actor, Actor):
            raise TypeError(f"actor: expected a smd_jax.integrations.tunix.Actor; got {type(rollout_actor).__name__}")
        check_tokenizer(tokenizer, rollout_actor.model.shape.vocab_size)
        self._actor = rollout_actor
        self._tokenizer = tokenizer
        self._policy = policy
        self._key = _typed_key(rollout_config.seed)
        self._step = 0
        self._records: list[Trajectory] | None = None
        self._rows_asked_for = 0
        lengths = rollout_config.max_tokens_to_generate
        self._sizes = RolloutConfig(
            max_new_tokens=lengths, budget=budget, buffer=buffer, prefill_chunk=prefill_chunk, quant=quant
        )
        # Checks that sizes, policy and model fit together.
        Sampler(rollout_actor.model, policy, self._config(rollout_config), rollout_config.max_prompt_length)

    def generate(self, prompts: list[Any], rollout_config: base_rollout.RolloutConfig) -> base_rollout.RolloutOutput:
        """Samples one completion per prompt. Its tokens include the end token, its text does not."""
        wrong = [type(prompt).__name__ for prompt in prompts if not isinstance(prompt, str)]
        if wrong:
            # Tunix repeats the items of a list one by one, but an array as a whole.
            raise TypeError(f"prompts: expected strings, in the data set a NumPy array of them; got {wrong[0]}")
        batch, group = self._encode(prompts, rollout_config.max_prompt_length)
        part = 0 if self._records is None else len(self._records)
        trajectory = rollout(
            self._actor.model,
            self._actor.params,
            batch,
            jax.random.fold_in(jax.random.fold_in(self._key, self._step), part),
            policy=self._policy,
            config=self._config(rollout_config),
            group_size=group,
        )
        if self._records is None:
            self._step += 1
        else:
            # Tunix trains no evictions, and draws of groups of different sizes cannot be joined.
            self._records.append(trajectory.replace(evictions=None))
        return self._output(trajectory)

    def start_record(self, step: int) -> None:
        """Begins a record of sampled rows. The same step uses the same random numbers."""
        self._step = step
        self._records = []
        self._rows_asked_for = 0

    def take_record(self) -> Trajectory:
        """Ends the record; the rows that were sampled since `start_record`, in order."""
        record = self._record()
        self._records = None
        return record

    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "rows P"], completion_tokens: Int[Array, "rows R"]
    ) -> Float[Array, "rows R"]:
        """The sampler's log-probabilities of the next rows of the record; ValueError for other rows."""
        record = self._record()
        asked = np.concatenate([prompt_tokens, completion_tokens], axis=1)
        rows = slice(self._rows_asked_for, self._rows_asked_for + len(asked))
        if not np.array_equal(asked, record.tokens[rows]):
            raise ValueError(f"prompt_tokens, completion_tokens: expected {rows} of the last rollout; got other tokens")
        self._rows_asked_for = rows.stop
        return record.logprobs[rows]

    def update_params(self, params: PyTree, filter_types: tuple[type, ...] | None = None) -> None:
        """Replaces these parameters of the actor."""
        nnx.update(self._actor, params)

    def pad_id(self) -> int:
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        return self._tokenizer.eos_id()

    def model(self) -> Actor:
        return self._actor

    def _record(self) -> Trajectory:
        if not self._records:
            raise ValueError("expected rollouts since start_record, which SmdGRPOLearner calls; got none")
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *self._records)

    def _config(self, given: base_rollout.RolloutConfig) -> RolloutConfig:
        """Our RolloutConfig for Tunix'."""
        top_k = 0 if given.top_k in (None, -1) else given.top_k
        top_p = 1.0 if given.top_p is None else given.top_p
        return dataclasses.replace(
            self._sizes,
            max_new_tokens=given.max_tokens_to_generate,
            eos_token_id=tuple(given.eos_tokens or [self.eos_id()]),
            pad_token_id=self.pad_id(),
            sampling=SamplingConfig(temperature=given.temperature, top_k=top_k, top_p=top_p),
        )

    def _encode(self, prompts: list[str], width: int) -> tuple[PromptBatch, int]:
        """The left-padded prompts, and how many completions to sample for each: equal neighbours are one prompt."""
        runs = [(prompt, len(list(copies))) for prompt, copies in itertools.groupby(prompts)]
        group = math.gcd(*(count for _, count in runs))
        texts = [prompt for prompt, count in runs for _ in range(count // group)]
        # One beginning-of-sequence token, if the tokenizer has it, as Tunix' own sampler does.
        begin = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
        rows = [self._tokenizer.dedup_bos_ids(begin + self._tokenizer.encode(text)) for text in texts]
        for text, ids in zip(texts, rows, strict=True):
            if not 0 < len(ids) <= width:
                raise ValueError(f"max_prompt_length: expected 1 to {width} tokens; got {len(ids)} in {text[:80]!r}")
        return pad_left(rows, width, self.pad_id()), group

    def _output(self, trajectory: Trajectory) -> base_rollout.RolloutOutput:
        lengths = np.asarray(trajectory.lengths())
        ended = np.asarray(trajectory.terminated)
        tokens = [row[:length] for row, length in zip(np.asarray(trajectory.response), lengths, strict=True)]
        logprobs = [row[:length] for row, length in zip(np.asarray(trajectory.logprobs), lengths, strict=True)]
        texts = [row[:-1] if end else row for row, end in zip(tokens, ended, strict=True)]
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(ids.tolist()) for ids in texts],
            logits=[],
            tokens=tokens,
            left_padded_prompt_tokens=np.asarray(trajectory.tokens[:, : trajectory.prompt_width]),
            logprobs=logprobs,
        )


def check_tokenizer(tokenizer: TokenizerAdapter, vocab_size: int) -> None:
    """Raises ValueError for a tokenizer that was made for another vocabulary than the model's."""
    if isinstance(tokenizer.tokenizer, Tokenizer):
        check_vocabulary(tokenizer.tokenizer, vocab_size)
    ids = {"pad_id": tokenizer.pad_id(), "eos_id": tokenizer.eos_id()}
    if not all(isinstance(token, int) and 0 <= token < vocab_size for token in ids.values()):
        raise ValueError(f"tokenizer: expected pad_id and eos_id from 0 to {vocab_size - 1}; got {ids}")


def _typed_key(seed: Array | int | None) -> Key[Array, ""]:
    """The key of Tunix' seed: None, a number, or a key of `jax.random.PRNGKey` or `jax.random.key`."""
    if seed is None or isinstance(seed, int):
        return jax.random.key(seed or 0, impl="threefry2x32")
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return seed
    return jax.random.wrap_key_data(seed, impl="threefry2x32")
