"""Options of the commands: help, command lines, config files, and the objects built from them. No command runs."""

import dataclasses
import importlib.machinery
import re
import shlex
import shutil
import signal
import sys
import types
import typing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import smd_jax as smd
from smd_jax.commands import certify, config_file, evaluate, export, plot
from smd_jax.commands.arguments import LossArgs, ReferenceArgs, RewardArgs
from smd_jax.commands.choices import loss_config, update_config
from smd_jax.commands.command_line import ALGORITHMS, DESCRIPTION, parse, parse_words
from smd_jax.commands.config_file import with_file
from smd_jax.commands.errors import UserError
from smd_jax.commands.evaluate import evaluation_rows, make_evaluator, print_results, read
from smd_jax.commands.limits import check_devices, evicts_keys
from smd_jax.commands.model_source import OpenedModel
from smd_jax.commands.places import by_content, check_output_dir, with_absolute_paths
from smd_jax.commands.prepare import learning_rate, prepare
from smd_jax.commands.task_source import held_out_choice, names_held_out_rows, rewards_of, task_choice
from smd_jax.commands.train import loggers, main
from smd_jax.eviction.policies import H2O, Dense, SnapKV
from smd_jax.eviction.wrappers import Pyramid
from smd_jax.metrics import evicted_share
from smd_jax.model.decoder import Decoder
from smd_jax.model.weights import read_config
from smd_jax.runs.run_config import Objective
from smd_jax.runs.stop import RunStoppedError
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.tasks.build import TaskChoice, build_task
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config
from smd_jax.train.evaluation import Evaluated
from tests.commands.conftest import MakeArgv
from tests.under_test import left_padded

REQUIRED = ["--model", "somewhere", "--dataset", "reasoning_gym:chain_sum"]


# --- command lines and files


def another_value(kind: Any, default: Any) -> Any:
    """A value of this type other than the default."""
    kind = getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind
    choices = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return next(choice for choice in choices if choice != default)
    if typing.get_origin(kind) is tuple:
        return (another_value(choices[0], None),)
    if choices:  # the first type of a union
        return another_value(next(choice for choice in choices if choice is not type(None)), default)
    return {bool: not default, int: 7, float: 0.25, str: "a b", Path: Path("/a b")}[kind]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_config_file_without_defaults_is_read_as_written(algorithm: str, tmp_path: Path):
    _, args = parse([algorithm, *REQUIRED])
    for group_name, group in vars(args).items():
        if group_name == "launch":  # not saved with the run
            continue
        kinds = typing.get_type_hints(type(group), include_extras=True)
        other = {name: another_value(kinds[name], value) for name, value in vars(group).items()}
        args = dataclasses.replace(args, **{group_name: dataclasses.replace(group, **other)})
    (tmp_path / "all.yaml").write_text(config_file.dump(algorithm, args))
    assert parse(["--config", str(tmp_path / "all.yaml")]) == (algorithm, args)
    minimizing = dataclasses.replace(args, evaluation=dataclasses.replace(args.evaluation, greater_is_better=False))
    (tmp_path / "all.yaml").write_text(config_file.dump(algorithm, minimizing))
    assert parse(["--config", str(tmp_path / "all.yaml")]) == (algorithm, minimizing)


def test_a_written_config_file_can_be_read(tmp_path: Path):
    """Characters outside of ASCII are written as six to ten, and a name of a file may have bytes that are no text."""
    prompt = "\u8bf7\U0001f642" * 11_000
    name, args = parse(["grpo", *REQUIRED, "--system-prompt", prompt])
    (tmp_path / "config.yaml").write_text(config_file.dump(name, args))
    assert parse(["--config", str(tmp_path / "config.yaml")])[1] == args
    _, args = parse(["grpo", *REQUIRED, "--dataset-source", "caf\udce9.jsonl"])
    with pytest.raises(
        ValueError, match=r"expected options that config\.yaml can hold, as text in UTF-8; expected YAML"
    ):
        config_file.dump(name, args)


