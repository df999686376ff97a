"""smd-train with an environment: a run, its files and its resume."""

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

ENVIRONMENT = '''
class Count:
    """Counts the turns; a short text gets a higher reward."""

    def reset(self, row):
        self.turn = 0
        return "n = " + row["answer"]

    def step(self, text):
        self.turn += 1
        return f"turn {self.turn}", 1 / (1 + len(text)), False
'''
# Tokens that end a turn: random weights sample one in about five. The first becomes the EOS of the exported tokenizer,
# which leaves it out of texts; it is not sampled here.
END_TOKENS = sorted(string.ascii_letters)


@pytest.fixture(scope="module")
def argv(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("model")
    write_random_checkpoint(directory, config=tiny_model_config(num_layers=1, max_positions=512))
    (directory / "count.py").write_text(ENVIRONMENT, encoding="utf-8")
    return [
        *("grpo", "--model", str(directory), "--dataset", "reasoning_gym:chain_sum", "--dataset-size", "8"),
        *("--num-prompts", "2", "--num-generations", "2", "--max-completion-length", "160", "--budget", "24"),
        *("--buffer", "8", "--eviction", "snapkv(window=4)", "--max-prompt-length", "64", "--eos-token", *END_TOKENS),
        *("--environment", f"{directory / 'count.py'}:Count", "--environment-timeout", "30", "--max-turns", "3"),
    ]


def test_a_dry_run_shows_the_prompts_of_the_environment(argv: list[str], tmp_path: Path, capsys):
    main([*argv, "--output-dir", str(tmp_path), "--dry-run"])
    shown = capsys.readouterr().out
    assert "--- prompt 2, " in shown and "<|im_start|>user\nn = " in shown
    message = error_of([*argv, "--output-dir", str(tmp_path), "--max-prompt-length", "5"], capsys)
    assert "expected an environment that begins a conversation about each row; got, for the first 3: prompt" in message


@pytest.mark.slow
def test_a_run_is_logged_evaluated_and_resumed(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    flags = ["--eval-steps", "1", "--eval-rows", "2", "--eval-decode", "dense", "sampler", "--print-completions", "1"]
    flags += ["--turn-credit", "turn", "--decode-rows", "2"]
    main([*argv, *flags, "--output-dir", str(run), "--max-steps", "1"])
    (row,) = read_metrics(run / "metrics.jsonl")
    assert row["conversations/turns"] > 1 and row["sampling/sampling_logp_difference/max"] <= 2e-5
    table = pyarrow.parquet.read_table(run / "completions" / "completions_00000.parquet").to_pydict()
    assert set(table["ending"]) <= {"turns", "length", "room"} and max(map(len, table["turns"])) == 3
    assert "<|im_start|>user\nn = " in table["prompt"][0] and "turn 1" in str(table["answers"])
    assert "[<|im_end|>" in capsys.readouterr().out  # an end of turn that the policy did not sample
    *_, evaluated = read_metrics(run / "evaluations.jsonl")
    rewards = [evaluated["eval/dense/reward"], evaluated["eval/sampler/reward"]]
    assert all(0 < reward < 3 for reward in rewards)
    smd_eval(["--run", str(run), "--eval-rows", "2", "--json"])  # reads the environment from the run
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["reward"] for each in results] == pytest.approx(rewards)
    main(["--config", str(run / "config.yaml"), "--max-steps", "2", "--eval-steps", "0", "--resume"])
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1]
    message = error_of(["--config", str(run / "config.yaml"), "--resume", "--max-turns", "2"], capsys)
    assert "max_turns: expected 3, got 2" in message


@pytest.mark.slow
def test_contexts_are_summarised_and_retry_uses_the_reward_of_the_dataset(argv: list[str], tmp_path: Path):
    run = tmp_path / "run"
    flags = ["--contexts", "2", "--context-length", "12", "--summary-request", "Sum up!", "--environment", "retry"]
    main([*argv, *flags, "--max-prompt-length", "160", "--output-dir", str(run), "--max-steps", "1"])
    (row,) = read_metrics(run / "metrics.jsonl")
    assert row["conversations/contexts"] > 1 and 0 <= row["reward"] <= 1
    assert row["sampling/sampling_logp_difference/max"] <= 2e-5
    table = pyarrow.parquet.read_table(run / "completions" / "completions_00000.parquet").to_pydict()
    assert "<|im_start|>user\nSum up!<|im_end|>\n<|im_start|>assistant\n" in max(table["contexts"], key=len)[0]
