"""Dumps a rejected rollout for debugging.

    arrays = safetensors.numpy.load_file("refused_41.safetensors")
    tokens, valid        [rows, T]       prompts and responses
    logprobs             [rows, R]       the sampler's
    rewards              [batch]         a completion has several rows if its contexts are compacted
    terminated           [rows]          counted_rows [rows], if some were left out
    evicted_at           [rows, layers, kv_heads, T]

The file's metadata hold the reason (`why`), the rollout's metrics, and its completions as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np

from smd_jax.devices.processes import all_or_none, is_first, on_host
from smd_jax.disk import disk_errors_named, write_safetensors
from smd_jax.learner.mismatch_guard import DIFFERENCE
from smd_jax.learner.state import TrainState
from smd_jax.train.samples import Samples


class RefusedRolloutError(RuntimeError):
    """A rollout after which the run must not continue; the message gives the reason.

    Attributes:
      index: its number. samples, metrics: the rollout. file: where it is dumped; None before that.
      state: the state before the rollout, or after it if its update was skipped.
    """

    file: Path | None = None

    def __init__(
        self, index: int, message: str, samples: Samples, metrics: dict[str, float], state: TrainState
    ) -> None:
        self.index, self.samples, self.metrics, self.state = index, samples, metrics, state
        super().__init__(f"rollout {index}: expected {message}")

    def __str__(self) -> str:
        return super().__str__() + ("" if self.file is None else f". The rollout is in {self.file}")


def mismatch_error(
    index: int, samples: Samples, metrics: dict[str, float], state: TrainState, bound: float, where: str | None
) -> RefusedRolloutError:
    """Sampler and learner differ by more than `bound` nats; `where` is the place, if a replay reproduces it."""
    message = f"sampler and learner within {bound:.3g} nats at every token; got {metrics[DIFFERENCE]:.3g}"
    message += "" if where is None else f", {where}"
    return RefusedRolloutError(index, message, samples, metrics, state)


def not_finite_error(
    index: int, samples: Samples, metrics: dict[str, float], state: TrainState, count: int
) -> RefusedRolloutError:
    """The last of `count` rollouts in a row whose updates were skipped."""
    message = (
        f"a finite loss and gradient; got loss {metrics['loss']:g} and grad_norm {metrics['grad_norm']:g}, and the "
        f"same in {count} rollouts in a row, from which nothing was learned. Try a lower learning rate, a lower "
        "max_grad_norm, or float32; and look at the rewards"
    )
    return RefusedRolloutError(index, message, samples, metrics, state)


def dump_rollout(directory: Path, refused: RefusedRolloutError) -> Path:
    """Writes `refused_<number>.safetensors` and returns its path; all processes must call it, the first one writes.

    Raises:
      OSError: the disk is full or fails; in one line. OtherProcessError: the same in the first process.
    """
    path = directory / f"refused_{refused.index}.safetensors"
    arrays = rollout_arrays(refused.samples)
    metadata = {
        "why": str(refused),
        "metrics": json.dumps(refused.metrics),
        "completions": json.dumps(refused.samples.completions),
    }
    with all_or_none():
        if is_first():
            with disk_errors_named(path):
                write_safetensors(path, arrays, metadata)
    return path


def rollout_arrays(samples: Samples) -> dict[str, np.ndarray]:
    """The arrays of a rollout on the host, under the names of the file."""
    trajectory = jax.tree.map(on_host, samples.trajectory)
    arrays = {
        "tokens": trajectory.tokens,
        "valid": trajectory.valid,
        "logprobs": trajectory.logprobs,
        "sampled": trajectory.sampled,
        "terminated": trajectory.terminated,
        "rewards": samples.rewards,
        "counted_rows": samples.counted_rows,
        "evicted_at": trajectory.mask.evicted_at,
    }
    return {name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}
