"""Error messages of the commands."""

from collections.abc import Callable

import pytest

from smd_jax.commands.train import main as smd_train


def error_of(
    words: list[str], capsys: pytest.CaptureFixture[str], command: Callable[[list[str]], None] = smd_train
) -> str:
    """Runs a command that must exit with status 2 and no traceback; returns its message in one line."""
    with pytest.raises(SystemExit) as end:
        command(words)
    message = capsys.readouterr().err
    assert end.value.code == 2 and "Traceback" not in message, message
    return " ".join(message.replace("│", " ").split())
