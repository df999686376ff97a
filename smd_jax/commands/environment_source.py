"""The environment of a run, from its flags."""

from __future__ import annotations

import functools
from typing import Any

from smd_jax.commands.arguments import Common, Grpo, environment_of
from smd_jax.commands.errors import UserError
from smd_jax.environments.processes import open_environments
from smd_jax.environments.retry import RetryEnvironment
from smd_jax.sampler.conversation_loop import ConversationConfig
from smd_jax.tasks.functions import import_function
from smd_jax.train.conversations import EnvironmentConfig

RETRY = "retry"


def check_environment(args: Common) -> None:
    """Raises UserError for flags that do not go together with an environment; before any data is read."""
    if environment_of(args) is None:
        return
    if args.rewards.reward:
        raise UserError(f"expected no --reward with --environment, which gives the rewards; got {args.rewards.reward}")
    if args.evaluation.eval_steps:
        raise UserError("expected no --eval-steps with --environment: evaluations sample single completions")
    if args.data.max_prompt_length is None:
        raise UserError("expected --max-prompt-length with --environment, which writes the prompts")


def environment_config(args: Common, task: Any, template_variables: dict[str, Any]) -> EnvironmentConfig | None:
    """The environment that the flags name; None for single completions.

    Args:
      task: whose rows and reward the environment `retry` takes.

    Raises:
      ValueError, FileNotFoundError: no such class, or one that another process cannot load.
    """
    if not isinstance(args, Grpo) or args.conversations.environment is None:
        return None
    flags, place = args.conversations, args.conversations.environment
    if place == RETRY:
        factory: Any = functools.partial(RetryEnvironment, task, flags.max_turns)
    else:
        factory = import_function(place)
    return EnvironmentConfig(
        environments=open_environments(factory, flags.environment_timeout),
        conversation=ConversationConfig(turns=flags.max_turns, turn_tokens=flags.max_turn_length),
        credit=flags.turn_credit,
        max_failed=args.rewards.max_failed_rewards,
        template_variables=template_variables,
    )
