"""Commands and their surroundings: output, current folder, home folder, cache of compiled programs."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from smd_jax.commands import compilation_cache, console_scripts
from smd_jax.monitor.metrics_log import read_metrics

NO_PASSWD_ENTRY = "import pwd\ndef unknown(user): raise KeyError(user)\npwd.getpwuid = unknown\n"


def script(name: str) -> list[str]:
    return [sys.executable, "-P", "-c", f"import sys; from smd_jax.commands.console_scripts import {name}; {name}()"]


@pytest.mark.parametrize("name", ["smd_train", "smd_eval", "smd_export", "smd_plot", "smd_certify"])
def test_commands_print_their_version(name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", [name, "--version"])
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # the command replaces it
    getattr(console_scripts, name)()
    assert capfd.readouterr().out.startswith("smd_jax 0.")


@pytest.mark.parametrize("name", ["train", "evaluate", "export", "plot", "certify"])
def test_command_modules_run(name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", [name, "--version"])
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # the command replaces it
    monkeypatch.delitem(sys.modules, f"smd_jax.commands.{name}", raising=False)  # else runpy warns
    # runpy would keep the code with jaxtyping's checks as the module's, and commands could not load it later.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    runpy.run_module(f"smd_jax.commands.{name}", run_name="__main__", alter_sys=True)
    assert capfd.readouterr().out.startswith("smd_jax 0.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "redirection", "status", "message"),
    [
        ("--help", ">/dev/full", 1, "expected to write to standard output; got: No space left"),
        ("--version", ">&-", 0, ""),
        ("--help", "| true", 0, ""),
    ],
)
def test_output_that_cannot_be_written_is_one_error_line(word: str, redirection: str, status: int, message: str):
    shell = ["sh", "-c", f'"$@" {redirection}', "sh", *script("smd_plot"), word]
    done = subprocess.run(shell, capture_output=True, text=True)
    assert done.returncode == status and message in done.stderr and done.stderr.count("\n") == bool(message)


def test_output_that_the_terminal_cannot_show_is_escaped(tmp_path: Path):
    code = (
        "import sys; sys.argv = ['x', '--version']; from smd_jax.commands.console_scripts import smd_plot; smd_plot()"
    )
    code += "; print('运行')"
    variables = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0 and done.stdout.endswith(b"\\u8fd0\\u884c\n")


@pytest.mark.slow
def test_a_run_whose_output_cannot_be_written_is_complete(model: Path, tmp_path: Path):
    argv = ["grpo", "--model", str(model), "--dataset", "reasoning_gym:chain_sum", "--dataset-size", "9"]
    argv += ["--num-prompts", "2", "--num-generations", "2", "--max-completion-length", "4", "--max-steps", "1"]
    argv += ["--distill", "none", "--reward-timeout", "None", "--output-dir", str(tmp_path / "run")]
    shell = ["sh", "-c", '"$@" >/dev/full', "sh", *script("smd_train"), *argv]
    done = subprocess.run(shell, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("expected to write to standard output") == 1
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 1
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_caches_without_a_home_are_in_the_temporary_folder(tmp_path: Path):
    """A container may run as a user without a passwd entry."""
    *options, code = script("smd_eval")
    variables = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    variables |= {"TMPDIR": str(tmp_path)}
    variables.pop("JAX_COMPILATION_CACHE_DIR", None)
    argv = [*options, NO_PASSWD_ENTRY + code, "--model", "./nowhere", "--dataset", "gsm8k"]
    done = subprocess.run(argv, env=variables, cwd=tmp_path, capture_output=True, text=True)
    folder = tmp_path / f"smd_jax-{os.getuid()}"
    assert done.returncode == 2 and f"got none: caches are kept in {folder}. Set HOME" in done.stderr
    assert "--model: expected a checkpoint directory" in done.stderr and "Traceback" not in done.stderr
    assert (folder / ".cache" / "smd_jax" / "programs").is_dir() and not (tmp_path / "~").exists()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_programs_are_not_cached_without_a_writable_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "file").write_text("")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compilation_cache.cache_programs()
    assert "compiled programs are not kept: [Errno 20] Not a directory" in capsys.readouterr().err
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    compilation_cache.cache_programs()
    assert "compiled programs are not kept: Could not determine home" in capsys.readouterr().err


def test_a_removed_current_folder_is_one_error_line(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    argv = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *script("smd_plot"), "runs"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2 and "one that was removed" in done.stderr and "Traceback" not in done.stderr


# --- the cache of compiled programs

PROGRAM = """
from smd_jax.commands.compilation_cache import cache_programs
cache_programs()
import jax
hits = []
jax.monitoring.register_event_listener(lambda name, **_: name.endswith("/cache_hits") and hits.append(name))
assert jax.jit(lambda x: x * 3.0)(2.0) == 6.0
print(len(hits))
"""


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DIR", "MIN_COMPILE_TIME_SECS", "MIN_ENTRY_SIZE_BYTES"):
        monkeypatch.delenv(f"JAX_COMPILATION_CACHE_{name}", raising=False)
        monkeypatch.delenv(f"JAX_PERSISTENT_CACHE_{name}", raising=False)


def run_program(caches: Path) -> tuple[str, int]:
    """Standard error of `PROGRAM`, and its number of cache hits."""
    variables = os.environ | {"XDG_CACHE_HOME": str(caches)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, check=True)
    return done.stderr, int(done.stdout)


def count_programs(folder: Path) -> int:
    return len(list(folder.glob("*-cache")))


@pytest.mark.slow
@pytest.mark.usefixtures("no_settings")
def test_programs_are_cached_and_found(tmp_path: Path):
    folder = tmp_path / "smd_jax" / "programs"
    message, hits = run_program(tmp_path)
    assert f"cached in {folder}" in message and not hits
    count = count_programs(folder)
    assert count > 0
    message, hits = run_program(tmp_path)
    assert "cached in" not in message, "its folder is printed once"
    assert hits == count == count_programs(folder)


def test_the_cache_folder_of_the_user_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config: Any = jax.config
    before = config.jax_compilation_cache_dir
    compilation_cache.cache_programs()
    assert config.jax_compilation_cache_dir == before
    assert not capsys.readouterr().err and not (tmp_path / "smd_jax").exists()
