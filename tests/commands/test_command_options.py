"""Options of the commands, one by one: what each changes, and what is refused before weights are read."""

from __future__ import annotations

import importlib.machinery
import json
import shlex
import signal
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoTokenizer

from smd_jax.commands import certify, config_file, evaluate, plot
from smd_jax.commands import export as export_command
from smd_jax.commands.command_line import parse, parse_words
from smd_jax.commands.config_file import with_file
from smd_jax.commands.contents import by_content
from smd_jax.commands.disk_plan import checkpoint_plan
from smd_jax.commands.errors import UserError
from smd_jax.commands.evaluate import evaluation_rows, make_evaluator, read
from smd_jax.commands.evaluate import main as smd_eval
from smd_jax.commands.export import main as export
from smd_jax.commands.limits import evicts_keys
from smd_jax.commands.prepare import prepare
from smd_jax.commands.train import loggers, main
from smd_jax.eviction.policies import H2O
from smd_jax.eviction.wrappers import Pyramid
from smd_jax.metrics import evicted_share
from smd_jax.model.decoder import Decoder
from smd_jax.model.weights import read_config
from smd_jax.runs.run_config import Objective, RunConfig
from smd_jax.runs.stop import RunStoppedError
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.tasks.rewards import RewardWarning
from smd_jax.tasks.task import Task
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config, write_random_checkpoint
from smd_jax.text.prompts import PromptBatch
from tests.command_errors import error_of
from tests.hub_files import write_lines

