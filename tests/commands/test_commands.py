"""The commands: their arguments, their files, their errors, and a whole run from a directory to a directory."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import sys
import typing
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from transformers import AutoTokenizer

import smd_jax as smd
from smd_jax.byte_sizes import show_bytes
from smd_jax.commands import config_file
from smd_jax.commands.arguments import (
    DataArgs,
    DeviceArgs,
    Grpo,
    LossArgs,
    ModelArgs,
    OnlineDpo,
    ReferenceArgs,
    SamplerArgs,
)
from smd_jax.commands.choices import eviction_policy, loss_config, update_config, with_sinks
from smd_jax.commands.command_line import ALGORITHMS, parse
from smd_jax.commands.errors import FLAGS, UserError, with_flags
from smd_jax.commands.evaluate import main as smd_eval
from smd_jax.commands.evaluate import print_results
from smd_jax.commands.export import main as export
from smd_jax.commands.limits import check_devices, unused_devices
from smd_jax.commands.plot import main as plot
from smd_jax.commands.prepare import check_ahead, learning_rate, prepare
from smd_jax.commands.task_source import held_out_choice, task_choice
from smd_jax.commands.train import main
from smd_jax.eviction.policies import Dense, SnapKV, StreamingLLM
from smd_jax.eviction.wrappers import Protect, Pyramid
from smd_jax.model.weights import load_checkpoint
from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.tasks.build import TaskChoice
from smd_jax.testing import byte_tokenizer, tiny_model_config, write_random_checkpoint
from smd_jax.train.evaluation import Evaluated
from tests.command_errors import error_of
from tests.hub_files import questions, write_lines

NEEDED = ["--model", "somewhere", "--dataset", "reasoning_gym:chain_sum"]
SORT = ["--dataset", "reasoning_gym:distractor_sort", "--dataset-parameters", "num_digits=3", "num_distractors=4"]
SMALL = ["--num-prompts", "2", "--num-generations", "4", "--max-completion-length", "5", "--budget", "12"]
SMALL += ["--buffer", "2", "--eviction", "h2o", "--dataset-size", "20"]
SMALL += ["--reward-timeout", "None"]  # no process for the reward, which takes seconds to start


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    config = tiny_model_config(num_layers=1, max_positions=2048)
    write_random_checkpoint(directory, config=config)
    return directory


@pytest.mark.parametrize("is_terminal", [False, True])
def test_results_of_an_evaluation_fit_80_columns(is_terminal, monkeypatch, capsys):
    """Three of four prompts have a reward: 1, 1 and 0."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    rewards, lengths = np.array([[0.0], [1.0], [1.0], [np.nan]]), np.array([[250], [200], [256], [256]])
    results = [
        Evaluated(name, rewards, lengths, lengths == 256, [["text"]] * 4, 2_211_840, 5127.4)
        for name in ("dense", "snapkv-512-128")
    ]
    print_results("rows.jsonl, model", results)
    title, _, head, _, *lines = capsys.readouterr().out.splitlines()
    assert title.rstrip() == "rows.jsonl, model: 4 prompts, 1 completion each"
    table = [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in (head, *lines[:2])]
    # Wilson's interval for 2 of 3.
    numbers = ["0.6667", "0.208..0.939", "240.5", "50%", "2.11 MiB", "5,127"]
    assert table == [
        ["decode", "reward", "95 %", "tokens", "cut off", "cache", "tok/s"],
        ["dense", *numbers],
        ["snapkv-512-128", *numbers],
    ]
    assert lines[3:] == [
        f"{name}: mean and interval leave out completions without a reward, 1" for name in ("dense", "snapkv-512-128")
    ]
    assert all(len(line) <= 80 for line in (title, head, *lines))