def test_a_config_file_next_to_a_checkpoints_folder_is_no_run(tmp_path: Path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "grpo.yaml").write_text("algorithm: grpo\nmodel: m\ndataset: d\noutput_dir: runs/a\n")
    assert parse(["--config", str(tmp_path / "grpo.yaml")])[1].run.output_dir == Path("runs/a")


@pytest.mark.parametrize("on_path", [False, True])  # `python -m` puts the current folder on Python's path
def test_modules_of_the_current_folder_get_absolute_paths(
    on_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "rewards_found_here.py").write_text("def r(completions, **columns): return [0.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    if on_path:
        monkeypatch.syspath_prepend("")
    _, args = parse(["grpo", *REQUIRED, "--reward", "rewards_found_here:r", "json:dumps", "--eviction", "h2o"])
    args = with_absolute_paths(args)
    assert args.rewards.reward == (f"{tmp_path}/rewards_found_here.py:r", "json:dumps")
    assert args.sampler.eviction == "h2o"


def test_a_policy_of_a_module_is_compared_by_its_content():
    _, args = parse(["grpo", *REQUIRED, "--eviction", "smd_jax.eviction.policies:H2O"])
    eviction = by_content(args)[0]["eviction"]
    assert eviction["place"] == "policies.py" and str(eviction["holds"]).startswith("sha256:")


def test_a_run_in_the_folder_of_its_model_can_be_resumed(model: Path, tmp_path: Path):
    """The run's files do not change the digest; those of a model inside the run's folder do."""
    base = tmp_path / "base"
    shutil.copytree(model, base)

    def digest_of(run: Path) -> object:
        _, args = parse(["grpo", *REQUIRED, "--model", str(base), "--output-dir", str(run)])
        check_output_dir(args)
        return by_content(args)[0]["model"]["model"]

    original = digest_of(base / "run")
    assert original == digest_of(tmp_path) == digest_of(tmp_path / "elsewhere")
    (base / "run").mkdir()
    (base / "run" / "config.yaml").write_text("algorithm: grpo")
    assert original == digest_of(base / "run") != digest_of(tmp_path)


def test_a_hidden_output_folder_may_be_inside_the_dataset(tmp_path: Path):
    """Datasets skip hidden files."""
    _, args = parse(["grpo", "--model", "m", "--dataset", str(tmp_path), "--output-dir", str(tmp_path / ".runs" / "a")])
    check_output_dir(args)


def test_rewards_with_the_same_name_are_logged_with_their_files(tmp_path: Path):
    for name in ("short_rewards", "long_rewards"):  # unused module names, because their folder joins the import path
        (tmp_path / f"{name}.py").write_text("def score(completions, **columns): return [0.0] * len(completions)\n")
    rewards = [f"{tmp_path}/{name}.py:score" for name in ("short_rewards", "long_rewards")]
    _, args = parse(["grpo", *REQUIRED, "--reward", *rewards])
    assert rewards_of(args, None, "d").logged_names == ("short_rewards.score", "long_rewards.score")


def test_a_written_config_file_starts_the_same_run(tmp_path: Path):
    argv = ["grpo", *REQUIRED, "--system-prompt", '- be: "brief"\n', "--memory", "80GiB", "--stop"]
    for words in (
        [*argv, "</s>"],
        [*argv, "a", "b c", "- d", "---", "-1", "--epsilon", "0.1", "--learning-rate", "1e-05", "--pyramid"],
    ):
        name, args = parse(words)
        file = tmp_path / "run.yaml"
        file.write_text(config_file.dump(name, args), encoding="utf-8")
        assert parse(["--config", str(file)]) == parse([name, f"--config={file}"]) == (name, args)
        _, other = parse(["--config", str(file), "--max-steps", "7"])
        assert other == dataclasses.replace(args, run=dataclasses.replace(args.run, max_steps=7))


def test_flags_override_the_file_which_overrides_the_preset(tmp_path: Path):
    file = tmp_path / "own.yaml"
    file.write_text(
        "budget: 99\nbuffer: 3\nlearning_rate: 0.1\nchat_template_kwargs: {enable_thinking: false, tone: dry}\n"
    )
    _, args = parse(["--preset", "gsm8k", "--config", str(file), *REQUIRED, "--buffer", "4", "--lr", "1e-4"])
    assert args.optimizer.learning_rate == 1e-4
    assert (args.sampler.eviction, args.sampler.budget, args.sampler.buffer) == ("rkv", 99, 4)
    assert task_choice(args.data, 0).chat_template_kwargs == (("enable_thinking", False), ("tone", "dry"))


@pytest.mark.parametrize("name", [path.stem for path in sorted(config_file.preset_path("gsm8k").parent.iterdir())])
def test_presets_are_read(name: str):
    assert parse(["--preset", name, *REQUIRED])[1].data.dataset == "reasoning_gym:chain_sum"
    assert re.search(rf"\b{name}\b", DESCRIPTION), "help names every preset"


@pytest.mark.parametrize(
    ("kind", "text", "argv", "flag"),
    [
        (
            evaluate.Args,
            "model: somewhere\ndataset: gsm8k\neval_decode: [dense, 'snapkv:512']\njson: true\neval_rows: 2\n",
            "--model somewhere --dataset gsm8k --eval-decode dense snapkv:512 --json --eval-rows 2",
            "--eval-rows=7",
        ),
        (export.Args, "run: a\nout: b\nformat: peft\nstep: 4\n", "a --out=b --format=peft --step=4", "--step=7"),
        (plot.Args, "runs: [runs/a, runs/b]\ntitle: two\n", "runs/a runs/b --title two", "--title=7"),
        # `debug` is in files of older runs.
        (certify.Args, "record: a.npz\nmodel: b\nrows: 3\ndebug: false\n", "a.npz --model b --rows 3", "--rows=7"),
    ],
)
def test_every_command_reads_its_options_from_a_file(kind: type, text: str, argv: str, flag: str, tmp_path: Path):
    file = tmp_path / "own.yaml"
    file.write_text(text)
    read_argv = with_file(["--config", str(file)], kind)
    assert parse_words(kind, "", "", read_argv) == parse_words(kind, "", "", argv.split())
    again = parse_words(kind, "", "", with_file([f"--config={file}", flag], kind))
    assert again == parse_words(kind, "", "", [*argv.split(), flag]), "flags override the file"


def test_names_stay_names_next_to_folders_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gsm8k", "mine", "rewards.py"):
        (tmp_path / name).mkdir()
    rewards = ["math_answer", "package.module:f", "rewards.py:f"]
    _, args = parse(["grpo", "--model", "mine", "--dataset", "gsm8k", "--eval-dataset", "mine", "--reward", *rewards])
    absolute = with_absolute_paths(args)
    assert absolute.data == args.data, "a built-in task next to a folder of the same name"
    assert absolute.model.model == absolute.evaluation.eval_dataset == str(tmp_path / "mine")
    assert absolute.rewards.reward == ("math_answer", "package.module:f", f"{tmp_path}/rewards.py:f")
    assert absolute.run.output_dir == tmp_path / "runs" / "train" and absolute.sampler == args.sampler


# --- objects built from options


def test_losses_and_corrections():
    reference = ReferenceArgs()
    assert loss_config(LossArgs(loss_type="dapo"), reference) == smd.losses.dapo()
    changed = loss_config(LossArgs(loss_type="dapo", epsilon_high=0.5), ReferenceArgs(beta=0.1, kl_estimator="k2"))
    assert changed == dataclasses.replace(smd.losses.dapo(epsilon_high=0.5, beta=0.1), kl_estimator="k2")
    with pytest.raises(ValueError, match=r"no bounds of the loss with the correction 'dppo_tv'.*got {'epsilon': 0.1}"):
        loss_config(LossArgs(correction="dppo_tv", epsilon=0.1), reference)
    assert update_config(LossArgs(), reference, SnapKV(), None, 8).distill is None
    distill = update_config(LossArgs(distill="anchor", distill_coef=0.2), reference, SnapKV(), None, 8).distill
    assert distill == smd.DistillConfig(direction="anchor", coef=0.2)
    assert update_config(LossArgs(correction="tis"), reference, SnapKV(), 2, 8).learner_visibility == "dense"
    for microbatch, rows in ((None, 8), (16, 8), (12, 4)):
        shared = update_config(LossArgs(share_prompts=True), reference, Dense(), microbatch, 8)
        assert shared.rows_per_prompt == rows
    packed = update_config(LossArgs(share_prompts=True, pack_columns=64), reference, Dense(), 1, 8)
    assert (packed.rows_per_prompt, packed.microbatch_size) == (8, 1), "a microbatch of packed rows has whole groups"


def test_adapters_have_a_larger_default_learning_rate():
    for flags, rate in (([], 1e-6), (["--lora-r", "4"], 1e-5), (["--lora-r", "4", "--learning-rate", "1e-4"], 1e-4)):
        assert learning_rate(parse(["grpo", *REQUIRED, *flags])[1]) == rate


def test_max_grad_norm_may_be_none():
    argv = ["grpo", *REQUIRED, "--max-grad-norm"]
    assert parse([*argv, "None"])[1].optimizer.max_grad_norm is None
    assert parse([*argv, "2"])[1].optimizer.max_grad_norm == 2


def test_a_mesh_over_a_part_of_the_devices_is_refused():
    for used in (1, 8):
        check_devices(used, 8)
    with pytest.raises(UserError, match=r"expected --data-parallel .* = 8, the number of devices; got 4\."):
        check_devices(4, 8)


def test_runs_of_all_seeds_can_share_held_out_rows():
    def held_out(*flags: str) -> TaskChoice:
        _, args = parse(["grpo", *REQUIRED, *flags])
        return held_out_choice(args.evaluation, args.data, args.run.seed)

    assert held_out("--seed", "3") == dataclasses.replace(held_out(), seed=3)
    assert held_out("--seed", "3", "--eval-seed", "0") == held_out()
    with pytest.raises(UserError, match="expected --eval-seed only with reasoning_gym:NAME"):
        held_out("--dataset", "gsm8k", "--eval-seed", "0")


def test_the_reward_of_a_task_has_a_timeout_and_a_failure_limit():
    """A verifier that parses a completion may never return."""
    _, args = parse(["grpo", *REQUIRED, "--reward-timeout", "7", "--max-failed-rewards", "0.5"])
    assert args.rewards == RewardArgs(reward_timeout=7.0, max_failed_rewards=0.5)
    rewards = rewards_of(args, build_task(TaskChoice(args.data.dataset, size=3)), args.data.dataset)
    assert (rewards.seconds, rewards.max_failed, rewards.logged_names) == (7.0, 0.5, ("chain_sum",))


def test_evicts_keys_agrees_with_a_rollout():
    """12 keys and a buffer of 4. A compression after the last token counts as no eviction: no query follows it."""
    prompts, tokens = [8, 8, 9, 12, 12, 13], [8, 9, 8, 4, 5, 4]
    model, policy, config = (
        Decoder(tiny_model_config(num_layers=1)),
        H2O(),
        RolloutConfig(max_new_tokens=9, budget=12, buffer=4),
    )
    batch, params = left_padded(prompts, 13, model.config.vocab_size), random_params(model.config)
    trajectory = rollout(model, params, batch, jax.random.key(0), policy=policy, config=config, limits=np.array(tokens))
    evicted_at, valid = trajectory.mask.evicted_at, trajectory.valid
    evicted = [bool(evicted_share(evicted_at[row : row + 1], valid[row : row + 1]) > 0) for row in range(6)]
    assert evicted == [False, True, True, False, True, True]
    for prompt, count, evicts in zip(prompts, tokens, evicted, strict=True):
        assert evicts_keys(policy, dataclasses.replace(config, max_new_tokens=count), 1, prompt) == evicts


def test_weights_and_biases_gets_the_options_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    inits: list[dict[str, Any]] = []
    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="wandb/__init__.py")
    vars(fake).update(init=lambda **options: inits.append(options), Settings=lambda **options: options)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    loggers(*parse(["grpo", *REQUIRED, "--output-dir", str(tmp_path / "name"), "--report-to", "wandb"]))
    assert (inits[-1]["project"], inits[-1]["name"]) == ("mine", "name")
    config = inits[-1]["config"]
    assert (config["algorithm"], config["budget"], config["output_dir"]) == ("grpo", 512, str(tmp_path / "name"))