SUMS = ["--dataset", "reasoning_gym:chain_sum", "--dataset-size", "20"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_random_checkpoint(directory, config=tiny_model_config(num_layers=1, max_positions=2048))
    return directory


# --- loggers


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("wandb", "wandb", "wandb"), ("tensorboard", "tensorboardX", "train")]
)
def test_a_logger_without_its_package_is_refused_before_weights_are_read(
    name: str,
    package: str,
    extra: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(sys.modules, package, None)

    def refuse(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("smd_jax.commands.train.load_checkpoint", refuse)
    words = ["grpo", "--model", str(model), *SUMS, "--output-dir", str(tmp_path / "run"), "--report-to", name]
    said = error_of(words, capsys)
    assert f"{package}, which is not installed: pip install -e '.[{extra}]'" in said
    assert not (tmp_path / "run").exists()


def test_weights_and_biases_gets_the_options_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    began: list[dict[str, Any]] = []
    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="wandb/__init__.py")
    vars(fake).update(init=lambda **options: began.append(options), Settings=lambda **options: options)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    words = ["grpo", "--model", "somewhere", *SUMS, "--output-dir", str(tmp_path / "mine"), "--report-to", "wandb"]
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    for variable, more, project in (
        (None, [], "smd_jax"),
        ("of the variable", [], "of the variable"),
        ("of the variable", ["--wandb-project", "of the flag"], "of the flag"),
    ):
        if variable is not None:
            monkeypatch.setenv("WANDB_PROJECT", variable)
        loggers(*parse([*words, *more]))
        assert (began[-1]["project"], began[-1]["name"], began[-1]["mode"]) == (project, "mine", "online")
    config = began[-1]["config"]
    assert (config["algorithm"], config["learning_rate"], config["budget"]) == ("grpo", None, 512)
    assert config["output_dir"] == str(tmp_path / "mine")


# --- models and tokenizers of the Hub


def test_a_revision_is_what_the_hub_is_asked_for(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[str, str | None]] = []

    def fetched(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        if revision == "gone":
            raise LocalEntryNotFoundError("no such revision")
        return str(model)

    monkeypatch.setattr("smd_jax.commands.model_source.snapshot_download", fetched)
    words = ["--model", "owner/name", "--model-revision", "v1", "--tokenizer", "owner/tokens"]
    words += ["--tokenizer-revision", "abc123"]
    train = ["grpo", *words, *SUMS, "--output-dir", str(tmp_path / "run"), "--dry-run"]
    main(train)
    # Of a model everything but weights, then the weights.
    assert asked == [("owner/name", "v1")] * 2 + [("owner/tokens", "abc123")]
    evaluate = ["--dataset", "reasoning_gym:chain_sum", "--eval-rows", "1", "--max-completion-length", "2"]
    evaluate += ["--eval-decode", "dense"]
    smd_eval([*words, *evaluate, "--reward-timeout", "None"])
    assert asked[3:] == asked[:3]
    said = error_of([*train, "--model-revision", "gone"], capsys)
    assert "at --model-revision gone, which is no directory here and could not be downloaded: no such revision" in said
    said = error_of([*train, "--model", str(model)], capsys)
    assert "expected no --model-revision with --model" in said and "a directory here; got 'v1'" in said
    alone = ["grpo", "--model", "owner/name", *SUMS, "--tokenizer-revision", "v1"]
    assert "expected --tokenizer, an id on the Hub, with --tokenizer-revision 'v1'; got none" in error_of(alone, capsys)


# --- prompts


@pytest.mark.slow
def test_prompts_without_the_chat_template(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tokenizer = byte_tokenizer()  # with a template
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": "ab"}])
    words = ["--model", str(model), "--max-completion-length", "4", "--reward", "format", "--reward-timeout", "None"]
    words += ["--tokenizer", str(tmp_path / "tokenizer")]
    train = ["grpo", *words, "--dataset", str(rows), "--num-prompts", "1", "--num-generations", "2", "--max-steps", "1"]
    train += ["--budget", "12", "--buffer", "4", "--eviction", "h2o", "--output-dir", str(tmp_path / "run")]
    main([*train, "--dry-run"])
    assert "user" in capsys.readouterr().out.partition("--- prompt 0")[2]
    main([*train, "--dry-run", "--chat-template", "none"])
    assert "--- prompt 0, 2 of 2 tokens:\nab\n" in capsys.readouterr().out
    said = error_of([*train, "--chat-template", "none", "--system-prompt", "Be kind."], capsys)
    assert "expected a plain string, because the tokenizer has no chat template" in said
    main([*train, "--chat-template", "none"])
    export([str(tmp_path / "run"), "--out", str(tmp_path / "again")])
    for folder in (tmp_path / "run" / "model", tmp_path / "again"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
    capsys.readouterr()
    smd_eval([*words, "--dataset", str(rows), "--eval-decode", "dense", "--chat-template", "none"])
    assert "the longest has 2 tokens" in capsys.readouterr().err


# --- smd-eval, as a run has it


def prompts_of(task: Task | None) -> list[Any]:
    assert task is not None
    return [task[index]["prompt"] for index in range(len(task))]


def test_an_evaluation_is_the_one_of_the_run(model: Path, tmp_path: Path):
    """Same rows, same rollout, same eviction policy: nothing else reproduces the policy that was trained."""
    task, size = ["reasoning_gym:chain_sum", "--dataset-size", "20"], ["--prefill-chunk", "16", "--pyramid"]
    words = ["grpo", "--model", str(model), "--dataset", *task, *size, "--output-dir", str(tmp_path / "run")]
    words += ["--seed", "3", "--max-completion-length", "6", "--min-completion-length", "2", "--eviction", "h2o"]
    words += ["--budget", "16", "--buffer", "4", "--eval-steps", "1", "--eval-rows", "5", "--reward-timeout", "None"]
    words += ["--eval-decode", "sampler", "snapkv:40+4", "--eval-temperature", "0.5", "--sinks", "2"]
    name, run = parse(words)
    during = prepare(run).evaluator
    assert during is not None
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(config_file.dump(name, run))
    decoder, tokenizer = Decoder(read_config(model, "float32")), byte_tokenizer()
    args = read(["--run", str(tmp_path / "run")])
    after, _ = make_evaluator(args, decoder, tokenizer, None, (258,))
    assert prompts_of(after.task) == prompts_of(during.task)
    assert [way.name for way in after.config.decodes] == ["sampler", "snapkv-40-4"]
    assert isinstance(after.config.decodes[0].policy, Pyramid) and after.config.seed == during.config.seed == 3
    for mine, its in zip(after.config.decodes, during.config.decodes, strict=True):
        assert mine.policy == its.policy and mine.rollout(after.config.rollout) == its.rollout(during.config.rollout)
    other, _ = make_evaluator(read(["--run", str(tmp_path / "run"), "--seed", "4"]), decoder, tokenizer, None, (258,))
    assert prompts_of(other.task) != prompts_of(during.task)
    # Flags override the run.
    args = read(["--run", str(tmp_path / "run"), "--budget", "9", "--model", "other", "--json"])
    assert (args.sampler.budget, args.sampler.buffer, args.model.model, args.command.json) == (9, 4, "other", True)


@pytest.mark.parametrize(
    ("more", "dataset", "source", "split"),
    [
        (["--dataset", "gsm8k"], "gsm8k", None, None),
        (["--dataset", "gsm8k", "--split", "train[:9]"], "gsm8k", None, None),
        (["--dataset", "gsm8k", "--dataset-source", "mine.jsonl"], "gsm8k", "mine.jsonl", None),
        (["--dataset", "gsm8k", "--eval-steps", "1", "--eval-source", "test.jsonl"], "gsm8k", "test.jsonl", None),
        (["--dataset", "a.jsonl"], "a.jsonl", None, None),
        (["--dataset", "owner/name", "--split", "train", "--eval-split", "test"], "owner/name", None, "test"),
        (["--dataset", "owner/name", "--split", "train"], "owner/name", None, "train"),
        (["--dataset", "a.jsonl", "--split", "train", "--eval-dataset", "b.jsonl"], "b.jsonl", None, None),
    ],
)
def test_rows_of_an_evaluation_are_those_that_the_run_names(more: list[str], dataset: str, source: Any, split: Any):
    rows = evaluation_rows(parse(["grpo", "--model", "somewhere", *more])[1])
    assert (rows.dataset, rows.dataset_source, rows.split) == (dataset, source, split)


def test_a_run_without_a_trained_model_says_how_to_write_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "expected a run with its config.yaml in" in error_of(["--run", str(tmp_path)], capsys, smd_eval)
    name, run = parse(["grpo", "--model", "somewhere", *SUMS, "--output-dir", str(tmp_path)])
    (tmp_path / "config.yaml").write_text(config_file.dump(name, run))
    said = error_of(["--run", str(tmp_path)], capsys, smd_eval)
    assert "expected a trained model in" in said and "smd-export" in said


def test_rewards_of_an_evaluation_have_weights_and_limits(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "mine.py"
    file.write_text("""
def one(completions, **columns):
    return [1.0 for _ in completions]


def fails(prompts, **columns):
    raise RuntimeError("no answer")
""")
    words = [
        "--model",
        str(model),
        "--dataset",
        "reasoning_gym:chain_sum",
        "--eval-rows",
        "6",
        "--eval-decode",
        "dense",
        "--json",
    ]
    words += ["--max-completion-length", "3", "--reward-timeout", "None", "--reward", f"{file}:one"]
    smd_eval([*words, "overlong", "--overlong-cache", "3", "--reward-weights", "2", "0.5"])
    # A completion of three tokens is at the limit, where `overlong` is -1, a shorter one between.
    assert 1.5 <= json.loads(capsys.readouterr().out)["reward"] < 2.0
    words = [*words, f"{file}:fails"]
    with pytest.warns(RewardWarning):
        assert "no answer" in error_of([*words, "--max-failed-rewards", "0"], capsys, smd_eval)


# --- what a run says of its end and of the disk


def test_a_stopped_run_is_a_short_box_and_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    directory = tmp_path / "a run"
    stopped = RunStoppedError(signal.SIGTERM, 3, 9, directory)
    monkeypatch.setattr("smd_jax.commands.train.run", lambda *_: (_ for _ in ()).throw(stopped))
    with pytest.raises(SystemExit) as end:
        main(["grpo", "--model", "somewhere", *SUMS, "--output-dir", str(directory)])
    *box, command = capsys.readouterr().err.splitlines()
    assert end.value.code == 143 and "SIGTERM stopped the run after 3 of 9 rollouts; saved in" in "".join(box)
    assert len(box) <= 5
    directory.mkdir()
    name, args = parse(["grpo", "--model", "somewhere", *SUMS, "--output-dir", str(directory)])
    (directory / "config.yaml").write_text(config_file.dump(name, args))
    program, *words = shlex.split(command.removeprefix("resume with: "))
    _, again = parse(words)
    assert program == "smd-train" and again.run.resume and again.run.output_dir == directory


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (RunConfig(steps=100, checkpoint_every=20), "the newest 3, 2.00 GiB each, 6.00 GiB in all"),
        (RunConfig(steps=100, checkpoint_every=20, keep=1), "the newest one, 2.00 GiB each, 2.00 GiB in all"),
        (RunConfig(steps=30, checkpoint_every=20), "the newest 2, 2.00 GiB each, 4.00 GiB in all"),
        (RunConfig(steps=100), "the newest one, 2.00 GiB each"),
        (
            RunConfig(
                steps=100, checkpoint_every=20, evaluate_every=20, keep=2, objective=Objective("eval/dense/reward")
            ),
            "the newest 2, and the best one, 2.00 GiB each",
        ),
    ],
)
def test_a_plan_says_which_checkpoints_stay(settings: RunConfig, said: str):
    plan = checkpoint_plan(2 * 2**30, settings)
    assert plan.startswith(f"checkpoints: {said}")
    assert ("--save-total-limit 1 keeps fewer" in plan) == (settings.keep > 1 and settings.checkpoint_every > 0)


# --- what changes no run


def test_options_that_came_later_are_compared_where_somebody_uses_them():
    """A run that was begun before there was such an option has nothing in its place."""
    words = ["grpo", "--model", "somewhere", *SUMS]
    later = {"model_revision", "tokenizer_revision", "chat_template", "chat_template_kwargs"}
    groups = by_content(parse(words)[1]).groups
    assert not later & {*groups["model"], *groups["data"]}
    groups = by_content(parse([*words, "--model-revision", "v1", "--chat-template", "none"])[1]).groups
    assert (groups["model"]["model_revision"], groups["data"]["chat_template"]) == ("v1", "none")


@pytest.mark.parametrize(("prompt", "tokens"), [(8, 8), (8, 9), (9, 8), (12, 4), (12, 5), (13, 4)])
def test_whether_a_key_will_be_lost(prompt: int, tokens: int):
    """Twelve keys and a buffer of four; what is compressed behind the last token is lost to nobody."""
    decoder = Decoder(tiny_model_config(num_layers=1))
    policy, config = H2O(), RolloutConfig(tokens, budget=12, buffer=4, eos_token_id=None)
    prompts = PromptBatch(jnp.ones((1, prompt), jnp.int32), jnp.ones((1, prompt), bool))
    params = random_params(decoder.config)
    drawn = rollout(decoder, params, prompts, jax.random.key(0), policy=policy, config=config)
    evicted = float(evicted_share(drawn.mask.evicted_at, drawn.valid)) > 0
    assert evicts_keys(policy, config, 1, prompt) == evicted


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (
            evaluate.Args,
            "model: somewhere\ndataset: gsm8k\neval_decode: [dense, 'snapkv:512']\njson: true\n",
            ["--model", "somewhere", "--dataset", "gsm8k", "--eval-decode", "dense", "snapkv:512", "--json"],
        ),
        (
            export_command.Args,
            "run: runs/a\nout: b\nformat: peft\nstep: 4\n",
            ["runs/a", "--out=b", "--format=peft", "--step=4"],
        ),
        (plot.Args, "runs: [runs/a, runs/b]\ntitle: two\n", ["runs/a", "runs/b", "--title", "two"]),
        (certify.Args, "record: a.npz\nmodel: b\nrows: 3\nprevious: null\n", ["a.npz", "--model", "b", "--rows", "3"]),
    ],
    ids=["eval", "export", "plot", "certify"],
)
def test_every_command_reads_its_options_from_a_file(kind: type, text: str, words: list[str], tmp_path: Path):
    file = tmp_path / "own.yaml"
    file.write_text(text)
    assert parse_words(kind, "", "", with_file(["--config", str(file)], kind)) == parse_words(kind, "", "", words)
    again = parse_words(kind, "", "", with_file([f"--config={file}", "--debug"], kind))
    assert "debug=True" in repr(again), "flags override the file"
    file.write_text(text + "modle: b\n")
    with pytest.raises(UserError, match=r"own.yaml: expected an option of this command; got 'modle'"):
        with_file(["--config", str(file)], kind)
