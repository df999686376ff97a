"""Reports user errors in one box, with the names of the flags, exit status 2 and no traceback."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import jax
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from smd_jax.environments.processes import UnloadableEnvironmentError
from smd_jax.message.trajectory import NonFiniteLogitsError
from smd_jax.tasks.reward_callers import UnloadableRewardError
from smd_jax.tasks.rewards import TooManyFailures
from smd_jax.tasks.task import MissingExtraError
from smd_jax.text.visible_text import one_line, visible


class UserError(Exception):
    """An error that the user can fix: the message says what was expected, what was received, and how to fix it."""


# Library options whose flag has another name, as regular expressions. The library's messages name the options.
FLAGS: Mapping[str, str] = {
    "prompts_per_step": "--num-prompts",
    "group_size": "--num-generations",
    "max_new_tokens": "--max-completion-length",
    "min_new_tokens": "--min-completion-length",
    "turn_tokens": "--max-turn-length",
    "after_tokens": "--context-length",
    "ask of the compaction": "--summary-request",
    "prompt_width": "--max-prompt-length",
    "microbatch_size": "--microbatch",
    "rows_per_prompt": "--share-prompts",
    "data axis": "--data-parallel",
    "sequence axis": "--sequence",
    "steps(?= of at least)": "--max-steps",  # not every word "steps"
    "another directory": "--output-dir",
    "resume=True": "--resume",
    "visibility": "--correction",
    "max_failed": "--max-failed-rewards",
    "seconds=None": "--reward-timeout",
    "None as its time limit": "--environment-timeout",
    "fewer checkpoints": "--save-total-limit",
    "stop_strings": "--stop",
    "eos_token_id": "--eos-token",
    "checkpoint_every": "--save-steps",
    "evaluate_every": "--eval-steps",
    "prompt_column": "--prompt-column",
    # A budget that is too small for the keys that are always kept.
    "budget(?= of at least)": "--budget or a number in --eval-decode",
    r"sinks(?= \+ window)": "--sinks",
    "window(?= that)": "--eviction 'NAME(window=8)'",
}
# Maximum characters of a message and of a line: a message may quote a very long name or a page of YAML.
LONGEST, LONGEST_LINE = 2000, 700
DEBUG = "--debug"


USER_ERRORS = (
    *(UserError, MissingExtraError, FloatingPointError),
    *(TooManyFailures, UnloadableRewardError, UnloadableEnvironmentError, NonFiniteLogitsError),
)


@contextmanager
def report_errors(words: Sequence[str] | None, *expected: type[Exception]) -> Iterator[list[str]]:
    """Yields the words, by default those of the process, without `--debug`. Ends the command with a box and exit status
    2 after a user error, and with status 130 after Ctrl-C; with `--debug` raises the error instead. `expected`: further
    errors whose message and notes are enough for the user."""
    given = list(sys.argv[1:] if words is None else words)
    debug = DEBUG in given
    try:
        yield [word for word in given if word != DEBUG]
    except (*USER_ERRORS, *expected) as error:
        if debug:
            raise
        print_box("error", with_flags("\n".join([str(error), *getattr(error, "__notes__", [])])))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        # Before or after training: during training the run handles Ctrl-C and saves.
        if debug:
            raise
        print_box("stopped", "by Ctrl-C")
        raise SystemExit(130) from None


@contextmanager
def as_user_errors() -> Iterator[None]:
    """Turns errors of parsing and planning into UserError.

    Do not use it around training: a ValueError there is a bug and needs its traceback.
    """
    try:
        yield
    except (ValueError, OSError, OverflowError, FloatingPointError) as error:
        raise UserError(str(error)) from error


@contextmanager
def memory_errors(advice: str) -> Iterator[None]:
    """Turns JAX's error of a full device into UserError. `advice`: which options choose smaller sizes."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(f"expected a run that fits the devices; got {one_line(str(error), 300)}. {advice}") from error


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
    found = ((re.search(rf"\b{option}\b", message), flag) for option, flag in FLAGS.items())
    named = {match[0]: flag for match, flag in found if match is not None}
    unnamed = [f"{option} is {flag}" for option, flag in named.items() if flag not in message]
    return f"{message}\nIn flags: {', '.join(unnamed)}." if unnamed else message


def print_box(title: str, message: str) -> None:
    """Prints a framed text to standard error; very long texts and lines are shortened in the middle."""
    message = _cut("\n".join(_cut(line, LONGEST_LINE) for line in message.splitlines()), LONGEST)
    # Text objects are not parsed as rich markup: a message may quote a file or a completion.
    panel = Panel(
        Text(visible(message)), title=Text(visible(title)), title_align="left", box=box.ROUNDED, border_style="red"
    )
    Console(file=sys.stderr, highlight=False).print(panel)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"
