"""Loads training and evaluation rows, their rewards, and the environment of conversations about them."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from smd_jax.commands.arguments import (
    RETRY,
    Common,
    ConversationArgs,
    DataArgs,
    EnvironmentArgs,
    EvaluationArgs,
    RewardArgs,
)
from smd_jax.commands.errors import UserError
from smd_jax.environments.processes import open_environments
from smd_jax.environments.retry import RetryEnvironment
from smd_jax.sampler.conversation_loop import ConversationConfig
from smd_jax.tasks import reward_functions
from smd_jax.tasks.build import PRESETS, PROCEDURAL, TaskChoice, build_task
from smd_jax.tasks.dataset_task import first_rows, own_reward, select_prompts, usable_lengths
from smd_jax.tasks.functions import import_function
from smd_jax.tasks.rewards import RewardFunction, Rewards, function_name
from smd_jax.tasks.task import Task
from smd_jax.text.near_names import did_you_mean, nearest_file
from smd_jax.text.yaml_limits import load_yaml
from smd_jax.train.conversations import ASK, EnvironmentConfig, TextCompaction

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
      width: longest allowed prompt to train on, in tokens. held_out_width: longest allowed prompt of all.
      counts: lines on kept and dropped prompts.
    """

    task: Task
    held_out: Task | None
    width: int
    held_out_width: int
    counts: list[str]


def load_data(args: Common, tokenizer: Any) -> Data:
    """Loads the training and the evaluation rows. Raises UserError, ValueError, FileNotFoundError or ConnectionError if
    data is missing or cannot be read."""
    data = args.data
    task: Any = task_of(task_choice(data, args.run.seed))
    if not args.rewards.reward and args.conversations.environment in (None, RETRY):
        check_has_reward(task)
    if args.conversations.environment is None or data.max_prompt_length is None:
        task, width, line = drop_long_prompts(task, tokenizer, data)
        counts = [f"to train on: {line}"]
    else:  # an environment writes its own prompts
        width, counts = data.max_prompt_length, []
    held_out, held_out_width = None, width
    if args.evaluation.eval_steps:
        choice = held_out_choice(args.evaluation, data, args.run.seed)
        held_out = first_rows(task_of(choice), args.evaluation.eval_rows)
        if args.conversations.environment is None:
            held_out, wide, line = drop_long_prompts(held_out, tokenizer, data)
            counts.append(f"to evaluate on: {line}")
            held_out_width = max(width, wide)  # not below, so that both may share a program
    return Data(task, held_out, width, held_out_width, counts)


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


def task_choice(args: DataArgs, seed: int) -> TaskChoice:
    """The training rows that the flags choose."""
    return TaskChoice(
        args.dataset,
        source=args.dataset_source,
        config=args.dataset_config,
        split=args.split,
        prompt_column=args.prompt_column,
        system_prompt=args.system_prompt,
        map_row=None if args.map_function is None else import_function(args.map_function),
        chat_template_kwargs=parameters_of("--chat-template-kwargs", args.chat_template_kwargs),
        seed=seed,
        size=args.dataset_size,
        parameters=parameters_of("--dataset-parameters", args.dataset_parameters),
    )


def evaluation_choice(args: DataArgs, seed: int) -> TaskChoice:
    """The evaluation rows that the flags choose."""
    return replace(task_choice(args, seed), held_out=names_held_out_rows(args.dataset, args.split))


def of_dataset(data: DataArgs, name: str) -> DataArgs:
    """The options with another dataset: without those that choose among the rows of the first one."""
    data = replace(data, dataset=name, dataset_config=None, dataset_source=None, split=None, dataset_parameters=())
    return replace(data, prompt_column=None, map_function=None) if has_held_out_rows(name) else data


def held_out_data(args: EvaluationArgs, data: DataArgs) -> DataArgs:
    """The options that name the evaluation rows of a run, given those of its training rows."""
    if args.eval_dataset is not None and args.eval_dataset != data.dataset:
        data = of_dataset(data, args.eval_dataset)
    # A split that the flags name is one of the training rows' source.
    source = args.eval_source or (data.dataset_source if args.eval_split is not None else None)
    return replace(data, dataset_source=source, split=args.eval_split)


