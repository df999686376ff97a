"""Reports user errors in one box, with the names of the flags, exit status 2 and no traceback."""

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
    """An error that the user can fix: the message says what was expected, what was received, and how to fix it."""


# The flags that set the library's options. The library's own messages name the options.
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
    """Ends the command with a box and exit status 2 after a user error, and with status 130 after Ctrl-C.

    Args:
      debug: raise the error instead, with its traceback.
    """
    try:
        yield
    except (UserError, MissingExtraError, FloatingPointError) as error:
        if debug:
            raise
        print_box("error", with_flags(str(error)))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        # Before or after training: during training the run handles Ctrl-C and saves.
        if debug:
            raise
        print_box("stopped", "by Ctrl-C")
        raise SystemExit(130) from None


@contextmanager
def users_mistakes() -> Iterator[None]:
    """Turns errors of parsing and planning into UserError.

    Do not use it around training: a ValueError there is a bug and needs its traceback.
    """
    try:
        yield
    except (ValueError, OSError, OverflowError, FloatingPointError) as error:
        raise UserError(str(error)) from error


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Prints warnings without their source line and with control characters escaped."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, category, filename, lineno, line=None: (
        f"{category.__name__}: {visible(str(message))}\n"
    )
    try:
        yield
    finally:
        warnings.formatwarning = before


def with_flags(message: str) -> str:
    """Appends the flags of the options that a message names."""
    named = {option: flag for option, flag in FLAGS.items() if re.search(rf"\b{option}\b", message)}
    unnamed = [f"{option} is {flag}" for option, flag in named.items() if flag not in message]
    return "\n".join([message, *([f"In flags: {', '.join(unnamed)}."] if unnamed else [])])


# Limits of a message in a box: it may quote a name of thousands of characters or a page of YAML.
LINE_LIMIT = 600
LINES = 60


def shortened(message: str) -> str:
    """Cuts the middle of very long lines, and all lines after the first 60."""
    lines = [_shortened_line(line) for line in message.split("\n")]
    more = len(lines) - LINES
    return "\n".join([*lines[:LINES], *([f"… and {more} more lines"] if more > 0 else [])])


def _shortened_line(line: str) -> str:
    if len(line) <= LINE_LIMIT:
        return line
    left_out = len(line) - LINE_LIMIT
    return f"{line[: LINE_LIMIT // 2]} … {left_out:,} characters … {line[-LINE_LIMIT // 2 :]}"


def print_box(title: str, message: str) -> None:
    """Prints a framed text to standard error."""
    message = shortened(message)
    # Text objects are not parsed as rich markup: a message may quote a file or a completion.
    panel = Panel(
        Text(visible(message)), title=Text(visible(title)), title_align="left", box=box.ROUNDED, border_style="red"
    )
    Console(file=sys.stderr, highlight=False).print(panel)
