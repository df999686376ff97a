"""The command line of smd-train: sub-commands, flags, and files in their place."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import tyro

from smd_jax.commands import config_file
from smd_jax.commands.arguments import Common, Grpo, OnlineDpo, Ppo, Rloo
from smd_jax.commands.errors import UserError
from smd_jax.commands.trl_names import in_place_of

ALGORITHMS: Mapping[str, type[Common]] = {"grpo": Grpo, "rloo": Rloo, "ppo": Ppo, "online-dpo": OnlineDpo}

DESCRIPTION = """Reinforcement learning of a language model under a KV cache of fixed size.

--config FILE takes options from a YAML file, --preset NAME from one of ours; flags that stand beside them win."""


def parse(words: Sequence[str]) -> tuple[str, Common]:
    """The algorithm and its arguments.

    Raises:
      UserError: a file that cannot be read, or says what cannot be; no algorithm; a flag of TRL's that has another
        name here.
      SystemExit: with tyro's message, and status 2, for a flag that does not exist or has no value of its type.
    """
    given = config_file.expanded(words, ALGORITHMS)
    check_words(given)
    kinds = [
        Annotated[kind, tyro.conf.subcommand(name, prefix_name=False, description=kind.__doc__)]
        for name, kind in ALGORITHMS.items()
    ]
    union: Any = functools.reduce(operator.or_, kinds)
    args = tyro.cli(
        union,
        prog="smd-train",
        description=DESCRIPTION,
        args=given,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    return next(name for name, kind in ALGORITHMS.items() if type(args) is kind), args


def check_words(words: Sequence[str]) -> None:
    """Raises UserError for what tyro would answer with a page of flags, or with "unrecognized" alone."""
    if any(word in ("-h", "--help") or word.startswith("--tyro-") for word in words):
        return
    if not words or words[0] not in ALGORITHMS:
        got = repr(words[0]) if words else "nothing"
        raise UserError(
            f"expected an algorithm first, one of {[*ALGORITHMS]}, as in `smd-train grpo --model …`, or --config or "
            f"--preset with one; got {got}"
        )
    for word in words:
        instead = in_place_of(word.partition("=")[0]) if word.startswith("--") else None
        if instead is not None:
            raise UserError(instead)
