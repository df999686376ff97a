"""Functions of the user's own, by import path and by file."""

import sys
from pathlib import Path

import pytest

from smd_jax.tasks.functions import import_function
from smd_jax.tasks.task import batch_indices


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file of rewards and its neighbour; the import path is put back after the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "neighbour_of_rewards.py").write_text("WEIGHT = 2.0\n")
    (tmp_path / "my_own_rewards.py").write_text(
        "from dataclasses import dataclass\n"
        "import neighbour_of_rewards\n"
        "LOADED = []\n"
        "LOADED.append(1)\n"
        "def brevity(prompts, completions, **columns):\n"
        "    return [-neighbour_of_rewards.WEIGHT * len(text) for text in completions]\n"
        "@dataclass\n"
        "class Bonus:\n"
        "    size: float = 1.0\n"
        "number = 3\n"
    )
    return tmp_path


def test_functions_of_files_and_modules(project: Path):
    brief = import_function("my_own_rewards.py:brevity")
    assert brief(prompts=["?"], completions=["abc"]) == [-6.0]
    assert import_function(f"{project}/my_own_rewards.py:brevity") is brief
    assert import_function("./my_own_rewards.py:Bonus")().size == 1.0
    assert brief.__globals__["LOADED"] == [1]
    assert import_function("my_own_rewards:brevity")(prompts=["?"], completions=["ab"]) == [-4.0]
    assert import_function("smd_jax.tasks.task:batch_indices") is batch_indices


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("brevity", ValueError, "a function as 'package.module:name' or 'path/to/file.py:name'; got 'brevity'"),
        ("my_own_rewards.py", ValueError, "expected a function as .* got 'my_own_rewards.py'"),
        (":brevity", ValueError, "expected a function as"),
        ("my_own_rewards.py:a b", ValueError, "expected a function as"),
        ("my own rewards:brevity", ValueError, "expected a function as"),
        (
            "my_own_rewards.py:bonus",
            ValueError,
            r"expected a function 'bonus' in my_own_rewards.py; got \['Bonus', 'brevity'\].*Did you mean Bonus",
        ),
        ("my_own_rewards.py:number", ValueError, "expected a function as 'number' in .*; got int 3"),
        ("rewards.py:brevity", FileNotFoundError, "a file of Python code at .*; got none .*'my_own_rewards.py'"),
        ("no_such.module:brevity", ValueError, "expected to import no_such.module; .* No module named 'no_such'"),
        ("broken_rewards.py:f", ValueError, "to import .*broken_rewards.py; it raised NameError in line 2: name"),
        ("needy_rewards.py:f", ValueError, "it raised ModuleNotFoundError in line 1: No module named 'not_installed'"),
        ("needy_rewards:f", ValueError, "expected to import needy_rewards; it raised ModuleNotFoundError: No module"),
        ("wrong_rewards.py:f", ValueError, "it raised SyntaxError"),
    ],
)
def test_functions_that_cannot_be_had(project: Path, where: str, error: type[Exception], message: str):
    (project / "broken_rewards.py").write_text("x = 1\ny = undefined\n")
    (project / "needy_rewards.py").write_text("import not_installed\n")
    (project / "wrong_rewards.py").write_text("def f(:\n")
    with pytest.raises(error, match=message):
        import_function(where)
