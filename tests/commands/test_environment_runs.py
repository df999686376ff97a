"""smd-train with an environment: a run, its files and its resume."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pyarrow.parquet
import pytest

from smd_jax.commands.evaluate import main as smd_eval
from smd_jax.commands.train import main
from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.testing import tiny_model_config, write_random_checkpoint
from tests.command_errors import error_of

SOURCE = '''
class Count:
    """Counts the turns, and likes short ones."""

    def reset(self, row):
        self.turn = 0
        return "n = " + row["answer"]

    def step(self, text):
        self.turn += 1
        return f"turn {self.turn}", 1 / (1 + len(text)), False
'''
# Tokens that end a turn: of random weights, about one in five. The first, which is not sampled here, becomes the EOS of
# the exported tokenizer, which leaves it out of texts.
ENDS = sorted(string.ascii_letters)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("model")
    write_random_checkpoint(directory, config=tiny_model_config(num_layers=1, max_positions=512))
    (directory / "count.py").write_text(SOURCE, encoding="utf-8")
    return [
        *("grpo", "--model", str(directory), "--dataset", "reasoning_gym:chain_sum", "--dataset-size", "8"),
        *("--num-prompts", "2", "--num-generations", "2", "--max-completion-length", "160", "--budget", "24"),
        *("--buffer", "8", "--eviction", "snapkv(window=4)", "--max-prompt-length", "64", "--eos-token", *ENDS),
        *("--environment", f"{directory / 'count.py'}:Count", "--environment-timeout", "30", "--max-turns", "3"),
    ]


def test_a_dry_run_shows_the_prompts_of_the_environment(words: list[str], tmp_path: Path, capsys):
    main([*words, "--output-dir", str(tmp_path), "--dry-run"])
    shown = capsys.readouterr().out
    assert "--- prompt 2, " in shown and "<|im_start|>user\nn = " in shown
    message = error_of([*words, "--output-dir", str(tmp_path), "--max-prompt-length", "5"], capsys)
    assert "expected an environment that begins a conversation about each row; got, for the first 3: prompt" in message


@pytest.mark.slow
def test_a_run(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    more = ["--eval-steps", "1", "--eval-rows", "2", "--eval-decode", "dense", "sampler", "--print-completions", "1"]
    more += ["--turn-credit", "turn", "--decode-rows", "2"]
    main([*words, *more, "--output-dir", str(run), "--max-steps", "1"])
    (row,) = read_metrics(run / "metrics.jsonl")
    assert row["conversations/turns"] > 1 and row["sampling/sampling_logp_difference/max"] <= 2e-5
    table = pyarrow.parquet.read_table(run / "completions" / "completions_00000.parquet").to_pydict()
    assert set(table["ending"]) <= {"turns", "length", "room"} and max(map(len, table["turns"])) == 3
    assert "<|im_start|>user\nn = " in table["prompt"][0] and "turn 1" in str(table["answers"])
    assert "[<|im_end|>" in capsys.readouterr().out  # ends of turns that the policy did not write itself
    *_, evaluated = read_metrics(run / "evaluations.jsonl")
    rewards = [evaluated["eval/dense/reward"], evaluated["eval/sampler/reward"]]
    assert all(0 < reward < 3 for reward in rewards)
    smd_eval(["--run", str(run), "--eval-rows", "2", "--json"])  # takes the environment from the run
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["reward"] for each in found] == pytest.approx(rewards)
    main(["--config", str(run / "config.yaml"), "--max-steps", "2", "--eval-steps", "0", "--resume"])
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1]
    said = error_of(["--config", str(run / "config.yaml"), "--resume", "--max-turns", "2"], capsys)
    assert "max_turns: expected 3, got 2" in said


@pytest.mark.slow
def test_contexts_are_summarised_and_retry_takes_the_rewards_of_the_dataset(words: list[str], tmp_path: Path):
    run = tmp_path / "run"
    more = ["--contexts", "2", "--context-length", "12", "--summary-request", "Sum up!", "--environment", "retry"]
    main([*words, *more, "--max-prompt-length", "160", "--output-dir", str(run), "--max-steps", "1"])
    (row,) = read_metrics(run / "metrics.jsonl")
    assert row["conversations/contexts"] > 1 and 0 <= row["reward"] <= 1
    assert row["sampling/sampling_logp_difference/max"] <= 2e-5
    table = pyarrow.parquet.read_table(run / "completions" / "completions_00000.parquet").to_pydict()
    assert "<|im_start|>user\nSum up!<|im_end|>\n<|im_start|>assistant\n" in max(table["contexts"], key=len)[0]