def test_every_algorithm_has_its_options():
    for name, kind in ALGORITHMS.items():
        found, args = parse([name, *NEEDED])
        assert (found, type(args)) == (name, kind)
        assert args.model == ModelArgs(model="somewhere") and args.data == DataArgs(dataset="reasoning_gym:chain_sum")
        assert args.sampler == SamplerArgs()
    _, args = parse(
        ["grpo", *NEEDED, "--num-generations", "3", "--epsilon-high", "0.3", "--gradient-checkpointing", "none"]
    )
    assert isinstance(args, Grpo)
    assert args.sampler.num_generations == 3 and args.loss.epsilon_high == 0.3
    assert args.model.gradient_checkpointing == "none"


def test_the_name_of_an_option_is_one_flag():
    """Flags have no prefix of their group: two groups of an algorithm must not share a name."""
    for kind in ALGORITHMS.values():
        groups = typing.get_type_hints(kind).values()
        assert len(config_file.options_of(kind)) == sum(len(dataclasses.fields(group)) for group in groups)
    flags = {f"--{name.replace('_', '-')}" for kind in ALGORITHMS.values() for name in config_file.options_of(kind)}
    assert set(FLAGS.values()) <= flags


@pytest.mark.slow
def test_what_is_said_of_a_cache_with_room_for_all_keys(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["grpo", "--model", str(model), *SORT, "--output-dir", str(tmp_path / "run"), "--dry-run"]
    words += ["--max-completion-length", "6", "--attention", "portable", "--eviction", "h2o"]
    small = ["--budget", "8", "--buffer", "2", "--sinks", "1"]
    for more, said, teacher in (
        (["--budget", "500"], True, "none"),
        (["--budget", "500", "--distill", "anchor"], True, "anchor, with a weight of 0.1 in the loss"),
        (small, False, "anchor, with a weight of 0.1 in the loss"),
        ([*small, "--correction", "tis"], False, "none"),
    ):
        main([*words, *more])
        output = capsys.readouterr()
        assert ("Nothing will be evicted" in output.err) == said, more
        # It would see no more than the policy does, and cost a pass and a copy of the weights.
        assert f"teacher: {teacher}\n" in output.out, more


def test_adapters_take_larger_steps():
    for more, rate in (([], 1e-6), (["--lora-r", "4"], 1e-5), (["--lora-r", "4", "--learning-rate", "1e-4"], 1e-4)):
        assert learning_rate(parse(["grpo", *NEEDED, *more])[1]) == rate


def test_devices_without_work_are_named():
    assert unused_devices(8, 8) is None
    for used in (1, 8):
        check_devices(used, 8)
    axes = r"--data-parallel \* --fsdp \* --tensor"
    with pytest.raises(UserError, match=rf"expected {axes} \* --sequence = 8, .*; got 4\."):
        check_devices(4, 8)
    with pytest.raises(UserError, match=rf"expected {axes} = 8, .*; got 4\."):
        check_devices(4, 8, ("--data-parallel", "--fsdp", "--tensor"))
    assert re.search(rf"7 of 8 devices are not used: {axes} \* --sequence = 1", str(unused_devices(1, 8)))


def test_a_written_configuration_starts_the_same_run(tmp_path: Path):
    words = ["grpo", *NEEDED, "--stop", "</s>", "--system-prompt", '- be: "brief"\n', "--memory", "80GiB"]
    for given in (words, [*words, "--stop", "a", "b c", "--epsilon", "0.1", "--learning-rate", "1e-05", "--pyramid"]):
        name, args = parse(given)
        file = tmp_path / "run.yaml"
        file.write_text(config_file.dump(name, args), encoding="utf-8")
        assert parse(["--config", str(file)]) == (name, args)
        assert parse([name, f"--config={file}"]) == (name, args)
        _, other = parse(["--config", str(file), "--max-steps", "7"])
        assert other == dataclasses.replace(args, run=dataclasses.replace(args.run, max_steps=7))
    # Every option is named, so that later defaults change nothing.
    assert yaml.safe_load(file.read_text()).keys() == config_file.options_of(Grpo).keys() | {"algorithm"}


def test_a_file_names_values_as_a_mapping(tmp_path: Path):
    file = tmp_path / "own.yaml"
    file.write_text("chat_template_kwargs: {enable_thinking: false, tone: dry}\ndataset_parameters: {min_terms: 2}\n")
    _, args = parse(["grpo", "--config", str(file), *NEEDED])
    choice = task_choice(args.data, 0)
    assert choice.chat_template_kwargs == (("enable_thinking", False), ("tone", "dry"))
    assert choice.parameters == (("min_terms", 2),)


def test_a_preset_stands_before_the_file_and_the_flags(tmp_path: Path):
    file = tmp_path / "own.yaml"
    file.write_text("budget: 99\nbuffer: 3\n")
    _, args = parse(["--preset", "gsm8k", "--config", str(file), *NEEDED, "--buffer", "4"])
    assert isinstance(args, Grpo)
    assert (args.sampler.eviction, args.sampler.budget, args.sampler.buffer) == ("rkv", 99, 4)


@pytest.mark.parametrize(
    "name", [path.stem for path in sorted(Path(config_file.preset_path("gsm8k")).parent.iterdir())]
)
def test_presets_are_read(name: str):
    _, args = parse(["--preset", name, *NEEDED])
    assert args.data.dataset == "reasoning_gym:chain_sum"


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


@pytest.mark.slow
def test_a_tokenizer_of_its_own(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bare, tokenizer = tmp_path / "bare", tmp_path / "tokenizer"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, bare / name)
    byte_tokenizer(chat=False).save_pretrained(tokenizer)
    run = tmp_path / "run"
    words = ["grpo", "--model", str(bare), *SORT, *SMALL, "--output-dir", str(run), "--max-steps", "1"]
    said = error_of(words, capsys)
    assert "--model: expected a tokenizer" in said and "--tokenizer names another" in said
    assert "--tokenizer: expected a tokenizer" in error_of([*words, "--tokenizer", str(bare)], capsys)
    assert "--tokenizer: expected a" in error_of([*words, "--tokenizer", "./nowhere"], capsys)
    main([*words, "--tokenizer", str(tokenizer)])
    export([str(run), "--out", str(tmp_path / "again")])
    for written in (run / "model", tmp_path / "again"):
        found = AutoTokenizer.from_pretrained(written)
        assert found.encode("ab") == [97, 98] and found.chat_template is None
        config = json.loads((written / "config.json").read_text())
        assert (config["eos_token_id"], config["pad_token_id"]) == (258, 256)


def test_runs_of_all_seeds_can_share_held_out_rows():
    def held_out(*more: str) -> TaskChoice:
        _, args = parse(["grpo", *NEEDED, *more])
        return held_out_choice(args.evaluation, task_choice(args.data, args.run.seed))

    assert held_out("--seed", "3") == dataclasses.replace(held_out(), seed=3)
    assert held_out("--seed", "3", "--eval-seed", "0") == held_out()
    with pytest.raises(UserError, match="expected --eval-seed only with reasoning_gym:NAME"):
        held_out("--dataset", "gsm8k", "--eval-seed", "0")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bugdet: 3", "got 'bugdet'. Did you mean budget"),
        ("- budget", "expected options, one `name: value` a line"),
        ("budget: [", "expected YAML"),
        ("stop: ['-a', 'b']", "expected no item that begins with a dash"),
        ("budget: {a: 1}", "expected a number, a text or a list of them in 'budget'"),
        ("algorithm: ppo", "expected a configuration of 'grpo'; got one of 'ppo'"),
        (None, "expected a YAML file; found none at"),
    ],
)
def test_what_a_file_gets_wrong(text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    assert said in error_of(["grpo", "--config", str(file), *NEEDED], capsys)


def test_names_become_the_librarys_objects():
    # Nothing has to be protected from a policy that never evicts, nor has it a budget to spread.
    assert eviction_policy(SamplerArgs(eviction="dense", sinks=4, pyramid=True)) == Dense()
    assert eviction_policy(SamplerArgs(eviction="streaming_llm", sinks=2)) == StreamingLLM(2)
    # What an evaluation names is protected as in training.
    assert with_sinks(SnapKV(), 3) == Protect(SnapKV(), sinks=3) and with_sinks(SnapKV(), 0) == SnapKV()
    assert with_sinks(StreamingLLM(), 0) == StreamingLLM(0) and with_sinks(Dense(), 4) == Dense()
    policy = eviction_policy(SamplerArgs(pyramid=True))
    assert isinstance(policy, Pyramid) and isinstance(policy.inner, Protect) and policy.inner.sinks == 4
    reference = ReferenceArgs()
    assert loss_config(LossArgs(loss_type="dapo"), reference) == smd.losses.dapo()
    given = loss_config(LossArgs(loss_type="dapo", epsilon_high=0.5), ReferenceArgs(beta=0.1, kl_estimator="k2"))
    assert given == dataclasses.replace(smd.losses.dapo(epsilon_high=0.5, beta=0.1), kl_estimator="k2")
    distill = update_config(LossArgs(), reference, SnapKV(), DeviceArgs(), 8, evicts=True).distill
    assert distill is not None and distill.direction == "anchor"
    for policy in (Dense(), SnapKV()):  # also where the budget has room for all keys
        assert update_config(LossArgs(), reference, policy, DeviceArgs(), 8, evicts=False).distill is None
    dense = update_config(LossArgs(correction="tis"), reference, SnapKV(), DeviceArgs(microbatch=2), 8, evicts=True)
    assert dense.visibility == "dense" and dense.rows_per_prompt == 1
    with pytest.raises(ValueError, match="expected, with share_prompts, .* a common divisor above 1; got 8 and 3"):
        update_config(LossArgs(), reference, Dense(), DeviceArgs(microbatch=3, share_prompts=True), 8, evicts=False)
    for microbatch, rows in ((None, 8), (16, 8), (12, 4)):
        device = DeviceArgs(microbatch=microbatch, share_prompts=True)
        assert update_config(LossArgs(), reference, Dense(), device, 8, evicts=False).rows_per_prompt == rows
    with pytest.raises(ValueError, match="only the bounds"):
        loss_config(LossArgs(loss_type="cispo", epsilon=0.1), reference)


def test_errors_are_said_in_flags():
    said = with_flags("lower microbatch_size or prefill_chunk; expected max_new_tokens >= 1")
    for flag in ("--microbatch", "--prefill-chunk", "--max-completion-length"):
        assert flag in said
    assert with_flags("expected a GPU") == "expected a GPU"


@pytest.mark.parametrize(
    ("more", "said", "flags"),
    [
        (
            ["--num-prompts", "3", "--num-generations", "3", "--data-parallel", "8"],
            "expected a minibatch (prompts_per_step * group_size / minibatches) that divides over data axis * fsdp "
            "axis = 8; got 9 rows",
            ["--num-prompts", "--num-generations", "--minibatches", "--data-parallel", "--fsdp"],
        ),
        (
            ["--microbatch", "4", "--fsdp", "8"],
            "expected a microbatch (microbatch_size) that divides over data axis * fsdp axis = 8; got 4 rows",
            ["--microbatch", "--data-parallel", "--fsdp"],
        ),
        (
            ["--num-prompts", "1", "--data-parallel", "4", "--sequence", "2"],
            "expected completions of a step (prompts_per_step * group_size) that divide over data axis * fsdp axis * "
            "sequence axis = 8",
            ["--num-prompts", "--num-generations", "--data-parallel", "--fsdp", "--sequence"],
        ),
        (
            ["--data-parallel", "8", "--fsdp", "2"],
            "expected 16 devices, the product of data axis 8, fsdp axis 2, sequence axis 1 and tensor axis 1; got 8",
            ["--data-parallel", "--fsdp", "--sequence", "--tensor"],
        ),
    ],
)
def test_what_does_not_fit_the_mesh_names_its_flags(
    more: list[str],
    said: str,
    flags: list[str],
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("COLUMNS", "1000")  # no line is broken inside of a flag
    words = ["grpo", "--model", str(model), *SORT, *SMALL, "--output-dir", str(tmp_path / "run"), *more]
    message, _, translated = error_of(words, capsys).partition("In flags: ")
    assert said in message
    assert sorted(flags) == sorted(re.findall("--[a-z-]+", translated))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--platform", "tpu"], "expected JAX to run on 'tpu'"),
        (["--model", "no/such/model"], "expected a checkpoint directory in Hugging Face's format, or an id on the Hub"),
        (["--dataset", "rows.jsonl", "--dataset-parameters"], "expected a file or a folder at"),
        (["--reward", "nonsense"], "expected --reward as one of"),
        (["--dataset", "ROWS", "--dataset-parameters"], "Name one: --reward path/to/file.py:function"),
        (["--eval-steps", "1", "--eval-decode", "snapkv"], "expected a budget of keys, as in snapkv:512"),
        (["--dataset", "reasoning_gym:chain_summ"], "got 'chain_summ'. Did you mean chain_sum"),
        (["--max-steps", "0"], "got 0"),
        (["--data-parallel", "0"], "expected --data-parallel >= 1; got 0"),
        (["--fsdp", "-2", "--tensor", "-4"], "expected --fsdp >= 1; got -2"),
        (["--tensor", "0"], "expected --tensor >= 1; got 0"),
        (["--sequence", "0"], "expected --sequence >= 1; got 0"),
        (["--learning-rate", "-1"], "expected a finite learning_rate > 0; got -1.0"),
        (["--memory", "1KiB"], "expected at most 1.00 KiB on each device; got"),
        (["--memory", "lots"], "as in 80GiB; got 'lots'"),
        (["--num-generations", "1"], "group_size is --num-generations"),
        (["--rollouts-ahead", "1", "--lora-r", "2"], "no --rollouts-ahead with --lora-r; got --lora-r 2"),
        (["--microbatch", "2", "--pack-columns", "600", "--min-completion-length", "2"], "min_new_tokens is --"),
        (["--temperature", "0"], "expected sampling at a temperature > 0"),
        (["--max-prompt-length", "3"], "expected a prompt of 1 to 3 tokens; got none"),
        (["--max-prompt-length", "3"], "expected a prompt of 1 to 3 tokens; got none"),
        (["--chat-template-kwargs", "a"], "expected --chat-template-kwargs as name=value; got 'a'"),
        (["--chat-template-kwargs", "a={"], "expected --chat-template-kwargs as name=value with YAML as value"),
    ],
)
def test_a_users_mistake_is_one_box(
    more: list[str], said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    more = [str(rows) if word == "ROWS" else word for word in more]
    words = ["grpo", "--model", str(model), *SORT, *SMALL, "--output-dir", str(tmp_path / "run"), *more]
    assert said in error_of(words, capsys)
    assert not (tmp_path / "run").exists(), "nothing is left of a run that could not begin"


def test_a_run_from_a_directory_to_a_directory(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    words = ["--model", str(model), *SORT, *SMALL, "--output-dir", str(run), "--max-steps", "2", "--save-steps", "1"]
    words += ["--eval-steps", "1", "--eval-rows", "4", "--metric-for-best-model", "learning_rate"]
    main(["grpo", *words, "--dry-run"])
    said = capsys.readouterr().out
    assert "--- prompt 2" in said and not run.exists()
    assert "checkpoints: the newest 2, and the best one, " in said and "--save-total-limit 1 keeps fewer" in said
    main(["grpo", *words])
    # The command that it prints at its end runs as printed.
    said = capsys.readouterr().out
    printed = re.findall("evaluate it with: smd-eval (.*)", said)
    smd_eval([*shlex.split(printed[0]), "--json"])
    assert re.search(rf"checkpoints: \S+ KiB in {run}/checkpoints, after 1, 2 rollouts; needed only to resume", said)
    evaluated = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rows = read_metrics(run / "metrics.jsonl")
    assert {row["decode"]: row["reward"] for row in evaluated} == {
        name: read_metrics(run / "evaluations.jsonl")[-1][f"eval/{name}/reward"] for name in ("sampler", "dense")
    }
    assert len(rows) == 2 and "learning_rate" in rows[-1]
    # Every 20th rollout, and the last one.
    kept = sorted(path.name for path in (run / "completions").iterdir())
    assert kept == [
        f"{kind}_0000{n}.{end}" for kind, end in (("completions", "parquet"), ("masks", "npz")) for n in (0, 1)
    ]
    assert (run / "training.png").read_bytes().startswith(b"\x89PNG")
    assert "expected no earlier run" in error_of(["grpo", *words], capsys)
    # More steps are no other mathematics, and neither is how much is said; another seed is.
    main(["--config", str(run / "config.yaml"), "--max-steps", "3", "--resume", "--memory", "64MiB"])
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 2]
    said = error_of(["--config", str(run / "config.yaml"), "--resume", "--seed", "1"], capsys)
    assert "seed: expected 0, got 1" in said
    export([str(run), "--out", str(tmp_path / "last")])
    export([str(run), "--out", str(tmp_path / "first"), "--step", "1"])
    export([str(run), "--out", str(tmp_path / "best"), "--best"])  # at the first of equal learning rates
    places = (model, tmp_path / "first", tmp_path / "best", tmp_path / "last", run / "model")
    before, first, best, last, after = (load_checkpoint(place)[1] for place in places)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    jax.tree.map(np.testing.assert_array_equal, last, after)
    jax.tree.map(np.testing.assert_array_equal, best, first)
    assert jax.tree.structure(first) == jax.tree.structure(after)
    plot([str(run), "--out", str(tmp_path / "page.html")])
    assert "eval/dense/reward" in (tmp_path / "page.html").read_text()
    plot([str(run), "--out", str(tmp_path / "curves.svg")])
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")
    assert "expected --out to end in .html, .png or .svg" in error_of([str(run), "--out", "page.pdf"], capsys, plot)


@pytest.mark.slow
def test_rloo_draws_ahead(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    words = ["rloo", "--model", str(model), *SORT, *SMALL, "--output-dir", str(run), "--rollouts-ahead", "1"]
    assert "expected no --rollouts-ahead with --lora-r" in error_of([*words, "--lora-r", "2"], capsys)
    said = error_of([*words, "--correction", "tis"], capsys)
    assert "expected visibility 'shadow'" in said and "rollouts_ahead is --rollouts-ahead" in said
    main([*words, "--max-steps", "2"])
    assert [row["staleness/rollouts"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1]
    main(["--config", str(run / "config.yaml"), "--max-steps", "3", "--resume"])
    assert [row["staleness/rollouts"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 1]
    said = error_of(["--config", str(run / "config.yaml"), "--resume", "--rollouts-ahead", "0"], capsys)
    assert "rollouts_ahead: expected 1, got 0" in said


def test_several_processes_draw_nothing_ahead(monkeypatch: pytest.MonkeyPatch):
    check_ahead(ModelArgs(model="somewhere"))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="expected no --rollouts-ahead with several processes; got 2 of them"):
        check_ahead(ModelArgs(model="somewhere"))


def planned_words(model: Path, run: Path, *more: str) -> list[str]:
    words = ["grpo", "--model", str(model), *SORT, *SMALL, "--output-dir", str(run), "--max-steps", "1"]
    return [*words, "--eval-steps", "1", "--eval-rows", "4", *more]


@pytest.mark.slow
def test_sizes_that_fit_the_memory(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    _, args = parse(planned_words(model, run))
    ready = prepare(args)
    assert ready.memory is None and not ready.chosen
    whole = prepare(parse(planned_words(model, run, "--memory", "1GiB"))[1])
    assert whole.loop.config == ready.loop.config and whole.evaluator is not None and ready.evaluator is not None
    assert whole.evaluator.config == ready.evaluator.config and whole.memory is not None
    less = max(whole.memory.rollout, whole.memory.update) - 1
    main(planned_words(model, run, "--dry-run", "--memory", str(less)))
    said = capsys.readouterr().out
    assert "so that an update fits" in said or "so that a rollout fits" in said
    assert f"into {show_bytes(less)}" in said and "weights, optimizer, reference" in said


@pytest.mark.slow
def test_a_checkpoint_is_evaluated(model: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--model", str(model), "--dataset", "reasoning_gym:distractor_sort", "--eval-rows", "4", "--json"]
    words += ["--dataset-parameters", "num_digits=3", "num_distractors=4", "--max-completion-length", "5"]
    smd_eval([*words, "--eval-decode", "dense", "h2o:12+2", "--num-generations", "2"])
    dense, sparse = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (dense["decode"], sparse["decode"]) == ("dense", "h2o-12-2")
    assert dense["prompts"] == 4 and dense["cache_bytes_per_sequence"] > sparse["cache_bytes_per_sequence"]
    said = error_of([*words, "--eval-decode", "snapkv:12+2"], capsys, smd_eval)
    assert "budget is --budget" in said
    said = error_of([*words, "--data-parallel", "0"], capsys, smd_eval)
    assert "expected --data-parallel >= 1; got 0" in said


def test_a_checkpoint_is_evaluated_on_the_data_that_it_was_trained_on(
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
    return [float(prompt == {"a": "ab?", "b": "abcd?"}[right]) for prompt, right in zip(prompts, gold)]
""")
    data = ["--prompt-column", "asked", "--map-function", f"{tmp_path}/mine.py:row"]
    data += ["--reward", f"{tmp_path}/mine.py:reward"]
    told = ["--chat-template-kwargs", "enable_thinking=false"]
    words = ["--model", f"{tmp_path}/model", "--dataset", str(rows), "--json", "--max-completion-length", "4", *data]
    words += ["--eval-decode", "dense"]
    smd_eval([*words, *told, "--max-prompt-length", "8"])
    output = capsys.readouterr()
    assert json.loads(output.out)["prompts"] == 1 and "the longest has 9 tokens" in output.err  # abcd?<no>
    said = error_of([*words, "--chat-template-kwargs", "enable_thinkin=false"], capsys, smd_eval)
    assert "that the model's chat template reads; got ['enable_thinkin']" in said
    train = ["grpo", "--model", f"{tmp_path}/model", "--dataset", str(rows), *data, *SMALL]
    main([*train, *told, "--output-dir", f"{tmp_path}/run", "--dry-run"])
    assert "abcd?<no>" in capsys.readouterr().out
    assert "got ['tone']" in error_of([*train, "--chat-template-kwargs", "tone=dry"], capsys)


@pytest.mark.parametrize("algorithm", ["rloo", "ppo", "online-dpo"])
def test_the_other_algorithms_take_a_step(algorithm: str, model: Path, tmp_path: Path):
    run = tmp_path / "run"
    more = [] if algorithm == "online-dpo" else ["--distill", "none"]
    main([algorithm, "--model", str(model), *SORT, *SMALL, "--output-dir", str(run), "--max-steps", "1", *more])
    assert len(read_metrics(run / "metrics.jsonl")) == 1
    assert OnlineDpo is ALGORITHMS["online-dpo"]


@pytest.mark.slow
def test_adapters_are_trained_and_exported(model: Path, tmp_path: Path):
    run = tmp_path / "run"
    words = [
        "grpo",
        "--model",
        str(model),
        *SORT,
        *SMALL,
        "--output-dir",
        str(run),
        "--max-steps",
        "1",
        "--lora-r",
        "2",
    ]
    main([*words, "--learning-rate", "1e-2"])
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    before, after = (load_checkpoint(path)[1] for path in (model, run / "model"))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    np.testing.assert_array_equal(before["norm"]["scale"], after["norm"]["scale"])
    export([str(run), "--out", str(tmp_path / "again")])
    again = load_checkpoint(tmp_path / "again")[1]
    jax.tree.map(np.testing.assert_array_equal, again, after)
    export([str(run), "--out", str(tmp_path / "adapter"), "--format", "peft"])
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_not_exported(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    main(["grpo", "--model", str(model), *SORT, *SMALL, "--output-dir", str(run), "--max-steps", "1"])
    largest = max((run / "checkpoints" / "1" / "state").rglob("*"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    said = error_of([str(run), "--out", str(tmp_path / "out")], capsys, export)
    assert "checkpoint 1 in" in said and "cannot be read" in said and not (tmp_path / "out").exists()
