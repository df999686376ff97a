"""Mistakes of users: each ends a command with one error box, before anything is written."""

import dataclasses
import importlib.util
import re
import shlex
import shutil
import sys
import typing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from smd_jax.commands import config_file, console_scripts
from smd_jax.commands.command_line import ALGORITHMS, parse
from smd_jax.commands.errors import FLAGS, LONGEST, LONGEST_LINE, UserError, print_box, with_flags
from smd_jax.commands.evaluate import main as smd_eval
from smd_jax.commands.evaluate import read
from smd_jax.commands.export import main as smd_export
from smd_jax.commands.limits import READ_IN_EVALUATION, READ_IN_TRAINING, unread_options
from smd_jax.commands.model_source import load_tokenizer
from smd_jax.commands.plot import main as smd_plot
from smd_jax.commands.train import config_text, main
from tests.command_errors import error_of
from tests.commands.conftest import MakeArgv

RULES = READ_IN_TRAINING
YAML_BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
CONVERSATION = "--environment FOLDER/own.py:Count --max-prompt-length 64"
ENVIRONMENT = """
class Count:
    def reset(self, row):
        return "n = " + row["answer"]

    def step(self, text):
        return "", 1.0, True
"""
CODE = {"own": ENVIRONMENT, "raises": "x = 1\nraise RuntimeError('no key')", "exits": "import sys\nsys.exit(3)"}
CODE["asks"] = "def reward(completions, answr):\n    return []"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        # numbers
        ("--seed -1", "expected --seed from 0 to 4294967295; got -1"),
        ("--eval-steps 1 --eval-seed 4294967296", "expected --eval-seed from 0 to 4294967295; got 4294967296"),
        ("--print-completions -1", "expected --print-completions from 0 to 16777216; got -1"),
        ("--eval-rows 0", "expected --eval-rows from 1 to 16777216; got 0"),
        ("--save-total-limit 0", "expected --save-total-limit from 1 to"),
        ("--tensor 0", "expected --tensor from 1 to"),
        ("--max-completion-length 5000", "2048 tokens together, the model's context; got"),
        ("--top-entropy-quantile 0", "expected --top-entropy-quantile > 0"),
        ("--num-generations 1", "group_size is --num-generations"),
        ("--memory 1KiB", "expected at most 1.00 KiB on each device; got"),
        ("--memory lots", "as in 80GiB; got 'lots'"),
        ("--data-parallel 8 --fsdp 2", "sequence axis 1 and tensor axis 1; got 8"),
        ("--num-prompts 3 --num-generations 3 --data-parallel 8", "prompts_per_step is --num-prompts"),
        ("--data-parallel 4", "the number of devices; got 4"),
        # names
        ("--platform tpu", "expected JAX to run on 'tpu'"),
        ("--model no/such/model", "expected a checkpoint directory in Hugging Face's format, or an id on the Hub"),
        ("--model MODEL --model-revision v1", "expected no --model-revision with --model"),
        ("--tokenizer-revision v1", "expected --tokenizer, an id on the Hub, with --tokenizer-revision 'v1'"),
        ("--tokenizer ./nowhere", "--tokenizer: expected a"),
        ("--dataset rows.jsonl --dataset-parameters", "expected a file or a folder at"),
        ("--dataset FOLDER/prompts.jsonl --dataset-parameters", "Name one: --reward path/to/file.py:function"),
        ("--dataset FOLDER/rows.jsonl --dataset-parameters --reward format", "prompt_column is --prompt-column"),
        ("--reward nonsense", "expected --reward as one of"),
        ("--reward format --reward overlong", "expected --reward once, with all its values after it; got it 2 times"),
        ("--stop a --stop=b", "expected --stop once"),
        ("--max-prompt-length 3", "expected a prompt of 1 to 3 tokens; got none"),
        ("--chat-template-kwargs a", "expected --chat-template-kwargs as name=value; got 'a'"),
        ("--chat-template-kwargs a={", "expected --chat-template-kwargs as name=value with YAML as value"),
        ("--chat-template-kwargs tone=dry", "that the model's chat template reads; got ['tone']"),
        ("--eval-steps 1 --eval-decode snapkv", "expected a budget of keys, as in snapkv:512"),
        ("--metric-for-best-model eval/dense/reward", "expected --eval-steps with --metric-for-best-model"),
        ("--resume", "got none. To begin one, leave --resume out"),
        # options that exclude each other
        ("--rollouts-ahead 1 --lora-r 2", "expected whole parameters and one process with rollouts_ahead 1"),
        ("--rollouts-ahead 1 --correction tis", "visibility is --correction"),
        ("--microbatch 2 --pack-columns 600 --min-completion-length 2", "min_new_tokens is --"),
        ("--microbatch 2 --pack-columns 600 --memory 1GiB", "expected no --memory with --pack-columns; set"),
        ("--loss-type cispo --epsilon 0.1", "bounds of the loss 'cispo', among ['epsilon_high']; got ['epsilon']"),
        ("--share-prompts --microbatch 3", "a common divisor above 1; got 4 and 3"),
        # policies
        ("--eviction snapkv(window=20)", "sinks is --sinks, window is --eviction 'NAME(window=8)'."),
        ("--eviction FOLDER/own.py:Count", "EvictionPolicy or an object of one; got type <class"),
        ("--eval-steps 1 --eval-decode gate:6", "expected --eviction gate with --eval-decode gate-6"),
        ("--eviction gate(greedy=True)", "expected a gate that samples its evictions"),
        ("--eviction gate --pyramid", "expected no --pyramid with 'gate'"),
        ("--eviction gate --gate-speed 0", "expected a finite gate_speed > 0"),
        # environments
        ("--environment FOLDER/own.py:Count", "expected --max-prompt-length with --environment"),
        ("--environment FOLDER/own.py:Count --reward format", "expected no --reward with --environment"),
        ("--environment nowhere.py:Count --max-prompt-length 64", "expected a file of Python code at"),
        (f"{CONVERSATION} --quant-bits 8 --buffer 32", "expected quant None in a conversation"),
        (f"{CONVERSATION} --contexts 2 --context-length 2 --turn-credit turn", "expected credit 'trajectory'"),
        ("--contexts 2", "expected --contexts of at least 2 with --context-length"),
        ("--contexts 2 --context-length 40", "expected --environment with --contexts"),
        # code of the user's own, and packages that are not installed
        ("--reward FOLDER/raises.py:reward", "it raised RuntimeError in line 2: no key"),
        ("--reward FOLDER/exits.py:reward", "it raised SystemExit in line 2: 3"),
        ("--reward FOLDER/asks.py:reward", "got ['answr'] among its parameters, which neither"),
        ("--report-to wandb", "wandb, which is not installed"),
        ("--report-to tensorboard", "tensorboardX, which is not installed"),
        # other algorithms
        ("online-dpo: --num-prompts 4 --microbatch 3", "expected a microbatch_size that divides 4 pairs; got 3"),
        ("online-dpo: --eviction gate", "expected grpo or rloo with --eviction gate"),
        ("ppo: --eviction gate", "expected grpo or rloo with --eviction gate"),
    ],
)
def test_a_mistake_prints_one_box(flags: str, message: str, train_argv: MakeArgv, model, tmp_path, monkeypatch, capsys):
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "result": "2"}\n' * 2)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1?"}\n' * 2)
    for name, code in CODE.items():
        (tmp_path / f"{name}.py").write_text(code)
    for package in ("wandb", "tensorboardX"):
        monkeypatch.setitem(sys.modules, package, None)
    algorithm, _, flags = flags.rpartition(": ")
    argv = shlex.split(flags.replace("FOLDER", str(tmp_path)).replace("MODEL", str(model)))
    assert message in error_of(train_argv(*argv, algorithm=algorithm or "grpo"), capsys)
    assert not (tmp_path / "run").exists(), "a run that cannot start writes nothing"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "expected a YAML file; found none at"),
        ("bugdet: 3", "expected an option of this command; got 'bugdet'. Did you mean budget?"),
        ("budget: [3, 4]", "expected one value in 'budget'; got a list, [3, 4]"),
        ("budget: true", "expected a number or a text in 'budget'; got 'True'"),
        ("dry_run: 'true'", "expected true or false in 'dry_run'; got 'true'"),
        ("- budget", "expected options, one `name: value` a line"),
        ("budget: 3\nsinks: 1\nbudget: 4", "expected 'budget' once in a mapping; got it 2 times"),
        ("chat_template_kwargs: {b: [{a: 1, 'a': 2}]}", "expected 'a' once in a mapping; got it 2 times"),
        ("budget: [", "expected YAML; got"),
        ("budget: {a: 1}", "expected a number, a text or a list of them in 'budget'"),
        ("algorithm: ppo", "expected 'algorithm' as grpo; got 'ppo'"),
        ("output_dir: null", "expected a value of 'output_dir'; got null"),
        ("stop: ['a', '-b']", "expected several values in 'stop' that are no flags; got ['-b']"),
        ("stop: [null]", "expected a number, a text or a list of them in 'stop'"),
        ("output_dir: ~nosuchuser/x", "expected a path; got '~nosuchuser/x'"),
        ("output_dir: " + "x" * 5000, "File name too long"),
        ("output_dir: sweep[lr=1]", "expected a path without * ? ["),
        ("num_prompts: 4000000000000", "expected --num-prompts from 0 to 16777216; got 4000000000000"),
        (YAML_BOMB, "expected YAML without aliases; got *a"),
        ("a: " + "[" * 500 + "]" * 500, "expected YAML of at most 20 levels"),
        ("a: " + "x" * 6_000_000, "expected at most 1,310,720 characters; got 6,000,003 bytes"),
        ("a: !!python/object:os.system x", "expected YAML; got"),
        ("? [a]\n: b", "expected"),
        ("a: 2020-13-45", "month must be in 1..12"),
    ],
)
def test_a_wrong_config_prints_one_box(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    if text is not None:
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    argv = ["grpo", "--model", "nowhere", "--dataset", "gsm8k", "--config", str(tmp_path / "run.yaml")]
    error = error_of(argv, capsys)
    assert message in error and len(error) < LONGEST + 500


@pytest.mark.parametrize(
    ("flags", "suggestion"),
    [
        ("--config colors.yaml", "colours.yaml"),
        ("--config colours.yaml", "budget"),
        ("--model modle", "model"),
        ("--dataset GSM8K", "gsm8k"),
        ("--dataset colors.jsonl", "colours.jsonl"),
        ("--dataset gsm8k --dataset-source ./colors.jsonl", "colours.jsonl"),
        ("--dataset reasoning_gym:chain_summ --dataset-parameters", "chain_sum"),
        ("--reward mine.py:rewrad", "reward"),
        ("--reward mien.py:reward", "mine.py"),
        ("--reward exact_mach", "exact_match"),
        ("--eviction snapvk", "snapkv"),
        ("--eviction mine.py:Olds", "Old"),
    ],
)
def test_a_misspelled_name_gets_its_nearest_match(
    flags: str,
    suggestion: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(model)
    Path("colours.yaml").write_text("bugdet: 3\n")
    Path("colours.jsonl").write_text('{"prompt": "a"}\n')
    Path("mine.py").write_text("from smd_jax.eviction import H2O\n\n\nclass Old(H2O): ...\n\n\ndef reward(**_): ...\n")
    argv = ["grpo", "--model", "model", "--dataset", "colours.jsonl", *flags.split()]
    argv += [] if "--reward" in argv else ["--reward", "mine.py:reward"]
    assert re.search(rf"Did you mean {re.escape(suggestion)}( or [^?]*)?\?", error_of(argv, capsys))


@pytest.mark.parametrize("argv", [[], ["nothing"], ["--model", "m", "--dataset", "d"], ["dpo", "--model", "m"]])
def test_a_command_line_without_an_algorithm(argv: list[str], capsys: pytest.CaptureFixture[str]):
    assert "expected an algorithm first, one of ['grpo', 'rloo', 'ppo', 'online-dpo']" in error_of(argv, capsys)


def test_a_chat_template_that_rejects_the_messages(
    train_argv: MakeArgv, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(model, tmp_path / "model")
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(refuses + "{{ messages[0]['content'] }}")
    message = error_of(train_argv("--model", f"{tmp_path}/model", "--system-prompt", "Add."), capsys)
    assert "got those of ['system', 'user'], and it says: " in message and "System role not supported" in message


def test_prompts_with_a_token_outside_the_embedding(
    train_argv: MakeArgv, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Gemma 3 1B has a token for images beyond its embedding."""
    shutil.copytree(model, tmp_path / "model")
    tokenizer = load_tokenizer(model)
    tokenizer.add_tokens([f"<{i}>" for i in range(10)], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "One?"}\n{"prompt": "A <9>?"}\n')
    argv = ["--model", f"{tmp_path}/model", "--dataset", f"{tmp_path}/rows.jsonl", "--dataset-parameters"]
    message = error_of(train_argv(*argv, "--reward", "format"), capsys)
    assert "got '<9>' in row 1, outside its embedding of 264 rows" in message
    message = error_of([*argv[:-1], "--reward", "format"], capsys, smd_eval)
    assert "got '<9>' in row 1, outside its embedding of 264 rows" in message


@pytest.mark.slow
def test_logits_that_are_not_finite(
    train_argv: MakeArgv, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(model, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    save_file(
        tensors | {"model.norm.weight": np.full_like(tensors["model.norm.weight"], 3e38)},
        tmp_path / "model" / "model.safetensors",
    )
    argv = train_argv("--model", f"{tmp_path}/model")
    assert "expected finite logits in the sampler; got NaN or infinity in" in error_of(argv, capsys)


def test_commands_without_their_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(console_scripts, "find_spec", lambda name: None if name == "tyro" else find_spec(name))
    with pytest.raises(SystemExit) as end:
        console_scripts.smd_train()
    assert (
        end.value.code == 2 and "the packages tyro; got none: pip install 'smd_jax[train]'" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model RUN/model", "expected --model elsewhere than"),
        ("--tokenizer RUN/model", "expected --tokenizer elsewhere than"),
        ("--model RUN", "expected --output-dir other than the folder of --model"),
        ("--dataset FOLDER --dataset-parameters --reward format", "outside the folder of --dataset"),
        ("--eval-steps 1 --eval-dataset FOLDER", "outside the folder of --eval-dataset"),
    ],
)
def test_an_output_folder_that_overlaps_the_model_or_the_data(
    flags: str, message: str, train_argv: MakeArgv, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The run would replace its base model, train on its own completions, or fail to resume."""
    run = tmp_path / "run"
    shutil.copytree(model, run)
    shutil.copytree(model, run / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?"}\n' * 2)
    argv = shlex.split(flags.replace("FOLDER", str(tmp_path)).replace("RUN", str(run)))
    assert message in error_of(train_argv("--dry-run", *argv), capsys)


@pytest.mark.parametrize("name", ["model", "adapter", "gate"])
def test_a_run_does_not_replace_files_of_others(
    name: str, train_argv: MakeArgv, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "run" / name).mkdir(parents=True)
    message = error_of(train_argv("--dry-run"), capsys)
    assert f"expectednothingat{tmp_path}/run/{name},whichtherunwrites" in message.replace(" ", "")


def test_mistakes_of_the_other_commands(
    train_argv: MakeArgv, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(config_text(*parse(train_argv())))
    for command, argv, message in (
        (smd_eval, f"--run {tmp_path}", "expected a run with its config.yaml in"),
        (smd_eval, f"--model {model} --dataset gsm8k --data-parallel 0", "expected --data-parallel from 1 to"),
        (smd_export, f"{tmp_path} --out {tmp_path}/out", "expected a run with its config.yaml in"),
        (smd_eval, f"--model {model} --dataset gsm8k --eval-seed 3", "--eval-seed only with reasoning_gym:NAME"),
        (smd_export, f"{run} --out {tmp_path}/out --best --step 4", "expected --best or --step; got both"),
        (smd_export, f"{run} --out {model}", "expected --out elsewhere than the base model of the run"),
        (smd_plot, f"{tmp_path} --out page.pdf", "expected --out to end in .html, .png or .svg"),
    ):
        assert message in error_of(argv.split(), capsys, command)


def test_ctrl_c_before_the_run_starts(
    train_argv: MakeArgv, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("smd_jax.commands.prepare.open_model", interrupted)
    with pytest.raises(SystemExit) as end:
        main(train_argv())
    message = capsys.readouterr().err
    assert end.value.code == 130 and "by Ctrl-C" in message and "Traceback" not in message


def test_options_that_the_run_does_not_read():
    argv = ["grpo", "--model", "m", "--dataset", "d"]
    changed = ["--lora-alpha", "8", "--use-rslora", "--kl-estimator", "k1", "--ref-model-sync-steps", "3"]
    changed += ["--overlong-cache", "9", "--max-turns", "3", "--summary-heading", "So far:"]
    changed += ["--gate-speed", "3", "--eval-split", "test", "--greater-is-better", "False"]
    switches = ["--lora-r", "4", "--beta", "0.1", "--sync-ref-model"]
    switches += ["--reward", "overlong", "--environment", "retry", "--contexts", "2", "--eviction", "gate"]
    switches += ["--eval-steps", "1", "--metric-for-best-model", "reward"]
    needed = ("--reward overlong", "--environment", "--contexts", "--lora-r", "--beta", "--sync-ref-model")
    needed += ("--eviction gate", "--eval-steps", "--metric-for-best-model")
    lines = unread_options(parse([*argv, *changed])[1], RULES)
    assert lines[3] == "--lora-alpha, --use-rslora: no effect without --lora-r"
    for line, flag in zip(lines, needed, strict=True):
        assert f": no effect without {flag}" in line
    assert unread_options(parse(argv)[1], RULES) == unread_options(parse([*argv, *changed, *switches])[1], RULES) == []
    assert unread_options(parse([*["online-dpo", *argv[1:]], *changed[:3]])[1], RULES) == [lines[3]]
    off = ["--eviction", "dense", "--sinks", "2", "--optim", "adafactor", "--adam-beta1", "0.8"]
    off += ["--correction", "tis", "--mismatch-bound", "1"]
    off += ["--dataset-size", "9", "--completions-steps", "0", "--print-completions", "1"]
    off += ["--environment", "retry", "--reward-timeout", "9"]
    lines = [line.split(":")[0] for line in unread_options(parse([*argv, *off])[1], RULES)]
    expected = ["--dataset-size", "--sinks", "--reward-timeout", "--mismatch-bound", "--adam-beta1"]
    assert lines == [*expected, "--print-completions"]
    full_cache = ["--eviction", "dense", "--distill", "reverse", "--dense-share", "0.5", "--budget", "64"]
    lines = unread_options(parse([*argv, *full_cache])[1], RULES)
    assert [line.split(":")[0] for line in lines] == ["--budget", "--distill", "--dense-share"]
    assert len(unread_options(parse([*argv, *full_cache, "--quant-bits", "4"])[1], RULES)) == 1
    moving = ["--distill", "ema", "--sync-ref-model"]
    assert unread_options(parse([*argv, *moving])[1], RULES)[0].startswith("--sync-ref-model: no effect in a run of")
    assert unread_options(parse([*argv, *moving, "--minibatches", "6"])[1], RULES) == []


def test_messages_name_flags_and_are_short(capsys: pytest.CaptureFixture[str]):
    message = with_flags("lower microbatch_size; expected max_new_tokens >= 1")
    assert "microbatch_size is --microbatch" in message and "max_new_tokens is --max-completion-length" in message
    assert with_flags("expected a GPU") == "expected a GPU"
    assert with_flags("expected steps of at least 9; got 8").endswith("\nIn flags: steps is --max-steps.")
    print_box("error", "begin " + "x" * 5000 + " end")
    message = re.sub(r"[\s│]", "", capsys.readouterr().err)
    assert "beginx" in message and "xend" in message and len(message) < LONGEST_LINE + 200


def test_every_option_is_one_flag():
    names = [config_file.options_of(kind) for kind in ALGORITHMS.values()]
    assert {flag.split()[0] for flag in FLAGS.values()} <= {
        f"--{name.replace('_', '-')}" for options in names for name in options
    }
    # Flags have no prefix of their group, so two groups of an algorithm must not share an option name.
    for kind, options in zip(ALGORITHMS.values(), names, strict=True):
        groups = typing.get_type_hints(kind).values()
        assert len(options) == sum(len(dataclasses.fields(group)) for group in groups)


def test_options_that_an_evaluation_does_not_read():
    argv = ["--model", "m", "--dataset", "d"]
    changed = ["--max-turns", "3", "--overlong-cache", "9", "--dataset-size", "9", "--eval-rows", "3"]
    lines = [line.split(":")[0] for line in unread_options(read([*argv, *changed]), READ_IN_EVALUATION)]
    assert lines == ["--dataset-size", "--overlong-cache", "--max-turns"]
    assert unread_options(read(argv), READ_IN_EVALUATION) == []


def test_debug_shows_the_error_itself():
    with pytest.raises(UserError, match="expected an algorithm first"):
        main(["--debug", "nothing"])
