"""The names of all metrics, and the file that stores them: one JSON object per step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from smd_jax.disk import replaced
from smd_jax.losses.dpo import DPO_METRICS
from smd_jax.losses.value import VALUE_METRICS
from smd_jax.metrics import CORRECTION_METRICS, EVALUATION_METRICS, SAMPLER_LEARNER_METRICS

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
STATM = Path("/proc/self/statm")  # Linux: sizes of this process in pages

Scalar = Array | np.ndarray | np.generic | float | int

# See docs/monitoring.md for what each of these times includes.
TIME_METRICS: dict[str, str] = {
    "step_time": "wall time of one step with its rollout, seconds",
    "time/rollout": "of it, prompts to trajectory, seconds",
    "time/environment": "of time/rollout, in calls of environments or waiting for them, seconds",
    "time/grading": "of it, texts of the completions and their rewards, seconds",
    "time/update": "of it, from the trajectory to the last optimizer step's metrics, seconds",
    "rollout/tokens_per_second": "rollout/tokens / time/rollout",
    "update/tokens_per_second": "tokens of the rollout, prompts included and padding not, / time/update",
}

MEMORY_METRICS: dict[str, str] = {
    "memory/host_bytes": "resident memory of this process; where the system reports it",
    "memory/device_bytes": "memory in use on the fullest device of this process; where the device reports it",
    "memory/device_peak_bytes": "peak memory of one device of this process; where the device reports it",
}

# These depend on the clock and the machine; all other metrics of a repeated or resumed run are bitwise equal.
MACHINE_METRICS = TIME_METRICS | MEMORY_METRICS

# A name in braces is a placeholder for any name.
METRICS: dict[str, str] = {
    "reward": "mean reward of the completions, sampled under the cache budget",
    "reward_std": "standard deviation (n - 1) of the reward over the batch, as in TRL since June 2026",
    "reward_std_within_group": "mean over groups of the standard deviation (n - 1) inside one; TRL's older reward_std",
    "frac_reward_zero_std": "share of groups in which all rewards are equal: they give no gradient",
    "kl": "estimate of KL(policy || reference) per kept token, nats, by `kl_estimator`; only with a reference",
    "entropy": "mean entropy of the next-token distribution over counted tokens, nats",
    "clip_ratio/low_mean": "share of counted tokens clipped from below: ratio < 1 - epsilon, negative advantage",
    "clip_ratio/high_mean": "share of counted tokens clipped from above: ratio > 1 + epsilon_high, positive advantage",
    "clip_ratio/region_mean": "share of counted tokens clipped at either side; of responses at ratio_level geometric",
    "cispo_clip_ratio": "share of counted tokens whose weight cispo cuts: ratio > 1 + epsilon_high, advantage > 0",
    "sapo_gate_mean": "how far sapo's gate is open: mean slope of the objective over its advantage, 1 on-policy",
    "completions/mean_length": "mean length of a completion, tokens",
    "completions/min_length": "shortest completion, tokens",
    "completions/max_length": "longest completion, tokens",
    "completions/clipped_ratio": "share of completions that hit the length limit before EOS",
    "rewards/failed": "completions on which a reward function failed; the update leaves them out",
    "rewards/{name}/mean": "mean reward of one function, before its weight; only with `Loop.rewards`",
    "rewards/{name}/std": "standard deviation (n - 1) of the same",
    "rollout/tokens": "sampled response tokens",
    "rollout/entropy": "mean entropy of the distributions that tokens were sampled from (filters applied), nats",
    "rollout/evicted_share": "share of the tokens of whole sequences whose keys are evicted before the last query",
    "rollout/utilisation": "rows of the cache that sampled / all of them, with `decode_rows` or an environment",
    "conversations/turns": "mean number of turns of a conversation; these only with an environment",
    "conversations/contexts": "mean number of contexts of a conversation, if they are compacted",
    "conversations/read_tokens": "mean number of tokens of a conversation that the policy read between its turns",
    "conversations/ended": "share of conversations that their environment ended; others reached a limit",
    "staleness/rollouts": "updates since the rollout was sampled; this and the next only with `rollouts_ahead`",
    "staleness/ratio_min": "minimum over tokens of p_learner / p_sampler at the first optimizer step, by age",
    "staleness/ratio_mean": "mean of the same",
    "staleness/ratio_max": "maximum of the same",
    "staleness/kl": "k3 estimate of KL(sampler || learner) per token at that step, nats",
    "update/padding": "share of the learner's columns that hold no token",
    "update/shared": "share of the batch's tokens that branches share, so that the learner reads them once",
    "grad_norm": "global norm of the gradient before clipping, mean over the optimizer steps with something to learn",
    "update/skipped": "share of optimizer steps that were skipped, because loss or gradient was not finite",
    "learning_rate": "learning rate of the optimizer steps, if the optimizer's state has it",
    "loss": "policy loss, less the weighted entropy bonus, and weighted distillation and value loss; as grad_norm",
    "distill": "divergence between dense and shadow policy per token, nats",
    "loss/dense_avg": "policy loss of a dense learner on the same weights, before its share",
    "evictions/loss": "policy loss of the evictions that a gate draws, without its coefficient",
    "evictions/logp_difference/max": "maximum of |log p_learner - log p_sampler| over the first step's evictions, nats",
    "distill/agreement_p5": "5th percentile over tokens of 1 - TV(teacher, masked policy), over the drawable tokens",
    "dynamic_sampling/rollouts": "rollouts that filled the batch; only with dynamic sampling",
    "eval/sparse": "mean reward on the evaluation prompts, decoding under the cache budget",
    "eval/dense": "mean reward on the evaluation prompts, decoding with the whole cache",
    **{f"eval/{{name}}/{metric}": what for metric, what in EVALUATION_METRICS.items()},
    **MACHINE_METRICS,
    **SAMPLER_LEARNER_METRICS,
    **CORRECTION_METRICS,
    **DPO_METRICS,
    **VALUE_METRICS,
}


def memory_in_use(statm: Path = STATM) -> dict[str, float]:
    """The `MEMORY_METRICS` that are known on this machine, in bytes. Reads counters, and waits for no device."""
    found: dict[str, float] = {}
    if statm.is_file():
        # The second number is the resident memory.
        found["memory/host_bytes"] = float(int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    # A CPU has no statistics: its arrays are memory of the process.
    reports = [report for device in jax.local_devices() if (report := device.memory_stats())]
    for name, field in (("memory/device_bytes", "bytes_in_use"), ("memory/device_peak_bytes", "peak_bytes_in_use")):
        values = [float(report[field]) for report in reports if field in report]
        if values:
            found[name] = max(values)
    return found


def meaning(name: str) -> str:
    """The meaning of a metric in `METRICS`, with names for placeholders; "" for an unknown one.

    A placeholder stands for a name without "/".
    """
    if name in METRICS:
        return METRICS[name]
    parts = name.split("/")
    return METRICS.get(f"{parts[0]}/{{name}}/{parts[2]}", "") if len(parts) == 3 else ""


def evaluated(name: str) -> str | None:
    """The evaluation whose mean reward this is: `dense` for `eval/dense` and `eval/dense/reward`; else None."""
    kind, _, rest = name.partition("/")
    what, _, value = rest.partition("/")
    return what if kind == "eval" and what and value in ("", "reward") else None


class MetricsWriter:
    """Appends one JSON object per step to a file, such as `{"step": 3, "reward": 0.5}`.

    Every line is flushed. Numbers are read back as the same double; NaN and infinities, which JSON lacks, become `null`
    (`read_metrics` returns NaN). With several processes only one may write a file.

    Args:
      path: the file; its directory is created if absent.
      next_step: None for a new run. For a resumed run, its first step: rows of that step and later ones are dropped, so
        that every step is in the file once, as is an incomplete last line.

    Raises:
      FileExistsError: `next_step` is None but the file holds rows.
      ValueError: a line that is not the last one cannot be read; nothing is changed then.
    """

    def __init__(self, path: str | Path, next_step: int | None = None) -> None:
        self.path = Path(path)
        rows = _read_lines(self.path)
        if next_step is None and rows:
            raise FileExistsError(
                f"expected no metrics in {self.path} for a new run; got {len(rows)} rows. Resume with next_step=..., "
                f"or take another directory"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [(step, line) for step, line in rows if next_step is not None and step < next_step]
        # Checked before it is replaced: a file with an unreadable line stays unchanged.
        with replaced(self.path) as temporary, open(temporary, "wb") as file:
            file.writelines(line + b"\n" for _, line in kept)
            file.flush()
            # On the disk before the rename: otherwise a power cut could leave an empty file.
            os.fsync(file.fileno())
        self._last_step = max((step for step, _ in kept), default=None)
        self._file = open(self.path, "ab")  # noqa: SIM115 - closed by close()

    def write(self, step: int, metrics: Mapping[str, Scalar]) -> dict[str, float | int | None]:
        """Writes one row and returns it as host numbers, fetched from the devices in one transfer.

        Raises:
          ValueError: `step` is not later than the last row, or a metric is no scalar or is called `step`.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"expected a step later than {self._last_step}, the last in {self.path}; got {step}")
        if "step" in metrics:
            raise ValueError(f"expected metrics without the reserved name 'step'; got {sorted(metrics)}")
        row: dict[str, float | int | None] = {"step": step}
        for name, value in jax.device_get(dict(metrics)).items():
            if np.shape(value) != ():
                raise ValueError(f"expected a scalar as metric {name!r}; got shape {np.shape(value)}")
            number = np.asarray(value).item()
            if not isinstance(number, bool | int | float):
                raise ValueError(f"expected a real number as metric {name!r}; got {type(number).__name__} {number!r}")
            row[name] = number if math.isfinite(number) else None  # JSON has neither NaN nor infinity
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._file.flush()
        self._last_step = step
        return row

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics file in their order; `null` becomes NaN, an incomplete last line is skipped.

    Raises:
      FileNotFoundError: no such file.
      ValueError: another line cannot be read; the message names its number.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"expected a metrics file; found none at {path}")
    rows = [json.loads(line) for _, line in _read_lines(Path(path))]
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]


def _read_lines(path: Path) -> list[tuple[int, bytes]]:
    """(step, line without its newline) of every row; empty without a file."""
    if not path.is_file():
        return []
    # Every complete row ends with a newline, so that the rest is empty or incomplete.
    *lines, tail = path.read_bytes().split(b"\n")
    # A crash may cut off the newline only; then the row is complete.
    with suppress(ValueError):
        json.loads(tail)
        lines.append(tail)
    return [(_step_of(path, number, line), line) for number, line in enumerate(lines, start=1)]


def _step_of(path: Path, number: int, line: bytes) -> int:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: expected a JSON object; got {line[:80]!r}") from error
    # `type` rather than isinstance, because True is an int in Python.
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise ValueError(f"{path}, line {number}: expected a JSON object with an integer 'step'; got {line[:80]!r}")
    return row["step"]
