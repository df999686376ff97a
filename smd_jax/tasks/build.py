"""Builds a task from a name: of a preset, a procedural data set, a data set of the Hub, a file, or a folder.

build_task(TaskChoice("gsm8k"))                                     a preset, with its own reward
build_task(TaskChoice("gsm8k", source="my_gsm8k.parquet"))          a preset on rows from elsewhere
build_task(TaskChoice("reasoning_gym:chain_sum"))                   a data set of reasoning-gym, with its own verifier
build_task(TaskChoice("owner/name", prompt_column="question", reward=my_reward))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from smd_jax.config import check_seed
from smd_jax.tasks.dataset_task import DatasetTask
from smd_jax.tasks.presets import PRESETS, Preset
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
        return _procedural(choice)
    if choice.name in PRESETS:
        return _preset(choice, PRESETS[choice.name])
    if choice.source is not None:
        raise ValueError(
            f"expected the name of a preset beside source {choice.source!r}, one of {[*PRESETS]}; got {choice.name!r}"
        )
    if choice.parameters:
        raise ValueError(
            f"expected parameters with {PROCEDURAL}NAME alone; got {choice.parameters} for {choice.name!r}"
        )
    source = DataSource(choice.name, choice.config, choice.split)
    prompt_column = choice.prompt_column or "prompt"
    row_format = RowFormat(prompt_column, choice.system_prompt, choice.map_row, choice.chat_template_kwargs)
    return DatasetTask(load_rows(source), choice.reward, row_format)


def _preset(choice: TaskChoice, preset: Preset) -> Task:
    _refuse(choice, ("prompt_column", "map_row", "parameters"), "a preset")
    if choice.source is None:
        own = preset.held_out if choice.held_out else preset.train
        source = dataclasses.replace(own, config=choice.config or own.config, split=choice.split or own.split)
    else:
        # The preset's configuration and split do not apply to other data.
        source = DataSource(choice.source, choice.config, choice.split)
    row_format = RowFormat("prompt", choice.system_prompt, preset.map_row, choice.chat_template_kwargs)
    return DatasetTask(load_rows(source, preset.columns), choice.reward or preset.reward, row_format)


def _procedural(choice: TaskChoice) -> Task:
    _refuse(choice, ("source", "config", "split", "prompt_column", "map_row"), "a procedural data set")
    seed = choice.seed + HELD_OUT_SEED if choice.held_out else choice.seed
    task = ReasoningGymTask(choice.name.removeprefix(PROCEDURAL), seed, choice.size, choice.parameters)
    row_format = RowFormat("prompt", choice.system_prompt, chat_template_kwargs=choice.chat_template_kwargs)
    if choice.reward is None and row_format == RowFormat():
        return task
    return DatasetTask(task, choice.reward or task.reward, row_format)


def _refuse(choice: TaskChoice, names: Sequence[str], what: str) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(TaskChoice)}
    for name in names:
        value = getattr(choice, name)
        if value != defaults[name]:
            raise ValueError(f"expected no {name} with {what}, which has its own; got {value!r} with {choice.name!r}")
