"""Untrusted files, archives and completions execute no code, leave no folder and control no terminal."""

import io
import json
import pickle
import re
import warnings
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from smd_jax.commands import errors
from smd_jax.commands.command_line import parse
from smd_jax.commands.errors import UserError, plain_warnings, print_box
from smd_jax.commands.model_source import load_tokenizer
from smd_jax.config import ModelConfig
from smd_jax.model.weights import save_checkpoint
from smd_jax.monitor import progress
from smd_jax.monitor.completions import load_masks
from smd_jax.runs import checkpoint
from smd_jax.tasks.reasoning_gym import EXPRESSIONS, LITERALS, ReasoningGymTask, readable_answer
from smd_jax.tasks.reward_calls import packed, unpacked
from smd_jax.tasks.reward_functions import math_answer
from smd_jax.tasks.rewards import Failure
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config
from tests.paths import ROOT

SOURCE_FOLDERS = ("smd_jax", "kernels", "experiments", "docs", ".ci")
# Calls of NumPy and transformers. Ruff finds other dangerous calls.
UNSAFE_LOAD = re.compile(
    r"np\.load\((?!.*allow_pickle=False)|allow_pickle=True|Auto\w+\.from_pretrained\((?!.*trust_remote_code=False)"
)


def test_no_source_loads_pickles_or_remote_code():
    other_environments = ("hf_", "kvpress_", "torch_", "trl_")  # in their own environments
    unsafe = {
        str(path): UNSAFE_LOAD.findall(path.read_text(encoding="utf-8"))
        for folder in SOURCE_FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not path.name.startswith(other_environments)
    }
    assert not {name: calls for name, calls in unsafe.items() if calls}
    assert len(UNSAFE_LOAD.findall("np.load(x)\nnp.savez(x, allow_pickle=True)\nAutoTokenizer.from_pretrained(x)")) == 3


# --- untrusted files


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_a_trap_runs_when_unpickled(tmp_path: Path):
    pickle.loads(pickle.dumps(Trap(tmp_path / "sprung")))
    assert (tmp_path / "sprung").exists()


def test_masks_with_a_pickle_are_refused(tmp_path: Path):
    trap = np.empty(1, object)
    trap[0] = Trap(tmp_path / "sprung")
    np.savez(tmp_path / "masks.npz", allow_pickle=True, others=trap)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        load_masks(tmp_path / "masks.npz")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "message",
    [pickle.dumps([0.5]), b"", b"[0.5]", b'{"values": [0.5, 0.5]}', b'{"values": ["x"]}', b'{"values": [NaN]}'],
)
def test_invalid_messages_of_a_reward_process_raise(message: bytes):
    with pytest.raises(ValueError):
        unpacked(message, 1)


@pytest.mark.parametrize("outcome", [[0.5, None, ("a number", "'x'")], ("ValueError", "x\ud800"), []])
def test_messages_of_a_reward_process_round_trip(outcome):
    assert unpacked(packed(outcome), len(outcome)) == outcome


def test_no_code_of_a_tokenizer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    byte_tokenizer().save_pretrained(tmp_path)
    secret = tmp_path.parent / "secret.json"
    secret.write_text("not a tokenizer")
    file = tmp_path / "tokenizer_config.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(saved | {"tokenizer_file": "../secret.json", "vocab_file": str(secret)}))
    assert load_tokenizer(tmp_path).encode("a", add_special_tokens=False) == [97], "its own file"
    file.write_text(json.dumps(saved | {"auto_map": {"AutoTokenizer": [None, "trap.Trap"]}, "tokenizer_class": "Trap"}))
    (tmp_path / "trap.py").write_text(
        f"import pathlib; pathlib.Path({str(tmp_path / 'sprung')!r}).touch()\nTrap = None"
    )
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run code"))
    with pytest.raises(UserError, match="without running its code"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "sprung").exists()


# --- paths outside of a folder


