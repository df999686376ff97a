"""What surrounds a command: its output, its current folder, the home of its user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from smd_jax.commands import compilation_cache, console_scripts
from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.testing import tiny_model_config, write_random_checkpoint

NO_ENTRY = "import pwd\ndef unknown(user): raise KeyError(user)\npwd.getpwuid = unknown\n"


def script(name: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; from smd_jax.commands.console_scripts import {name}; {name}()"]


@pytest.mark.parametrize("name", ["smd_train", "smd_eval", "smd_export", "smd_plot", "smd_certify"])
def test_every_command_says_its_version(name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", [name, "--version"])
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # the command replaces it
    getattr(console_scripts, name)()
    assert capfd.readouterr().out.startswith("smd_jax 0.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "redirection", "status", "said"),
    [
        ("--help", ">/dev/full", 1, "expected to write to standard output; got: No space left"),
        ("--version", ">/dev/full", 1, "expected to write to standard output; got: No space left"),
        ("--version", ">&-", 0, ""),
        ("--help", "| true", 0, ""),
    ],
)
def test_output_that_cannot_be_written_is_one_line(word: str, redirection: str, status: int, said: str):
    shell = ["sh", "-c", f'"$@" {redirection}', "sh", *script("smd_plot"), word]
    done = subprocess.run(shell, capture_output=True, text=True)
    assert done.returncode == status and said in done.stderr and done.stderr.count("\n") == bool(said)


@pytest.mark.slow
@pytest.mark.parametrize(("redirection", "status"), [(">/dev/full", 1), (">&-", 0)])
def test_a_run_whose_output_cannot_be_written_is_complete(redirection: str, status: int, tmp_path: Path):
    write_random_checkpoint(tmp_path / "model", config=tiny_model_config(num_layers=1, max_positions=2048))
    words = ["grpo", "--model", str(tmp_path / "model"), "--dataset", "reasoning_gym:chain_sum", "--dataset-size", "9"]
    words += ["--num-prompts", "2", "--num-generations", "2", "--max-completion-length", "4", "--max-steps", "2"]
    words += ["--reward-timeout", "None", "--output-dir", str(tmp_path / "run")]
    shell = ["sh", "-c", f'"$@" {redirection}', "sh", *script("smd_train"), *words]
    done = subprocess.run(shell, capture_output=True, text=True)
    assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("expected to write to standard output") == status
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_nothing_is_said_before_the_help():
    """By transformers, that there is no PyTorch."""
    done = subprocess.run([*script("smd_eval"), "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: smd-eval") and done.stderr == ""


@pytest.mark.slow
def test_without_a_home_caches_have_a_folder(tmp_path: Path):
    """A container may run as a user without an entry in the system's list."""
    python, option, code, *_ = script("smd_eval")
    variables = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    variables |= {"TMPDIR": str(tmp_path)}
    variables.pop("JAX_COMPILATION_CACHE_DIR", None)
    words = [python, option, NO_ENTRY + code, "--model", "./nowhere", "--dataset", "gsm8k"]
    done = subprocess.run(words, env=variables, cwd=tmp_path, capture_output=True, text=True)
    folder = tmp_path / f"smd_jax-{os.getuid()}"
    assert done.returncode == 2 and f"got none: caches are kept in {folder}. Set HOME" in done.stderr
    assert "--model: expected a checkpoint directory" in done.stderr and "Traceback" not in done.stderr
    assert (folder / ".cache" / "smd_jax" / "programs").is_dir() and not (tmp_path / "~").exists()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_without_a_writable_home_programs_are_not_kept(
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


def test_a_removed_current_folder_is_one_line(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    words = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *script("smd_plot"), "runs"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2 and "one that was removed" in done.stderr and "Traceback" not in done.stderr
