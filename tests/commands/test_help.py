"""The help pages of the commands."""

from __future__ import annotations

import re
from typing import Any

import pytest

from smd_jax.commands.command_line import ALGORITHMS
from smd_jax.commands.evaluate import main as smd_eval
from smd_jax.commands.export import main as export
from smd_jax.commands.plot import main as plot
from smd_jax.commands.train import main

HELP_PAGES = [*((main, [name]) for name in ALGORITHMS), (smd_eval, []), (export, []), (plot, [])]


def help_page(command: Any, words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Flag -> its help text, on a page of 80 columns."""
    with pytest.raises(SystemExit) as end:
        command(words)
    assert end.value.code == 0
    texts: dict[str, str] = {"": ""}
    column = 0
    for line in capsys.readouterr().out.splitlines():
        column = max(column, line.find("show this help message"))
        found = re.match(r"[│ ] (?:-h, )?(--[a-z][a-z0-9-]*)[ ,]", line)
        if found is not None:
            assert len(line) <= 80
            texts[found[1]] = ""
        if found is None or line[column - 2 : column] == "  ":
            texts[[*texts][-1]] += f" {line[column:].strip(' │')}"
    return texts


@pytest.mark.slow
@pytest.mark.parametrize(("command", "words"), HELP_PAGES)
def test_every_flag_says_what_it_does(
    command: Any, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Comments that tyro does not find, as behind the bracket of a value over several lines, would be missing."""
    monkeypatch.setenv("COLUMNS", "80")  # one column of flags
    whole = help_page(command, [*words, "--help-all"], capsys)
    assert not [flag for flag, text in whole.items() if re.match(r"\s*(\((default|required)|$)", text)]
    first = help_page(command, [*words, "--help"], capsys)
    intro, *flags = first
    assert 4 <= len(flags) <= 30 and set(flags) <= whole.keys()
    assert len(whole) == len(first) or f"{len(whole) - len(first)} more options: --help-all" in first[intro]
    if command is main:
        assert {"--model", "--dataset", "--reward", "--budget", "--max-steps"} <= set(flags)
