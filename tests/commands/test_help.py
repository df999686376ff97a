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


def help_page(command: Any, argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Flag -> its help text, on a page of 80 columns."""
    with pytest.raises(SystemExit) as end:
        command(argv)
    assert end.value.code == 0
    texts: dict[str, str] = {"": ""}
    column = 0
    for line in capsys.readouterr().out.splitlines():
        column = max(column, line.find("show this help message"))
        flag = re.match(r"[│ ] (?:-h, )?(--[a-z][a-z0-9-]*)[ ,]", line)
        if flag is not None:
            assert len(line) <= 80
            texts[flag[1]] = ""
        if flag is None or line[column - 2 : column] == "  ":
            texts[[*texts][-1]] += f" {line[column:].strip(' │')}"
    return texts


@pytest.mark.slow
@pytest.mark.parametrize(("command", "argv"), HELP_PAGES)
def test_every_flag_has_a_help_text(
    command: Any, argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """tyro misses some comments, such as one after the closing bracket of a value over several lines."""
    monkeypatch.setenv("COLUMNS", "80")  # one column of flags
    all_flags = help_page(command, [*argv, "--help-all"], capsys)
    assert not [flag for flag, text in all_flags.items() if re.match(r"\s*(\((default|required)|$)", text)]
    first = help_page(command, [*argv, "--help"], capsys)
    intro, *flags = first
    assert 3 <= len(flags) <= 30 and set(flags) <= all_flags.keys()
    assert len(all_flags) == len(first) or f"{len(all_flags) - len(first)} more options: --help-all" in first[intro]
    if command is main:
        assert {"--model", "--dataset", "--reward", "--budget", "--max-steps"} <= set(flags)
        assert ("--correction" in flags) == ("--dense-share" in flags)  # together they choose the learner
