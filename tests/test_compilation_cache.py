"""Commands keep what they compile, where nobody has said otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
PROGRAM = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
from compilation_cache import keep_programs
keep_programs(Path(sys.argv[2]))
import jax
print(jax.jit(lambda x: x * 3.0)(2.0))
"""


def run(folder: Path) -> tuple[str, int]:
    """What a command says on standard error, and the programs in the folder after it."""
    command = [sys.executable, "-c", PROGRAM, str(EXPERIMENTS), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "6.0\n"
    return done.stderr, len(list(folder.glob("*-cache")))


def test_programs_are_kept_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    folder = tmp_path / "programs"
    said, kept = run(folder)
    assert f"kept in {folder}" in said and kept > 0
    said, again = run(folder)
    assert "kept in" not in said, "its place is said once"
    assert again == kept


def test_the_users_own_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "own"))
    said, kept = run(tmp_path / "programs")
    assert "kept in" not in said and kept == 0
