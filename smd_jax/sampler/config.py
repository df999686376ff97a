"""Sizes of a rollout, and the resulting keys per layer and bytes of the cache."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from smd_jax.cache.quantized import no_slots
from smd_jax.cache.slots import LayerCache, no_keys, pad
from smd_jax.config import ModelConfig, check_instance, check_whole
from smd_jax.disk import stored_bytes
from smd_jax.eviction.base import EvictionPolicy, check_budget, check_policy
from smd_jax.eviction.statistics import CacheShape
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.sampling import SamplingConfig
from smd_jax.model.protocol import ModelShape, check_model
from smd_jax.typed_fields import check_types


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Sizes of a rollout, in tokens. Static.

    Attributes:
      max_new_tokens: R, columns of the response.
      budget: keys kept per layer and KV head at a compression. Ignored by a policy that never evicts.
      buffer: queries between two compressions; the cache has `budget + buffer` slots.
      eos_token_id: id or ids that end a response; None: only the length limit does.
      pad_token_id: fills the columns after a response.
      min_new_tokens: shortest response; stop strings are matched from there on.
      prefill_chunk: columns of a prompt that are read at once. The cache is compressed after each chunk, so memory does
        not depend on the prompt's length; the mask records it. None reads prompts whole and densely.
      sampling: temperature and filters.
      quant: quantises keys and values when their segment of `buffer` tokens ends, and those of the prompt at once; also
        without eviction. None keeps full precision.
    """

    max_new_tokens: int
    budget: int
    buffer: int
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int = 0
    min_new_tokens: int = 0
    prefill_chunk: int | None = None
    sampling: SamplingConfig = SamplingConfig()
    quant: QuantConfig | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if isinstance(self.eos_token_id, tuple) and not self.eos_token_id:
            raise ValueError("expected eos_token_id as one id, several, or None without any; got ()")
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        check_whole("budget", self.budget, 1)
        check_whole("buffer", self.buffer, 1)
        check_whole("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"expected min_new_tokens <= max_new_tokens = {self.max_new_tokens}; got {self.min_new_tokens}"
            )
        if self.prefill_chunk is not None:
            check_whole("prefill_chunk", self.prefill_chunk, 1, "columns, or None")
        if self.quant is None:
            return
        if self.buffer % self.quant.group:
            raise ValueError(
                "expected a quantisation group that divides the buffer, because a segment is quantised as a whole; got "
                f"group {self.quant.group} and buffer {self.buffer}"
            )
        if self.prefill_chunk is not None:
            raise ValueError(
                "expected prefill_chunk None with a quantised cache, because a prompt is quantised as a whole; got "
                f"{self.prefill_chunk}"
            )


def check_sampler(model: object, policy: object, config: object) -> None:
    """Raises TypeError for an object that is no valid model, eviction policy or RolloutConfig."""
    check_model(model)
    check_policy(policy)
    check_instance("config", config, RolloutConfig)


def plan(
    policy: EvictionPolicy, config: RolloutConfig, num_layers: int, prompt_width: int
) -> tuple[tuple[int, ...], int]:
    """Keys kept per layer, and buffer slots. A policy that never evicts gets a slot for every token."""
    check_policy(policy)
    if policy.evicts:
        check_budget(policy, config.budget, num_layers)
        return tuple(policy.layer_budgets(config.budget, num_layers)), config.buffer
    if config.quant is None:
        # Without compression, prompt and buffer form the ring of P + R slots.
        return (prompt_width,) * num_layers, config.max_new_tokens
    # Segments are quantised as a whole, so there is room for whole segments in addition to the buffer.
    return (prompt_width + whole_segments(config),) * num_layers, config.buffer


def check_limits(
    limits: Int[Array, " rows"] | Int[np.ndarray, " rows"], rows: int, config: RolloutConfig
) -> Int[np.ndarray, " rows"]:
    """Returns the limits on the host, int32. Raises ValueError unless each row has a whole number from 1 to
    `max_new_tokens`."""
    given = np.asarray(limits)
    most = config.max_new_tokens
    if not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"expected limits in whole tokens; got numbers of {given.dtype}")
    if given.shape != (rows,) or given.min() < 1 or given.max() > most:
        raise ValueError(
            f"expected limits for {rows} rows, each from 1 to max_new_tokens {most}; got shape {given.shape} with "
            f"values from {given.min(initial=most)} to {given.max(initial=0)}"
        )
    return given.astype(np.int32)


def whole_segments(config: RolloutConfig) -> int:
    """Columns of a response, rounded up to whole segments."""
    return -(-config.max_new_tokens // config.buffer) * config.buffer


def cache_bytes(
    model: ModelConfig | ModelShape, policy: EvictionPolicy, config: RolloutConfig, prompt_width: int, rows: int
) -> int:
    """Bytes of keys and values that a rollout of `rows` prompts holds, without the policy's statistics; see
    `statistics_bytes`.

    Raises:
      TypeError: a model in place of its `shape`.
      ValueError: a budget that the policy refuses; fewer than one row or column of prompts.
    """
    caches = _empty_caches(model, policy, config, prompt_width, rows)
    return stored_bytes([(cache.keys, cache.values, cache.quantized) for cache in caches])


def statistics_bytes(
    model: ModelConfig | ModelShape, policy: EvictionPolicy, config: RolloutConfig, prompt_width: int, rows: int
) -> int:
    """Bytes of the policy's statistics in a rollout of `rows` prompts. Raises errors like `cache_bytes`."""
    return stored_bytes([cache.states for cache in _empty_caches(model, policy, config, prompt_width, rows)])


def _empty_caches(
    model: ModelConfig | ModelShape, policy: EvictionPolicy, config: RolloutConfig, prompt_width: int, rows: int
) -> list[LayerCache]:
    """The shapes of every layer's cache; checks the sizes."""
    if not isinstance(model, ModelConfig | ModelShape):
        raise TypeError(f"expected a model's shape, a ModelShape or ModelConfig; got {type(model).__name__}")
    check_whole("prompt_width", prompt_width, 1)
    check_whole("rows", rows, 1)
    budgets, buffer = plan(policy, config, model.num_layers, prompt_width)
    shape = CacheShape(rows, model.num_heads, model.num_kv_heads, 0, model.head_dim, jnp.dtype(model.dtype))

    def of_layer(budget: int) -> LayerCache:
        cache = no_keys(policy.statistics, shape)
        if config.quant is not None:
            slots = no_slots(cache.keys, prompt_width, whole_segments(config), config.quant)
            cache = cache.replace(quantized=slots)
        return pad(cache, budget, buffer)

    return jax.eval_shape(lambda: [of_layer(budget) for budget in budgets])
