"""Commands keep what they compile, where nobody has said otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
from smd_jax.commands.compilation_cache import cache_programs
cache_programs(Path(sys.argv[1]))
import jax
hits = []
jax.monitoring.register_event_listener(lambda name, **_: name.endswith("/cache_hits") and hits.append(name))
assert jax.jit(lambda x: x * 3.0)(2.0) == 6.0
print(len(hits))
"""


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DIR", "MIN_COMPILE_TIME_SECS", "MIN_ENTRY_SIZE_BYTES"):
        monkeypatch.delenv(f"JAX_COMPILATION_CACHE_{name}", raising=False)
        monkeypatch.delenv(f"JAX_PERSISTENT_CACHE_{name}", raising=False)


def run(folder: Path) -> tuple[str, int]:
    """What a command says on standard error, and how many programs it found in the cache."""
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stderr, int(done.stdout)


def programs(folder: Path) -> int:
    return len(list(folder.glob("*-cache")))


@pytest.mark.slow
def test_programs_are_kept_and_found(tmp_path: Path):
    folder = tmp_path / "programs"
    said, found = run(folder)
    assert f"cached in {folder}" in said and not found
    kept = programs(folder)
    assert kept > 0
    said, found = run(folder)
    assert "cached in" not in said, "its place is said once"
    assert found == kept == programs(folder)


def test_the_users_own_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "own"))
    said, _ = run(tmp_path / "programs")
    assert "cached in" not in said and not programs(tmp_path / "programs")
    assert programs(tmp_path / "own") > 0
