"""Sharding: a mesh with axes data, fsdp, sequence and tensor, and the table of parameters by axis.

data       rows of the batch
fsdp       rows of the batch, and one axis of every matrix (parameters are gathered where they are used)
sequence   columns of the learner's rows; in attention, heads instead (DeepSpeed-Ulysses, arXiv:2309.14509), so that
           every device has all keys of its heads
tensor     attention heads, the width of the MLP, experts, the vocabulary
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

AXES = ("data", "fsdp", "sequence", "tensor")
BATCH = ("data", "fsdp")
HEADS = (("tensor", "sequence"), ("tensor",))  # axes of heads: the first that divides them
_RUN = re.compile(r"layers_\d+_to_\d+")  # key of the stacked parameters of a run of layers

# Last two names of a parameter's path -> its spec, for the Decoder; of adapters of experts the last three. Matrices of
# other models are split over fsdp only, see `param_spec`. Adapters are split like their matrix; their small rank is
# replicated.
_KERNELS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"), P("fsdp", "tensor"))
_KERNELS |= dict.fromkeys(("o_proj", "down_proj"), P("tensor", "fsdp"))
_EXPERTS = dict.fromkeys(("gate_proj", "up_proj"), P("tensor", "fsdp", None)) | {"down_proj": P("tensor", None, "fsdp")}
RULES: dict[tuple[str, ...], P] = {
    ("embed", "embedding"): P("tensor", "fsdp"),
    ("router", "kernel"): P("fsdp", None),
    **{("experts", name): P("tensor", None) for name in ("gate_bias", "up_bias", "down_bias")},
    **{(name, "kernel"): rule for name, rule in _KERNELS.items()},
    **{(name, "lora_A"): P(rule[0], None) for name, rule in _KERNELS.items()},
    **{(name, "lora_B"): P(None, rule[1]) for name, rule in _KERNELS.items()},
    **{("experts", name): rule for name, rule in _EXPERTS.items()},
    **{("experts", name, "lora_A"): P(rule[0], rule[1], None) for name, rule in _EXPERTS.items()},
    **{("experts", name, "lora_B"): P(rule[0], None, rule[2]) for name, rule in _EXPERTS.items()},
}


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, sequence: int = 1, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh over the first `data * fsdp * sequence * tensor` devices; those of a process are contiguous.

    Raises:
      ValueError: for an axis below 1; if there are fewer devices; with several processes also if there are more; for a
        device given twice.
    """
    for axis, size in (("data", data), ("fsdp", fsdp), ("tensor", tensor), ("sequence", sequence)):
        # The product of two negative sizes is positive.
        if size < 1:
            raise ValueError(f"expected at least 1 device on the {axis} axis; got {size}")
    available = list(jax.devices() if devices is None else devices)
    needed = data * fsdp * sequence * tensor
    several = devices is None and jax.process_count() > 1
    if len(available) < needed or (several and len(available) > needed):
        where = f" in {jax.process_count()} processes" if several else ""
        raise ValueError(
            f"expected {needed} devices, the product of data axis {data}, fsdp axis {fsdp}, sequence axis {sequence} "
            f"and tensor axis {tensor}; got {len(available)}{where}"
        )
    if len(set(available)) < len(available):
        raise ValueError(f"expected different devices; got {available}")
    # Tensor, the last axis, communicates most, and rows of one process must be contiguous.
    available.sort(key=lambda device: device.process_index)
    grid = np.asarray(available[:needed]).reshape(data, fsdp, sequence, tensor)
    # Auto: the compiler propagates shardings from the few places that pin them.
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def param_spec(path: Sequence[str], shape: Sequence[int], mesh: Mesh | AbstractMesh) -> P:
    """The spec of one parameter (or of optimizer state of its shape). Axes that do not divide a side are left out.

    A parameter outside the table with at least two sides longer than 1 is split over fsdp along its longest side that
    fsdp divides, the first of equals. That is correct for any model, because parameters are gathered where they are
    used. It is replicated over the tensor axis.

    Stacked parameters of a run of layers (`smd_jax.model.stacked_params`) are split like those of one layer.
    """
    within = [part for part in path if not _RUN.fullmatch(part)]
    if shape and len(within) < len(path):
        return P(None, *param_spec(within, shape[1:], mesh))
    rule = RULES.get(tuple(path[-3:]), RULES.get(tuple(path[-2:])))
    if rule is not None and len(rule) == len(shape):
        return P(*(axis if axis and shape[i] % mesh.shape[axis] == 0 else None for i, axis in enumerate(rule)))
    divided = [i for i, side in enumerate(shape) if side > 1 and side % mesh.shape["fsdp"] == 0]
    if not divided or sum(side > 1 for side in shape) < 2:
        return P()
    longest = max(divided, key=lambda i: shape[i])
    return P(*("fsdp" if i == longest else None for i in range(len(shape))))


