"""Chat templates: foreign Jinja programs that render the prompt.

A separate process renders them, with limits on CPU time, memory and the length of the text. The date that a template
reads by `strftime_now` is fixed by the row or by this process, so that a run resumed on another day has the same
prompts.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

from smd_jax.text import template_process
from smd_jax.text.child_process import ChildEndedError, ChildProcess
from smd_jax.text.prompts import Tokenizer
from smd_jax.text.template_process import Limits

DAY = "strftime_now"  # the name by which templates ask for the date
START_SECONDS = 300.0  # to import transformers, on a machine under load
WALL_FACTOR = 6.0  # wall-clock limit over CPU limit, for a process that waits for a core


class TemplateError(ValueError):
    """A chat template raised, took too long, or needed too much memory."""


def render_messages(
    messages: list[dict[str, Any]],
    tokenizer: Tokenizer,
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Renders chat messages with the tokenizer's template, and by default with a generation prompt.

    Equals `tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=…, **variables)` on the day
    that the variable `strftime_now` names. Without it, on the day on which this process first rendered such a template.

    Raises:
      TemplateError: the template raised or exceeded a limit.
      ValueError: several templates without a default; a day that is no date, or a variable that cannot be pickled.
    """
    # As transformers does. Templates test whether a message has a key, and `datasets` fills in None for missing ones.
    messages = [{name: value for name, value in message.items() if value is not None} for message in messages]
    day = first_day() if variables.get(DAY) is None else variables[DAY]
    if not isinstance(day, datetime.date):
        try:
            day = datetime.date.fromisoformat(str(day))
        except ValueError as error:
            raise ValueError(f"expected {DAY} as a day such as 2026-01-31; got {day!r:.40}") from error
    values = {**tokenizer.special_tokens_map, **variables, DAY: day.isoformat()}
    template = tokenizer.get_chat_template(tools=variables.get("tools"))
    return _renderer(os.getpid()).render(template, messages, values, Limits(), add_generation_prompt)


class Renderer:
    """The process that renders. It starts with the first rendering, and restarts after it was ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: ChildProcess | None = None

    def render(
        self,
        template: str,
        messages: list[dict[str, Any]],
        variables: dict[str, Any],
        limits: Limits,
        add_generation_prompt: bool = True,
    ) -> str:
        """Renders one prompt; raises TemplateError."""
        with self._lock:
            process = self._running_process()
            try:
                process.send((template, messages, variables, tuple(limits), add_generation_prompt))
                answer = json.loads(process.receive(WALL_FACTOR * limits.seconds))
            except RecursionError as error:
                raise TemplateError("its messages are nested too deeply") from error
            except TimeoutError as error:
                raise TemplateError(f"it takes longer than {WALL_FACTOR * limits.seconds:g} s") from error
            except ChildEndedError as error:
                timed_out = error.exit_code == -template_process.CPU_SIGNAL
                reason = f"it takes longer than {limits.seconds:g} s" if timed_out else str(error)
                raise TemplateError(reason) from error
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer["text"]

    def _running_process(self) -> ChildProcess:
        if self._process is None or not self._process.is_running:
            # One thread: numpy's others would count as memory of a template.
            environment = {"OPENBLAS_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
            self._process = ChildProcess(template_process.__file__, environment, quiet=True)
            self._process.send(sys.path)
            self._process.receive(START_SECONDS)
        return self._process


@functools.lru_cache(maxsize=1)
def _renderer(process: int) -> Renderer:
    """The renderer of this process: a fork must not share the pipe of its parent."""
    return Renderer()


@functools.cache
def first_day() -> datetime.date:
    """The day of this process's first call."""
    return datetime.date.today()
