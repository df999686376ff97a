"""Whole runs of the commands, from a directory to a directory, and what must not harm them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoTokenizer

from smd_jax.commands.command_line import parse
from smd_jax.commands.evaluate import main as smd_eval
from smd_jax.commands.export import main as export
from smd_jax.commands.plot import main as plot
from smd_jax.commands.prepare import prepare
from smd_jax.commands.train import config_text, main, run_settings
from smd_jax.commands.train import export as export_trained
from smd_jax.devices.processes import differences
from smd_jax.model.lora import LoraConfig, add_lora
from smd_jax.model.peft_format import load_peft
from smd_jax.model.weights import load_checkpoint, save_checkpoint
from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.runs.lock import LOCK, lock_directory
from smd_jax.runs.settings import to_jsonable
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config, write_random_checkpoint
from tests.bitwise import assert_bitwise_equal
from tests.command_errors import error_of
from tests.commands.conftest import SMALL, SORT, Words
from tests.hub_files import questions, write_lines

REWARD = "def reward(completions, **columns):\n    return [float(len(text)) for text in completions]\n"


def steps_of(run: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run / "metrics.jsonl")]


def assert_same_model(one: Path, other: Path) -> None:
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(one)[1], load_checkpoint(other)[1])


def test_a_run_from_a_directory_to_a_directory(
    train_words: Words, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    words = train_words("--max-steps", "2", "--save-steps", "1", "--eval-steps", "1", "--eval-rows", "4")
    main([*words, "--dry-run"])
    assert "--- prompt 2" in capsys.readouterr().out and not run.exists()
    main(words)
    # The command that it prints at its end runs as printed.
    printed = re.findall("evaluate it with: smd-eval (.*)", capsys.readouterr().out)
    smd_eval([*shlex.split(printed[0]), "--json"])
    evaluated = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rows = read_metrics(run / "metrics.jsonl")
    last = read_metrics(run / "evaluations.jsonl")[-1]
    names = ("sampler", "dense")
    assert {row["decode"]: row["reward"] for row in evaluated} == {name: last[f"eval/{name}/reward"] for name in names}
    assert len(rows) == 2 and "learning_rate" in rows[-1]
    # Every 20th rollout, and the last one.
    kept = sorted(path.name for path in (run / "completions").iterdir())
    assert kept == ["completions_00000.parquet", "completions_00001.parquet", "masks_00000.npz", "masks_00001.npz"]
    assert (run / "training.png").read_bytes().startswith(b"\x89PNG")
    assert "expected no earlier run" in error_of(words, capsys)
    # More steps are no other mathematics, and neither is how much is said; another seed is.
    again = ["--config", str(run / "config.yaml"), "--resume"]
    main([*again, "--max-steps", "3"])
    assert steps_of(run) == [0, 1, 2]
    assert "seed: expected 0, got 1" in error_of([*again, "--seed", "1"], capsys)
    assert "--max-steps" in error_of([*again, "--max-steps", "1"], capsys)
    export([str(run), "--out", str(tmp_path / "last")])
    export([str(run), "--out", str(tmp_path / "first"), "--step", "1"])
    assert_same_model(tmp_path / "last", run / "model")
    structures = [jax.tree.structure(load_checkpoint(place)[1]) for place in (model, tmp_path / "first", run / "model")]
    assert structures[0] == structures[1] == structures[2]
    plot([str(run), "--out", str(tmp_path / "page.html")])
    assert "eval/dense/reward" in (tmp_path / "page.html").read_text()
    plot([str(run), "--out", str(tmp_path / "curves.svg")])
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")
    # The run and its base model may move, for example to another machine.
    shutil.move(run, tmp_path / "moved")
    shutil.copytree(model, tmp_path / "base")
    export([str(tmp_path / "moved"), "--out", str(tmp_path / "again"), "--model", str(tmp_path / "base")])
    assert_same_model(tmp_path / "again", tmp_path / "last")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "online-dpo"])
def test_ppo_and_online_dpo_take_a_step(algorithm: str, train_words: Words, tmp_path: Path):
    main(train_words(algorithm=algorithm))
    assert steps_of(tmp_path / "run") == [0]


@pytest.mark.slow
def test_rloo_draws_ahead(train_words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    main(train_words("--rollouts-ahead", "1", "--max-steps", "2", algorithm="rloo"))
    main(["--config", str(run / "config.yaml"), "--max-steps", "3", "--resume"])
    assert [row["staleness/rollouts"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 1]
    said = error_of(["--config", str(run / "config.yaml"), "--resume", "--rollouts-ahead", "0"], capsys)
    assert "rollouts_ahead: expected 1, got 0" in said


@pytest.mark.slow
def test_sizes_that_fit_the_memory(train_words: Words, capsys: pytest.CaptureFixture[str]):
    evaluate = ["--eval-steps", "1", "--eval-rows", "4"]
    ready = prepare(parse(train_words(*evaluate))[1])
    whole = prepare(parse(train_words(*evaluate, "--memory", "1GiB"))[1])
    assert ready.memory is None and whole.memory is not None and whole.loop.config == ready.loop.config
    assert whole.evaluator is not None and ready.evaluator is not None
    assert whole.evaluator.config == ready.evaluator.config
    less = max(whole.memory.rollout, whole.memory.update) - 1
    main(train_words(*evaluate, "--dry-run", "--memory", str(less)))
    said = capsys.readouterr().out
    assert "weights, optimizer, reference" in said and "sizes that fit: microbatch " in said
    assert "microbatch all, decode rows all" not in said


@pytest.fixture
def phi(tmp_path: Path) -> Path:
    """A Phi, whose config Llama and Mistral can express, too."""
    config = tiny_model_config(num_layers=1, max_positions=2048, qkv_bias=False)
    write_random_checkpoint(tmp_path / "llama", config=config)
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "phi3"}')
    save_checkpoint(tmp_path / "phi", random_params(config), config, tokenizer_from=tmp_path / "llama")
    return tmp_path / "phi"


def test_adapters_of_a_model_from_the_hub_have_its_names(
    phi: Path,
    train_words: Words,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr("smd_jax.commands.model_source.snapshot_download", lambda *_, **__: str(phi))
    algorithm, args = parse(train_words("--model", "owner/phi", "--lora-r", "2"))
    config, base = load_checkpoint(phi)
    params = add_lora(base, LoraConfig(rank=2), jax.random.key(0))
    run = tmp_path / "run"
    export_trained(prepare(args), params, run)
    (run / "config.yaml").write_text(config_text(algorithm, args))
    monkeypatch.setattr("smd_jax.commands.export.trained_model", lambda *_: params)
    for _ in range(2):
        export([str(run), "--out", str(tmp_path / "again"), "--format", "peft"])
    said = error_of([str(run), "--out", str(run / "model"), "--format", "peft"], capsys, export)
    assert "expected --out without a model for --format peft" in said
    for adapter in (run / "adapter", tmp_path / "again"):
        content = json.loads((adapter / "adapter_config.json").read_text())
        assert content["base_model_name_or_path"] == "owner/phi"
        assert set(content["target_modules"]) == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
        assert_bitwise_equal(load_peft(adapter, base, config), params)


@pytest.mark.parametrize(
    ("targets", "said"),
    [(["up_proj"], "adapters on all of gate_proj, up_proj or on none"), (["q_proj"], "all of q_proj, k_proj, v_proj")],
)
def test_adapters_that_peft_cannot_store_are_refused_before_the_first_rollout(
    targets: list[str], said: str, phi: Path, train_words: Words, capsys: pytest.CaptureFixture[str]
):
    words = train_words("--model", str(phi), "--dry-run", "--lora-r", "2", "--lora-target-modules", *targets)
    assert said in error_of(words, capsys)


@pytest.mark.slow
def test_adapters_are_trained_and_exported(train_words: Words, model: Path, tmp_path: Path):
    run = tmp_path / "run"
    main(train_words("--lora-r", "2", "--learning-rate", "1e-2"))
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    before, after = (load_checkpoint(path)[1] for path in (model, run / "model"))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    np.testing.assert_array_equal(before["norm"]["scale"], after["norm"]["scale"])
    export([str(run), "--out", str(tmp_path / "again")])
    assert_same_model(tmp_path / "again", run / "model")
    export([str(run), "--out", str(tmp_path / "adapter"), "--format", "peft"])
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k", "lora", "sums", "countdown", "sorting"])
def test_presets_need_a_model_alone(name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--preset", name, "--model", str(model), "--output-dir", str(tmp_path / "run"), "--dry-run"]
    if name in ("gsm8k", "lora"):  # the rows are those of the Hub, in its layout
        rows = str(write_lines(tmp_path / "rows.jsonl", questions(4)))
        words += ["--dataset-source", rows, "--eval-source", rows]
    else:
        words += ["--dataset-size", "20"]
    main(words)
    assert "--- prompt 2" in capsys.readouterr().out


def test_held_out_prompts_do_not_widen_those_of_training(model: Path, tmp_path: Path):
    paths = []
    for name, size in (("short", 3), ("long", 40)):
        paths.append(str(write_lines(tmp_path / f"{name}.jsonl", [{"prompt": "a" * size}] * 2)))
    words = ["grpo", "--model", str(model), *SMALL, "--reward", "format", "--chat-template", "none"]
    widths = []
    for train, held_out in (paths, paths[::-1]):
        evaluation = ["--eval-steps", "1", "--eval-dataset", held_out]
        ready = prepare(parse([*words, "--dataset", train, *evaluation])[1])
        assert ready.evaluator is not None
        widths.append((ready.loop.config.prompt_width, ready.evaluator.config.prompt_width))
    assert widths == [(3, 40), (40, 40)]


def test_a_plan_says_what_stays_on_the_disk_and_which_rows_come_twice(
    train_words: Words, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    main(train_words("--dataset-size", "1", "--dry-run"))
    said = capsys.readouterr().out
    assert re.search(r"checkpoints: 3 at most, [\d.]+ KiB each, to resume .*; --save-total-limit 1 keeps one\n", said)
    assert "2 prompts a rollout from 1 rows: each rollout has rows more than once\n" in said
    full = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: full)
    assert "free on the disk of" in error_of(train_words("--dry-run"), capsys)


@pytest.mark.slow
def test_a_plan_says_whether_keys_are_evicted(train_words: Words, capsys: pytest.CaptureFixture[str]):
    for more, nothing, teacher in (
        (["--budget", "500"], True, "none"),
        (["--budget", "500", "--distill", "anchor"], True, "anchor, with a weight of 0.1 in the loss"),
        ([], False, "none"),
    ):
        main(train_words(*more, "--dry-run"))
        output = capsys.readouterr()
        assert ("Nothing will be evicted" in output.err) == nothing and f"teacher: {teacher}\n" in output.out, more


# --- models, tokenizers and prompts


@pytest.mark.slow
def test_a_tokenizer_of_its_own(train_words: Words, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bare, tokenizer = tmp_path / "bare", tmp_path / "tokenizer"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, bare / name)
    byte_tokenizer(chat=False).save_pretrained(tokenizer)
    words = train_words("--model", str(bare))
    said = error_of(words, capsys)
    assert "--model: expected a tokenizer" in said and "--tokenizer names another" in said
    assert "--tokenizer: expected a tokenizer" in error_of([*words, "--tokenizer", str(bare)], capsys)
    main([*words, "--tokenizer", str(tokenizer)])
    export([str(tmp_path / "run"), "--out", str(tmp_path / "again")])
    for written in (tmp_path / "run" / "model", tmp_path / "again"):
        found = AutoTokenizer.from_pretrained(written)
        assert found.encode("ab") == [97, 98] and found.chat_template is None
        config = json.loads((written / "config.json").read_text())
        assert (config["eos_token_id"], config["pad_token_id"]) == (258, 256)


def test_a_revision_is_what_the_hub_is_asked_for(
    train_words: Words, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[str, str | None]] = []

    def fetched(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        if revision == "gone":
            raise LocalEntryNotFoundError("no such revision")
        return str(model)

    monkeypatch.setattr("smd_jax.commands.model_source.snapshot_download", fetched)
    words = train_words("--model", "owner/name", "--model-revision", "v1", "--tokenizer", "owner/tokens")
    words += ["--tokenizer-revision", "abc123", "--dry-run"]
    main(words)
    # The model first without its weights, whose names are then known.
    assert asked == [("owner/name", "v1"), ("owner/name", "v1"), ("owner/tokens", "abc123")]
    said = error_of([*words, "--model-revision", "gone"], capsys)
    assert "at --model-revision gone, which is no directory here and could not be downloaded: no such revision" in said


@pytest.mark.slow
def test_prompts_without_the_chat_template(train_words: Words, model: Path, tmp_path: Path, capsys: Any):
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": "ab"}, {"prompt": "\u001b[31mred [bold]x[/bold]"}])
    data = ["--dataset", str(rows), "--reward", "format", "--chat-template", "none"]
    words = [word for word in train_words(*data) if word not in SORT[2:]]
    main([*words, "--dry-run", "--chat-template", "auto"])
    assert "user" in capsys.readouterr().out.partition("--- prompt 0")[2]
    main([*words, "--dry-run"])
    said = capsys.readouterr().out
    assert "--- prompt 0, 2 of 23 tokens:\nab\n" in said
    assert "␛[31mred [bold]x[/bold]" in said and "\x1b" not in said
    said = error_of([*words, "--system-prompt", "Be kind."], capsys)
    assert "expected a plain string, because the tokenizer has no chat template" in said
    main(words)
    export([str(tmp_path / "run"), "--out", str(tmp_path / "again")])
    for folder in (tmp_path / "run" / "model", tmp_path / "again"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == byte_tokenizer().chat_template


# --- smd-eval


@pytest.mark.slow
def test_a_checkpoint_is_evaluated(model: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--model", str(model), *SORT, "--eval-rows", "4", "--json", "--max-completion-length", "5"]
    smd_eval([*words, "--eval-decode", "dense", "h2o:12+2", "--num-generations", "2"])
    dense, sparse = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (dense["decode"], sparse["decode"]) == ("dense", "h2o-12-2")
    assert dense["prompts"] == 4 and dense["cache_bytes_per_sequence"] > sparse["cache_bytes_per_sequence"]
    assert "protects); got 12" in error_of([*words, "--eval-decode", "snapkv:12+2"], capsys, smd_eval)


def test_an_evaluation_has_the_data_and_rewards_of_training(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    template = "{{ messages[0].content }}{% if enable_thinking is false %}<no>{% endif %}"
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    rows = write_lines(tmp_path / "rows.jsonl", [{"question": "ab", "gold": "a"}, {"question": "abcd", "gold": "b"}])
    (tmp_path / "mine.py").write_text("""