def tree_shardings(tree: Any, mesh: Mesh | AbstractMesh, gathered: bool = False) -> Any:
    """NamedShardings for any pytree with parameters in it: parameters, optimizer state, train state.

    Args:
      gathered: whether fsdp is left out, for parameters of a loop; they are still split over tensor.
    """

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        spec = param_spec(names, np.shape(leaf), mesh)
        return NamedSharding(mesh, P(*(None if gathered and axis == "fsdp" else axis for axis in spec)))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def shard_tree(tree: Any, mesh: Mesh) -> Any:
    """Puts a pytree with parameters in it onto the mesh. With several processes, host arrays must be equal in all."""
    return _put(tree, tree_shardings(tree, mesh), mesh)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp."""
    return NamedSharding(mesh, P(BATCH))


def sampled_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data, fsdp and sequence, as they are sampled."""
    return NamedSharding(mesh, P((*BATCH, "sequence")))


def row_ways(mesh: Mesh | AbstractMesh | None) -> int:
    """Number of devices that have different rows of a batch."""
    return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]


def check_rows(rows: int, mesh: Mesh, what: str = "a batch") -> None:
    """Raises ValueError if `rows` do not divide over the data and fsdp axes.

    Args:
      what: the array with these rows, and the options that decide their number, for the message.
    """
    ways = row_ways(mesh)
    if rows % ways:
        raise ValueError(f"expected {what} that divides over data axis * fsdp axis = {ways}; got {rows} rows")


def shard_batch(tree: Any, mesh: Mesh) -> Any:
    """Puts arrays `[batch, ...]` onto the mesh.

    Raises:
      ValueError: if the rows do not divide over the data and fsdp axes.
    """
    for leaf in jax.tree.leaves(tree):
        check_rows(leaf.shape[0], mesh)
    sharding = batch_sharding(mesh)
    return _put(tree, jax.tree.map(lambda _: sharding, tree), mesh)


def _put(tree: Any, shardings: Any, mesh: Mesh) -> Any:
    """`jax.device_put`, also onto devices of other processes."""
    if batch_sharding(mesh).is_fully_addressable:
        return jax.device_put(tree, shardings)

    def put(x: Any, sharding: NamedSharding) -> Array:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            # `device_put` takes no random keys there, and those stay where they are.
            return x if x.sharding.is_equivalent_to(sharding, x.ndim) else jax.device_put(x, sharding)
        # Each process takes its devices' parts; `device_put` would communicate to compare the values.
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            return jax.make_array_from_callback(np.shape(x), sharding, lambda index: x)  # keys are never split
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, tree, shardings)


def constrain(x: Array) -> Array:
    """Pins `[batch, ...]` activations to the batch axes of the mesh in `jax.set_mesh`; without a mesh does nothing."""
    return x if _mesh() is None else jax.lax.with_sharding_constraint(x, P(BATCH))


def sequence_ways(mesh: Mesh | AbstractMesh | None) -> int:
    """Devices that share the columns of a row in the learner."""
    return 1 if mesh is None else mesh.shape["sequence"]


def sampling_ways(mesh: Mesh | AbstractMesh | None) -> int:
    """Number of devices that sample different rows: a sampled token has no columns to share."""
    return row_ways(mesh) * sequence_ways(mesh)


def check_sampled_rows(rows: int, mesh: Mesh) -> None:
    """Raises ValueError if `rows` do not divide over the devices that sample them."""
    ways = sampling_ways(mesh)
    if rows % ways:
        raise ValueError(
            f"expected completions of a step (prompts_per_step * group_size) that divide over data axis * fsdp axis * "
            f"sequence axis = {ways}, because each of these devices samples different rows; got {rows}"
        )


