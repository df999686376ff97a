"""Processes that train one model together: how they join, and how they exchange data outside compiled programs.

    every process       join(...) ─► check_same(settings) ─► loop.step(state) ─► loop.step(state) ─► …

Uses `jax.distributed`: after `join`, `jax.devices()` lists the devices of all processes, and every process must start
the same programs in the same order. With one process, nothing here communicates.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

# Packages that compute, or that build rows and prompts: every process builds those of the whole batch.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers", "tokenizers", "smd_jax")
# Optional packages.
EXTRAS = ("datasets", "reasoning-gym")

ABSENT = "(absent)"  # instead of a field that only one of two settings has


class OtherProcessError(RuntimeError):
    """Another process has other settings or versions, or has failed."""


def join(coordinator: str | None = None, count: int | None = None, index: int | None = None) -> None:
    """Joins this process to the others. Call it before anything asks JAX for its devices.

    Args:
      coordinator: `host:port` of the process with index 0, reachable by all. None: JAX detects all three arguments (TPU
        pods, SLURM, GKE, Open MPI).
      count: number of processes. index: of this process, from 0.

    Raises:
      ValueError: some but not all of the arguments, or an index that is not below the count.
      RuntimeError: JAX found no coordinator, or not all processes joined in time.
    """
    given = (coordinator, count, index)
    if any(x is None for x in given) and not all(x is None for x in given):
        raise ValueError(
            "expected coordinator, count and index of a process together, or none of them where JAX detects them; "
            f"got {coordinator}, {count} and {index}"
        )
    if count is not None and index is not None and not 0 <= index < count:
        raise ValueError(f"expected the index of a process from 0 to {count - 1}, of {count} processes; got {index}")
    # Collectives of CPUs; other platforms ignore this setting.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Two CPU programs at once would wait for each other's threads.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # Its SIGTERM handler would replace ours, and a process without ours would not end.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(coordinator, count, index)
    except ValueError as error:  # JAX detected no coordinator
        raise RuntimeError(f"expected a TPU pod, SLURM, GKE or Open MPI to name the processes; got: {error}") from error


def is_first() -> bool:
    """Whether this process writes the shared files: metrics, completions, the trained model."""
    return jax.process_index() == 0


def gather_json(value: Any) -> list[Any]:
    """The JSON values of all processes, by their index, including NaN and infinities; all must call it."""
    text = json.dumps(value).encode()
    if jax.process_count() == 1:
        return [json.loads(text)]
    words = np.frombuffer(text, np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(words))).reshape(-1)
    room = np.zeros(int(lengths.max()), np.uint8)
    room[: len(words)] = words
    rows = multihost_utils.process_allgather(room)
    return [json.loads(bytes(row[:length])) for row, length in zip(rows, lengths, strict=True)]


@contextmanager
def all_or_none() -> Iterator[None]:
    """A failure of the body in one process stops all processes, which would otherwise hang.

    All processes must enter and wait for each other at the exit. The process that failed raises its error, and the
    others raise OtherProcessError. The body must not wait for another process without a time limit.
    """
    went_well = False
    try:
        yield
        went_well = True
    finally:
        # After a success, `sys.exception` may be an error that the caller handles.
        error = None if went_well else sys.exception()
        ended = gather_json(None if error is None else f"{type(error).__name__}: {error}")
    for process, other in enumerate(ended):
        if other is not None:
            raise OtherProcessError(f"expected every process to continue; process {process} ended with {other}")


def on_host(x: jax.Array | np.ndarray) -> np.ndarray:
    """The values of an array. If it is spread over several processes, all must call this."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


def on_first_host(tree: Any) -> Any:
    """The tree with its arrays on the host of the first process, leaf by leaf; None in the others. All must call it."""

    def taken(leaf: Any) -> np.ndarray | None:
        whole = on_host(leaf)  # all processes take part; the others drop it at once and need no room for a model
        return whole if is_first() else None

    leaves, structure = jax.tree.flatten(tree)
    kept = [taken(leaf) for leaf in leaves]
    return structure.unflatten(kept) if is_first() else None


def versions() -> dict[str, str]:
    """Versions of the packages that decide the numbers of a run, including installed optional ones."""
    found = {name: metadata.version(name) for name in PACKAGES}
    for name in EXTRAS:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def check_same(settings: Mapping[str, Any]) -> None:
    """Compares the settings and package versions of all processes with those of the first; all raise together.

    Args:
      settings: JSON values by name; objects in them are compared field by field.

    Raises:
      OtherProcessError: names every difference.
    """
    first, *others = gather_json({"versions": versions(), **settings})
    lines = [f"process {index}: {line}" for index, other in enumerate(others, 1) for line in differences(first, other)]
    if lines:
        raise OtherProcessError(
            "expected the settings and versions of process 0 in all processes of a run; got others:\n  "
            + "\n  ".join(lines)
        )


def differences(expected: Any, got: Any, name: str = "", words: tuple[str, str] = ("expected", "got")) -> list[str]:
    """One line per field in which two JSON values differ.

    Args:
      name: beginning of every line.
      words: before the two values.
    """
    left, right = _fields(expected), _fields(got)
    if left and right and (isinstance(expected, dict) or len(left) == len(right)):
        names = {key: f"{name}.{key}" if name else key for key in left | right}
        lines = [differences(left.get(k, ABSENT), right.get(k, ABSENT), inner, words) for k, inner in names.items()]
        return [line for of_field in lines for line in of_field]
    shown = [ABSENT if value is ABSENT else json.dumps(value) for value in (expected, got)]
    # As text NaN equals NaN.
    is_same = expected == got or shown[0] == shown[1]
    return [] if is_same else [f"{name}: {words[0]} {shown[0]}, {words[1]} {shown[1]}"]


def _fields(value: Any) -> dict[str, Any]:
    """The fields of an object or the items of a list; empty for other values."""
    if isinstance(value, list):
        return {str(index): item for index, item in enumerate(value)}
    return value if isinstance(value, dict) else {}