def row(row):
    return {"asked": row["question"] + "?", "gold": row["gold"]}


def reward(prompts, completions, gold, **columns):
    print("graded")
    return [float(prompt == {"a": "ab?", "b": "abcd?"}[right]) for prompt, right in zip(prompts, gold)]


def fails(prompts, **columns):
    raise RuntimeError("no answer")
""")
    words = ["--model", f"{tmp_path}/model", "--dataset", str(rows), "--json", "--max-completion-length", "3"]
    words += ["--prompt-column", "asked", "--map-function", f"{tmp_path}/mine.py:row", "--eval-decode", "dense"]
    words += ["--chat-template-kwargs", "enable_thinking=false", "--reward-timeout", "None"]
    rewards = ["--reward", f"{tmp_path}/mine.py:reward", "overlong", "--overlong-cache", "3"]
    # The JSON of stdout stays whole.
    smd_eval([*words, *rewards, "--reward-weights", "2", "0.5", "--max-prompt-length", "8"])
    output = capsys.readouterr()
    assert json.loads(output.out)["prompts"] == 1 and "the longest has 9 tokens" in output.err  # abcd?<no>
    # A completion of three tokens is at the limit, where `overlong` is -1, a shorter one between.
    assert 1.5 <= json.loads(output.out)["reward"] < 2.0
    fails = ["--reward", f"{tmp_path}/mine.py:fails", "--max-failed-rewards", "0"]
    with pytest.warns(UserWarning):
        assert "no answer" in error_of([*words, *fails], capsys, smd_eval)


# --- resume


@pytest.fixture
def files(train_words: Words, model: Path, tmp_path: Path) -> list[str]:
    """The words of a run with a model, rows and a reward in the folder `here`."""
    here = tmp_path / "here"
    shutil.copytree(model, here / "model")
    write_lines(here / "rows.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}])
    (here / "my.rewards.py").write_text(REWARD)  # the dot belongs to the name
    words = [word for word in train_words() if word not in SORT[2:]]
    words += ["--model", f"{here}/model", "--dataset", f"{here}/rows.jsonl"]
    return [*words, "--reward", f"{here}/my.rewards.py:reward"]


@pytest.mark.slow
def test_a_refused_resume_leaves_the_run_as_it_was(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """And one that is accepted finds its files from any folder, however they were spelled."""
    monkeypatch.chdir(tmp_path / "here")
    run = tmp_path / "run"
    spelled = ["--model", "model", "--dataset", "./rows.jsonl", "--reward", "my.rewards.py:reward"]
    place = files.index("--reward")
    main([*files[:place], *files[place + 2 :], *spelled, "--output-dir", os.path.relpath(run)])
    kept = (run / "config.yaml").read_text()
    monkeypatch.chdir("/")
    again = ["--config", str(run / "config.yaml"), "--resume", "--max-steps", "2"]
    for more in ([], ["--dry-run"]):
        said = error_of([*again, "--learning-rate", "0.5", *more], capsys)
        assert "optimizer.learning_rate: expected 1e-06, got 0.5" in said
        assert (run / "config.yaml").read_text() == kept
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "here" / "rows.jsonl")
    limits = ["--reward-timeout", "30", "--max-failed-rewards", "0.5", "--dataset", str(tmp_path / "link.jsonl")]
    main([*again, *limits])
    assert steps_of(run) == [0, 1]
    # A folder that was moved is no new run under its old name.
    shutil.move(run, tmp_path / "moved")
    moved = ["--config", str(tmp_path / "moved" / "config.yaml"), "--resume", "--max-steps", "3", "--dry-run"]
    assert "a run that was moved needs its new --output-dir" in error_of(moved, capsys)
    main([*moved, "--output-dir", str(tmp_path / "moved")])


@pytest.mark.slow
def test_a_run_goes_on_where_its_files_lie_elsewhere(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The model's weights need not be what they were: checkpoints have them."""
    here, there, run = tmp_path / "here", tmp_path / "there", tmp_path / "run"
    main(files)
    shutil.move(here, there)
    line = [word.replace(str(here), str(there)) for word in files] + ["--resume", "--max-steps"]
    main([*line, "2"])
    assert f'files.model: was "{here}/model", is now "{there}/model"' in capsys.readouterr().out
    reward = there / "my.rewards.py"
    reward.write_text(reward.read_text().replace("len(text)", "2 * len(text)"))
    main([*line, "3"])
    assert "files.my.rewards.py.1: was" in capsys.readouterr().out, "a function may be mended, and that is said"
    kept = (run / "config.yaml").read_text()
    with (there / "rows.jsonl").open("a") as rows:
        rows.write('\n{"prompt": "c", "answer": "3"}')
    assert 'data.dataset: expected "sha256:' in error_of([*line, "4"], capsys)
    shutil.rmtree(there / "model")
    write_random_checkpoint(there / "model", config=tiny_model_config(num_layers=2))
    assert 'model.model: expected "sha256:' in error_of([*line, "4"], capsys)
    assert (run / "config.yaml").read_text() == kept


