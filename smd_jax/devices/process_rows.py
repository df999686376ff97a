"""Assigns rows of a batch to processes, and converts between a process's rows and the batch on all devices.

A batch is sampled in blocks, one for each position of the mesh on data, fsdp and sequence. Devices that share the
columns of a row in the learner sample different rows, because a sampled token has one column. A process samples the
blocks that its devices hold:

    mesh (data 2, fsdp 2), two processes                rows  0 1 │ 2 3 │ 4 5 │ 6 7
                                                    device  0 │  1  │  2  │  3
                                                   process       0      │      1

Sampling needs no communication between processes. If the tensor axis is longer than a process has devices, several
processes hold the same blocks and sample them together; the first of them reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from smd_jax.devices.sharding import (
    AXES,
    batch_sharding,
    check_rows,
    make_mesh,
    sampled_sharding,
    sampling_ways,
    sequence_ways,
    shard_batch,
)


class DataShards(NamedTuple):
    """The processes that feed a mesh.

    Attributes:
      process_groups: processes that hold the same blocks, in the order of their rows; each group has equally many
        blocks.
      own: index of this process's group.
    """

    process_groups: tuple[tuple[int, ...], ...]
    own: int

    def part(self, rows: int) -> slice:
        """The rows of a batch that this process samples."""
        share = rows // len(self.process_groups)
        return slice(self.own * share, (self.own + 1) * share)

    def one_per_group(self, by_process: list[Any]) -> list[Any]:
        """The values of the first process of every group, in the order of the rows."""
        return [by_process[group[0]] for group in self.process_groups]


def data_shards(mesh: Mesh) -> DataShards:
    """The processes that feed this mesh.

    Raises:
      ValueError: a process without devices in it, or whose blocks of rows are not contiguous.
    """
    blocks = mesh.devices.reshape(sampling_ways(mesh), -1)
    owners = [tuple(sorted({device.process_index for device in block})) for block in blocks]
    process_groups = tuple(dict.fromkeys(owners))
    members = sorted(process for group in process_groups for process in group)
    in_order = owners == [group for group in process_groups for _ in range(len(owners) // len(process_groups))]
    if members != list(range(jax.process_count())) or not in_order:
        raise ValueError(
            f"expected a mesh in which every one of {jax.process_count()} processes has equally many blocks of rows "
            f"next to each other, as those of make_mesh over all devices; got the processes {owners} for the blocks "
            f"of {dict(mesh.shape)}"
        )
    return DataShards(process_groups, next(i for i, group in enumerate(process_groups) if jax.process_index() in group))


@dataclass(frozen=True)
class SamplerPlacement:
    """The devices on which this process samples its rows. If that is the mesh itself, its methods return their
    arguments.

    Raises:
      ValueError: for a mesh with other axes than those of `make_mesh`, another order of them, or explicit ones.
    """

    mesh: Mesh

    def __post_init__(self) -> None:
        # Blocks of rows are read off the array of devices, so the order counts.
        types = self.mesh.axis_types
        if self.mesh.axis_names != AXES or any(kind != AxisType.Auto for kind in types):
            raise ValueError(
                f"expected a mesh of smd.make_mesh, or one with the axes {AXES} in this order, all of type Auto; got "
                f"{self.mesh.axis_names} of types {', '.join(kind.name for kind in types)}"
            )

    @cached_property
    def data_shards(self) -> DataShards:
        """Which process samples which rows."""
        return data_shards(self.mesh)

    @cached_property
    def own_mesh(self) -> Mesh:
        """The mesh of this process's sampler: `mesh` itself with one process and no sequence axis, else its own blocks,
        with weights that are split over tensor only."""
        mesh, ways = self.mesh, sampling_ways(self.mesh)
        if jax.process_count() == 1 and sequence_ways(mesh) == 1:
            return mesh
        blocks = mesh.devices.reshape(ways, -1)[self.data_shards.part(ways)]
        return make_mesh(len(blocks), tensor=mesh.shape["tensor"], devices=list(blocks.flat))

    @property
    def has_own_mesh(self) -> bool:
        """Whether this process samples on another mesh than the learner's."""
        return self.own_mesh is not self.mesh

    def own(self, tree: Any) -> Any:
        """The rows of this process; with several processes on the host."""
        return tree if jax.process_count() == 1 else rows_here(tree)

    def whole(self, own: Any) -> Any:
        """The batch on the mesh, from the rows of every process.

        Raises:
          ValueError: rows that do not divide over the data and fsdp axes.
        """
        if jax.process_count() == 1:
            return shard_batch(own, self.mesh) if self.has_own_mesh else own

        def on_mesh(x: np.ndarray) -> jax.Array:
            rows = x.shape[0] * len(self.data_shards.process_groups)
            check_rows(rows, self.mesh)
            sharding = sampled_sharding(self.mesh)
            sampled = jax.make_array_from_process_local_data(sharding, x, (rows, *x.shape[1:]))
            # Devices that share columns in the learner need each other's sampled rows.
            return jax.device_put(sampled, batch_sharding(self.mesh)) if sequence_ways(self.mesh) > 1 else sampled

        return jax.tree.map(on_mesh, own)


def check_prompts_divide(prompts: int, shards: DataShards) -> None:
    """Raises ValueError for prompts that do not divide over the processes that sample them."""
    if prompts % len(shards.process_groups):
        raise ValueError(
            f"expected prompts_per_step that divide over {len(shards.process_groups)} processes, because all "
            f"completions of a prompt are sampled by one; got {prompts} prompts"
        )


def rows_here(tree: Any) -> Any:
    """The rows of arrays `[rows, ...]` on this process's devices, on the host."""

    def here(x: jax.Array | np.ndarray) -> np.ndarray:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return np.asarray(x)
        assert isinstance(x.sharding, NamedSharding) and isinstance(x.sharding.mesh, Mesh)
        # A compiler may have split other axes than the rows, or nothing.
        by_rows: jax.Array = jax.device_put(x, batch_sharding(x.sharding.mesh))
        parts = {shard.index[0].start or 0: shard.data for shard in by_rows.addressable_shards}
        return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])

    return jax.tree.map(here, tree)


def local_key(key: jax.Array) -> jax.Array:
    """A PRNG key that is replicated over a mesh, for programs of this process only."""
    data = jnp.asarray(np.asarray(jax.random.key_data(key)))
    return jax.random.wrap_key_data(data, impl=str(jax.random.key_impl(key)))
