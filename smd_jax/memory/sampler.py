"""Bytes of parameters, trajectory and sampler on one device.

Parameters, optimizer, cache and trajectory are exact. Temporary arrays are counted from the equations and calibrated
against the compiled programs (jax 0.10.2, CPU, float32; `tests/memory/test_memory.py`). `shape` is one device's part of
a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, Mesh

from smd_jax.cache import slots as kv_cache
from smd_jax.cache.row_parts import rows_at_once
from smd_jax.config import ModelConfig
from smd_jax.devices.sharding import tree_shardings
from smd_jax.eviction.base import CacheView, EvictionPolicy
from smd_jax.eviction.statistics import CacheShape
from smd_jax.message.quantization import packed_size
from smd_jax.message.sampling import drawable_form
from smd_jax.model.decoder import Decoder
from smd_jax.model.lora import LORA, has_lora
from smd_jax.model.protocol import Params
from smd_jax.model.value_head import drop_value_head
from smd_jax.sampler.config import RolloutConfig, cache_bytes, plan
from smd_jax.sampler.params import sampler_params

Platform = Literal["cpu", "gpu", "tpu"]

INT = 4  # bytes of an int32
WIDE = 4  # bytes of the float32 in which softmax and logits are computed
SAMPLER_LOGITS = 3  # of a step alive together: logits, weights, their sums
SCORE_COPIES = 3  # of attention's scores alive together: scores, weights, mask


def local_shape(config: ModelConfig, mesh: Mesh | AbstractMesh | None) -> ModelConfig:
    """A device's part of heads, MLP and vocabulary; whole where the tensor axis does not divide it."""
    ways = 1 if mesh is None else mesh.shape["tensor"]
    # One divisor for both: the query heads of a group stay with their KV head.
    heads = ways if config.num_kv_heads % ways == 0 else 1
    return replace(
        config,
        num_heads=config.num_heads // heads,
        num_kv_heads=config.num_kv_heads // heads,
        intermediate_size=config.intermediate_size // (ways if config.intermediate_size % ways == 0 else 1),
        vocab_size=config.vocab_size // (ways if config.vocab_size % ways == 0 else 1),
    )


