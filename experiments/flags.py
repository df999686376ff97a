"""What the library says about its options, said again in the flags of a script.

The library knows no command lines: its errors name options such as `microbatch_size`. A script that lets a user set
them says here which flag that is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from smd_jax.train.stop import RunStoppedError

# Option of the library -> field of a script's `Args`, after which tyro names the flag.
FIELDS = {
    "prompts_per_step": "prompts",
    "group_size": "group",
    "max_new_tokens": "response_tokens",
    "microbatch_size": "microbatch",
    "decode_rows": "decode_rows",
    "budget": "budget",
    "buffer": "buffer",
    "prefill_chunk": "prefill_chunk",
    "fsdp": "fsdp",
    "tensor": "tensor",
    "resume": "resume",
    "directory": "runs",
}


@contextmanager
def explained(args: type) -> Iterator[None]:
    """Ends the script with one message and exit status 2 where its arguments ask for what cannot be.

    To be put around what reads the arguments and plans, not around what trains: an error from there is a bug, and needs
    its traceback.

    Args:
      args: the script's dataclass of arguments.
    """
    try:
        yield
    except (ValueError, FileExistsError) as error:
        print(explanation(str(error), args), file=sys.stderr)
        raise SystemExit(2) from error


@contextmanager
def stopped_in_order() -> Iterator[None]:
    """Around what trains: a run that a signal stopped says where it goes on, and has the signal's exit status."""
    try:
        yield
    except RunStoppedError as error:
        print(f"{error}: the same command with --resume", file=sys.stderr)
        raise SystemExit(error.exit_code) from error


def explanation(message: str, args: type) -> str:
    """The message, and below it the flags of the options that it names, as far as the script has them."""
    there = {field.name for field in fields(args)}
    flags = [
        f"{option} is --{name.replace('_', '-')}"
        for option, name in FIELDS.items()
        if name in there and re.search(rf"\b{option}\b", message)
    ]
    return "\n".join([message, *([f"In flags: {', '.join(flags)}."] if flags else [])])
