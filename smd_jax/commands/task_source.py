"""Loads training and evaluation rows and their rewards."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from smd_jax.commands.arguments import RETRY, Common, DataArgs, DataSource, EvaluationArgs, RewardArgs
from smd_jax.commands.errors import UserError
from smd_jax.tasks import reward_functions
from smd_jax.tasks.build import PROCEDURAL, TaskChoice, build_task
from smd_jax.tasks.dataset_task import first_rows, own_reward
from smd_jax.tasks.functions import import_function
from smd_jax.tasks.lengths import select_prompts, usable_lengths
from smd_jax.tasks.presets import PRESETS
from smd_jax.tasks.rewards import RewardFunction, Rewards
from smd_jax.tasks.task import Task
from smd_jax.text.near_names import did_you_mean, nearest_file
from smd_jax.text.yaml_limits import load_yaml

BUILT_IN_REWARDS: Mapping[str, RewardFunction] = {
    "math_answer": reward_functions.math_answer,
    "exact_match": reward_functions.exact_match,
    "token_f1": reward_functions.token_f1,
    "rouge_l": reward_functions.rouge_l,
    "format": reward_functions.FormatReward(),
}


class Data(NamedTuple):
    """The data of a run.

    Attributes:
      task: training rows, without prompts that are too long.
      held_out: evaluation rows, also without those prompts; None disables evaluation.
      width: longest allowed prompt, in tokens.
      counts: lines on kept and dropped prompts.
    """

    task: Task
    held_out: Task | None
    width: int
    counts: list[str]


def load_data(args: Common, tokenizer: Any) -> Data:
    """Loads the training and the evaluation rows.

    Raises:
      UserError, ValueError, FileNotFoundError, ConnectionError: missing or unreadable data.
    """
    data = args.data
    choice = task_choice(data, args.run.seed)
    task: Any = task_of(choice)
    if not args.rewards.reward and args.conversations.environment in (None, RETRY):
        check_has_reward(task)
    if args.conversations.environment is None or data.max_prompt_length is None:
        task, width, line = drop_long_prompts(task, tokenizer, data)
        counts = [f"to train on: {line}"]
    else:  # an environment writes its own prompts
        width, counts = data.max_prompt_length, []
    held_out = None
    if args.evaluation.eval_steps:
        held_out = first_rows(task_of(held_out_choice(args.evaluation, choice)), args.evaluation.eval_rows)
        if args.conversations.environment is None:
            held_out, wide, line = drop_long_prompts(held_out, tokenizer, data)
            counts.append(f"to evaluate on: {line}")
            width = max(width, wide)
    return Data(task, held_out, width, counts)


def task_of(choice: TaskChoice) -> Task:
    """`build_task`, whose errors about data that does not exist name the nearest preset or file."""
    try:
        return build_task(choice)
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        name = choice.source or choice.name
        if name in PRESETS or name.startswith(PROCEDURAL) or os.path.exists(name):
            raise
        raise UserError(f"{error}{did_you_mean(name, PRESETS) or nearest_file(name)}") from error


def check_has_reward(task: Any) -> None:
    """Raises UserError for data that defines no reward."""
    try:
        own_reward(task)
    except ValueError as error:
        named = f"--reward path/to/file.py:function, or one of {[*BUILT_IN_REWARDS, 'overlong']}"
        raise UserError(f"{error}. Name one: {named}") from error


def drop_long_prompts(task: Any, tokenizer: Any, args: DataArgs) -> tuple[Task, int, str]:
    """Drops prompts that are too long. Returns the task, the prompt width in tokens, and a line on both."""
    lengths = usable_lengths(task, tokenizer)
    width = args.max_prompt_length or int(lengths.max())
    chosen, counts = select_prompts(task, lengths, width)
    return chosen, width, str(counts)


def task_choice(args: DataSource, seed: int) -> TaskChoice:
    """The training rows that the flags choose."""
    return TaskChoice(
        args.dataset,
        args.dataset_source,
        args.dataset_config,
        args.split,
        prompt_column=args.prompt_column,
        system_prompt=args.system_prompt,
        map_row=None if args.map_function is None else import_function(args.map_function),
        chat_template_kwargs=parameters_of("--chat-template-kwargs", args.chat_template_kwargs),
        seed=seed,
        size=args.dataset_size,
        parameters=parameters_of("--dataset-parameters", args.dataset_parameters),
    )


def held_out_choice(args: EvaluationArgs, training: TaskChoice) -> TaskChoice:
    """The evaluation rows, in the layout of the training rows unless they come from another dataset."""
    own = replace(training, held_out=True, split=args.eval_split, source=args.eval_source)
    if args.eval_seed is not None:
        if not (args.eval_dataset or training.name).startswith(PROCEDURAL):
            raise UserError(f"expected --eval-seed only with {PROCEDURAL}NAME, which generates rows from a seed")
        own = replace(own, seed=args.eval_seed)
    if args.eval_dataset is not None:
        return replace(own, name=args.eval_dataset, config=None, held_out=args.eval_split is None)
    if args.eval_split is None and args.eval_source is None and not has_held_out_rows(training.name):
        raise UserError(
            f"expected --eval-split or --eval-dataset with --eval-steps, because {training.name!r} does not define "
            "held-out rows; got neither"
        )
    return own


def has_held_out_rows(name: str) -> bool:
    """Whether a task of this name defines its held-out rows."""
    return name in PRESETS or name.startswith(PROCEDURAL)


def names_held_out_rows(name: str, split: str | None) -> bool:
    """Whether these are the held-out rows of a task: without a split, or with a preset's held-out split or a part of
    it, such as test[:100]. A preset may have them from another source than its training rows."""
    if split is None or name not in PRESETS:
        return split is None and has_held_out_rows(name)
    return split.partition("[")[0] == PRESETS[name].held_out.split


def rewards_of(args: Any, task: Any, name: str) -> Rewards:
    """The reward functions of --reward, or the task's own reward, with the time and failure limits of the flags.

    Args:
      args: the arguments of smd-train or smd-eval.
      task: the graded rows.
      name: dataset name of the task.

    Raises:
      UserError, ValueError: an unknown reward; a wrong number of weights; no --reward for a task that defines none.
    """
    flags: RewardArgs = args.rewards
    names = None
    if flags.reward:
        functions = tuple(reward_function(reward, args) for reward in flags.reward)
    else:
        check_has_reward(task)
        functions, names = (own_reward(task),), (name.removeprefix(PROCEDURAL),)
    # The time limit also applies to the task's own reward: some verifiers never return.
    return Rewards(functions, flags.reward_weights or None, names, flags.reward_timeout, flags.max_failed_rewards)


def reward_function(name: str, args: Any) -> RewardFunction:
    """The reward function of a built-in name, or of path/to/file.py:function."""
    if ":" in name:
        return import_function(name)
    if name == "overlong":
        length = args.sampler.max_completion_length
        cache = length // 5 if args.rewards.overlong_cache is None else args.rewards.overlong_cache
        return reward_functions.Overlong(length, cache)
    if name not in BUILT_IN_REWARDS:
        names = [*BUILT_IN_REWARDS, "overlong"]
        raise UserError(
            f"expected --reward as one of {names} or path/to/file.py:function; got {name[:200]!r}"
            f"{did_you_mean(name, names)}"
        )
    return BUILT_IN_REWARDS[name]


def parameters_of(flag: str, texts: Sequence[str]) -> tuple[tuple[str, Any], ...]:
    """Parses `min_terms=2` into a name and a value; values are YAML: `false`, `0.5`, `[1, 2]`.

    Raises:
      UserError: no `=`, or a value that is not valid YAML.
    """
    parameters = []
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            parameters.append((name, load_yaml(value)))
        except ValueError as error:
            raise UserError(f"expected {flag} as name=value with YAML as value; got {text[:80]!r}: {error}") from error
        if not name or not equals:
            raise UserError(f"expected {flag} as name=value; got {text[:80]!r}")
    return tuple(parameters)
