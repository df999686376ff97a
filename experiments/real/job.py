"""A run of the study on a real model: arm, seed, sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import smd_jax as smd
from lib.arms import Arm
from lib.files import Row, read_kept, settings_text, write_kept
from real.task import DigitSums, Split
from smd_jax.eviction.policies import RKV, EvictionPolicy, SnapKV
from smd_jax.eviction.wrappers import Protect

Rule = Literal["snapkv", "r-kv"]
RULES: dict[Rule, EvictionPolicy] = {"snapkv": SnapKV(), "r-kv": RKV()}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run; lengths in tokens.

    Attributes:
      terms, shots: of the task.
      learning_rate: of all arms.
      warmup: rollouts over which the learning rate rises.
      chunk: rollouts between two checkpoints.
      microbatch: rows of one forward and backward pass; whole groups, which share their prompt.
    """

    terms: int = 3
    shots: int = 2
    response: int = 64
    budget: int = 128
    buffer: int = 16
    rollouts: int = 16
    learning_rate: float = 3e-4
    prompts: int = 4
    group: int = 8
    microbatch: int = 8
    warmup: int = 5
    chunk: int = 4
    rank: int = 16
    training_rows: int = 700
    evaluation_rows: int = 144


SIZES = Sizes()


@dataclass(frozen=True)
class Base:
    """The model that all runs start from.

    Attributes:
      load: reads the parameters. A run donates their buffers, so every run reads them again.
    """

    config: smd.ModelConfig
    tokenizer: Any
    load: Callable[[], Any]


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
      rule: eviction policy of the sampler. `settings` contains it as `policy`.
    """

    arm: Arm
    seed: int
    sizes: Sizes = SIZES
    rule: Rule = field(default="snapkv", repr=False)

    @property
    def rollouts(self) -> int:
        return self.sizes.rollouts if self.arm.trains else 0

    def rows(self, split: Split, size: int) -> DigitSums:
        return DigitSums(split, size, self.sizes.terms, self.sizes.shots)

    @property
    def training(self) -> DigitSums:
        return self.rows("train", self.sizes.training_rows)

    @property
    def held_out(self) -> DigitSums:
        return self.rows("evaluation", self.sizes.evaluation_rows)

    @property
    def policy(self) -> Protect:
        """The eviction policy of the sampler."""
        return Protect(RULES[self.rule], sinks=4)

    def settings(self, base: Base) -> str:
        """Everything except code and weights that the numbers of the run depend on."""
        return settings_text((self, self.policy, base.config))

    def folder(self, runs: Path) -> Path:
        return runs.joinpath(self.training.label, self.rule, self.arm.name, f"seed-{self.seed}")


def kept(job: Job, base: Base, runs: Path) -> Row | None:
    """The kept row of a job, which may be unfinished; None without one.

    Raises:
      ValueError: if the run had other settings.
    """
    return read_kept(job.folder(runs) / "run.json", job.settings(base))


def keep_row(job: Job, base: Base, runs: Path, row: Row) -> None:
    """Keeps a row for `kept`."""
    write_kept(job.folder(runs) / "run.json", job.settings(base), row)


def is_finished(job: Job, base: Base, runs: Path) -> bool:
    row = kept(job, base, runs)
    return row is not None and row["finished"]
