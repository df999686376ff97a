"""The rollout: prefill, then segments of `buffer` decode steps with a compression between them, in one jitted program.

    prompt ──prefill──► compress ─► [decode × buffer] ─► compress ─► [decode × buffer] ─► …  ─► Trajectory
                         evicted_at = P                   evicted_at = P + buffer

Query t writes its own key, attends to every live key, and after that attention, when all slots are full, each layer and
KV head keeps its `budget` best keys. What was dropped, and when, is the shadow mask.
"""

from __future__ import annotations

from functools import partial
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from smd_jax import cache as kv_cache
from smd_jax.cache import EMPTY, KVCache, LayerCache
from smd_jax.eviction import CacheView, EvictionPolicy
from smd_jax.masks import NEVER, Segments, ShadowMask, dense_mask, positions
from smd_jax.model import Decoder, Params, PrefillLayer, apply_model
from smd_jax.prompts import PromptBatch
from smd_jax.quantization import Parity, QuantizedReplay, packed_size
from smd_jax.quantized_cache import QuantizedSlots, no_slots
from smd_jax.rollout_config import RolloutConfig as RolloutConfig
from smd_jax.rollout_config import cache_bytes as cache_bytes
from smd_jax.rollout_config import plan as plan
from smd_jax.rollout_config import whole_segments
from smd_jax.sampling import sample
from smd_jax.trajectory import Trajectory


@no_type_check  # JAX rebuilds pytrees with leaves that are not arrays
class LayerRecord(struct.PyTreeNode):
    """What the learner will have to know of one layer, in the making.

    Attributes:
      evicted_at: `[batch, kv_heads, T]` of the shadow mask.
      parity: of a quantised cache, `[batch, kv_heads, T or more, bytes]`; None without one, or if not asked for.
    """

    evicted_at: Int[Array, "batch kv_heads T"]
    parity: Parity | None


