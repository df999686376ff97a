"""Configurations and names that no command may choke on: one box, soon, with little of the input."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from smd_jax.commands.errors import shortened
from smd_jax.runs.stop import StopSignals
from smd_jax.testing import tiny_model_config, write_random_checkpoint
from tests.command_errors import error_of

GOOD = "algorithm: grpo\nmodel: nowhere\ndataset: gsm8k\n"
LAUGHS = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LAUGHS, "expected YAML without aliases; got *a"),
        ("a: " + "[" * 5000 + "]" * 5000, "expected YAML of at most 20 levels"),
        ("a: " + "{a: " * 5000, "expected YAML of at most 20 levels"),
        ("a: " + "x" * 6_000_000, "expected at most 131,072 characters; got 6,000,003 bytes"),
        ("a: [", "expected YAML; got"),
        ("a: !!python/object:os.system x", "expected YAML; got"),
        ("? [a]\n: b", "expected"),
        ("seed: 2020-13-45", "month must be in 1..12"),
        ("\x00", "expected YAML"),
        (GOOD.replace("grpo", "[grpo]"), "expected 'algorithm' as a text"),
        (GOOD + "output_dir: null", "expected a value of 'output_dir'; got null"),
        (GOOD + "stop: [null]", "got a list with null"),
        (GOOD + "stop: [{a: b}]", "expected a number, a text or a list of them in 'stop'"),
        (GOOD + "output_dir: ~nosuchuser/x", "expected a path; got '~nosuchuser/x'"),
        (GOOD + 'output_dir: "\\ud800"', "expected a path; got"),
        (GOOD + "output_dir: " + "x" * 5000, "File name too long"),
        (GOOD + "budget: 2147483648", "expected --budget <= 16777216; got 2147483648"),
        (GOOD + "num_prompts: 4000000000000", "expected --num-prompts <= 1048576; got 4000000000000"),
        (GOOD + "seed: 9223372036854775808", "expected --seed <= 4294967295"),
        (GOOD + "output_dir: sweep[lr=1]", "expected a path without * ? ["),
    ],
)
def test_a_configuration_that_cannot_be_is_one_box(tmp_path, capsys, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text, encoding="utf-8")
    message = error_of(["--config", "run.yaml"], capsys)
    assert said in message and len(message) < 1500


@pytest.mark.parametrize(
    ("more", "near"),
    [
        (["--dataset", "gsm9k"], "gsm8k"),
        (["--dataset", "GSM8K"], "gsm8k"),
        (["--dataset", "reasoning_gym:chain_summ"], "chain_sum"),
        (["--reward", "mine.py:rewrad"], "reward"),
        (["--reward", "exact_mach"], "exact_match"),
        (["--map-function", "mine.py:rewrad"], "reward"),
        (["--eviction", "snapvk"], "snapkv"),
    ],
)
def test_a_name_that_is_nearly_right_gets_its_nearest_match(more, near, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    monkeypatch.chdir(tmp_path)
    write_random_checkpoint(Path("model"), config=tiny_model_config(num_layers=1, max_positions=2048))
    Path("colours.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    Path("mine.py").write_text("def reward(completions, **columns):\n    return [0.0 for _ in completions]\n")
    words = ["grpo", "--model", "model", "--dataset", "colours.jsonl", "--reward", "mine.py:reward", *more]
    assert re.search(rf"Did you mean (\S*/)?{re.escape(near)}( or [^?]*)?\?", error_of(words, capsys))


def test_long_messages_keep_their_ends():
    assert shortened("short\nlines") == "short\nlines"
    line = "begin " + "x" * 5000 + " end"
    assert shortened(line).startswith("begin x") and shortened(line).endswith("x end") and len(shortened(line)) < 700
    assert shortened("a\n" * 100).endswith("… and 41 more lines")


def test_a_signal_that_the_shell_ignores_is_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN and stop.received is None
    finally:
        signal.signal(signal.SIGINT, before)