@pytest.mark.slow
def test_one_line_begins_a_run_and_goes_on(train_words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    line = train_words("--resume-if-there", "--save-steps", "1", "--max-steps")
    main([*line, "1"])
    main([*line, "2"])
    assert "resumes after 1 of 2 rollouts" in capsys.readouterr().out and steps_of(tmp_path / "run") == [0, 1]
    assert "resume_if_there: false" in (tmp_path / "run" / "config.yaml").read_text()


def test_another_attention_is_noted(train_words: Words):
    """Its kernels round differently, so a resume says that it changed; so are sizes and limits, which change no
    result."""
    changed = ["--attention", "portable", "--microbatch", "4", "--reward-timeout", "3"]
    (compared, noted), (compared_again, noted_again) = (
        run_settings(args, prepare(args).loop) for _, args in map(parse, (train_words(), train_words(*changed)))
    )
    assert compared == compared_again
    lines = differences(to_jsonable(noted), to_jsonable(noted_again), words=("was", "is now"))
    assert 'attention: was "auto", is now "portable"' in lines and len(lines) == 3


# --- what must not cost a run


@pytest.mark.slow
def test_a_damaged_checkpoint_is_not_exported(train_words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    main(train_words())
    largest = max((run / "checkpoints" / "1" / "state").rglob("*"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    said = error_of([str(run), "--out", str(tmp_path / "out")], capsys, export)
    assert "checkpoint 1 in" in said and "cannot be read" in said and not (tmp_path / "out").exists()
    shutil.rmtree(run / "model")
    said = error_of(["--run", str(run)], capsys, smd_eval)
    assert "expected a trained model in" in said and "smd-export" in said


@pytest.mark.slow
def test_a_plot_and_an_export_that_fail_do_not_cost_the_run(
    train_words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def fails(*_: object, **__: object) -> None:
        raise OSError("a reason")

    with monkeypatch.context() as patch:
        patch.setenv("COLUMNS", "1000")  # no line is broken inside of a path
        patch.setattr("smd_jax.commands.train.save_model", fails)
        patch.setattr("smd_jax.commands.train.plot_runs", fails)
        said = error_of(train_words(), capsys)
    assert "training.png could not be written" in said
    assert "The run is complete, and its checkpoints are saved. Its export failed: a reason" in said
    export([str(tmp_path / "run"), "--out", str(tmp_path / "again")])
    load_checkpoint(tmp_path / "again")


def test_curves_that_cannot_be_drawn_do_not_cost_the_export(
    train_words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    other = tmp_path / "run" / "other" / "metrics.jsonl"
    other.parent.mkdir(parents=True)
    other.write_text("no JSON\n{}\n")
    exported = list[Any]()
    monkeypatch.setattr("smd_jax.commands.train.initial_state", lambda _: None)
    monkeypatch.setattr("smd_jax.commands.train.train", lambda *_, **__: SimpleNamespace(params={"embed": 1.0}))
    monkeypatch.setattr("smd_jax.commands.train.export_or_explain", lambda _, params: exported.append(params))
    main(train_words())
    assert exported == [{"embed": 1.0}] and "line 1: expected a JSON object" in capsys.readouterr().err


def test_a_full_disk_leaves_config_yaml_as_it_was(
    train_words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run, write = tmp_path / "run", Path.write_text
    run.mkdir()
    (run / "config.yaml").write_text("algorithm: grpo\n")

    def fails(path: Path, text: str, **options: Any) -> None:
        write(path, text[:9], **options)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setenv("COLUMNS", "1000")  # no line is broken inside of a path
    monkeypatch.setattr("smd_jax.commands.train.initial_state", lambda _: None)
    monkeypatch.setattr(Path, "write_text", fails)
    assert "config.yaml could not be written" in error_of(train_words(), capsys)
    assert (run / "config.yaml").read_text() == "algorithm: grpo\n"
    assert {file.name for file in run.iterdir()} == {"config.yaml", LOCK}


def test_two_processes_do_not_share_a_run(train_words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    with lock_directory(run), (run / LOCK).open() as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert "expected no other process that trains in" in error_of(train_words(), capsys)
    assert not (run / "config.yaml").exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_is_said(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def flock(file: Any, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    if number == errno.EIO:  # a disk that fails
        with pytest.raises(OSError, match=f"{LOCK} could not be written .*: .*error"), lock_directory(tmp_path / "run"):
            pytest.fail("expected no run behind a disk that fails")
        return
    with lock_directory(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()
    assert f"got {os.strerror(number)}. Make sure" in capsys.readouterr().out