@no_type_check  # JAX rebuilds pytrees with leaves that are not arrays
class RolloutState(struct.PyTreeNode):
    """Carry of the decode loop; `step` response tokens are decided.

    Attributes:
      step: tokens written to `tokens` so far, at least 1.
      tokens: `[batch, R]`. logprobs: `[batch, R]`. emitted: `[batch, R]` tokens that belong to the response.
      done: `[batch]` rows that have emitted their end of sequence.
      cache: per layer. recorded: per layer.
    """

    step: Int[Array, ""]
    tokens: Int[Array, "batch R"]
    logprobs: Float[Array, "batch R"]
    emitted: Bool[Array, "batch R"]
    done: Bool[Array, " batch"]
    cache: KVCache
    recorded: tuple[LayerRecord, ...]


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
        nothing = self.no_record()
        compressed = [
            self.compress(self.from_prompt(layer), nothing, index, self.width, self.width)
            for index, layer in enumerate(layers)
        ]
        cache, recorded = zip(*compressed, strict=True)
        empty = jnp.zeros((self.batch, self.config.max_new_tokens))
        state = RolloutState(
            step=jnp.zeros((), jnp.int32),
            tokens=jnp.full(empty.shape, self.config.pad_token_id, jnp.int32),
            logprobs=empty.astype(jnp.promote_types(self.model.config.dtype, jnp.float32)),
            emitted=jnp.zeros(empty.shape, bool),
            done=jnp.zeros((self.batch,), bool),
            cache=cache,
            recorded=recorded,
        )
        return self.draw(state, hidden[:, -1:])

    def no_record(self) -> LayerRecord:
        """Of a layer, before anything was evicted or quantised."""
        shape, quant = (self.batch, self.model.config.num_kv_heads), self.config.quant
        parity = None
        if quant is not None and quant.record_parity:
            columns = self.width + whole_segments(self.config)
            bits = jnp.zeros((*shape, columns, packed_size(self.model.config.head_dim, 1)), jnp.uint8)
            parity = Parity(bits, bits)
        return LayerRecord(jnp.full((*shape, self.columns), NEVER, jnp.int32), parity)

    def from_prompt(self, layer: PrefillLayer) -> LayerCache:
        """A layer's prompt as a cache of P slots, in column order with the padding first."""
        column = jnp.where(self.prompts.valid, jnp.arange(self.width)[None], EMPTY)[:, None]
        return LayerCache(
            keys=layer.keys,
            values=layer.values,
            columns=jnp.broadcast_to(column, layer.keys.shape[:3]).astype(jnp.int32),
            received=layer.received,
            queries=layer.queries,
            quantized=self.no_slots(layer.keys),
        )

    def no_slots(self, keys: Array) -> QuantizedSlots | None:
        quant = self.config.quant
        return None if quant is None else no_slots(keys, self.width, whole_segments(self.config), quant)

    def segment(self, state: RolloutState, unfinished) -> RolloutState:
        """Decodes until the buffer is full or nothing is left to do, then compresses."""
        first = state.step

        def going_on(state: RolloutState) -> Bool[Array, ""]:
            return (state.step < first + self.buffer) & unfinished(state)

        state = jax.lax.while_loop(going_on, lambda state: self.step(state, state.step - first), state)
        if not self.policy.evicts and self.config.quant is None:
            return state
        now, boundary = (self.width - 1 + step for step in (state.step, first + self.buffer))
        compressed = [
            self.compress(layer, recorded, index, now, boundary)
            for index, (layer, recorded) in enumerate(zip(state.cache, state.recorded, strict=True))
        ]
        cache, recorded = zip(*compressed, strict=True)
        return state.replace(cache=cache, recorded=recorded)

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
        recorded: LayerRecord,
        index: int,
        now: Int[Array, ""] | int,
        boundary: Int[Array, ""] | int,
    ) -> tuple[LayerCache, LayerRecord]:
        """Keeps a layer's best keys at the left of an empty buffer; what it drops is invisible from `boundary` on.

        Args:
          now: column after the newest key. boundary: column after the segment, later than `now` if no row had
            anything left to say. No query follows then; dropping keys all the same keeps the mask to its segments.
        """
        budget, slots = self.budgets[index], layer.columns.shape[2]
        if slots <= budget:
            layer, recorded = self.quantize(layer, recorded, boundary)
            return kv_cache.pad(layer, budget - slots, self.buffer), recorded
        if self.policy.evicts:
            scores = self.policy.score(self.view(layer, index, now))
            kept, dropped = kv_cache.select(scores, layer.valid, budget)
            evicted_at = kv_cache.record(
                recorded.evicted_at, layer.columns, dropped & (boundary < self.columns), boundary
            )
            recorded = recorded.replace(evicted_at=evicted_at)
        else:  # the oldest slots are empty
            kept = jnp.broadcast_to(jnp.arange(slots - budget, slots), (*layer.columns.shape[:2], budget))
        layer, recorded = self.quantize(layer, recorded, boundary)
        return kv_cache.gather(layer, kept, self.buffer), recorded

    def quantize(
        self, layer: LayerCache, recorded: LayerRecord, boundary: Int[Array, ""] | int
    ) -> tuple[LayerCache, LayerRecord]:
        """Quantises what a layer holds in full precision, if it is to be: the columns before `boundary`."""
        if layer.quantized is None:
            return layer, recorded
        start = boundary - layer.keys.shape[2]
        layer, parity = kv_cache.quantize(layer, layer.quantized, start)
        if recorded.parity is None:
            return layer, recorded

        def put(x: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(x, new, start, axis=2)

        return layer, recorded.replace(parity=jax.tree.map(put, recorded.parity, parity))

    def view(self, layer: LayerCache, index: int, now: Int[Array, ""] | int) -> CacheView:
        window = kv_cache.newest_columns(now - 1, max(self.policy.query_window, 1))[: self.policy.query_window]
        rng = jax.vmap(lambda key: jax.random.fold_in(jax.random.fold_in(key, now), index))(self.eviction_keys)
        start = self.start[:, None, None]
        keys, values = kv_cache.read(layer)
        return CacheView(
            keys=keys,
            values=values,
            valid=layer.valid,
            positions=jnp.where(layer.valid, layer.columns - start, EMPTY),
            received=layer.received,
            queries=layer.queries,
            query_positions=window[None] - self.start[:, None],
            keys_rng=rng,
            budget=self.budgets[index],
        )

    def trajectory(self, state: RolloutState) -> Trajectory:
        valid = jnp.concatenate([self.prompts.valid, state.emitted], axis=1)
        evicted_at = jnp.stack([recorded.evicted_at for recorded in state.recorded], axis=1)
        evicted_at = jnp.where(valid[:, None, None], evicted_at, 0)
        segments = ()
        if self.policy.evicts:
            evicted_at = self.without_last(evicted_at, state)
            segments = tuple(Segments(self.width, self.buffer, budget) for budget in self.budgets)
        mask = ShadowMask(evicted_at, segments, self.replay(state))
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

    def replay(self, state: RolloutState) -> QuantizedReplay | None:
        """How the cache was quantised."""
        if self.config.quant is None:
            return None
        parities = [recorded.parity for recorded in state.recorded]
        parity = jax.tree.map(lambda *x: jnp.stack(x, axis=1)[..., : self.columns, :], *parities)
        return QuantizedReplay(parity, self.config.quant, self.width, self.buffer)

    def without_last(self, evicted_at: Int[Array, "batch layers kv_heads T"], state: RolloutState) -> Array:
        """The mask in which nothing but itself sees a row's last token: it was drawn, but never entered the cache."""
        column = jnp.arange(self.columns, dtype=jnp.int32)[None]
        after = self.width + state.emitted.sum(axis=1, keepdims=True, dtype=jnp.int32)
        last = (column == after - 1) & (after < self.columns)
        return jnp.where(last[:, None, None], after[:, None, None], evicted_at)
