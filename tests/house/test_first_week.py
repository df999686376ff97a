"""What a new user does wrong in a first week, mostly with TRL's habits: each is said in one box, and loses nothing."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from smd_jax.commands import config_file, console_scripts
from smd_jax.commands.arguments import Grpo, RewardArgs
from smd_jax.commands.command_line import ALGORITHMS, parse
from smd_jax.commands.errors import UserError
from smd_jax.commands.places import LOCK, from_the_root, only_process
from smd_jax.commands.prepare import prepare
from smd_jax.commands.task_source import rewards_of
from smd_jax.commands.train import main
from smd_jax.commands.trl_names import TRL_NAMES, in_place_of
from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.tasks.build import TaskChoice, build_task
from smd_jax.tasks.reasoning_gym import ReasoningGymTask
from smd_jax.testing import tiny_model_config, write_random_checkpoint
from tests.command_errors import error_of

SIZES = ["--num-prompts", "2", "--num-generations", "2", "--max-completion-length", "4", "--budget", "12", "--buffer"]
SIZES += ["2", "--eviction", "h2o", "--max-steps", "1", "--distill", "none", "--reward-timeout", "None"]
REWARD = "def reward(completions, **columns):\n    return [float(len(text)) for text in completions]\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, rows, and a reward."""
    folder = tmp_path_factory.mktemp("place")
    write_random_checkpoint(folder / "model", config=tiny_model_config(num_layers=1))
    (folder / "rows.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    (folder / "my.rewards.py").write_text(REWARD)  # the dot belongs to the name
    return folder


def words(place: Path, run: Path, *more: str) -> list[str]:
    files = [
        "--model",
        f"{place}/model",
        "--dataset",
        f"{place}/rows.jsonl",
        "--reward",
        f"{place}/my.rewards.py:reward",
    ]
    return ["grpo", *files, *SIZES, "--output-dir", str(run), *more]


# --- flags


def test_flags_of_trl_are_answered_with_ours():
    options = {name for kind in ALGORITHMS.values() for name in config_file.options_of(kind)}
    assert not options & TRL_NAMES.keys(), "a flag that is there is no foreign one"
    for instead in TRL_NAMES.values():
        flags = [word.strip(",;") for word in instead.split() if word.startswith("--")]
        assert all(flag.removeprefix("--").replace("-", "_") in options for flag in flags), instead
    assert in_place_of("--bf16") == "TRL's --bf16 is --dtype bfloat16 here" and in_place_of("reward") is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "expected an algorithm first, one of ['grpo', 'rloo', 'ppo', 'online-dpo']"),
        (["--model", "m", "--dataset", "d"], "got '--model'"),
        (["dpo", "--model", "m"], "got 'dpo'"),
        (["grpo", "--reward-funcs", "f.py:f"], "TRL's --reward-funcs is --reward path/to/file.py:function here"),
        (["grpo", "--per_device_train_batch_size=4"], "is --num-prompts, prompts of a rollout"),
        (["grpo", "--lora-dropout", "0.1"], "TRL's --lora-dropout has no flag here: with dropout sampler and learner"),
    ],
)
def test_a_command_line_that_cannot_be(given: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert said in error_of(given, capsys)


def test_options_of_trl_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run.yaml").write_text("algorithm: grpo\nmodel_name_or_path: m\n")
    assert "TRL's model_name_or_path is --model here" in error_of(["--config", str(tmp_path / "run.yaml")], capsys)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--seed", "-1"], "expected --seed >= 0; got -1"),
        (["--completions-steps", "-1"], "expected --completions-steps >= 0; got -1"),
        (["--print-completions", "-1"], "expected --print-completions >= 0; got -1"),
        (["--eval-rows", "0"], "expected --eval-rows >= 1; got 0"),
        (["--dataset-size", "0"], "expected --dataset-size >= 1; got 0"),
        (["--max-prompt-length", "0"], "expected --max-prompt-length >= 1; got 0"),
        (["--save-total-limit", "0"], "expected --save-total-limit >= 1; got 0"),
        (["--max-completion-length", "5000"], "together, the model's context; got 20 and 5000"),
        (["--top-entropy-quantile", "0"], "expected --top-entropy-quantile > 0"),
        (["--stop", ""], "expected non-empty strings for --stop; got an empty one"),
        (["--metric-for-best-model", "eval/dense/reward"], "expected --eval-steps with --metric-for-best-model"),
        (["--resume"], "got none. To begin one, leave --resume out"),
    ],
)
def test_numbers_that_cannot_be(
    more: list[str], said: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert said in error_of(words(place, tmp_path / "run", *more), capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [[], ["--map-function", "FILE:same"]])
def test_rows_without_a_prompt(more: list[str], place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "result": "2"}\n' * 2)
    (tmp_path / "same.py").write_text("def same(row):\n    return row\n")
    more = [word.replace("FILE", f"{tmp_path}/same.py") for word in more]
    given = ["grpo", "--model", f"{place}/model", "--dataset", f"{tmp_path}/rows.jsonl", "--reward", "format", *more]
    said = error_of([*given, "--output-dir", f"{tmp_path}/run"], capsys)
    assert "prompt_column is --prompt-column" in said and "'question', 'result'" in said


def test_commands_without_their_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    there = importlib.util.find_spec
    monkeypatch.setattr(console_scripts, "find_spec", lambda name: None if name == "tyro" else there(name))
    with pytest.raises(SystemExit) as end:
        console_scripts.smd_train()
    assert end.value.code == 2 and "the packages tyro; got none: pip install -e '.[train]'" in capsys.readouterr().err


@pytest.mark.slow
def test_nothing_is_said_before_the_help():
    """By transformers, that there is no PyTorch."""
    environment = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_NO_ADVISORY_WARNINGS"}
    command = [sys.executable, "-m", "smd_jax.commands.evaluate", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: smd-eval") and done.stderr == ""


def test_only_what_is_a_flags_business_is_translated(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    said = error_of(words(place, tmp_path / "run", "--model", "no/such/place"), capsys)
    assert "expected a checkpoint directory" in said and "--output-dir" not in said


def test_a_template_that_refuses_the_messages(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copytree(place / "model", tmp_path / "model")
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(refuses + "{{ messages[0]['content'] }}")
    given = words(place, tmp_path / "run", "--model", f"{tmp_path}/model", "--system-prompt", "Add.")
    said = error_of(given, capsys)
    assert "got those of ['system', 'user'], and it says: " in said and "System role not supported" in said


# --- files of rewards


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise RuntimeError('no key')", "it raised RuntimeError in line 1: no key"),
        ("assert 1 == 2, 'why'", "it raised AssertionError in line 1: why"),
        ("x = 1\nimport sys\nsys.exit(3)", "it raised SystemExit in line 3: 3"),
        ("def reward(completions, answr):\n    return []", "got ['answr'] among its parameters, which neither"),
    ],
)
def test_a_file_that_is_no_reward(
    code: str, said: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "rewards.py").write_text(code)
    given = words(place, tmp_path / "run", "--reward", f"{tmp_path}/rewards.py:reward", "--dry-run")
    assert said in error_of(given, capsys)


def test_a_tasks_own_reward_has_the_limits_of_any(place: Path, tmp_path: Path):
    """A verifier that parses what a model wrote may take for ever."""
    task = build_task(TaskChoice("reasoning_gym:chain_sum", size=3))
    assert isinstance(task, ReasoningGymTask)
    rewards = rewards_of(RewardArgs(reward_timeout=7.0, max_failed_rewards=0.5), 5, task, "reasoning_gym:chain_sum")
    assert (rewards.seconds, rewards.max_failed, rewards.logged_names) == (7.0, 0.5, ("chain_sum",))
    # A task is found by the other process without what it has made of itself so far.
    again = pickle.loads(pickle.dumps(task))
    assert "dataset" not in vars(again) and again == task and again[0] == task[0]


def test_held_out_rows_of_another_task_are_graded_by_it(place: Path, tmp_path: Path):
    other = ["--dataset", "reasoning_gym:chain_sum", "--eval-steps", "1", "--eval-dataset", "reasoning_gym:gcd"]
    given = ["grpo", "--model", f"{place}/model", *SIZES, *other, "--dataset-size", "4", "--eval-rows", "2"]
    _, args = parse([*given, "--max-prompt-length", "400"])
    ready = prepare(args)
    assert ready.loop.rewards is not None and ready.evaluator is not None and ready.evaluator.rewards is not None
    assert ready.loop.rewards.logged_names == ("chain_sum",)
    assert ready.evaluator.rewards.logged_names == ("gcd",)


# --- a run, and what must not harm it


def test_a_prompt_is_shown_as_text(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "\\u001b[31mred [bold]x[/bold]"}\n')
    main(words(place, tmp_path / "run", "--dataset", f"{tmp_path}/rows.jsonl", "--dry-run"))
    said = capsys.readouterr().out
    assert "␛[31mred [bold]x[/bold]" in said and "\x1b" not in said


@pytest.mark.slow
def test_a_refused_resume_leaves_the_run_as_it_was(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """And one that is accepted finds its files from any folder, however they were spelled."""
    monkeypatch.chdir(place)
    run = tmp_path / "run"
    spelled = ["--model", "model", "--dataset", "./rows.jsonl", "--reward", "my.rewards.py:reward"]
    main([*words(place, run), *spelled, "--output-dir", os.path.relpath(run)])
    kept = (run / "config.yaml").read_text()
    monkeypatch.chdir("/")
    refused = ["--config", str(run / "config.yaml"), "--resume", "--max-steps", "2", "--learning-rate", "0.5"]
    for more in ([], ["--dry-run"]):
        assert "optimizer.learning_rate: expected 1e-06, got 0.5" in error_of([*refused, *more], capsys)
        assert (run / "config.yaml").read_text() == kept
    fewer = ["--config", str(run / "config.yaml"), "--resume", "--max-steps"]
    main([*fewer, "2"])
    kept = (run / "config.yaml").read_text()
    assert "--max-steps" in error_of([*fewer, "1"], capsys)
    link = tmp_path / "link.jsonl"
    link.symlink_to(place / "rows.jsonl")
    limits = ["--reward-timeout", "30", "--max-failed-rewards", "0.5", "--dataset", str(link)]
    main(["--config", str(run / "config.yaml"), "--resume", "--max-steps", "2", *limits])
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1]
    # A folder that was moved is no new run under its old name.
    shutil.move(run, tmp_path / "moved")
    moved = ["--config", str(tmp_path / "moved" / "config.yaml"), "--resume", "--max-steps", "3", "--dry-run"]
    assert "a run that was moved needs its new --output-dir" in error_of(moved, capsys)
    assert not run.exists()
    main([*moved, "--output-dir", str(tmp_path / "moved")])


@pytest.mark.slow
def test_one_line_begins_a_run_and_goes_on(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    line = words(place, tmp_path / "run", "--resume-if-there", "--save-steps", "1")
    main([*line, "--max-steps", "1"])
    assert "resume" not in capsys.readouterr().err
    main([*line, "--max-steps", "2"])
    assert "resumes after 1 of 2 rollouts" in capsys.readouterr().out
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1]
    assert "resume_if_there: false" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.slow
def test_another_model_in_its_place_leaves_the_run_as_it_was(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_random_checkpoint(tmp_path / "model", config=tiny_model_config(num_layers=1))
    line = words(place, tmp_path / "run", "--model", str(tmp_path / "model"))
    main(line)
    kept = (tmp_path / "run" / "config.yaml").read_text()
    shutil.rmtree(tmp_path / "model")
    write_random_checkpoint(tmp_path / "model", config=tiny_model_config(num_layers=2))
    assert 'model.model: expected "sha256:' in error_of([*line, "--resume", "--max-steps", "2"], capsys)
    assert (tmp_path / "run" / "config.yaml").read_text() == kept


@pytest.mark.slow
def test_a_run_goes_on_where_its_files_lie_elsewhere(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The model's weights need not be what they were: checkpoints have them."""
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(place, here)
    main(words(here, here / "run"))
    shutil.move(here, there)
    line = [*words(there, there / "run"), "--resume", "--max-steps"]
    main([*line, "2"])
    assert f'files.model: was "{here}/model", is now "{there}/model"' in capsys.readouterr().out
    reward = there / "my.rewards.py"
    reward.write_text(reward.read_text().replace("len(text)", "2 * len(text)"))
    main([*line, "3"])
    assert "files.my.rewards.py.1: was" in capsys.readouterr().out, "a function may be mended, and that is said"
    before = (there / "run" / "config.yaml").read_text()
    with (there / "rows.jsonl").open("a") as rows:
        rows.write('{"prompt": "c", "answer": "3"}\n')
    assert 'data.dataset: expected "sha256:' in error_of([*line, "4"], capsys)
    assert (there / "run" / "config.yaml").read_text() == before


@pytest.mark.parametrize(("free", "what"), [(10_000, "checkpoint"), (10_000_000, None)])
def test_a_disk_without_room_is_found_before_weights_are_read(
    free: int, what: str | None, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    def read(*arguments: Any, **more: Any) -> None:
        raise UserError("weights are read")

    monkeypatch.setattr("smd_jax.commands.train.load_checkpoint", read)
    monkeypatch.setattr("shutil.disk_usage", lambda path: namedtuple("Usage", "total used free")(2**30, 0, free))
    said = error_of(words(place, tmp_path / "run"), capsys)
    assert ("weights are read" in said) == (what is None)
    assert what is None or f"for one {what}" in said
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_plot_that_cannot_be_written_costs_no_model(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(*arguments: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setenv("COLUMNS", "1000")  # no line is broken inside of the path
    monkeypatch.setattr("smd_jax.commands.train.plot_runs", full)
    main(words(place, tmp_path / "run"))
    assert "training.png could not be written" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_two_processes_do_not_share_a_run(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    with only_process(run), (run / LOCK).open() as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert "expected no other process that trains in" in error_of(words(place, run), capsys)
    assert not (run / "config.yaml").exists()


def flock_answers(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: Any, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    flock_answers(number, monkeypatch)
    with only_process(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"got {os.strerror(number)}. Make sure that no second process trains there" in said


def test_a_lock_that_fails_in_another_way_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    flock_answers(errno.EIO, monkeypatch)
    with pytest.raises(OSError, match=f"{LOCK} could not be written .*: .*error"), only_process(tmp_path / "run"):
        pytest.fail("expected no run behind a disk that fails")


def test_ctrl_c_before_the_run_has_begun(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("smd_jax.commands.prepare.open_model", interrupted)
    with pytest.raises(SystemExit) as end:
        main(words(place, tmp_path / "run"))
    said = capsys.readouterr().err
    assert end.value.code == 130 and "by Ctrl-C" in said and "Traceback" not in said


def test_names_are_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gsm8k", "mine", "rewards.py"):
        (tmp_path / name).mkdir()
    rewards = ["math_answer", "package.module:f", "rewards.py:f"]
    _, args = parse(["grpo", "--model", "mine", "--dataset", "gsm8k", "--eval-dataset", "mine", "--reward", *rewards])
    rooted = from_the_root(args)
    assert rooted.data == args.data, "a task that is ready, beside a folder of its name"
    assert rooted.model.model == rooted.evaluation.eval_dataset == str(tmp_path / "mine")
    assert rooted.rewards.reward == ("math_answer", "package.module:f", f"{tmp_path}/rewards.py:f")
    assert isinstance(rooted, Grpo) and rooted.run.output_dir == tmp_path / "runs" / "train"
    unchanged = dataclasses.replace(rooted, model=args.model, evaluation=args.evaluation, rewards=args.rewards)
    assert dataclasses.replace(unchanged, run=args.run) == args
