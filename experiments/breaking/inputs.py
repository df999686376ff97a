"""Hostile input for `smd-train`: configurations, names, data, models and chat templates.

Each must end in one error that names what was expected, within a minute and without a gigabyte of memory.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from breaking.disks import files_of
from breaking.run_result import Fault, Outcome
from smd_jax.commands.train import main as smd_train
from smd_jax.testing import write_random_checkpoint

SECONDS = 120
MEMORY = 2**30
LONGEST_ERROR = 2_500
SIZES = {"--num-prompts": "2", "--num-generations": "2", "--max-completion-length": "64", "--max-steps": "1"}
ROW = '{"prompt": "1 + 1?", "answer": "2"}\n'

Words = dict[str, str]  # options of smd-train, besides those of a run that works


class Case(NamedTuple):
    """One input. Attributes: writes its files and gives its options; a text that the error has."""

    prepare: Callable[[Path], Words]
    says: str


def one_error(*cases: Case) -> Fault:
    """Runs that must end in one error, and change none of their files."""

    def fault(folder: Path, rng: random.Random) -> Iterator[Outcome]:
        for number, case in enumerate(cases):
            place = folder / str(number)
            write_random_checkpoint(place / "model")
            (place / "rows.jsonl").write_text(ROW * 4)
            options = case.prepare(place)
            before = files_of(place)
            said = error_of(options, place)
            left = {name: content for name, content in files_of(place).items() if name != "run/process.lock"}
            yield Outcome(case.says in said and left == before)

    return fault


def error_of(options: Words, place: Path) -> str:
    """The error of a run, in one line; empty if it is a traceback, too long, too slow, or needs too much memory."""
    given = {"--model": f"{place}/model", "--dataset": f"{place}/rows.jsonl", "--reward": "format", **SIZES}
    given |= {"--budget": "40", "--buffer": "8", "--output-dir": f"{place}/run"} | options
    words = ["--config", options["--config"]] if "--config" in options else ["grpo"]
    words += [] if "--config" in options else [word for pair in given.items() for word in pair]
    printed = StringIO()
    before = peak_memory()
    signal.signal(signal.SIGALRM, _raise_timeout)
    signal.alarm(SECONDS)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(printed):
            smd_train(words)
        return ""
    except SystemExit as end:
        said = " ".join(printed.getvalue().replace("│", " ").split())
        bounded = peak_memory() - before < MEMORY and len(said) < LONGEST_ERROR
        return said if end.code == 2 and "Traceback" not in said and bounded else ""
    except TimeoutError:
        return ""
    finally:
        signal.alarm(0)


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _raise_timeout(number: int, frame: object) -> None:
    raise TimeoutError


def option(name: str, value: str, says: str) -> Case:
    return Case(lambda place: {name: value}, says)


def written(name: str, content: str | bytes | Callable[[bytes], bytes], says: str, option: str = "") -> Case:
    """A file with this content, or with what a function makes of its bytes; its path is the value of `option`.

    With a slash in its name `option` gets the folder.
    """

    def prepare(place: Path) -> Words:
        file = place / name
        file.parent.mkdir(exist_ok=True)
        if isinstance(content, str):
            file.write_bytes(content.encode("utf-8", "surrogatepass"))
        else:
            file.write_bytes(content if isinstance(content, bytes) else content(file.read_bytes()))
        return {option: str(file.parent if "/" in name else file)} if option else {}

    return Case(prepare, says)


def configuration(text: str, says: str) -> Case:
    return written("run.yaml", text, says, "--config")


def data(name: str, content: str | bytes, says: str) -> Case:
    """A data file; with a slash in its name a file of a data folder."""
    return written(name, content, says, "--dataset")


def model_file(name: str, content: str | bytes, says: str) -> Case:
    """A file of the model that is something else."""
    return written(f"model/{name}", content, says)


def model_config(says: str, **values: Any) -> Case:
    """A config.json with other values."""
    return written("model/config.json", lambda text: json.dumps(json.loads(text) | values).encode(), says)


def weights(change: Callable[[bytes], bytes], says: str) -> Case:
    """A model.safetensors with other bytes."""
    return written("model/model.safetensors", change, says)


def _not_finite(place: Path) -> Words:
    file = place / "model" / "model.safetensors"
    arrays = load_file(file)
    save_file({name: np.full_like(array, np.nan) for name, array in arrays.items()}, file, {"format": "pt"})
    return {}


def _long_index(place: Path) -> Words:
    shutil.move(place / "model" / "model.safetensors", place / "model" / "a.safetensors")
    index = {"weight_map": {"x" * 3_000_000: "a.safetensors", "y": "z" * 3_000_000}}
    (place / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    return {}


GOOD = "algorithm: grpo\nmodel: nowhere\ndataset: gsm8k\n"
LAUGHS = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
CARD = "---\n{}\n---\n"
DEEP = '{"prompt": "a", "x": ' + "[" * 5000 + "]" * 5000 + "}\n"
ZEROS = b'{"prompt": "' + b"0" * 300_000_000 + b'"}\n'
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = "{% set n = namespace(x='x') %}" + "{% set n.x = n.x + n.x %}" * 60

KINDS: dict[str, Fault] = {
    "YAML that grows, nests or never ends": one_error(
        configuration(LAUGHS, "expected YAML without aliases; got *a"),
        configuration("a: " + "[" * 5000 + "]" * 5000, "expected YAML of at most 20 levels"),
        configuration("a: " + "{a: " * 5000, "expected YAML of at most 20 levels"),
        configuration("a: " + "x" * 6_000_000, "expected at most 1,310,720 characters"),
        configuration("a: !!python/object:os.system x", "expected YAML; got"),
        configuration("\x00", "expected YAML"),
    ),
    "configuration of wrong types": one_error(
        configuration(GOOD.replace("grpo", "[grpo]"), "expected 'algorithm' as"),
        configuration(GOOD + "output_dir: null", "expected a value of 'output_dir'; got null"),
        configuration(GOOD + "stop: [null]", "expected a number, a text or a list of them in 'stop'"),
        configuration(GOOD + "stop: [{a: b}]", "expected a number, a text or a list of them in 'stop'"),
        configuration("? [a]\n: b", "expected"),
    ),
    "sizes and seeds that cannot be": one_error(
        option("--budget", "2147483648", "expected --budget from 0 to 16777216"),
        option("--num-prompts", "4000000000000", "expected --num-prompts from 0 to 16777216"),
        option("--seed", "9223372036854775808", "expected --seed from 0 to 4294967295"),
        option("--seed", "-1", "expected --seed"),
    ),
    "names that are no paths": one_error(
        option("--output-dir", "x" * 5000, "File name too long"),
        option("--output-dir", "~nosuchuser/run", "expected a path; got '~nosuchuser/run'"),
        option("--dataset", "x" * 5000, "expected"),
        option("--dataset", "rows\udcff.jsonl", "expected"),
        option("--dataset", "~nosuchuser/rows.jsonl", "expected"),
        option("--model", "\udcff", "expected"),
        option("--model", "../nowhere", "expected"),
    ),
    "rows that would be changed": one_error(
        data("two.csv", "prompt,a,a\nx,1,2\n", "expected columns of different names"),
        data("long.csv", "prompt,a\nx,1,2\n", "expected 2 fields in every row"),
        data("short.tsv", "prompt\ta\nx\n", "expected 2 fields in every row"),
        data("two.jsonl", '{"prompt": "x", "prompt": "y"}\n', "expected fields of different names"),
        data("half.jsonl", '{"prompt": "\\ud83d"}\n', "surrogates not allowed"),
        data("half.json", '[{"prompt": "\\ud83d"}]', "surrogates not allowed"),
        data("latin.jsonl", b'{"prompt": "\xff"}\n', "expected"),
    ),
    "rows that nest or unpack without end": one_error(
        data("deep.jsonl", DEEP, "expected JSON nested at most 64 deep"),
        data("deep.json", f"[{DEEP}]", "expected JSON nested at most 64 deep"),
        data("zeros.jsonl.gz", gzip.compress(ZEROS), "to unpack to at most"),
        data("zeros.jsonl.bz2", bz2.compress(ZEROS), "to unpack to at most"),
        data("zeros.csv.xz", lzma.compress(ZEROS, preset=0), "to unpack to at most"),
        data("digits.jsonl", '{"prompt": ' + "9" * 100_000 + "}\n", "expected"),
        data("folder/README.md", CARD.format(LAUGHS * 3), "expected"),
        data("folder/README.md", CARD.format("a: " + "[" * 5000), "expected YAML of at most 50 levels"),
    ),
    "data of another kind than its name": one_error(
        data("rows.csv", b"PAR1" + bytes(100), "got a parquet file"),
        data("rows.jsonl", gzip.compress(ROW.encode()), "got a file compressed by gzip"),
        data("rows.parquet", ROW, "expected a parquet file"),
        data("rows.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:0", "got a pointer of Git LFS"),
        data("rows.jsonl", "", "got an empty file"),
        data("rows.jsonl.gz", gzip.compress(ROW.encode() * 100)[:-20], "expected"),
    ),
    "config.json that asks for more than the weights hold": one_error(
        model_config("expected head_dim of at most 2147483647; got 2147483648", head_dim=2**31),
        model_config("expected [", head_dim=2**30),
        model_config("`num_hidden_layers` (100000)", num_hidden_layers=100_000),
        model_config("embed_tokens.weight: expected [2147483647", vocab_size=2**31 - 1),
        model_config("gate_proj.weight: expected [2147483647", intermediate_size=2**31 - 1),
    ),
    "config.json of wrong types": one_error(
        model_config("num_hidden_layers", num_hidden_layers="2"),
        model_config("num_hidden_layers", num_hidden_layers=True),
        model_config("expected hidden_size", hidden_size=-1),
        model_config("expected a finite norm_eps >= 0; got nan", rms_norm_eps=float("nan")),
        model_config("rms_norm_eps", rms_norm_eps="small"),
        model_file("config.json", '{"model_type": "qwen2", "hidden_size": 1e400}', "expected"),
        model_file("config.json", "[]", "config.json must hold a JSON object"),
        model_file("config.json", "{", "config.json is not JSON"),
        model_file("config.json", b"\xff\xfe", "config.json is not JSON"),
    ),
    "tokenizer files that are none": one_error(
        model_file("tokenizer.json", "null", "expected"),
        model_file("tokenizer.json", "{", "expected"),
        model_file("tokenizer.json", '{"model": 3}', "expected"),
        model_file("tokenizer_config.json", "[]", "expected"),
        model_file("tokenizer_config.json", "{}" * 1000, "expected"),
    ),
    "damaged weights": one_error(
        weights(lambda content: content[:100], "not a readable safetensors file"),
        weights(lambda content: b"", "not a readable safetensors file"),
        weights(lambda content: b"\xff" * 8 + content[8:], "not a readable safetensors file"),
        weights(lambda content: content[:8] + b"[" * 1000 + content[1008:], "not a readable safetensors file"),
        Case(_long_index, "must name safetensors files in its own directory"),
        Case(_not_finite, "finite"),
    ),
    "chat template that never ends": one_error(
        model_file("chat_template.jinja", LOOP, "it takes longer than"),
        model_file("chat_template.jinja", "{{ 7 ** (10 ** 9) }}", "it takes longer than"),
        model_file("chat_template.jinja", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ),
    "chat template that takes all memory, or raises": one_error(
        model_file("chat_template.jinja", DOUBLES, "it needs more than 1,073,741,824 bytes of memory"),
        model_file("chat_template.jinja", "{{ 'x' * 10 ** 10 }}", "it needs more than 1,073,741,824 bytes of memory"),
        model_file("chat_template.jinja", "{{ 'x' * 10 ** 8 }}", "it renders 100,000,000 characters"),
        model_file("chat_template.jinja", "{{ messages[0].content + none }}", "TypeError"),
        model_file("chat_template.jinja", "{{ 1 / 0 }}", "ZeroDivisionError"),
        model_file("chat_template.jinja", "{% for m in messages %}", "TemplateSyntaxError"),
        model_file("chat_template.jinja", "{{ raise_exception('x' * 50000) }}", "TemplateError"),
    ),
}