def check_sequence(columns: int, heads: int, mesh: Mesh) -> None:
    """Raises ValueError if the sequence axis cannot share these columns of a row, or their heads."""
    ways = sequence_ways(mesh)
    if columns % ways:
        raise ValueError(
            f"expected a number of columns (prompt_width + max_new_tokens, with rows_per_prompt so many times "
            f"max_new_tokens; or pack_columns) that the sequence axis divides, {ways}; got {columns}"
        )
    if ways > 1 and heads % (ways * mesh.shape["tensor"]):
        raise ValueError(
            f"expected attention heads that sequence axis * tensor axis = {ways * mesh.shape['tensor']} divides, "
            f"because devices that share the columns of a row share its heads where they attend; got {heads}"
        )


def columns_apart() -> bool:
    """Whether the mesh in `jax.set_mesh` splits the columns of a row."""
    return sequence_ways(_mesh()) > 1


def constrain_tokens(x: Array, axis: int = 1) -> Array:
    """Pins `[batch, ...]` activations that have tokens on `axis`: rows to the batch axes, tokens to the sequence axis.

    Axes after the tokens are not split, and the compiler decides about axes between rows and tokens (heads). Tokens
    that the sequence axis does not divide are not split. Without a mesh this does nothing.
    """
    mesh = _mesh()
    ways = sequence_ways(mesh)
    if ways == 1 or x.shape[axis] % ways:
        return constrain(x) if axis == 1 else x
    between = (P.UNCONSTRAINED,) * (axis - 1)
    return jax.lax.with_sharding_constraint(x, P(BATCH, *between, "sequence"))


def constrain_blocks(x: Array) -> Array:
    """`constrain_tokens` for blocks `[blocks, batch, tokens, ...]`; does nothing if columns are not split."""
    mesh = _mesh()
    if mesh is None or not columns_apart():
        return x
    return jax.lax.with_sharding_constraint(x, P(None, _rows_axes([x[0]], mesh), "sequence"))


def over_heads(f: Callable[..., Any], *arrays: Any) -> Any:
    """Runs `f` on arrays or pytrees of arrays `[batch, heads, ...]`, on each device for its own rows and heads, without
    communication. Heads are split over the tensor axis, and over the sequence axis instead of columns.

    The compiler cannot split a kernel and would gather its inputs, as it does for `lax.top_k` and other sorts (jax
    0.10.2, openxla/xla#49006). Axes that do not divide every array are not split, so every device does all of that
    work. Without a mesh in `jax.set_mesh` this is `f(*arrays)`.
    """
    mesh = _mesh()
    if mesh is None or mesh.size == 1:
        return f(*arrays)
    leaves = jax.tree.leaves(arrays)
    heads = next((axes for axes in HEADS if all(x.shape[1] % _ways(axes, mesh) == 0 for x in leaves)), None)
    spec = P(_rows_axes(leaves, mesh), heads)
    return jax.shard_map(f, in_specs=spec, out_specs=spec, check_vma=False)(*arrays)


