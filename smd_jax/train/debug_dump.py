"""A rollout with which a run must not go on, as a file: what somebody needs to find out why.

    arrays = safetensors.numpy.load_file("refused_41.safetensors")
    tokens, valid        [batch, T]      prompts and responses
    logprobs             [batch, R]      the sampler's
    rewards, terminated  [batch]         counted_rows [batch], where some were left out
    evicted_at           [batch, layers, kv_heads, T], or visible [batch, layers, kv_heads, T, T]

Beside the arrays, in the file's metadata: why, the rollout's metrics, and its completions as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np

from smd_jax.devices.processes import all_or_none, is_first, on_host
from smd_jax.disk import written
from smd_jax.learner.mismatch_guard import DIFFERENCE, Parting
from smd_jax.learner.state import TrainState
from smd_jax.message.masks import ShadowMask
from smd_jax.safetensors_files import write_safetensors
from smd_jax.train.samples import Samples


class RefusedRolloutError(RuntimeError):
    """A rollout with which a run must not go on, as the message says.

    Attributes:
      index: its number. samples, metrics: what it was. file: where it is kept; None: nowhere yet.
      state: what it has left: that before it, or where an update was taken and left out, that after it.
    """

    def __init__(
        self, index: int, message: str, samples: Samples, metrics: dict[str, float], state: TrainState
    ) -> None:
        self.index = index
        self.samples = samples
        self.state = state
        self.metrics = metrics
        self.file: Path | None = None
        super().__init__(message)

    def with_file(self, file: Path) -> RefusedRolloutError:
        """The same, which says where the rollout is kept."""
        said = f"{self}. The rollout is in {file}"
        other = RefusedRolloutError(self.index, said, self.samples, self.metrics, self.state)
        other.file = file
        return other


def not_one_policy(
    index: int, samples: Samples, metrics: dict[str, float], state: TrainState, bound: float, parting: Parting | None
) -> RefusedRolloutError:
    """Sampler and learner differ by more than `bound` nats; `parting` says where, if a replay finds it again."""
    said = f"rollout {index}: expected sampler and learner within {bound:.3g} nats at every token; got "
    said += f"{metrics[DIFFERENCE]:.3g}" if parting is None else f"{metrics[DIFFERENCE]:.3g}, {parting}"
    return RefusedRolloutError(index, said, samples, metrics, state)


def never_finite(
    index: int, samples: Samples, metrics: dict[str, float], state: TrainState, count: int
) -> RefusedRolloutError:
    """The newest of `count` rollouts in a row whose updates were left out."""
    said = f"rollout {index}: expected a finite loss and gradient; got loss {metrics['loss']:g} and grad_norm "
    said += (
        f"{metrics['grad_norm']:g}, and no better in {count} rollouts in a row, from which nothing was learnt. Try a "
    )
    said += "lower learning rate, a lower max_grad_norm, or float32; and look at the rewards"
    return RefusedRolloutError(index, said, samples, metrics, state)


def write_refused(directory: Path, refused: RefusedRolloutError) -> Path:
    """Writes `refused_<number>.safetensors` and returns its path; of several processes all must call it, and the first
    writes.

    Raises:
      OSError: the disk is full, or fails; in one line. OtherProcessError: so it is in the first process.
    """
    path = directory / f"refused_{refused.index}.safetensors"
    arrays = refused_arrays(refused.samples)
    about = {
        "why": str(refused),
        "metrics": json.dumps(refused.metrics),
        "completions": json.dumps(refused.samples.completions),
    }
    with all_or_none():
        if is_first():
            with written(path):
                write_safetensors(path, arrays, about)
    return path


def refused_arrays(samples: Samples) -> dict[str, np.ndarray]:
    """The arrays of a rollout, on the host and under the names above."""
    trajectory = jax.tree.map(on_host, samples.trajectory)
    mask = trajectory.mask
    arrays = {
        "tokens": trajectory.tokens,
        "valid": trajectory.valid,
        "logprobs": trajectory.logprobs,
        "terminated": trajectory.terminated,
        "rewards": samples.rewards,
        "counted_rows": samples.counted_rows,
        **({"evicted_at": mask.evicted_at} if isinstance(mask, ShadowMask) else {"visible": mask}),
    }
    return {name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}