def test_an_export_copies_no_file_outside_the_source(tmp_path: Path):
    config: ModelConfig = tiny_model_config(num_layers=1)
    params = random_params(config)
    source, secret = tmp_path / "source", tmp_path / "id_rsa"
    source.mkdir()
    secret.write_text("mine")
    byte_tokenizer().save_pretrained(source)
    (source / "generation_config.json").symlink_to(secret)
    message = "expected generation_config.json in .*source itself, because the export copies it; got a link to .*id_rsa"
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path / "out", params, config, tokenizer_from=source)
    assert not (tmp_path / "out").exists()
    # Links of the Hub's cache to its own files are followed.
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in source.iterdir():
        if file.name != "generation_config.json":
            file.rename(blobs / file.name)
            (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    save_checkpoint(tmp_path / "out", params, config, tokenizer_from=snapshot)
    assert (tmp_path / "out" / "tokenizer.json").is_file() and not (tmp_path / "out" / "tokenizer.json").is_symlink()


def test_the_config_file_of_a_run_must_name_its_own_folder(tmp_path: Path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    file, elsewhere = run / "config.yaml", tmp_path / "home"
    file.write_text(f"algorithm: grpo\nmodel: m\ndataset: gsm8k\noutput_dir: {elsewhere}\n")
    with pytest.raises(UserError, match=r"expected output_dir to be .*run, the folder of this run; got .*home"):
        parse(["--config", str(file), "--resume"])
    assert parse(["--config", str(file), "--output-dir", str(run)])[1].run.output_dir == run
    file.write_text(f"algorithm: grpo\nmodel: m\ndataset: gsm8k\noutput_dir: {run}/../run\n")
    parse(["--config", str(file), "--resume"])
    # A config file outside a run may name any folder.
    own = tmp_path / "mine.yaml"
    own.write_text(f"algorithm: grpo\nmodel: m\ndataset: gsm8k\noutput_dir: {elsewhere}\n")
    assert parse(["--config", str(own)])[1].run.output_dir == elsewhere


def test_a_preset_is_no_path():
    with pytest.raises(UserError, match="expected a preset"):
        parse(["--preset", "../../../etc/passwd"])


def test_names_in_a_checkpoint_stay_in_its_folder(tmp_path: Path):
    state = {"x": np.zeros(2, np.float32)}
    with checkpoint.Writer(tmp_path / "checkpoints") as writer:
        writer.save(1, state, config={})
    sums = tmp_path / "checkpoints" / "1" / "checksums.json"
    sums.write_text(json.dumps(json.loads(sums.read_text()) | {"../../secret": 1}))
    with pytest.raises(checkpoint.DamagedCheckpointError, match=r"\.\./\.\./secret \(no file\)"):
        checkpoint.restore(tmp_path / "checkpoints", state, config={})
    (tmp_path / "elsewhere").mkdir()
    for name in ("..", "2/../../elsewhere", "-1", "1e3"):
        with pytest.raises((ValueError, TypeError, FileNotFoundError)):
            checkpoint.restore(tmp_path / "checkpoints", state, config={}, step=name)  # pyright: ignore


# --- completions


def test_which_verifiers_evaluate_answers():
    """In the installed reasoning-gym. Review every verifier that a new version adds to these lists."""
    package = Path(find_spec("reasoning_gym").submodule_search_locations[0])  # pyright: ignore
    calls = re.compile(r"(?<![\w.])(eval|(?:sympy\.|sp\.)?(?:parse_expr|sympify))\((?:predicted_|user_)?answer\b")
    calls_of_verifier = {path.stem: set(calls.findall(path.read_text("utf-8"))) for path in package.rglob("*.py")}
    assert {name for name, how in calls_of_verifier.items() if "eval" in how} == LITERALS
    assert {name for name, how in calls_of_verifier.items() if how - {"eval"}} == EXPRESSIONS


def malicious_answers(file: Path) -> list[str]:
    touch = f"__import__('pathlib').Path('{file}').touch()"
    return [
        *(touch, f"[{touch}]", f"1+{touch}", f"(lambda: {touch})()", f"[x for x in [{touch}]]"),
        *(f"open('{file}', 'w')", f"(open)('{file}', 'w')", f"open ('{file}', 'w')+4!", f"{touch}+4!"),
        *(f'S("{touch}")', f"sin.__class__('{file}')", f"f'{{{touch}}}'", f"x if {touch} else 1"),
        *(f"\\boxed{{{touch}}}", f"#### {touch}", f"$({touch})$"),
    ]


@pytest.mark.parametrize("name", sorted(LITERALS | EXPRESSIONS))
def test_verifiers_execute_no_answer(name: str, tmp_path: Path):
    task = ReasoningGymTask(name, seed=0, size=1)
    row = task[0]
    texts = malicious_answers(tmp_path / "sprung")
    columns = {key: [row[key]] * len(texts) for key in ("answer", "metadata")}
    unreadable = task.reward([row["prompt"]], ["?"], answer=[row["answer"]], metadata=[row["metadata"]])
    assert task.reward([row["prompt"]] * len(texts), texts, **columns) == unreadable * len(texts)
    assert not (tmp_path / "sprung").exists()


def test_math_verify_executes_no_answer(tmp_path: Path):
    texts = malicious_answers(tmp_path / "sprung")
    math_answer(texts, ["18"] * len(texts))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        *(("n_queens", "[['_', 'Q'], ['Q', '_']]"), ("n_queens", "_ Q\nQ _"), ("spiral_matrix", "1 2 -3")),
        *(("countdown", "(3 + 4) * 2 - 10 / 5"), ("puzzle24", "(8/(3-8/3))"), ("countdown", "4! + 3**2")),
        *(("simple_integration", "2*x**3/3 + sin(x) - exp(2*x) + C"), ("polynomial_multiplication", "x**2 - 2*x*y")),
        ("chain_sum", "__import__('os')"),  # its verifier compares texts
    ],
)
def test_harmless_answers_are_readable(name: str, answer: str):
    assert readable_answer(name, answer) == answer