def held_out_choice(args: EvaluationArgs, data: DataArgs, seed: int) -> TaskChoice:
    """The evaluation rows, in the layout of the training rows unless another dataset has its own."""
    check_eval_seed(args.eval_seed, args.eval_dataset or data.dataset)
    named = args.eval_dataset or args.eval_split or args.eval_source
    if named is None and not has_held_out_rows(data.dataset):
        raise UserError(
            f"expected --eval-split or --eval-dataset with --eval-steps, because {data.dataset!r} does not define "
            "held-out rows; got neither"
        )
    return evaluation_choice(held_out_data(args, data), seed if args.eval_seed is None else args.eval_seed)


def check_eval_seed(seed: int | None, dataset: str) -> None:
    """Raises UserError for a seed of rows that do not come from a seed."""
    if seed is not None and not dataset.startswith(PROCEDURAL):
        raise UserError(
            f"expected --eval-seed only with {PROCEDURAL}NAME, which generates rows from a seed; got it with {dataset}"
        )


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
    """The reward functions of --reward, or the reward of the task, whose dataset has this name; with the flags' limits.

    Raises UserError or ValueError for an unknown reward, a wrong number of weights, or no reward at all.
    """
    flags: RewardArgs = args.rewards
    names = None
    if flags.reward:
        functions = tuple(reward_function(reward, args) for reward in flags.reward)
        own = [*map(function_name, functions)]
        if len(set(own)) < len(own):  # functions of one name in several files
            names = tuple(reward.rpartition("/")[2].replace(".py:", ".") for reward in flags.reward)
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
    """Parses `min_terms=2` into a name and a value; values are YAML: `false`, `0.5`, `[1, 2]`. Raises UserError for no
    `=`, or a value that is not valid YAML."""
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


def check_environment(flags: ConversationArgs, rewards: RewardArgs, max_prompt_length: int | None) -> None:
    """Raises UserError for flags that do not go together with an environment; before any data is read."""
    if (flags.contexts > 1) != (flags.context_length is not None):
        raise UserError(
            "expected --contexts of at least 2 with --context-length, after which a context is summarised, or neither; "
            f"got {flags.contexts} and {flags.context_length}"
        )
    if flags.environment is None and flags.contexts > 1:
        raise UserError("expected --environment with --contexts, because a single completion has one; got none")
    if flags.environment is not None and rewards.reward:
        raise UserError(f"expected no --reward with --environment, which gives the rewards; got {rewards.reward}")
    if flags.environment is not None and max_prompt_length is None:
        raise UserError("expected --max-prompt-length with --environment, which writes the prompts")


def environment_config(
    flags: ConversationArgs, max_failed: float, task: Any, data: DataArgs
) -> EnvironmentConfig | None:
    """The environment that the flags name; `retry` takes the task's rows and reward. None for single completions.

    Raises ValueError or FileNotFoundError for no such class, or one that another process cannot load.
    """
    if flags.environment is None:
        return None
    factory: Any = functools.partial(RetryEnvironment, task, flags.max_turns)
    if flags.environment != RETRY:
        factory = import_function(flags.environment)
    compaction = None
    if flags.context_length is not None:
        compaction = TextCompaction(
            contexts=flags.contexts,
            after_tokens=flags.context_length,
            ask=ASK if flags.summary_request is None else flags.summary_request,
            heading=flags.summary_heading,
        )
    return EnvironmentConfig(
        environments=open_environments(factory, flags.environment_timeout),
        conversation=ConversationConfig(turns=flags.max_turns, turn_tokens=flags.max_turn_length),
        compaction=compaction,
        credit=flags.turn_credit if isinstance(flags, EnvironmentArgs) else "trajectory",
        max_failed=max_failed,
        template_variables=dict(parameters_of("--chat-template-kwargs", data.chat_template_kwargs)),
    )
