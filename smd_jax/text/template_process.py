"""The process that renders chat templates: limited in CPU time and memory, so that no template harms the run.

It runs this file as a script and imports nothing of smd_jax, which would take seconds. Requests are
(template, messages, variables, limits, add_generation_prompt); an answer is JSON, {"text": …} or {"error": …}.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import signal
import sys
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jinja2

# Errors that template code raises. Any other exception ends the process, which the parent reports.
TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError, NameError),
    *(RuntimeError, SyntaxError, TypeError, ValueError),
)
CPU_SIGNAL = signal.SIGPROF  # its default action ends the process, even inside a loop in C


class Limits(NamedTuple):
    """Limits of one rendering.

    Attributes:
      seconds: CPU time.
      memory: bytes above the need of the process without a template.
      characters: of the rendered text.
    """

    seconds: float = 10.0
    memory: int = 2**30
    characters: int = 2**24


def render(
    template: str,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    limits: Limits,
    add_generation_prompt: bool,
) -> dict[str, str]:
    """Renders messages, as `tokenizer.apply_chat_template` does; returns the text or the error of the template.

    `variables["strftime_now"]` is the day, such as "2026-01-31", that the template's function of this name formats.
    """
    from transformers.utils import chat_template_utils

    midnight = datetime.fromisoformat(variables.pop("strftime_now", "2000-01-01"))
    # transformers' `strftime_now` formats `datetime.now()` of this module.
    chat_template_utils.datetime = type("Midnight", (datetime,), {"now": lambda: midnight})  # pyright: ignore[reportPrivateImportUsage]
    try:
        (text,), _ = chat_template_utils.render_jinja_template(
            conversations=[messages],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        text.encode()  # raises for a lone surrogate, which no tokenizer accepts
    except MemoryError:
        return {"error": f"it needs more than {limits.memory:,} bytes of memory"}
    except TEMPLATE_ERRORS as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    if len(text) > limits.characters:
        return {"error": f"it renders {len(text):,} characters, more than {limits.characters:,}"}
    return {"text": text}


def serve(connection: Connection) -> None:
    """Answers requests until the other side closes the connection."""
    sys.path[:] = connection.recv()
    import transformers.utils.chat_template_utils  # noqa: F401  before memory is limited

    logging.disable()
    baseline = 0  # bytes of address space that this process uses; 0 if the system does not tell
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        baseline = int(file.read().split()[0]) * resource.getpagesize()
    connection.send_bytes(b"ready")
    while True:
        template, messages, variables, limits, add_generation_prompt = connection.recv()
        limits = Limits(*limits)
        # macOS does not limit the address space.
        with contextlib.suppress(ValueError, OSError):
            if baseline:
                _, most = resource.getrlimit(resource.RLIMIT_AS)
                resource.setrlimit(resource.RLIMIT_AS, (baseline + limits.memory, most))
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)
        answer = render(template, messages, variables, limits, add_generation_prompt)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as connection, contextlib.suppress(EOFError, ConnectionError):
        serve(connection)
