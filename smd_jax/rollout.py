"""The rollout: prefill, then segments of `buffer` decode steps with a compression between them, in one jitted program.

    prompt ──prefill──► compress ─► [decode × buffer] ─► compress ─► [decode × buffer] ─► …  ─► Trajectory
                         evicted_at = P                   evicted_at = P + buffer

Query t writes its own key, attends to every live key, and after that attention, when all slots are full, each layer and
KV head keeps its `budget` best keys. What was dropped, and when, is the shadow mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from smd_jax import cache as kv_cache
from smd_jax.cache import EMPTY, KVCache, LayerCache
from smd_jax.config import ModelConfig
from smd_jax.eviction import CacheView, EvictionPolicy, check_budget
from smd_jax.masks import NEVER, Segments, ShadowMask, dense_mask, positions
from smd_jax.model import Decoder, Params, PrefillLayer, apply_model
from smd_jax.prompts import PromptBatch
from smd_jax.sampling import SamplingConfig, sample
from smd_jax.trajectory import Trajectory


@dataclass(frozen=True)
class RolloutConfig:
    """Sizes of a rollout, in tokens; static.

    Attributes:
      max_new_tokens: R, columns of the response.
      budget: keys kept per layer and KV head at a compression. Ignored by a policy that never evicts.
      buffer: queries between two compressions; the cache has `budget + buffer` slots.
      eos_token_id: ends a response; None never does. pad_token_id: fills what follows.
      sampling: temperature and filters.
      mask_storage: "compact" stores one integer per key, "boolean" the explicit T × T masks.
    """

    max_new_tokens: int
    budget: int
    buffer: int
    eos_token_id: int | None = None
    pad_token_id: int = 0
    sampling: SamplingConfig = SamplingConfig()
    mask_storage: Literal["compact", "boolean"] = "compact"

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "budget", "buffer"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1; got {getattr(self, name)}")


@no_type_check  # JAX rebuilds pytrees with leaves that are not arrays
class RolloutState(struct.PyTreeNode):
    """Carry of the decode loop; `step` response tokens are decided.

    Attributes:
      step: tokens written to `tokens` so far, at least 1.
      tokens: `[batch, R]`. logprobs: `[batch, R]`. emitted: `[batch, R]` tokens that belong to the response.
      done: `[batch]` rows that have emitted their end of sequence.
      cache: per layer. evicted_at: per layer `[batch, kv_heads, T]`, the shadow mask in the making.
    """

    step: Int[Array, ""]
    tokens: Int[Array, "batch R"]
    logprobs: Float[Array, "batch R"]
    emitted: Bool[Array, "batch R"]
    done: Bool[Array, " batch"]
    cache: KVCache
    evicted_at: tuple[Int[Array, "batch kv_heads T"], ...]


@partial(jax.jit, static_argnames=("model", "policy", "config"))
def rollout(
    model: Decoder,
    params: Params,
    prompts: PromptBatch,
    key: Key[Array, ""],
    *,
    policy: EvictionPolicy,
    config: RolloutConfig,
) -> Trajectory:
    """Samples one response per prompt with a KV cache of fixed size.

    Args:
      model, policy, config: static; equal ones compile once.
      params: parameters of `model`.
      prompts: left-padded, `[batch, P]`.
      key: random number generator state, the key is consumed. Row i draws from `fold_in(key, i)` alone.

    Raises:
      ValueError: if the budget cannot hold what the policy protects, or prompt and response exceed the model's context.
    """
    return _Rollout(model, params, prompts, key, policy, config).run()


class _Rollout:
    """One rollout's constants, so that the steps below are short functions of the state."""

    def __init__(
        self,
        model: Decoder,
        params: Params,
        prompts: PromptBatch,
        key: Key[Array, ""],
        policy: EvictionPolicy,
        config: RolloutConfig,
    ) -> None:
        self.model, self.params, self.prompts = model, params, prompts
        self.policy, self.config = policy, config
        self.batch, self.width = prompts.tokens.shape
        self.columns = self.width + config.max_new_tokens
        rows = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(self.batch))
        self.token_keys, self.eviction_keys = jax.vmap(jax.random.split, out_axes=1)(rows)
        self.start = jnp.argmax(prompts.valid, axis=1).astype(jnp.int32)
        self.budgets, self.buffer = plan(policy, config, model.config.num_layers, self.width)
        if self.columns > model.config.max_positions:
            raise ValueError(
                f"expected prompt + response within the model's context of {model.config.max_positions} tokens; "
                f"got {self.width} + {config.max_new_tokens}"
            )

    def run(self) -> Trajectory:
        state = self.prefill()

        def unfinished(state: RolloutState) -> Bool[Array, ""]:
            return (state.step < self.config.max_new_tokens) & ~jnp.all(state.done)

        state = jax.lax.while_loop(unfinished, lambda state: self.segment(state, unfinished), state)
        return self.trajectory(state)

    def prefill(self) -> RolloutState:
        """Reads the prompts densely, compresses every layer to its budget, draws the first token."""
        where = positions(self.prompts.valid)
        hidden, layers = apply_model(
            self.model,
            self.params,
            self.prompts.tokens,
            where,
            dense_mask(self.prompts.valid),
            self.policy.query_window,
            self.policy.observes_attention,
            method=Decoder.prefill,
        )
        never = jnp.full((self.batch, self.model.config.num_kv_heads, self.columns), NEVER, jnp.int32)
        cache, evicted_at = [], []
        for index, layer in enumerate(layers):
            filled, recorded = self.compress(self.from_prompt(layer), never, index, self.width, self.width)
            cache.append(filled)
            evicted_at.append(recorded)
        empty = jnp.zeros((self.batch, self.config.max_new_tokens))
        state = RolloutState(
            step=jnp.zeros((), jnp.int32),
            tokens=jnp.full(empty.shape, self.config.pad_token_id, jnp.int32),
            logprobs=empty.astype(jnp.promote_types(self.model.config.dtype, jnp.float32)),
            emitted=jnp.zeros(empty.shape, bool),
            done=jnp.zeros((self.batch,), bool),
            cache=tuple(cache),
            evicted_at=tuple(evicted_at),
        )
        return self.draw(state, hidden[:, -1:])

    def from_prompt(self, layer: PrefillLayer) -> LayerCache:
        """A layer's prompt as a cache of P slots, in column order with the padding first."""
        column = jnp.where(self.prompts.valid, jnp.arange(self.width)[None], EMPTY)[:, None]
        return LayerCache(
            keys=layer.keys,
            values=layer.values,
            columns=jnp.broadcast_to(column, layer.keys.shape[:3]).astype(jnp.int32),
            received=layer.received,
            queries=layer.queries,
        )

    def segment(self, state: RolloutState, unfinished) -> RolloutState:
        """Decodes until the buffer is full or nothing is left to do, then compresses."""
        first = state.step

        def going_on(state: RolloutState) -> Bool[Array, ""]:
            return (state.step < first + self.buffer) & unfinished(state)

        state = jax.lax.while_loop(going_on, lambda state: self.step(state, state.step - first), state)
        if not self.policy.evicts:
            return state
        now, boundary = (self.width - 1 + step for step in (state.step, first + self.buffer))
        compressed = [
            self.compress(layer, recorded, index, now, boundary)
            for index, (layer, recorded) in enumerate(zip(state.cache, state.evicted_at, strict=True))
        ]
        cache, evicted_at = zip(*compressed, strict=True)
        return state.replace(cache=cache, evicted_at=evicted_at)

    def step(self, state: RolloutState, filled: Int[Array, ""]) -> RolloutState:
        """Reads the newest token into buffer slot `filled` and draws the next."""
        column = self.width + state.step - 1
        token = jax.lax.dynamic_slice_in_dim(state.tokens, state.step - 1, 1, axis=1)
        hidden, cache = apply_model(
            self.model,
            self.params,
            token,
            (column - self.start)[:, None],
            state.cache,
            tuple(size + filled for size in self.budgets),
            column,
            ~state.done,
            method=Decoder.decode,
        )
        return self.draw(state.replace(cache=cache), hidden)

    def draw(self, state: RolloutState, hidden: Float[Array, "batch 1 hidden"]) -> RolloutState:
        """Draws the token that follows `hidden` and appends it to the rows that are not done."""
        logits = apply_model(self.model, self.params, hidden, method=Decoder.logits)[:, 0]
        keys = jax.vmap(lambda key: jax.random.fold_in(key, state.step))(self.token_keys)
        token, logprob = sample(logits, keys, self.config.sampling)
        live = ~state.done
        token = jnp.where(live, token, self.config.pad_token_id)
        ended = jnp.zeros_like(live) if self.config.eos_token_id is None else token == self.config.eos_token_id

        def put(x: Array, column: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(x, column[:, None].astype(x.dtype), state.step, axis=1)

        return state.replace(
            step=state.step + 1,
            tokens=put(state.tokens, token),
            logprobs=put(state.logprobs, jnp.where(live, logprob, 0.0)),
            emitted=put(state.emitted, live),
            done=state.done | (live & ended),
        )

    def compress(
        self,
        layer: LayerCache,
        evicted_at: Int[Array, "batch kv_heads T"],
        index: int,
        now: Int[Array, ""] | int,
        boundary: Int[Array, ""] | int,
    ) -> tuple[LayerCache, Int[Array, "batch kv_heads T"]]:
        """Keeps a layer's best keys at the left of an empty buffer; what it drops is invisible from `boundary` on.

        Args:
          now: column after the newest key. boundary: column after the segment, later than `now` if no row had
            anything left to say. No query follows then; dropping keys all the same keeps the mask to its segments.
        """
        budget, slots = self.budgets[index], layer.keys.shape[2]
        if slots <= budget:
            return kv_cache.pad(layer, budget - slots, self.buffer), evicted_at
        scores = self.policy.score(self.view(layer, index, now))
        kept, dropped = kv_cache.select(scores, layer.valid, budget)
        recorded = kv_cache.record(evicted_at, layer.columns, dropped & (boundary < self.columns), boundary)
        return kv_cache.gather(layer, kept, self.buffer), recorded

    def view(self, layer: LayerCache, index: int, now: Int[Array, ""] | int) -> CacheView:
        window = kv_cache.newest_columns(now - 1, max(self.policy.query_window, 1))[: self.policy.query_window]
        keys = jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, now), index))(self.eviction_keys)
        start = self.start[:, None, None]
        return CacheView(
            keys=layer.keys,
            values=layer.values,
            valid=layer.valid,
            positions=jnp.where(layer.valid, layer.columns - start, EMPTY),
            received=layer.received,
            queries=layer.queries,
            query_positions=window[None] - self.start[:, None],
            keys_rng=keys,
            budget=self.budgets[index],
        )

    def trajectory(self, state: RolloutState) -> Trajectory:
        valid = jnp.concatenate([self.prompts.valid, state.emitted], axis=1)
        recorded = jnp.stack(state.evicted_at, axis=1)
        recorded = jnp.where(valid[:, None, None], recorded, 0)
        segments = ()
        if self.policy.evicts:
            recorded = self.without_last(recorded, state)
            segments = tuple(Segments(self.width, self.buffer, budget) for budget in self.budgets)
        mask = ShadowMask(recorded, segments)
        ended = self.config.eos_token_id
        return Trajectory(
            tokens=jnp.concatenate([self.prompts.tokens, state.tokens], axis=1),
            valid=valid,
            logprobs=state.logprobs,
            terminated=jnp.zeros_like(state.done) if ended is None else state.done,
            mask=mask.to_boolean() if self.config.mask_storage == "boolean" else mask,
            temperature=self.config.sampling.temperature,
            replayable=self.config.sampling.trainable,
        )

    def without_last(self, evicted_at: Int[Array, "batch layers kv_heads T"], state: RolloutState) -> Array:
        """The mask in which nothing but itself sees a row's last token: it was drawn, but never entered the cache."""
        column = jnp.arange(self.columns, dtype=jnp.int32)[None]
        after = self.width + state.emitted.sum(axis=1, keepdims=True, dtype=jnp.int32)
        last = (column == after - 1) & (after < self.columns)
        return jnp.where(last[:, None, None], after[:, None, None], evicted_at)


def plan(
    policy: EvictionPolicy, config: RolloutConfig, num_layers: int, prompt_width: int
) -> tuple[tuple[int, ...], int]:
    """Keys kept per layer, and buffer slots. A policy that never evicts gets a slot for every token."""
    if not policy.evicts:
        return (prompt_width,) * num_layers, config.max_new_tokens
    check_budget(policy, config.budget, num_layers)
    return policy.layer_budgets(config.budget, num_layers), config.buffer


def cache_bytes(model: ModelConfig, policy: EvictionPolicy, config: RolloutConfig, prompt_width: int, rows: int) -> int:
    """Bytes of keys and values that a rollout of `rows` prompts holds."""
    budgets, buffer = plan(policy, config, model.num_layers, prompt_width)
    slots = sum(budget + buffer for budget in budgets)
    return 2 * slots * model.num_kv_heads * model.head_dim * jnp.dtype(model.dtype).itemsize * rows
