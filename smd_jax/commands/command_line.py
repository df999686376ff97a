"""Command lines: sub-commands, flags, help pages and configuration files."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from smd_jax.commands import config_file
from smd_jax.commands.arguments import BASIC, Common, Grpo, OnlineDpo, Ppo, Rloo
from smd_jax.commands.errors import DEBUG, UserError

T = TypeVar("T")
ALGORITHMS: Mapping[str, type[Common]] = {"grpo": Grpo, "rloo": Rloo, "ppo": Ppo, "online-dpo": OnlineDpo}
HELP, HELP_ALL = ("-h", "--help"), "--help-all"

DESCRIPTION = """Reinforcement learning of a language model under a KV cache of fixed size.

--config FILE reads options from a YAML file, --preset NAME from one of ours: countdown, gsm8k, lora, smoke, sorting,
sums. Flags override both."""
DEBUG_HELP = f"{DEBUG} shows the traceback of every error."


def parse(words: Sequence[str]) -> tuple[str, Common]:
    """The algorithm and its arguments.

    Raises:
      UserError: a file that cannot be read or has a wrong option; no algorithm.
      SystemExit: with tyro's message and status 2 for an unknown flag or a value of the wrong type; after a help page.
    """
    given = config_file.expand_words(words, ALGORITHMS)
    name = given[0] if given else "nothing"
    if name in ALGORITHMS:
        kind = ALGORITHMS[name]
        return name, parse_options(kind, f"smd-train {name}", f"{DESCRIPTION}\n\n{kind.__doc__}", given[1:])
    if any(word in (*HELP, HELP_ALL) for word in given):
        algorithms = "\n".join(f"  smd-train {name} --help  {kind.__doc__}" for name, kind in ALGORITHMS.items())
        print(f"usage: smd-train ALGORITHM --model … --dataset …\n\n{DESCRIPTION}\n\n{algorithms}")
        raise SystemExit(0)
    raise UserError(
        f"expected an algorithm first, one of {[*ALGORITHMS]}, as in `smd-train grpo --model …`, or --config or "
        f"--preset with one; got {name!r}"
    )


def arguments_of_run(directory: Path) -> Common:
    """The arguments of the run in this directory, which may have moved. Raises UserError for no run there, or an
    unreadable config.yaml."""
    settings = directory / "config.yaml"
    if not os.path.isfile(settings):
        raise UserError(f"expected a run with its config.yaml in {str(directory)[:300]}; found none")
    return parse(["--config", str(settings), "--output-dir", str(directory)])[1]


def parse_options(kind: type[T], prog: str, description: str, words: Sequence[str], default: T | None = None) -> T:
    """The options of a command without sub-commands; `default` replaces the defaults of the class. Exits as `parse`."""
    if asks_for_help(words):
        left_out = sum(not _is_basic(hint) for hint in config_file.options_of(kind).values())
        more = f"\n\n{left_out} more options: {HELP_ALL}" if left_out else ""
        return parse_words(basic_options(kind), prog, f"{description}{more}", words)
    return parse_words(kind, prog, description, words, default)


def parse_words(kind: Any, prog: str, description: str, words: Sequence[str], default: Any = None) -> Any:
    """Parses the words with tyro."""
    given = ["--help" if word == HELP_ALL else word for word in words]
    options: dict[str, Any] = {} if default is None else {"default": default}
    flat = (tyro.conf.OmitArgPrefixes,)
    return tyro.cli(kind, prog=prog, description=f"{description}\n\n{DEBUG_HELP}", args=given, config=flat, **options)


def asks_for_help(words: Sequence[str]) -> bool:
    """Whether the words ask for the short help page."""
    return any(word in HELP for word in words)


def _is_basic(hint: Any) -> bool:
    return BASIC in getattr(hint, "__metadata__", ())


def basic_options(kind: type[T]) -> type[T]:
    """The class without the options that are not `Basic`: they keep their defaults and have no flag."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(kind):  # pyright: ignore[reportArgumentType]
        hint, default = hints[field.name], dataclasses.field(default=field.default)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            hint = basic_options(hint)
            if field.default is not dataclasses.MISSING:
                default = dataclasses.field(default_factory=hint)
        elif not _is_basic(hint):
            hint = Annotated[hint, tyro.conf.Suppress]
        fields.append((field.name, hint, default))
    # tyro reads the help texts from the source of the class, which it finds by these names.
    names = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=True, kw_only=True, namespace=names)
