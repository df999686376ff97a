"""What a user did wrong, said in one box and in the words of the command line: exit status 2, and no traceback."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from smd_jax.tasks.task import MissingExtraError
from smd_jax.text.visible_text import visible


class UserError(Exception):
    """What a user can mend: the message says what was expected, what came, and what to do about it."""


# Options of the library, and the flags that set them: the library knows no command lines.
FLAGS: Mapping[str, str] = {
    "prompts_per_step": "--num-prompts",
    "group_size": "--num-generations",
    "max_new_tokens": "--max-completion-length",
    "min_new_tokens": "--min-completion-length",
    "prompt_width": "--max-prompt-length",
    "microbatch_size": "--microbatch",
    "pack_columns": "--pack-columns",
    "rows_per_prompt": "--share-prompts",
    "rollouts_ahead": "--rollouts-ahead",
    "decode_rows": "--decode-rows",
    "budget": "--budget",
    "buffer": "--buffer",
    "prefill_chunk": "--prefill-chunk",
    "minibatches": "--minibatches",
    "data axis": "--data-parallel",
    "fsdp": "--fsdp",
    "tensor": "--tensor",
    "sequence axis": "--sequence",
    "resume": "--resume",
    "steps of at least": "--max-steps",
    "another directory": "--output-dir",
    "visibility": "--correction",
    "max_failed": "--max-failed-rewards",
    "seconds=None": "--reward-timeout",
    "seconds of Rewards": "--reward-timeout",
    "microbatches": "--microbatch",
    "fewer checkpoints": "--save-total-limit",
    "stop_strings": "--stop",
    "eos_token_id": "--eos-token",
    "prompt_column": "--prompt-column",
    "learning_rate": "--learning-rate",
    "checkpoint_every": "--save-steps",
    "evaluate_every": "--eval-steps",
}


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Ends the command with one box and exit status 2 where something is a user's to mend, and with 130 after Ctrl-C.

    Args:
      debug: raise instead, for the traceback.
    """
    try:
        yield
    except (UserError, MissingExtraError, FloatingPointError) as error:
        if debug:
            raise
        print_box("error", with_flags(str(error)))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        # A run under way answers Ctrl-C itself, and saves what it has: this one came before or after.
        if debug:
            raise
        print_box("stopped", "by Ctrl-C")
        raise SystemExit(130) from None


@contextmanager
def users_mistakes() -> Iterator[None]:
    """Makes UserError of what reading the arguments and planning raises.

    To be put around that, and never around what trains: a ValueError from there is a bug, and needs its traceback.
    """
    try:
        yield
    except (ValueError, OSError, OverflowError, FloatingPointError) as error:
        raise UserError(str(error)) from error


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Warnings without the place in our code that says them, as text that moves no terminal."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, category, filename, lineno, line=None: (
        f"{category.__name__}: {visible(str(message))}\n"
    )
    try:
        yield
    finally:
        warnings.formatwarning = before


def with_flags(message: str) -> str:
    """The message, and below it the flags of the library's options that it names."""
    named = {option: flag for option, flag in FLAGS.items() if re.search(rf"\b{option}\b", message)}
    # A flag that is in the message needs no translation, nor does one whose name is that of the option.
    said = [f"{option} is {flag}" for option, flag in named.items() if flag not in message]
    return "\n".join([message, *([f"In flags: {', '.join(said)}."] if said else [])])


# Of a message in a box. What is left out is input: a name of thousands of characters, a page of YAML.
LINE_LIMIT = 600
LINES = 60


def shortened(message: str) -> str:
    """The message without the middle of very long lines, and without the lines behind the first 60."""
    lines = [_shortened_line(line) for line in message.split("\n")]
    more = len(lines) - LINES
    return "\n".join([*lines[:LINES], *([f"… and {more} more lines"] if more > 0 else [])])


def _shortened_line(line: str) -> str:
    if len(line) <= LINE_LIMIT:
        return line
    left_out = len(line) - LINE_LIMIT
    return f"{line[: LINE_LIMIT // 2]} … {left_out:,} characters … {line[-LINE_LIMIT // 2 :]}"


def print_box(title: str, message: str) -> None:
    """A framed text on standard error."""
    message = shortened(message)
    # Text objects: nothing in a message is taken for rich's markup. It may quote a file, or what a model wrote.
    panel = Panel(
        Text(visible(message)), title=Text(visible(title)), title_align="left", box=box.ROUNDED, border_style="red"
    )
    Console(file=sys.stderr, highlight=False).print(panel)
