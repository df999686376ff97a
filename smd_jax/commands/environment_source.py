"""The environment of a run or an evaluation, from its flags."""

from __future__ import annotations

import functools
from typing import Any

from smd_jax.commands.arguments import RETRY, ConversationArgs, DataSource, EnvironmentArgs, RewardArgs
from smd_jax.commands.errors import UserError
from smd_jax.commands.task_source import parameters_of
from smd_jax.environments.processes import open_environments
from smd_jax.environments.retry import RetryEnvironment
from smd_jax.sampler.conversation_loop import ConversationConfig
from smd_jax.tasks.functions import import_function
from smd_jax.train.conversations import ASK, EnvironmentConfig, TextCompaction


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
    flags: ConversationArgs, max_failed: float, task: Any, data: DataSource
) -> EnvironmentConfig | None:
    """The environment that the flags name; None for single completions.

    Args:
      task: whose rows and reward the environment `retry` takes.
      data: its variables of the chat template.

    Raises:
      ValueError, FileNotFoundError: no such class, or one that another process cannot load.
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