def tree_bytes(tree: Any, mesh: Mesh | AbstractMesh | None = None) -> int:
    """Bytes of a pytree on each device; its leaves are arrays or their shapes."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in _placed(tree, mesh))


def cast_bytes(params: Params, config: ModelConfig, platform: Platform, mesh: Mesh | AbstractMesh | None = None) -> int:
    """Bytes of the copy in the compute dtype; 0 if the parameters are stored in it. XLA's CPU backend also holds
    matrices of 16 bits in float32."""
    of_policy = drop_value_head(params)
    read = jax.eval_shape(lambda params: sampler_params(Decoder(config), params), of_policy)
    copied = zip(_placed(of_policy, mesh), _placed(read, mesh), strict=True)
    narrow = jnp.dtype(config.dtype).itemsize
    widened = compute_itemsize(config, platform)
    # A copy in the compute dtype, and where the platform widens that, one more in what it widens to.
    each = narrow + (widened if widened != narrow else 0)
    return sum(math.prod(shape) * each for (_, old), (shape, new) in copied if old != new)


def gathered_bytes(
    params: Params, config: ModelConfig, platform: Platform, mesh: Mesh | AbstractMesh | None
) -> tuple[int, int]:
    """Bytes of weights gathered from the fsdp axis: of those gathered at once, all on CPUs (measured) and two layers
    elsewhere (assumed); and of the others, which a rollout gathers before its loop."""
    if mesh is None or mesh.shape["fsdp"] == 1:
        return 0, 0
    size = compute_itemsize(config, platform)

    # Only matrices are divided (`smd_jax.devices.sharding.param_spec`).
    def whole(part: Any) -> int:
        return mesh.shape["fsdp"] * sum(math.prod(shape) for shape, _ in _placed(part, mesh) if len(shape) == 2) * size

    parts = sorted(whole({name: part}) for name, part in params.items())
    at_once = sum(parts) if platform == "cpu" else sum(parts[-2:])
    return at_once, sum(parts) - at_once


def _placed(tree: Any, mesh: Mesh | AbstractMesh | None) -> list[tuple[tuple[int, ...], Any]]:
    """Shape on each device, and dtype, of every leaf."""
    leaves = jax.tree.leaves(tree)
    if mesh is None:
        return [(x.shape, x.dtype) for x in leaves]
    placed = zip(leaves, jax.tree.leaves(tree_shardings(tree, mesh)), strict=True)
    return [(sharding.shard_shape(x.shape), x.dtype) for x, sharding in placed]


def largest_part(params: Params, mesh: Mesh | AbstractMesh | None) -> int:
    """Bytes of the largest layer or other module, whose gradients exist at once."""
    parts = {name: part for name, part in params.items() if name != LORA}
    # Adapters are layers, too.
    parts |= params[LORA].matrices if has_lora(params) else {}
    return max(tree_bytes({name: part}, mesh) for name, part in parts.items())


def trajectory_bytes(
    model: ModelConfig, config: RolloutConfig, prompt_width: int, rows: int, draws: bool = False
) -> int:
    """Bytes of tokens, validity, log-probabilities, entropies, drawable tokens, mask and order of drawn evictions."""
    response = config.max_new_tokens
    columns = prompt_width + config.max_new_tokens
    form = drawable_form(config.sampling, model.vocab_size)
    each = 2 * WIDE + (0 if form is None else math.prod(form.shape) * form.dtype.itemsize)
    # Booleans have a byte: validity of a column, and whether a row has terminated.
    return rows * (columns * (INT + 1) + response * each + 1 + recorded_bytes(model, config, prompt_width, draws))


def recorded_bytes(model: ModelConfig, config: RolloutConfig, prompt_width: int, draws: bool = False) -> int:
    """Bytes of a row's shadow mask (one integer a key, or T x T booleans), parities of a quantised cache, and order of
    `draws` (one integer a key)."""
    columns = prompt_width + config.max_new_tokens
    heads = model.num_layers * model.num_kv_heads
    each = columns * columns if config.mask_storage == "boolean" else columns * INT
    if config.quant is not None and config.quant.record_parity:
        each += 2 * columns * packed_size(model.head_dim, 1)
    if draws:
        each += columns * INT
    return heads * each


def compute_itemsize(shape: ModelConfig, platform: Platform) -> int:
    """Bytes of a number in arithmetic; XLA's CPU backend widens 16 bits."""
    size = jnp.dtype(shape.dtype).itemsize
    return max(size, WIDE) if platform == "cpu" else size


