"""One graded rollout, the selection of groups from several rollouts (dynamic sampling), and the dump of a refused one.

    arrays = safetensors.numpy.load_file("refused_41.safetensors")
    tokens, valid        [rows, T]       prompts and responses
    logprobs             [rows, R]       the sampler's
    sampled              [rows, R]       which tokens the policy sampled, if some were given
    rewards              [batch]         a completion has several rows if its contexts are compacted
    terminated           [rows]          counted_rows [rows]
    evicted_at           [rows, layers, kv_heads, T]

The file's metadata hold the reason (`why`), the rollout's metrics, and its completions as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from smd_jax.devices.processes import all_or_none, is_first, on_host
from smd_jax.disk import disk_errors_named, write_safetensors
from smd_jax.environments.respondent import Conversation
from smd_jax.learner.state import TrainState
from smd_jax.losses.advantages import groups_with_signal
from smd_jax.message.trajectory import Trajectory
from smd_jax.metrics import reward_metrics
from smd_jax.tasks.task import Row
from smd_jax.train.grading import part_metrics


class Samples(NamedTuple):
    """One rollout with its rewards, on the host; the completions of a prompt are contiguous.

    Attributes:
      trajectory: `[rows, ...]`; a row for each completion, or for each context of a conversation that is compacted.
      rewards: float32 `[batch]`; NaN where a reward function failed, see `smd_jax.tasks.rewards`.
      task_rows: the task row of each completion.
      completions: their texts.
      counted_rows: `[rows]`, false for rows that the update leaves out: completions without a reward or a signal, and
        rows without a context. Without such rows it is an array too: None would need a second program of the update.
      metrics: metrics of all sampled completions, including those that are left out.
      reward_parts: float32 `[batch]` for each function of `Loop.rewards`, NaN where it failed or does not apply; empty
        where the task's own reward grades.
      advantages: float32 `[batch]`, where they follow from the rewards; None elsewhere. Set only for
        `Loop.watch`.
      conversations: of rollouts with an environment; otherwise empty.
    """

    trajectory: Trajectory
    rewards: np.ndarray
    task_rows: list[Row]
    completions: list[str]
    counted_rows: np.ndarray
    metrics: dict[str, Any]
    reward_parts: Mapping[str, np.ndarray] = MappingProxyType({})
    advantages: np.ndarray | None = None
    conversations: tuple[Conversation, ...] = ()

    @property
    def rewarded_rows(self) -> np.ndarray:
        """`[batch]`, true for completions with a reward."""
        return ~np.isnan(self.rewards)

    @property
    def contexts(self) -> int:
        """Rows of the trajectory for each completion."""
        return len(self.trajectory.terminated) // len(self.rewards)

    def has_signal(self, group_size: int) -> np.ndarray:
        """`[groups]`, true for groups with unequal rewards; NaN is ignored."""
        return np.asarray(groups_with_signal(jnp.asarray(self.rewards), group_size, jnp.asarray(self.rewarded_rows)))


def select_groups(rollouts: Sequence[Samples], group_size: int, groups: int) -> Samples:
    """The first `groups` groups of several rollouts that have signal, then groups without, which do not count.

    Rewards, lengths and times in the metrics are those of all rollouts.
    """
    rewards = np.concatenate([samples.rewards for samples in rollouts])
    signal = np.concatenate([samples.has_signal(group_size) for samples in rollouts])
    # False sorts before True, and a stable sort keeps the order of the rollouts among equal groups.
    chosen = np.argsort(~signal, kind="stable")[:groups]
    rows = (chosen[:, None] * group_size + np.arange(group_size)).reshape(-1)
    contexts = rollouts[0].contexts
    of_trajectory = (rows[:, None] * contexts + np.arange(contexts)).reshape(-1)
    counted_rows = np.concatenate([samples.counted_rows for samples in rollouts])[of_trajectory]
    counted_rows &= np.repeat(signal[chosen], group_size * contexts)
    trajectories = [samples.trajectory for samples in rollouts]
    task_rows = [row for samples in rollouts for row in samples.task_rows]
    completions = [text for samples in rollouts for text in samples.completions]
    metrics = {
        name: _over_rollouts(name, [samples.metrics[name] for samples in rollouts]) for name in rollouts[0].metrics
    }
    conversations = [each for samples in rollouts for each in samples.conversations]
    parts = {name: np.concatenate([each.reward_parts[name] for each in rollouts]) for name in rollouts[0].reward_parts}
    # From all rewards at once: the mean of a rollout without any is NaN, and deviations cannot be averaged.
    metrics |= reward_metrics(jnp.asarray(rewards), group_size, jnp.asarray(~np.isnan(rewards)))
    for name, part in parts.items():
        metrics |= part_metrics(name, part)
    return Samples(
        trajectory=jax.tree.map(lambda *x: jnp.concatenate(x)[of_trajectory], *trajectories),
        rewards=rewards[rows],
        task_rows=[task_rows[i] for i in rows],
        completions=[completions[i] for i in rows],
        counted_rows=counted_rows,
        metrics=metrics | {"dynamic_sampling/rollouts": jnp.float32(len(rollouts))},
        reward_parts={name: part[rows] for name, part in parts.items()},
        conversations=tuple(conversations[i] for i in rows) if conversations else (),
    )


def _over_rollouts(name: str, values: list[jax.Array]) -> jax.Array:
    reductions = {"completions/min_length": jnp.min, "completions/max_length": jnp.max}
    summed = ("rewards/failed", "rollout/tokens", "time/rollout", "time/grading", "time/environment")
    reductions |= dict.fromkeys(summed, jnp.sum)
    return reductions.get(name, jnp.mean)(jnp.stack(values))


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


def dump_rollout(directory: Path, refused: RefusedRolloutError) -> Path:
    """Writes `refused_<number>.safetensors` and returns its path; all processes must call it, the first one writes.

    Raises:
      OSError: the disk is full or fails; in one line. OtherProcessError: the same in the first process.
    """
    path, samples = directory / f"refused_{refused.index}.safetensors", refused.samples
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
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}
    metadata = {
        "why": str(refused),
        "metrics": json.dumps(refused.metrics),
        "completions": json.dumps(samples.completions),
    }
    with all_or_none():
        if is_first():
            with disk_errors_named(path):
                write_safetensors(path, arrays, metadata)
    return path
