"""Several processes that train one model: joining them, and what they say to each other beside the compiled programs.

    every process       join(...) ─► check_same(settings) ─► loop.step(state) ─► loop.step(state) ─► …

JAX's own runtime does the work (`jax.distributed`): after `join`, `jax.devices()` are those of all processes, and every
process must start the same programs in the same order. With one process nothing here talks to anybody.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

# What computes, and what builds the rows and prompts: every process makes those of the whole batch by itself.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers", "tokenizers", "smd_jax")
# Of extras, which need not be installed.
EXTRAS = ("datasets", "reasoning-gym")


class OtherProcessError(RuntimeError):
    """A process cannot take part: it has other settings or versions, or it has stopped."""


def join(coordinator: str | None = None, count: int | None = None, index: int | None = None) -> None:
    """Makes this process one of several. Call it before anything asks JAX for its devices.

    Args:
      coordinator: `host:port` of the process with index 0, as all can reach it. None: what surrounds the process tells
        (TPU pods, SLURM, GKE, Open MPI), and then the other two are not needed either.
      count: how many processes there are. index: which one this is, from 0.

    Raises:
      ValueError: only a part of the three, or an index that is not below the count.
      RuntimeError: JAX found no coordinator, or not all processes came within its time.
    """
    given = (coordinator, count, index)
    if any(x is None for x in given) and not all(x is None for x in given):
        raise ValueError(
            "expected coordinator, count and index of a process together, or none of them where JAX finds out by "
            f"itself; got {coordinator}, {count} and {index}"
        )
    if count is not None and index is not None and not 0 <= index < count:
        raise ValueError(f"expected the index of a process from 0 to {count - 1}, of {count} processes; got {index}")
    # How CPUs of several processes add up; other platforms have their own ways and don't look at it.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # And one program after the other: two at once would wait for each other's threads.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # It would take SIGTERM away from whoever listens to it, and a process that nobody listens in would not end.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(coordinator, count, index)
    except ValueError as error:  # JAX's, where nothing around the process names a coordinator
        raise RuntimeError(f"expected a TPU pod, SLURM, GKE or Open MPI to name the processes; got: {error}") from error


def is_first() -> bool:
    """Whether this process writes what is written once: metrics, completions, the trained model."""
    return jax.process_index() == 0


def gather_texts(text: str) -> list[str]:
    """The texts of all processes, by their index; all must call it."""
    if jax.process_count() == 1:
        return [text]
    words = np.frombuffer(text.encode("utf-8"), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(words))).reshape(-1)
    room = np.zeros(max(int(lengths.max()), 1), np.uint8)
    room[: len(words)] = words
    rows = multihost_utils.process_allgather(room)
    return [bytes(row[:length]).decode("utf-8") for row, length in zip(rows, lengths, strict=True)]


def gather_json(value: Any) -> list[Any]:
    """`gather_texts` of JSON values, in which NaN and infinities may be."""
    return [json.loads(text) for text in gather_texts(json.dumps(value))]


@contextmanager
def all_or_none() -> Iterator[None]:
    """What fails in one process ends all of them, where otherwise they would wait for it: whatever the body raises is
    raised, and OtherProcessError in the processes where it went well. All must come here; nobody leaves before the
    others have come. In the body nothing may wait for another process, unless that wait has a limit of its own.
    """
    went_well = False
    try:
        yield
        went_well = True
    finally:
        # Where the body went well, it is one that the caller is handling, if there is any.
        error = None if went_well else sys.exception()
        ended = gather_json(None if error is None else f"{type(error).__name__}: {error}")
    for process, other in enumerate(ended):
        if other is not None:
            raise OtherProcessError(f"expected every process to go on; process {process} ended with {other}")


def on_host(x: jax.Array | np.ndarray) -> np.ndarray:
    """The values of an array that may lie on several processes' devices; then all must call it."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)


def on_first_host(tree: Any) -> Any:
    """The tree with its arrays on the host of the first process, leaf by leaf; None in the others. All must call it."""
    leaves, structure = jax.tree.flatten(tree)
    # The others keep nothing: their hosts need not have room for a whole model.
    kept = [on_host(leaf) if is_first() else _taken_part(leaf) for leaf in leaves]
    return structure.unflatten(kept) if is_first() else None


def _taken_part(x: jax.Array | np.ndarray) -> None:
    on_host(x)


def versions() -> dict[str, str]:
    """Versions of what decides the numbers of a run; those of extras, where they are installed."""
    return {name: metadata.version(name) for name in (*PACKAGES, *filter(_is_installed, EXTRAS))}


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def check_same(settings: Mapping[str, Any]) -> None:
    """Refuses to begin where a process has other settings than the first, or other versions of the libraries; in every
    process, so that none waits for another.

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


def differences(expected: Any, got: Any, name: str = "") -> list[str]:
    """One line a field in which two JSON values differ."""
    if isinstance(expected, dict) and isinstance(got, dict):
        inner = [
            differences(expected.get(key, "(absent)"), got.get(key, "(absent)"), f"{name}.{key}" if name else key)
            for key in expected | got
        ]
        return [line for lines in inner for line in lines]
    # As text: NaN is NaN there.
    left, right = json.dumps(expected), json.dumps(got)
    return [] if left == right else [f"{name}: expected {left}, got {right}"]