@dataclass(frozen=True)
class SamplerPass:
    """Sampling on one device; `rows` are those of the device.

    Attributes:
      shape: the device's part of the model.
      prompt_width: columns of the prompt.
      devices: devices of the mesh.
      params: the parameters, or their shapes, for a policy that reads them.
    """

    shape: ModelConfig
    policy: EvictionPolicy
    config: RolloutConfig
    prompt_width: int
    platform: Platform
    devices: int = 1
    params: Params | None = None

    def cache(self, rows: int) -> int:
        """Bytes of a KV cache with its statistics."""
        keys = cache_bytes(self.shape, self.policy, self.config, self.prompt_width, rows)
        return keys + rows * self._statistics()

    def _statistics(self) -> int:
        """Bytes of a row's columns of slots and statistics."""
        budgets, buffer = self._plan()
        columns = sum(budget + buffer for budget in budgets) * self.shape.num_kv_heads * INT
        return columns + sum(tree_bytes(_states(self.shape, self.policy, 1, budget + buffer)) for budget in budgets)

    def _plan(self) -> tuple[tuple[int, ...], int]:
        return plan(self.policy, self.config, self.shape.num_layers, self.prompt_width)

    def _numbers(self) -> int:
        return compute_itemsize(self.shape, self.platform)

    def prefill(self, rows: int) -> int:
        """Bytes of prefill: keys and values of all layers, and temporary arrays of one layer."""
        shape = self.shape
        width = self.prompt_width
        chunk = self.config.prefill_chunk
        columns = width if chunk is None else min(chunk, width)  # a chunk is never longer than the prompt
        # The queries of a chunk meet its keys and the kept ones: the whole prompt if nothing is evicted.
        slots = width if chunk is None else columns + (self.config.budget if self.policy.evicts else width)
        heads = shape.num_heads * shape.head_dim
        kv_heads = shape.num_kv_heads * shape.head_dim
        kept = rows * slots * 2 * kv_heads * shape.num_layers * jnp.dtype(shape.dtype).itemsize
        layer = rows * columns * (3 * shape.intermediate_size + 2 * shape.hidden_size) * self._numbers()
        observed = kv_cache.needs_attention(self.policy.statistics)
        if observed or chunk is not None:
            at_once = self._part(rows) if chunk is None else rows
            scores = SCORE_COPIES * at_once * shape.num_heads * columns * slots * WIDE
            layer = max(layer, scores + rows * columns * 2 * (shape.hidden_size + heads) * self._numbers())
        return kept + max(layer, self.score(self._part(rows), slots))

    def decode(self, rows: int) -> int:
        """Bytes of a step's logits, hidden states, scores and one layer of a quantised cache; or of a compression."""
        shape = self.shape
        budgets, buffer = self._plan()
        slots = max(budgets) + buffer
        keys = 2 * slots * shape.num_kv_heads * shape.head_dim * self._numbers()
        wide = 3 * shape.intermediate_size + 4 * shape.hidden_size + 2 * shape.num_heads * shape.head_dim
        step = WIDE * (SAMPLER_LOGITS * shape.vocab_size + SCORE_COPIES * shape.num_heads * slots)
        step += wide * self._numbers() + (0 if self.config.quant is None else 2 * keys)
        part = self._part(rows)
        return max(rows * step, part * keys + self.score(part, slots) if self.policy.evicts else 0)

    def _part(self, rows: int) -> int:
        """Rows that are compressed at once."""
        return rows_at_once(rows, self.devices)

    def score(self, rows: int, slots: int) -> int:
        """Bytes of scoring one layer: twice the largest array of the policy's traced `score`."""
        if not self.policy.evicts:
            return 0
        view = _view(self.shape, self.policy, self.params, rows, slots, min(self.config.budget, slots))
        traced = jax.make_jaxpr(self.policy.score)(view)
        return 2 * max((x.size * x.dtype.itemsize for x in _arrays(traced.jaxpr)), default=0)


def _view(
    shape: ModelConfig, policy: EvictionPolicy, params: Params | None, rows: int, slots: int, budget: int
) -> CacheView:
    def array(*sizes: int, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((rows, *sizes), dtype)

    heads = shape.num_kv_heads
    dtype = jnp.dtype(shape.dtype)
    keys = array(heads, slots, shape.head_dim, dtype=dtype)
    scalar: Any = jax.ShapeDtypeStruct((), jnp.int32)
    return CacheView(
        keys=keys,
        values=keys,
        valid=array(heads, slots, dtype=bool),
        positions=array(heads, slots, dtype=jnp.int32),
        newest=array(dtype=jnp.int32),
        number=scalar,
        states=_states(shape, policy, rows, slots),
        rng=jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows)),
        budget=budget,
        declared=policy.statistics,
        parameters=() if params is None else policy.parameters(params, 0),
    )


def _states(shape: ModelConfig, policy: EvictionPolicy, rows: int, slots: int) -> tuple[Any, ...]:
    """Shapes of the statistics of one layer."""
    cache = CacheShape(rows, shape.num_heads, shape.num_kv_heads, slots, shape.head_dim, shape.dtype)
    return jax.eval_shape(lambda: tuple(statistic.init(cache) for statistic in policy.statistics))


def _arrays(jaxpr: Jaxpr) -> Iterator[ShapedArray]:
    """Every array that a program computes, also in functions that it calls; no PRNG keys."""
    for equation in jaxpr.eqns:
        found = (x.aval for x in equation.outvars)
        yield from (x for x in found if isinstance(x, ShapedArray) and not jnp.issubdtype(x.dtype, jax.dtypes.extended))
        for value in equation.params.values():
            if isinstance(value, ClosedJaxpr | Jaxpr):
                yield from _arrays(value.jaxpr if isinstance(value, ClosedJaxpr) else value)