def test_a_stopped_run_prints_a_box_and_the_resume_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    argv = ["grpo", *REQUIRED, "--output-dir", str(tmp_path / "a run")]
    stopped = RunStoppedError(signal.SIGTERM, 3, 9, tmp_path / "a run")
    monkeypatch.setattr("smd_jax.commands.train.run", lambda *_: (_ for _ in ()).throw(stopped))
    with pytest.raises(SystemExit) as end:
        main(argv)
    *box, command = capsys.readouterr().err.splitlines()
    assert end.value.code == 143 and "SIGTERM stopped the run after 3 of 9 rollouts; saved in" in "".join(box)
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "config.yaml").write_text(config_file.dump(*parse(argv)))
    program, *again = shlex.split(command.removeprefix("resume with: "))
    assert program == "smd-train" and parse(again)[1].run.resume


def test_a_moved_run_uses_its_new_folder(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(config_file.dump(*parse(["grpo", *REQUIRED, "--output-dir", "elsewhere"])))
    for flag in ("--output-dir", "--output_dir"):
        assert parse(["--config", str(tmp_path / "config.yaml"), flag, str(tmp_path)])[1].run.output_dir == tmp_path


# --- smd-eval


def test_smd_eval_repeats_the_evaluation_of_the_run(train_argv: MakeArgv, model: Path, tmp_path: Path):
    """It has the rows, the rollout config and the eviction policies of the run."""
    argv = "--seed 3 --min-completion-length 2 --eval-steps 1 --eval-rows 5 --eval-decode sampler snapkv:40+4"
    argv += " --prefill-chunk 16 --pyramid --budget 16 --eval-temperature 0.5 --top-k 9 --sinks 2"
    name, run = parse(train_argv(*argv.split()))
    during = prepare(run).evaluator
    assert during is not None
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(config_file.dump(name, run))
    tokenizer = byte_tokenizer()
    opened = OpenedModel(model, read_config(model, "float32"), tokenizer, tokenizer, (258,))

    def evaluator(*flags: str) -> Any:
        return make_evaluator(read(["--run", str(tmp_path / "run"), *flags]), Decoder(opened.config), opened, None)[0]

    after = evaluator()
    assert [row["prompt"] for row in after.task] == [row["prompt"] for row in during.task]
    assert [each.name for each in after.config.decodes] == ["sampler", "snapkv-40-4"]
    assert isinstance(after.config.decodes[0].policy, Pyramid) and after.config.seed == during.config.seed == 3
    for decode, expected in zip(after.config.decodes, during.config.decodes, strict=True):
        assert decode.policy == expected.policy
        assert decode.rollout(after.config.rollout) == expected.rollout(during.config.rollout)
    assert evaluator("--seed", "4").task[0] != during.task[0]
    # Flags override the run.
    args = read(["--run", str(tmp_path / "run"), "--budget", "9", "--model", "other", "--json"])
    assert (args.sampler.budget, args.sampler.buffer, args.model.model, args.command.json) == (9, 2, "other", True)


@pytest.mark.parametrize(
    ("flags", "dataset", "source", "split"),
    [
        ("--dataset gsm8k --split train[:9]", "gsm8k", None, None),
        ("--dataset gsm8k --dataset-source mine.jsonl", "gsm8k", "mine.jsonl", None),
        ("--dataset gsm8k --eval-steps 1 --eval-source test.jsonl", "gsm8k", "test.jsonl", None),
        ("--dataset owner/name --split train --eval-split test", "owner/name", None, "test"),
        ("--dataset owner/name --split train", "owner/name", None, "train"),
        ("--dataset a.jsonl --split train --eval-dataset b.jsonl", "b.jsonl", None, None),
        ("--dataset gsm8k --dataset-source a.jsonl --eval-split train[90%:]", "gsm8k", "a.jsonl", "train[90%:]"),
        ("--dataset a.jsonl --eval-dataset math --eval-split test", "math", None, "test"),
        ("--dataset math --eval-split train[90%:]", "math", None, "train[90%:]"),
    ],
)
def test_evaluation_rows_come_from_the_options_of_the_run(flags: str, dataset: str, source: Any, split: Any):
    _, args = parse(["grpo", "--model", "somewhere", *flags.split()])
    rows = evaluation_rows(args)
    assert (rows.dataset, rows.dataset_source, rows.split) == (dataset, source, split)
    if args.evaluation.eval_dataset or args.evaluation.eval_split:  # evaluations during the run read the same rows
        during = held_out_choice(args.evaluation, args.data, 0)
        assert (during.name, during.source, during.split) == (dataset, source, split)
        assert during.held_out == names_held_out_rows(dataset, split)


def test_options_of_the_training_rows_do_not_apply_to_another_dataset():
    """A built-in task has its own prompt column."""
    own = ["--dataset-parameters", "min_terms=2", "--eval-dataset"]
    _, args = parse(["grpo", *REQUIRED, *own, "b.jsonl"])
    assert held_out_choice(args.evaluation, args.data, 0).parameters == ()
    _, args = parse(["grpo", *REQUIRED, *own, "reasoning_gym:chain_sum"])
    assert held_out_choice(args.evaluation, args.data, 0).parameters == (("min_terms", 2),)
    named = ["--model", "m", "--dataset", "a.jsonl", "--prompt-column", "question", "--eval-dataset"]
    columns = {}
    for name in ("gsm8k", "reasoning_gym:gcd", "b.jsonl"):
        _, args = parse(["grpo", *named, name])
        columns[name] = held_out_choice(args.evaluation, args.data, 0).prompt_column
    assert columns == {"gsm8k": None, "reasoning_gym:gcd": None, "b.jsonl": "question"}


def test_smd_eval_reads_all_rows_of_another_dataset(tmp_path: Path):
    argv = ["grpo", "--model", "m", "--dataset", "a.jsonl", "--split", "train[:90%]", "--eval-split", "train[90%:]"]
    (tmp_path / "config.yaml").write_text(config_file.dump(*parse([*argv, "--output-dir", str(tmp_path)])))
    assert read(["--run", str(tmp_path)]).data.split == "train[90%:]"
    assert read(["--run", str(tmp_path), "--dataset", "b.jsonl"]).data.split is None
    assert read(["--run", str(tmp_path), "--dataset=b.jsonl", "--split", "test"]).data.split == "test"


def test_the_held_out_split_of_a_preset_names_its_held_out_source():
    """MATH's held-out rows come from another source than its training rows."""
    assert names_held_out_rows("math", None) and names_held_out_rows("math", "test[:100]")
    assert not names_held_out_rows("math", "train[:100]") and not names_held_out_rows("rows.jsonl", None)


def test_metrics_are_maximized_or_minimized():
    for metric, maximize in (("reward", True), ("loss", False), ("kl --greater-is-better False", False)):
        argv = ["grpo", "--model", "m", "--dataset", "d", "--metric-for-best-model", *metric.split()]
        assert parse(argv)[1].evaluation.objective == Objective(metric.split()[0], maximize=maximize)


def test_held_out_rows_of_another_task_have_its_reward(train_argv: MakeArgv):
    argv = train_argv("--eval-steps", "1", "--eval-dataset", "reasoning_gym:gcd", "--eval-rows", "2")
    argv = [word for word in argv if word not in ("--dataset-parameters", "num_digits=3", "num_distractors=4")]
    ready = prepare(parse(argv)[1])
    assert ready.loop.rewards is not None and ready.evaluator is not None and ready.evaluator.rewards is not None
    assert ready.loop.rewards.logged_names == ("distractor_sort",)
    assert ready.evaluator.rewards.logged_names == ("gcd",)


def test_results_of_an_evaluation_fit_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Three of four prompts have a reward: 1, 1 and 0."""
    monkeypatch.setenv("COLUMNS", "80")
    rewards, lengths = np.array([[0.0], [1.0], [1.0], [np.nan]]), np.array([[250], [200], [256], [256]])
    clipped = lengths == 256
    results = [
        Evaluated(name, rewards, lengths, clipped, [["text"]] * 4, 2_211_840, 5127.4)
        for name in ("dense", "snapkv-512-128")
    ]
    print_results("rows.jsonl, model", results)
    output = capsys.readouterr().out
    assert "rows.jsonl, model: 4 prompts, 1 completion each" in output and max(map(len, output.splitlines())) <= 80
    # Wilson's interval for 2 of 3.
    for text in ("0.6667", "0.208..0.939", "240.5", "50%", "2.11 MiB", "5,127"):
        assert output.count(text) == 2
    assert "dense: mean and interval leave out completions without a reward, 1" in output


# --- help pages

HELP_PAGES = [*((main, [name]) for name in ALGORITHMS), (evaluate.main, []), (export.main, []), (plot.main, [])]


def help_page(command: Any, argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Flag -> its help text, on a page of 80 columns."""
    with pytest.raises(SystemExit) as end:
        command(argv)
    assert end.value.code == 0
    texts: dict[str, str] = {"": ""}
    column = 0
    for line in capsys.readouterr().out.splitlines():
        column = max(column, line.find("show this help message"))
        flag = re.match(r"[│ ] (?:-h, )?(--[a-z][a-z0-9-]*)[ ,]", line)
        if flag is not None:
            assert len(line) <= 80
            texts[flag[1]] = ""
        if flag is None or line[column - 2 : column] == "  ":
            texts[[*texts][-1]] += f" {line[column:].strip(' │')}"
    return texts


@pytest.mark.slow
@pytest.mark.parametrize(("command", "argv"), HELP_PAGES)
def test_every_flag_has_a_help_text(command: Any, argv: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch):
    """tyro misses some comments, such as one after the closing bracket of a value over several lines."""
    monkeypatch.setenv("COLUMNS", "80")  # one column of flags
    all_flags = help_page(command, [*argv, "--help-all"], capsys)
    assert not [flag for flag, text in all_flags.items() if re.match(r"\s*(\((default|required)|$)", text)]
    first = help_page(command, [*argv, "--help"], capsys)
    intro, *flags = first
    assert 3 <= len(flags) <= 30 and set(flags) <= all_flags.keys()
    assert len(all_flags) == len(first) or f"{len(all_flags) - len(first)} more options: --help-all" in first[intro]
    if command is main:
        assert {"--model", "--dataset", "--reward", "--budget", "--max-steps"} <= set(flags)
        assert ("--correction" in flags) == ("--dense-share" in flags)  # together they choose the learner
