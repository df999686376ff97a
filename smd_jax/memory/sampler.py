"""Bytes of what a run holds on one device: parameters, trajectory, all of the sampler; for `smd_jax.memory.plan`.

Sizes of arrays that exist by name (parameters, optimizer, cache, trajectory) are exact. What is worked with is counted
from the equations, and was calibrated against the buffers that XLA assigns to the compiled programs (jax 0.10.2, CPU,
float32; `tests/memory/test_memory.py`). `shape` is one device's part of a model.
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
    """Bytes of a pytree with parameters in it, on each device; its leaves are arrays or their shapes."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in _placed(tree, mesh))


def cast_bytes(params: Params, config: ModelConfig, platform: Platform, mesh: Mesh | AbstractMesh | None = None) -> int:
    """Bytes of the copy in the compute dtype: all but the scales of norms; 0 if they are stored in it. XLA's
    CPU backend multiplies matrices of 16 bits in float32, and holds them once more in that."""
    of_policy = drop_value_head(params)
    read = jax.eval_shape(lambda params: sampler_params(Decoder(config), params), of_policy)
    copied = zip(_placed(of_policy, mesh), _placed(read, mesh), strict=True)
    narrow = jnp.dtype(config.dtype).itemsize
    widened = compute_itemsize(config, platform)
    # A copy in the compute dtype, and where the platform widens that, one more in what it widens to.
    each = narrow + (widened if widened != narrow else 0)
    return sum(math.prod(shape) * each for (_, old), (shape, new) in copied if old != new)


def gathered_bytes(params: Params, config: ModelConfig, platform: Platform, mesh: Mesh | AbstractMesh | None) -> int:
    """Bytes of weights that are here whole though the fsdp axis divides them: of all layers on CPUs, where the compiler
    gathers them early and keeps them (measured), of the one at work and the next elsewhere (assumed)."""
    parts = _gathered_parts(params, config, platform, mesh)
    return sum(parts) if platform == "cpu" else sum(parts[-2:])


def kept_gathered_bytes(
    params: Params, config: ModelConfig, platform: Platform, mesh: Mesh | AbstractMesh | None
) -> int:
    """Bytes of the other layers, which a rollout gathers before its loop and keeps."""
    return sum(_gathered_parts(params, config, platform, mesh)) - gathered_bytes(params, config, platform, mesh)


def _gathered_parts(
    params: Params, config: ModelConfig, platform: Platform, mesh: Mesh | AbstractMesh | None
) -> list[int]:
    """Bytes of every layer and other module as it is gathered, ascending; nothing where there is no fsdp axis."""
    if mesh is None or mesh.shape["fsdp"] == 1:
        return []
    size = compute_itemsize(config, platform)

    # Matrices alone: vectors are whole on every device anyway (`smd_jax.devices.sharding.param_spec`).
    def whole(part: Any) -> int:
        return mesh.shape["fsdp"] * sum(math.prod(shape) for shape, _ in _placed(part, mesh) if len(shape) == 2) * size

    return sorted(whole({name: part}) for name, part in params.items())


def _placed(tree: Any, mesh: Mesh | AbstractMesh | None) -> list[tuple[tuple[int, ...], Any]]:
    """Shape on each device, and dtype, of every leaf."""
    leaves = jax.tree.leaves(tree)
    if mesh is None:
        return [(x.shape, x.dtype) for x in leaves]
    placed = zip(leaves, jax.tree.leaves(tree_shardings(tree, mesh)), strict=True)
    return [(sharding.shard_shape(x.shape), x.dtype) for x, sharding in placed]


def largest_part(params: Params, mesh: Mesh | AbstractMesh | None) -> int:
    """Bytes of the gradients that are on their way at once: of one layer, or of the widest other module."""
    parts = {name: part for name, part in params.items() if name != LORA}
    # Adapters are layers, too.
    parts |= params[LORA].matrices if has_lora(params) else {}
    return max(tree_bytes({name: part}, mesh) for name, part in parts.items())


def trajectory_bytes(
    model: ModelConfig, config: RolloutConfig, prompt_width: int, rows: int, draws: bool = False
) -> int:
    """Bytes of tokens and validity; of the response's log-probabilities, entropies and drawable tokens; of the mask;
    and of the order of evictions, if they are draws of a gate."""
    response = config.max_new_tokens
    columns = prompt_width + config.max_new_tokens
    form = drawable_form(config.sampling, model.vocab_size)
    each = 2 * WIDE + (0 if form is None else math.prod(form.shape) * form.dtype.itemsize)
    # A byte for every boolean: the validity of a column, and whether a row has terminated.
    return rows * (columns * (INT + 1) + response * each + 1 + recorded_bytes(model, config, prompt_width, draws))


