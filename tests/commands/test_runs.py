"""Whole runs of the commands: training, evaluation, export, resume, and failures that a run must survive."""

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

from smd_jax.commands import config_file
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
from tests.commands.conftest import SMALL_RUN, SORT_ARGV, MakeArgv
from tests.hub_files import questions, write_lines

REWARD = "def reward(completions, **columns):\n    return [float(len(text)) for text in completions]\n"


def logged_steps(run: Path) -> list[int]:
    return [row["step"] for row in read_metrics(run / "metrics.jsonl")]


def assert_same_model(one: Path, other: Path) -> None:
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(one)[1], load_checkpoint(other)[1])


def test_train_evaluate_resume_export_and_plot(
    train_argv: MakeArgv, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    argv = train_argv("--max-steps", "2", "--save-steps", "1", "--eval-steps", "1", "--eval-rows", "4")
    main([*argv, "--dry-run"])
    assert "--- prompt 2" in capsys.readouterr().out and not run.exists()
    main(argv)
    # The smd-eval command that the run prints works.
    printed = re.findall("evaluate it with: smd-eval (.*)", capsys.readouterr().out)
    smd_eval([*shlex.split(printed[0]), "--json"])
    output = capsys.readouterr()
    assert "trained on these rows" not in output.err
    evaluated = [json.loads(line) for line in output.out.splitlines()]
    rows = read_metrics(run / "metrics.jsonl")
    last = read_metrics(run / "evaluations.jsonl")[-1]
    names = ("sampler", "dense")
    assert {row["decode"]: row["reward"] for row in evaluated} == {name: last[f"eval/{name}/reward"] for name in names}
    assert len(rows) == 2 and "learning_rate" in rows[-1]
    # Every 20th rollout, and the last one.
    saved = sorted(path.name for path in (run / "completions").iterdir())
    assert saved == ["completions_00000.parquet", "completions_00001.parquet", "masks_00000.npz", "masks_00001.npz"]
    assert (run / "training.png").read_bytes().startswith(b"\x89PNG")
    assert "expected no earlier run" in error_of(argv, capsys)
    # A resume may have more steps, but no other seed.
    again = ["--config", str(run / "config.yaml"), "--resume"]
    main([*again, "--max-steps", "3"])
    assert logged_steps(run) == [0, 1, 2]
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
def test_ppo_and_online_dpo_take_a_step(algorithm: str, train_argv: MakeArgv, tmp_path: Path):
    main(train_argv("--memory", "1GiB", algorithm=algorithm))
    assert logged_steps(tmp_path / "run") == [0]


@pytest.mark.slow
def test_rloo_with_rollouts_ahead(train_argv: MakeArgv, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    main(train_argv("--rollouts-ahead", "1", "--max-steps", "2", algorithm="rloo"))
    main(["--config", str(run / "config.yaml"), "--max-steps", "3", "--resume"])
    assert [row["staleness/rollouts"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 1]
    message = error_of(["--config", str(run / "config.yaml"), "--resume", "--rollouts-ahead", "0"], capsys)
    assert "rollouts_ahead: expected 1, got 0" in message


@pytest.mark.slow
def test_sizes_are_lowered_to_fit_the_memory_flag(train_argv: MakeArgv, capsys: pytest.CaptureFixture[str]):
    evaluate = ["--eval-steps", "1", "--eval-rows", "4"]
    ready = prepare(parse(train_argv(*evaluate))[1])
    fitted = prepare(parse(train_argv(*evaluate, "--memory", "1GiB"))[1])
    assert ready.memory is None and fitted.memory is not None and fitted.loop.config == ready.loop.config
    assert fitted.evaluator is not None and ready.evaluator is not None
    assert fitted.evaluator.config == ready.evaluator.config
    limit = max(fitted.memory.rollout, fitted.memory.update) - 1
    main(train_argv(*evaluate, "--dry-run", "--memory", str(limit)))
    plan = capsys.readouterr().out
    assert "weights, optimizer, reference" in plan and "sizes that fit: microbatch " in plan
    assert "microbatch all, decode rows all" not in plan


@pytest.fixture
def phi(tmp_path: Path) -> Path:
    """A Phi checkpoint, whose config would also fit Llama and Mistral."""
    config = tiny_model_config(num_layers=1, max_positions=2048, qkv_bias=False)
    write_random_checkpoint(tmp_path / "llama", config=config)
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "phi3"}')
    save_checkpoint(tmp_path / "phi", random_params(config), config, tokenizer_from=tmp_path / "llama")
    return tmp_path / "phi"


def test_exported_adapters_have_the_module_names_of_the_hub_model(
    phi: Path, train_argv: MakeArgv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("smd_jax.commands.model_source.snapshot_download", lambda *_, **__: str(phi))
    algorithm, args = parse(train_argv("--model", "owner/phi", "--lora-r", "2"))
    config, base = load_checkpoint(phi)
    params = add_lora(base, LoraConfig(rank=2), jax.random.key(0))
    run = tmp_path / "run"
    export_trained(prepare(args), params, run)
    (run / "config.yaml").write_text(config_text(algorithm, args))
    monkeypatch.setattr("smd_jax.commands.export.trained_model", lambda *_: params)
    for _ in range(2):
        export([str(run), "--out", str(tmp_path / "again"), "--format", "peft"])
    message = error_of([str(run), "--out", str(run / "model"), "--format", "peft"], capsys, export)
    assert "expected --out without a model for --format peft" in message
    for adapter in (run / "adapter", tmp_path / "again"):
        content = json.loads((adapter / "adapter_config.json").read_text())
        assert content["base_model_name_or_path"] == "owner/phi"
        assert set(content["target_modules"]) == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
        assert_bitwise_equal(load_peft(adapter, base, config), params)


@pytest.mark.parametrize(
    ("targets", "message"),
    [(["up_proj"], "adapters on all of gate_proj, up_proj or on none"), (["q_proj"], "all of q_proj, k_proj, v_proj")],
)
def test_adapters_that_peft_cannot_store_are_refused_before_the_first_rollout(
    targets: list[str], message: str, phi: Path, train_argv: MakeArgv, capsys: pytest.CaptureFixture[str]
):
    argv = train_argv("--model", str(phi), "--dry-run", "--lora-r", "2", "--lora-target-modules", *targets)
    assert message in error_of(argv, capsys)


@pytest.mark.slow
def test_adapters_are_trained_and_exported(train_argv: MakeArgv, model: Path, tmp_path: Path):
    run = tmp_path / "run"
    main(train_argv("--lora-r", "2", "--learning-rate", "1e-2"))
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
def test_presets_need_only_a_model(name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["--preset", name, "--model", str(model), "--output-dir", str(tmp_path / "run"), "--dry-run"]
    if name in ("gsm8k", "lora"):  # local rows in the layout of the Hub
        rows = str(write_lines(tmp_path / "rows.jsonl", questions(4)))
        argv += ["--dataset-source", rows, "--eval-source", rows]
    else:
        argv += ["--dataset-size", "20"]
    main(argv)
    assert "--- prompt 2" in capsys.readouterr().out


def test_held_out_prompts_do_not_widen_training_prompts(model: Path, tmp_path: Path):
    paths = []
    for name, size in (("short", 3), ("long", 40)):
        paths.append(str(write_lines(tmp_path / f"{name}.jsonl", [{"prompt": "a" * size}] * 2)))
    argv = ["grpo", "--model", str(model), *SMALL_RUN, "--reward", "format", "--chat-template", "none"]
    widths = []
    for train, held_out in (paths, paths[::-1]):
        evaluation = ["--eval-steps", "1", "--eval-dataset", held_out]
        ready = prepare(parse([*argv, "--dataset", train, *evaluation])[1])
        assert ready.evaluator is not None
        widths.append((ready.loop.config.prompt_width, ready.evaluator.config.prompt_width))
    assert widths == [(3, 40), (40, 40)]


def test_dry_run_reports_what_decides_a_run(
    train_argv: MakeArgv, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    main(train_argv("--dataset-size", "1", "--dense-share", "0.5", "--lora-r", "2", "--dry-run"))
    plan = capsys.readouterr().out
    assert plan.splitlines()[:5] == [
        "grpo: 1 rollouts of 2 x 4 completions, learning rate 1e-05",
        "loss: grpo, correction shadow, dense share 0.5",
        "reward: distractor_sort",
        "trained: LoRA adapters of rank 2, stored in float32, computed in float32",
        "eviction: h2o --sinks 4, 12 + 2 keys per layer and KV head",
    ]
    assert re.search(r"checkpoints: 3 at most, [\d.]+ KiB each, to resume .*; --save-total-limit 1 keeps one\n", plan)
    assert "2 prompts a rollout from 1 rows: each rollout has rows more than once\n" in plan
    full = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: full)
    assert "free on the disk of" in error_of(train_argv("--dry-run"), capsys)


@pytest.mark.slow
def test_dry_run_reports_whether_keys_are_evicted(train_argv: MakeArgv, capsys: pytest.CaptureFixture[str]):
    for flags, dense, teacher in (
        (["--budget", "500"], True, []),
        (["--budget", "500", "--distill", "anchor"], True, ["anchor, with a weight of 0.1 in the loss"]),
        ([], False, []),
    ):
        main(train_argv(*flags, "--dry-run"))
        output = capsys.readouterr()
        assert ("Nothing will be evicted" in output.err) == dense, flags
        assert re.findall("teacher: (.*)", output.out) == teacher


# --- models, tokenizers and prompts


@pytest.mark.slow
def test_a_separate_tokenizer(train_argv: MakeArgv, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bare, tokenizer = tmp_path / "bare", tmp_path / "tokenizer"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, bare / name)
    byte_tokenizer(chat=False).save_pretrained(tokenizer)
    argv = train_argv("--model", str(bare))
    message = error_of(argv, capsys)
    assert "--model: expected a tokenizer" in message and "--tokenizer names another" in message
    assert "--tokenizer: expected a tokenizer" in error_of([*argv, "--tokenizer", str(bare)], capsys)
    main([*argv, "--tokenizer", str(tokenizer)])
    export([str(tmp_path / "run"), "--out", str(tmp_path / "again")])
    for written in (tmp_path / "run" / "model", tmp_path / "again"):
        exported = AutoTokenizer.from_pretrained(written)
        assert exported.encode("ab") == [97, 98] and exported.chat_template is None
        config = json.loads((written / "config.json").read_text())
        assert (config["eos_token_id"], config["pad_token_id"]) == (258, 256)


def test_revisions_are_passed_to_the_hub(
    train_argv: MakeArgv, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    requests: list[tuple[str, str | None]] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        requests.append((name, revision))
        if revision == "gone":
            raise LocalEntryNotFoundError("no such revision")
        return str(model)

    monkeypatch.setattr("smd_jax.commands.model_source.snapshot_download", download)
    argv = train_argv("--model", "owner/name", "--model-revision", "v1", "--tokenizer", "owner/tokens")
    argv += ["--tokenizer-revision", "abc123", "--dry-run"]
    main(argv)
    # The model twice: first the files that name its weights, then the weights.
    assert requests == [("owner/name", "v1"), ("owner/name", "v1"), ("owner/tokens", "abc123")]
    error = error_of([*argv, "--model-revision", "gone"], capsys)
    assert "at --model-revision gone, which is no directory here and could not be downloaded: no such revision" in error


@pytest.mark.slow
def test_prompts_without_the_chat_template(train_argv: MakeArgv, model: Path, tmp_path: Path, capsys: Any):
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": "ab"}, {"prompt": "\u001b[31mred [bold]x[/bold]"}])
    data = ["--dataset", str(rows), "--reward", "format", "--chat-template", "none"]
    argv = [word for word in train_argv(*data) if word not in SORT_ARGV[2:]]
    main([*argv, "--dry-run", "--chat-template", "auto"])
    assert "user" in capsys.readouterr().out.partition("--- prompt 0")[2]
    main([*argv, "--dry-run"])
    plan = capsys.readouterr().out
    assert "--- prompt 0, 2 of 23 tokens:\nab\n" in plan
    assert "␛[31mred [bold]x[/bold]" in plan and "\x1b" not in plan
    message = error_of([*argv, "--system-prompt", "Be kind."], capsys)
    assert "expected a plain string, because the tokenizer has no chat template" in message
    main(argv)
    export([str(tmp_path / "run"), "--out", str(tmp_path / "again")])
    for folder in (tmp_path / "run" / "model", tmp_path / "again"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == byte_tokenizer().chat_template


# --- smd-eval


@pytest.mark.slow
def test_smd_eval_of_a_checkpoint(model: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["--model", str(model), *SORT_ARGV, "--eval-rows", "4", "--json", "--max-completion-length", "5"]
    smd_eval([*argv, "--eval-decode", "dense", "h2o:12+2", "--num-generations", "2"])
    dense, sparse = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (dense["decode"], sparse["decode"]) == ("dense", "h2o-12-2")
    assert dense["prompts"] == 4 and dense["cache_bytes_per_sequence"] > sparse["cache_bytes_per_sequence"]
    assert "protects); got 12" in error_of([*argv, "--eval-decode", "snapkv:12+2"], capsys, smd_eval)


def test_smd_eval_has_the_data_and_reward_options_of_training(
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
    argv = ["--model", f"{tmp_path}/model", "--dataset", str(rows), "--json", "--max-completion-length", "3"]
    argv += ["--prompt-column", "asked", "--map-function", f"{tmp_path}/mine.py:row", "--eval-decode", "dense"]
    argv += ["--chat-template-kwargs", "enable_thinking=false", "--reward-timeout", "None"]
    rewards = ["--reward", f"{tmp_path}/mine.py:reward", "overlong", "--overlong-cache", "3"]
    # What the reward prints does not mix with the JSON on stdout.
    smd_eval([*argv, *rewards, "--reward-weights", "2", "0.5", "--max-prompt-length", "8"])
    output = capsys.readouterr()
    assert json.loads(output.out)["prompts"] == 1 and "the longest has 9 tokens" in output.err  # abcd?<no>
    assert "trained on these rows" not in output.err
    # `overlong` gives -1 to a completion of three tokens, the limit, and more to a shorter one.
    assert 1.5 <= json.loads(output.out)["reward"] < 2.0
    fails = ["--reward", f"{tmp_path}/mine.py:fails", "--max-failed-rewards", "0"]
    with pytest.warns(UserWarning):
        assert "no answer" in error_of([*argv, *fails], capsys, smd_eval)
    # A run of these rows names no others to evaluate on.
    trained = ["grpo", *(word for word in argv if word != "--json"), *rewards, "--output-dir", str(tmp_path)]
    (tmp_path / "config.yaml").write_text(config_file.dump(*parse(trained)))
    smd_eval(["--run", str(tmp_path), "--json", "--max-prompt-length", "8"])
    assert "trained on these rows" in capsys.readouterr().err


# --- resume


@pytest.fixture
def local_argv(train_argv: MakeArgv, model: Path, tmp_path: Path) -> list[str]:
    """Arguments of a run whose model, rows and reward are in the folder `here`."""
    here = tmp_path / "here"
    shutil.copytree(model, here / "model")
    write_lines(here / "rows.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}])
    (here / "my.rewards.py").write_text(REWARD)  # the dot belongs to the name
    argv = [word for word in train_argv() if word not in SORT_ARGV[2:]]
    argv += ["--model", f"{here}/model", "--dataset", f"{here}/rows.jsonl"]
    return [*argv, "--reward", f"{here}/my.rewards.py:reward"]


@pytest.mark.slow
def test_a_refused_resume_leaves_the_run_unchanged(
    local_argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """An accepted resume finds its files from any folder, also after relative paths."""
    monkeypatch.chdir(tmp_path / "here")
    run = tmp_path / "run"
    spelled = ["--model", "model", "--dataset", "./rows.jsonl", "--reward", "my.rewards.py:reward"]
    place = local_argv.index("--reward")
    main([*local_argv[:place], *local_argv[place + 2 :], *spelled, "--output-dir", os.path.relpath(run)])
    saved = (run / "config.yaml").read_text()
    monkeypatch.chdir("/")
    again = ["--config", str(run / "config.yaml"), "--resume", "--max-steps", "2"]
    for flags in ([], ["--dry-run"]):
        message = error_of([*again, "--learning-rate", "0.5", *flags], capsys)
        assert "optimizer.learning_rate: expected 1e-06, got 0.5" in message
        assert (run / "config.yaml").read_text() == saved
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "here" / "rows.jsonl")
    limits = ["--reward-timeout", "30", "--max-failed-rewards", "0.5", "--dataset", str(tmp_path / "link.jsonl")]
    main([*again, *limits])
    assert logged_steps(run) == [0, 1]
    # A moved run is resumed only with its new --output-dir.
    shutil.move(run, tmp_path / "moved")
    moved = ["--config", str(tmp_path / "moved" / "config.yaml"), "--resume", "--max-steps", "3", "--dry-run"]
    assert "a run that was moved needs its new --output-dir" in error_of(moved, capsys)
    main([*moved, "--output-dir", str(tmp_path / "moved")])


@pytest.mark.slow
def test_resume_with_moved_files(local_argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Checkpoints have the weights: only the other files of the model must be equal."""
    here, there, run = tmp_path / "here", tmp_path / "there", tmp_path / "run"
    main(local_argv)
    shutil.move(here, there)
    line = [word.replace(str(here), str(there)) for word in local_argv] + ["--resume", "--max-steps"]
    main([*line, "2"])
    assert f'files.model: was "{here}/model", is now "{there}/model"' in capsys.readouterr().out
    reward = there / "my.rewards.py"
    reward.write_text(reward.read_text().replace("len(text)", "2 * len(text)"))
    main([*line, "3"])
    assert "files.my.rewards.py.1: was" in capsys.readouterr().out, "a changed reward function is reported"
    saved = (run / "config.yaml").read_text()
    with (there / "rows.jsonl").open("a") as rows:
        rows.write('\n{"prompt": "c", "answer": "3"}')
    assert 'data.dataset: expected "sha256:' in error_of([*line, "4"], capsys)
    shutil.rmtree(there / "model")
    write_random_checkpoint(there / "model", config=tiny_model_config(num_layers=2))
    assert 'model.model: expected "sha256:' in error_of([*line, "4"], capsys)
    assert (run / "config.yaml").read_text() == saved


@pytest.mark.slow
def test_the_same_command_starts_and_resumes_a_run(
    train_argv: MakeArgv, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    line = train_argv("--resume-if-there", "--save-steps", "1", "--max-steps")
    main([*line, "1"])
    main([*line, "2"])
    assert "resumes after 1 of 2 rollouts" in capsys.readouterr().out and logged_steps(tmp_path / "run") == [0, 1]
    assert "resume_if_there: false" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_changed_attention_is_reported_at_a_resume(train_argv: MakeArgv):
    """Its kernels round differently. Changed sizes and limits, which change no result, are reported too."""
    changed = ["--attention", "portable", "--microbatch", "4", "--reward-timeout", "3"]
    (compared, reported), (compared_again, reported_again) = (
        run_settings(args, prepare(args).loop) for _, args in map(parse, (train_argv(), train_argv(*changed)))
    )
    assert compared == compared_again
    lines = differences(to_jsonable(reported), to_jsonable(reported_again), words=("was", "is now"))
    assert 'attention: was "auto", is now "portable"' in lines and len(lines) == 3


# --- failures that must not cost a run


@pytest.mark.slow
def test_a_damaged_checkpoint_is_not_exported(train_argv: MakeArgv, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    main(train_argv())
    largest = max((run / "checkpoints" / "1" / "state").rglob("*"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    message = error_of([str(run), "--out", str(tmp_path / "out")], capsys, export)
    assert "checkpoint 1 in" in message and "cannot be read" in message and not (tmp_path / "out").exists()
    shutil.rmtree(run / "model")
    message = error_of(["--run", str(run)], capsys, smd_eval)
    assert "expected a trained model in" in message and "smd-export" in message


@pytest.mark.slow
def test_a_failed_plot_and_a_failed_export_keep_the_run(
    train_argv: MakeArgv, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def fails(*_: object, **__: object) -> None:
        raise OSError("a reason")

    with monkeypatch.context() as patch:
        patch.setenv("COLUMNS", "1000")  # no line break inside a path
        patch.setattr("smd_jax.commands.train.save_model", fails)
        patch.setattr("smd_jax.commands.train.plot_runs", fails)
        message = error_of(train_argv(), capsys)
    assert "training.png could not be written" in message
    assert "The run is complete, and its checkpoints are saved. Its export failed: a reason" in message
    export([str(tmp_path / "run"), "--out", str(tmp_path / "again")])
    load_checkpoint(tmp_path / "again")


def test_a_failed_plot_does_not_stop_the_export(
    train_argv: MakeArgv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    other = tmp_path / "run" / "other" / "metrics.jsonl"
    other.parent.mkdir(parents=True)
    other.write_text("no JSON\n{}\n")
    exported = list[Any]()
    monkeypatch.setattr("smd_jax.commands.train.initial_state", lambda _: None)
    monkeypatch.setattr("smd_jax.commands.train.train", lambda *_, **__: SimpleNamespace(params={"embed": 1.0}))
    monkeypatch.setattr("smd_jax.commands.train.export_or_explain", lambda _, params: exported.append(params))
    main(train_argv())
    assert exported == [{"embed": 1.0}] and "line 1: expected a JSON object" in capsys.readouterr().err


def test_a_full_disk_leaves_config_yaml_unchanged(
    train_argv: MakeArgv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run, write = tmp_path / "run", Path.write_text
    run.mkdir()
    (run / "config.yaml").write_text("algorithm: grpo\n")

    def fails(path: Path, text: str, **options: Any) -> None:
        write(path, text[:9], **options)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setenv("COLUMNS", "1000")  # no line break inside a path
    monkeypatch.setattr("smd_jax.commands.train.initial_state", lambda _: None)
    monkeypatch.setattr(Path, "write_text", fails)
    assert "config.yaml could not be written" in error_of(train_argv(), capsys)
    assert (run / "config.yaml").read_text() == "algorithm: grpo\n"
    assert {file.name for file in run.iterdir()} == {"config.yaml", LOCK}


def test_two_processes_do_not_share_a_run(train_argv: MakeArgv, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    with lock_directory(run), (run / LOCK).open() as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert "expected no other process that trains in" in error_of(train_argv(), capsys)
    assert not (run / "config.yaml").exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_is_reported(
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