def over_experts(
    f: Callable[..., Array], count: int, weights: dict[str, Array], x: Array, chosen: Array, gates: Array
) -> Array:
    """`f(weights, first, x, chosen, gates)`, the sum over a token's experts, where each device of the tensor axis has
    the weights of some of `count` experts, from number `first` on, and all tokens of its rows and columns.

    Experts that the tensor axis does not divide are on every device. Without a mesh `first` is 0.
    """
    mesh = _mesh()
    if mesh is None or mesh.size == 1:
        return f(weights, 0, x, chosen, gates)
    ways = mesh.shape["tensor"]
    axis = "tensor" if count % ways == 0 else None
    columns = "sequence" if x.shape[1] % mesh.shape["sequence"] == 0 else None
    tokens = P(_rows_axes([x], mesh), columns)

    def of_device(weights: dict[str, Array], x: Array, chosen: Array, gates: Array) -> Array:
        if axis is None:
            return f(weights, 0, x, chosen, gates)
        first = jax.lax.axis_index(axis) * (count // ways)
        return jax.lax.psum(f(weights, first, x, chosen, gates), axis)

    specs = (P(axis), tokens, tokens, tokens)
    return jax.shard_map(of_device, in_specs=specs, out_specs=tokens, check_vma=False)(weights, x, chosen, gates)


def over_rows(f: Callable[..., Any], *arrays: Any) -> Any:
    """`over_heads` for arrays `[rows, ...]` without heads. Devices of the tensor axis do the same work: arrays
    that were split over them are gathered."""
    mesh = _mesh()
    if mesh is None or mesh.size == 1:
        return f(*arrays)
    spec = P(_rows_axes(jax.tree.leaves(arrays), mesh))
    return jax.shard_map(f, in_specs=spec, out_specs=spec, check_vma=False)(*arrays)


def splits_rows_only(rows: int) -> bool:
    """Whether the mesh in `jax.set_mesh` splits only the rows of a batch of `rows`, so that `over_rows` gathers
    nothing."""
    mesh = _mesh()
    return mesh is not None and mesh.size == row_ways(mesh) and rows % mesh.size == 0


def _rows_axes(leaves: Sequence[Array], mesh: AbstractMesh) -> tuple[str, ...] | None:
    """The mesh axes of the first axis of all these arrays; None if it does not divide."""
    return BATCH if all(x.shape[0] % row_ways(mesh) == 0 for x in leaves) else None


def split_heads(x: Array, heads: int) -> Array:
    """Repeats KV heads `[batch, kv_heads, ...]` so that the axes of heads divide them, if they divide the query heads.

    Otherwise every device would attend with all heads. The groups of query heads become smaller accordingly.
    """
    mesh = _mesh()
    if mesh is None:
        return x
    kv_heads = x.shape[1]
    ways = next((n for n in (_ways(axes, mesh) for axes in HEADS) if heads % n == 0), 1)
    # Both divide the query heads, so their least common multiple does.
    times = math.lcm(ways, kv_heads) // kv_heads
    return x if times == 1 else jnp.repeat(x, times, axis=1)


def gathered_embedding(table: Array) -> Array:
    """The embedding table for a lookup: columns gathered from fsdp, rows still sharded."""
    mesh = _mesh()
    if mesh is None:
        return table
    rows = param_spec(("embed", "embedding"), table.shape, mesh)[0]
    return jax.lax.with_sharding_constraint(table, P(rows))


class Parts(NamedTuple):
    """Number of parts into which a mesh splits the learner's arrays."""

    rows: int
    columns: int
    vocabulary: int


def parts() -> Parts:
    """The parts for the mesh in `jax.set_mesh`; all 1 without a mesh."""
    mesh = _mesh()
    return Parts(1, 1, 1) if mesh is None else Parts(row_ways(mesh), sequence_ways(mesh), mesh.shape["tensor"])


def _ways(axes: Sequence[str], mesh: AbstractMesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _mesh() -> AbstractMesh | None:
    """The mesh in `jax.set_mesh` if `make_mesh` made it; another mesh is left to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    ours = set(AXES) <= set(mesh.axis_names) and all(kind == AxisType.Auto for kind in mesh.axis_types)
    return mesh if ours else None


def constrain_tree(tree: Any, gathered: bool = False) -> Any:
    """Pins a pytree to the `tree_shardings` of the mesh; without a mesh does nothing."""
    mesh = _mesh()
    return tree if mesh is None else jax.lax.with_sharding_constraint(tree, tree_shardings(tree, mesh, gathered))


def constrain_rows(tree: Any, heads_axis: int = 1) -> Any:
    """Pins arrays `[rows, ...]` of a sampler's state to the batch axes, and those of its cache `[rows, heads, ...]`
    also to the tensor axis. Scalars are ignored. Without a mesh does nothing.

    Args:
      heads_axis: 2 for the cache of a run of layers, `[rows, layers, heads, ...]`.
    """
    mesh = _mesh()
    if mesh is None:
        return tree

    def pin(x: Array) -> Array:
        if x.ndim < 2 + heads_axis:
            return constrain(x) if x.ndim else x
        # Heads that the tensor axis does not divide are replicated.
        heads = "tensor" if x.shape[heads_axis] % mesh.shape["tensor"] == 0 else None
        return jax.lax.with_sharding_constraint(x, P(BATCH, *(None,) * (heads_axis - 1), heads))

    return jax.tree.map(pin, tree)