def recorded_bytes(model: ModelConfig, config: RolloutConfig, prompt_width: int, draws: bool = False) -> int:
    """Bytes of a row's shadow mask, one integer a key or T x T booleans, of the parities of a quantised cache,
    and of the order of `draws`, one more integer a key."""
    columns = prompt_width + config.max_new_tokens
    heads = model.num_layers * model.num_kv_heads
    each = columns * columns if config.mask_storage == "boolean" else columns * INT
    if config.quant is not None and config.quant.record_parity:
        # One bit for every number of a key and of a value.
        each += 2 * columns * packed_size(model.head_dim, 1)
    if draws:
        each += columns * INT
    return heads * each


def compute_itemsize(shape: ModelConfig, platform: Platform) -> int:
    """Bytes of a number that is being worked with; XLA's CPU backend widens those of 16 bits."""
    size = jnp.dtype(shape.dtype).itemsize
    return max(size, WIDE) if platform == "cpu" else size


@dataclass(frozen=True)
class SamplerPass:
    """Sampling on one device; `rows` are those of the device.

    Attributes:
      shape: the device's part of the model.
      prompt_width: columns of the prompt.
      devices: devices of the mesh.
      params: the parameters, or their shapes; a policy that reads some of them is counted with those.
    """

    shape: ModelConfig
    policy: EvictionPolicy
    config: RolloutConfig
    prompt_width: int
    platform: Platform
    devices: int = 1
    params: Params | None = None

    def cache(self, rows: int) -> int:
        """Bytes of a whole KV cache: keys and values, and their statistics."""
        keys = cache_bytes(self.shape, self.policy, self.config, self.prompt_width, rows)
        return keys + rows * self._statistics()

    def _statistics(self) -> int:
        """Bytes of a row beside its keys: the column of every slot, and what the policy's statistics keep."""
        budgets, buffer = self._plan()
        columns = sum(budget + buffer for budget in budgets) * self.shape.num_kv_heads * INT
        return columns + sum(tree_bytes(_states(self.shape, self.policy, 1, budget + buffer)) for budget in budgets)

    def _plan(self) -> tuple[tuple[int, ...], int]:
        return plan(self.policy, self.config, self.shape.num_layers, self.prompt_width)

    def _numbers(self) -> int:
        return compute_itemsize(self.shape, self.platform)

    def prefill(self, rows: int) -> int:
        """Reading prompts, whole or chunk by chunk: keys and values of all layers, and what one layer works with."""
        shape = self.shape
        width = self.prompt_width
        chunk = self.config.prefill_chunk
        columns = width if chunk is None else min(chunk, width)  # a chunk is never longer than the prompt
        # The queries of a chunk meet their own keys and those that are kept: all of the prompt if nothing is evicted.
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
        """A step's logits, hidden states and scores; of a quantised cache a layer as it is read. Or what compressing
        some rows of a layer takes, if that is more."""
        shape = self.shape
        budgets, buffer = self._plan()
        # Layers are worked on one after another: the one with the most slots decides.
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
        """What a policy works with to score one layer: twice its largest array, read from its own equations."""
        if not self.policy.evicts:
            return 0
        view = _view(self.shape, self.policy, self.params, rows, slots, min(self.config.budget, slots))
        # Traced from shapes and neither compiled nor run: a policy of the user's own is counted like ours.
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
    """Shapes of what the policy's statistics keep of one layer."""
    cache = CacheShape(rows, shape.num_heads, shape.num_kv_heads, slots, shape.head_dim, shape.dtype)
    return jax.eval_shape(lambda: tuple(statistic.init(cache) for statistic in policy.statistics))


def _arrays(jaxpr: Jaxpr) -> Iterator[ShapedArray]:
    """Every array that a program computes, also in the functions that it calls; PRNG keys are not counted."""
    for equation in jaxpr.eqns:
        found = (x.aval for x in equation.outvars)
        yield from (x for x in found if isinstance(x, ShapedArray) and not jnp.issubdtype(x.dtype, jax.dtypes.extended))
        for value in equation.params.values():
            if isinstance(value, ClosedJaxpr | Jaxpr):
                yield from _arrays(value.jaxpr if isinstance(value, ClosedJaxpr) else value)