ESCAPES = "a\x1b[31mred\x1b]0;title\x07 [bold]x[/bold] \x9b2J\u202eabc\r\x00"


def shown_text(show) -> str:
    file = io.StringIO()
    show(file)
    return file.getvalue()


def show_in_box(file: io.StringIO) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(errors, "Console", lambda **options: Console(**options | {"file": file, "width": 200}))
        print_box(ESCAPES, ESCAPES)


def show_report(file: io.StringIO) -> None:
    with progress.training_progress(1, name=ESCAPES, file=file) as report:
        report(1, {"reward": 1.0})


def show_warning(file: io.StringIO) -> None:
    with plain_warnings():
        file.write(warnings.formatwarning(UserWarning(ESCAPES), UserWarning, "x", 1))


@pytest.mark.parametrize(
    "show",
    [
        *(show_in_box, show_report, show_warning),
        lambda file: progress.summary_table(ESCAPES, ["x", ESCAPES], [["y", ESCAPES]], file=file, width=200),
        lambda file: file.write(Failure(0, "f", "ValueError", ESCAPES).described()),
    ],
    ids=["box", "report", "warning", "table", "failure"],
)
def test_control_characters_are_escaped(show):
    shown = shown_text(show)
    assert "[bold]x[/bold]" in shown and "␛[31mred" in shown
    assert not set(shown) & set("\x1b\x07\x9b\u202e\r\x00")


# --- the audit of the pins


@pytest.mark.parametrize(
    ("out", "err", "status", "message"),
    [
        ('{"dependencies": [{"name": "a", "version": "1", "vulns": []}]}', "", 0, "1 pinned versions, nothing known"),
        (
            '{"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}]}',
            *("Found 1 known vulnerability", 1, "got 1:\na 1: X-1, mended in 2"),
        ),
        (
            "",
            "Traceback\nrequests.exceptions.ConnectionError: no route",
            0,
            "not audited: the service cannot be reached",
        ),
        ("", "ERROR:pip_audit._cli:requirements.txt: no such file", 1, "pip-audit failed with exit status 1"),
    ],
    ids=["clean", "known", "offline", "broken"],
)
def test_the_audit_distinguishes_offline_from_clean(out: str, err: str, status: int, message: str):
    spec = spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    assert spec is not None and spec.loader is not None
    audit = module_from_spec(spec)
    spec.loader.exec_module(audit)
    got, text = audit.verdict(1 if err else 0, out, err)
    assert got == status and message in text
    assert all((ROOT / file).is_file() for file in audit.PINS)
