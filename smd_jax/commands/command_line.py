"""The command line of smd-train: sub-commands, flags, and files in their place."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import tyro

from smd_jax.commands import config_file
from smd_jax.commands.arguments import Common, Grpo, OnlineDpo, Ppo, Rloo

ALGORITHMS: Mapping[str, type[Common]] = {"grpo": Grpo, "rloo": Rloo, "ppo": Ppo, "online-dpo": OnlineDpo}

DESCRIPTION = """Reinforcement learning of a language model under a KV cache of fixed size.

--config FILE takes options from a YAML file, --preset NAME from one of ours; flags that stand beside them win."""


def parse(words: Sequence[str]) -> tuple[str, Common]:
    """The algorithm and its arguments.

    Raises:
      UserError: a file that cannot be read, or says what cannot be.
      SystemExit: with tyro's message, and status 2, for a flag that does not exist or has no value of its type.
    """
    kinds = [
        Annotated[kind, tyro.conf.subcommand(name, prefix_name=False, description=kind.__doc__)]
        for name, kind in ALGORITHMS.items()
    ]
    union: Any = functools.reduce(operator.or_, kinds)
    args = tyro.cli(
        union,
        prog="smd-train",
        description=DESCRIPTION,
        args=config_file.expanded(words, ALGORITHMS),
        config=(tyro.conf.OmitArgPrefixes,),
    )
    return next(name for name, kind in ALGORITHMS.items() if type(args) is kind), args
