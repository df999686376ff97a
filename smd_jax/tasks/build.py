"""Builds a task from a name: of a preset, a procedural data set, a data set of the Hub, a file, or a folder.

build_task(TaskChoice("gsm8k"))                                     a preset, with its own reward
build_task(TaskChoice("gsm8k", source="my_gsm8k.parquet"))          a preset on rows from elsewhere
build_task(TaskChoice("reasoning_gym:chain_sum"))                   a data set of reasoning-gym, with its own verifier
build_task(TaskChoice("owner/name", prompt_column="question", reward=my_reward))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smd_jax.config import check_seed
from smd_jax.tasks.dataset_task import DatasetTask
from smd_jax.tasks.presets import PRESETS
from smd_jax.tasks.reasoning_gym import ReasoningGymTask
from smd_jax.tasks.rewards import RewardFunction
from smd_jax.tasks.row_format import RowFormat, RowFunction
from smd_jax.tasks.sources import DataSource, load_rows
from smd_jax.tasks.task import Task

PROCEDURAL = "reasoning_gym:"

# Most procedural data sets make row i from seed + i, so held-out rows need a seed far from that of any run.
HELD_OUT_SEED = 1_000_000_007


@dataclass(frozen=True)
class TaskChoice:
    """Data and reward to train or evaluate on.

    Attributes:
      name: a preset of `PRESETS`; "reasoning_gym:NAME"; or what `DataSource.name` takes.
      source: replaces the rows of a preset by others in its layout; same values as `DataSource.name`.
      config, split: see DataSource. None: the preset's own, or the only one.
      held_out: take the evaluation rows of a preset or a procedural data set.
      prompt_column, system_prompt, map_row, chat_template_kwargs: see RowFormat. A preset brings its own prompt column
        and map function.
      reward: TRL's signature; None: that of the preset or the procedural data set. Other data has none, see
        `own_reward`.
      seed, size, parameters: of a procedural data set, see ReasoningGymTask.
    """

    name: str
    source: str | None = None
    config: str | None = None
    split: str | None = None
    held_out: bool = False
    prompt_column: str | None = None
    system_prompt: str | None = None
    map_row: RowFunction | None = None
    chat_template_kwargs: tuple[tuple[str, object], ...] = ()
    reward: RewardFunction | None = None
    seed: int = 0
    size: int = 10_000
    parameters: tuple[tuple[str, object], ...] = ()

    def __post_init__(self) -> None:
        check_seed("seed", self.seed)


def build_task(choice: TaskChoice) -> Task:
    """Builds the task.

    Raises:
      ValueError: options that exclude each other. For other errors see `load_rows`.
    """
    if choice.name.startswith(PROCEDURAL):
        _refuse(choice, ("source", "config", "split", "prompt_column", "map_row"), "a procedural data set")
        seed = choice.seed + HELD_OUT_SEED if choice.held_out else choice.seed
        task = ReasoningGymTask(choice.name.removeprefix(PROCEDURAL), seed, choice.size, choice.parameters)
        row_format = RowFormat("prompt", choice.system_prompt, chat_template_kwargs=choice.chat_template_kwargs)
        if choice.reward is None and row_format == RowFormat():
            return task
        return DatasetTask(task, choice.reward or task.reward, row_format)
    _refuse(choice, ("parameters",), f"anything but {PROCEDURAL}NAME")
    if choice.name not in PRESETS:
        _refuse(choice, ("source",), f"anything but the presets {[*PRESETS]}")
        column = choice.prompt_column or "prompt"
        row_format = RowFormat(column, choice.system_prompt, choice.map_row, choice.chat_template_kwargs)
        return DatasetTask(load_rows(DataSource(choice.name, choice.config, choice.split)), choice.reward, row_format)
    _refuse(choice, ("prompt_column", "map_row"), "a preset")
    preset = PRESETS[choice.name]
    # The preset's configuration and split do not apply to other data.
    own = preset.held_out if choice.held_out else preset.train
    own = own if choice.source is None else DataSource(choice.source)
    source = DataSource(own.name, choice.config or own.config, choice.split or own.split)
    row_format = RowFormat("prompt", choice.system_prompt, preset.map_row, choice.chat_template_kwargs)
    return DatasetTask(load_rows(source, preset.columns), choice.reward or preset.reward, row_format)


def _refuse(choice: TaskChoice, names: Sequence[str], what: str) -> None:
    for name in names:
        if getattr(choice, name) != getattr(TaskChoice, name):
            raise ValueError(f"expected no {name} with {what}; got {getattr(choice, name)!r} with {choice.name!r}")
