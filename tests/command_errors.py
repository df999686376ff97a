"""What the commands say of a mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from smd_jax.commands.train import main as smd_train


def error_of(
    words: list[str], capsys: pytest.CaptureFixture[str], command: Callable[[list[str]], None] = smd_train
) -> str:
    """What a command says of its mistake, in one line; it must end with status 2 and without a traceback."""
    with pytest.raises(SystemExit) as end:
        command(words)
    said = capsys.readouterr().err
    assert end.value.code == 2 and "Traceback" not in said, said
    return " ".join(said.replace("│", " ").split())
