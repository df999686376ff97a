"""Models and tokenizers as commands read them: files fetched from the Hub, missing special tokens, broken files."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from smd_jax.commands.errors import UserError
from smd_jax.commands.export import main as smd_export
from smd_jax.commands.model_source import (
    end_token_ids,
    load_tokenizer,
    model_directory,
    tokenizer_to_export,
    with_reachable_padding,
)
from smd_jax.commands.train import main
from smd_jax.model.weights import load_checkpoint
from smd_jax.testing import byte_tokenizer, tiny_model_config, write_random_checkpoint
from tests.command_errors import error_of

RUN = ["--num-prompts", "2", "--num-generations", "2", "--max-completion-length", "4", "--budget", "12"]
RUN += ["--buffer", "2", "--sinks", "1", "--eviction", "h2o", "--dataset-size", "8", "--reward-timeout", "None"]
RUN += ["--dataset", "reasoning_gym:distractor_sort", "--dataset-parameters", "num_digits=3", "num_distractors=4"]
RUN += ["--max-steps", "1"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_random_checkpoint(tmp_path / "model", config=tiny_model_config(num_layers=1, max_positions=2048))
    return tmp_path / "model"


def edit(file: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if key not in drop}))


class Hub:
    """A repository, of which `snapshot_download` copies the files that match the patterns."""

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        self.snapshot, self.files = folder / "snapshots" / "c0ffee", files
        self.revisions: list[str | None] = []

    def download(self, name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        self.revisions.append(revision)
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for file, text in self.files.items():
            if any(fnmatch(file, pattern) for pattern in allow_patterns):
                (self.snapshot / file).parent.mkdir(exist_ok=True)
                (self.snapshot / file).write_text(text)
        return str(self.snapshot)

    @property
    def weights(self) -> list[str]:
        return sorted(str(file.relative_to(self.snapshot)) for file in self.snapshot.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("there", "fetched"),
    [
        (["model.safetensors"], ["model.safetensors"]),
        (["model.safetensors", "consolidated.safetensors", "onnx/model.safetensors"], ["model.safetensors"]),
        (["a-1.safetensors", "a-2.safetensors", "consolidated.safetensors"], ["a-1.safetensors", "a-2.safetensors"]),
        (["a-1.safetensors", "a-2.safetensors", "model.safetensors"], ["model.safetensors"]),
        (["a-1.safetensors", "a-2.safetensors", "a-1.fp16.safetensors"], ["a-1.safetensors", "a-2.safetensors"]),
        (["pytorch_model.bin"], []),
    ],
)
def test_only_the_weights_that_are_read_are_fetched(
    there: list[str], fetched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """transformers reads model.safetensors if there is one, and else the shards of the index."""
    files = dict.fromkeys([*there, "tokenizer.json", "additional_chat_templates/tools.jinja"], "")
    files["config.json"] = "{}"
    if "a-1.safetensors" in there:
        index = {"weight_map": {"a": "a-1.safetensors", "b": "a-2.safetensors", "c": "a-1.safetensors"}}
        files["model.safetensors.index.json"] = json.dumps(index)
    hub = Hub(tmp_path, files)
    monkeypatch.setattr("smd_jax.commands.model_source.snapshot_download", hub.download)
    assert model_directory("owner/name", "main") == hub.snapshot
    assert hub.weights == fetched
    assert (hub.snapshot / "additional_chat_templates/tools.jinja").is_file()
    # One commit, even if the branch moves between the calls.
    assert hub.revisions[0] == "main" and set(hub.revisions[1:]) == {"c0ffee"}


def test_an_index_that_names_other_files_fetches_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for shard in ("../a.safetensors", 7, "x" * 10**6):
        index = json.dumps({"weight_map": {"a": shard}})
        hub = Hub(tmp_path, {"config.json": "{}", "model.safetensors.index.json": index, "a.safetensors": ""})
        monkeypatch.setattr("smd_jax.commands.model_source.snapshot_download", hub.download)
        with pytest.raises(UserError, match="must name safetensors files in its own directory") as caught:
            model_directory("owner/name")
        assert hub.weights == [] and len(str(caught.value)) < 400


def test_a_tokenizer_without_end_and_padding_has_those_of_the_model(model: Path):
    # A Llama: the tokenizers of Qwen have an end of their own.
    write_random_checkpoint(model, config=tiny_model_config(num_layers=1, qkv_bias=False))
    edit(model / "tokenizer_config.json", drop=("eos_token", "pad_token"), tokenizer_class="PreTrainedTokenizerFast")
    edit(model / "generation_config.json", eos_token_id=[257, 258], pad_token_id=256)
    tokenizer = load_tokenizer(model)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_start|>", "<|endoftext|>")
    assert end_token_ids(model, tokenizer, ()) == (257, 258)
    (model / "generation_config.json").unlink()  # config.json has 258 and 256
    tokenizer = load_tokenizer(model)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    edit(model / "config.json", pad_token_id=-1)  # older Llamas
    assert load_tokenizer(model).pad_token == "<|im_end|>"
    edit(model / "config.json", eos_token_id=None, pad_token_id=None)
    tokenizer = load_tokenizer(model)
    assert tokenizer.eos_token is None and tokenizer.pad_token is not None
    with pytest.raises(UserError, match=r"a token that ends a completion, from .* got none. Name one with --eos-token"):
        end_token_ids(model, tokenizer, ())
    assert end_token_ids(model, tokenizer, ("<|im_end|>",)) == (258,)


def test_ends_are_taken_from_config_json_where_no_other_file_has_them(model: Path):
    edit(model / "config.json", eos_token_id=[256, 258])
    edit(model / "generation_config.json", eos_token_id=257)
    tokenizer = load_tokenizer(model)
    assert end_token_ids(model, tokenizer, ()) == (257, 258)
    edit(model / "generation_config.json", eos_token_id=None)
    assert end_token_ids(model, tokenizer, ()) == (256, 258)
    (model / "generation_config.json").unlink()
    assert end_token_ids(model, tokenizer, ()) == (256, 258)


def test_ends_and_padding_without_a_row_are_left_out(model: Path):
    tokenizer = byte_tokenizer()
    assert end_token_ids(model, tokenizer, (), vocab_size=259) == (258,)
    edit(model / "generation_config.json", eos_token_id=[256, 258, 10**9])
    assert end_token_ids(model, tokenizer, (), vocab_size=259) == (256, 258)
    assert end_token_ids(model, tokenizer, (), vocab_size=258) == (256,)
    with pytest.raises(UserError, match=r"ids \[256, 258, 1000000000\], and an embedding of 256 rows"):
        end_token_ids(model, tokenizer, (), vocab_size=256)
    with pytest.raises(UserError, match="expected --eos-token as tokens of the tokenizer"):
        end_token_ids(model, tokenizer, ("<|im_end|>",), vocab_size=258)
    # A padding token that was added to the tokenizer alone.
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert with_reachable_padding(tokenizer, 260).pad_token_id == 259
    assert with_reachable_padding(tokenizer, 259).pad_token_id == 0 and tokenizer.pad_token_id == 259


def test_an_exported_tokenizer_ends_where_training_did():
    tokenizer = byte_tokenizer()
    assert tokenizer_to_export(tokenizer, True, (256, 258)) is None
    assert tokenizer_to_export(tokenizer, False, (256, 258)) is tokenizer
    changed = tokenizer_to_export(tokenizer, True, (256,))
    assert (changed.eos_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert changed.encode("a<|im_end|>") == tokenizer.encode("a<|im_end|>")
    # Prompts that have EOS in them stay as they were.
    tokenizer.chat_template = "{{ messages[0].content + eos_token }}"
    assert tokenizer_to_export(tokenizer, True, (256,)) is None


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "null"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"model": 7}'),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", "7"),
        ("tokenizer_config.json", "\x00"),
        ("tokenizer_config.json", '{"tokenizer_class": 7}'),
        ("tokenizer_config.json", '{"eos_token": 7}'),
        ("tokenizer_config.json", '{"chat_template": {"default": 7}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}'),
        ("tokenizer_config.json", '{"model_max_length": "many"}'),
        ("tokenizer_config.json", '{"extra_special_tokens": 7}'),
        ("special_tokens_map.json", '{"eos_token": 7}'),
    ],
)
def test_files_of_a_tokenizer_that_cannot_be(file: str, content: str, model: Path):
    """Read, or refused in one error; transformers itself takes some of these values and does not use them."""
    (model / file).write_text(content)
    try:
        tokenizer = load_tokenizer(model)
    except UserError as error:
        assert str(model) in str(error) and len(str(error)) < 600
    else:
        assert tokenizer.encode("a") == [97] and isinstance(tokenizer.pad_token, str)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("content", ["{", "[1]", '{"eos_token_id": "x"}', '{"eos_token_id": [true]}', "[" * 100_000])
def test_files_with_ends_that_cannot_be(file: str, content: str, model: Path):
    tokenizer = load_tokenizer(model)
    (model / "generation_config.json").unlink()
    (model / file).write_text(content)
    with pytest.raises(UserError, match=f"{file}") as caught:
        end_token_ids(model, tokenizer, ())
    assert len(str(caught.value)) < 400


@pytest.mark.slow
def test_ends_of_a_run_are_those_of_its_exports(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = tmp_path / "run"
    words = ["grpo", "--model", str(model), *RUN, "--output-dir", str(run), "--eos-token", "<|endoftext|>"]
    main(words)
    smd_export([str(run), "--out", str(tmp_path / "again")])
    for folder in (run / "model", tmp_path / "again"):
        for name in ("config.json", "generation_config.json"):
            assert json.loads((folder / name).read_text())["eos_token_id"] == 256
        assert end_token_ids(folder, load_tokenizer(folder), ()) == (256,)
        load_checkpoint(folder)


@pytest.mark.slow
def test_an_export_that_fails_does_not_cost_the_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    run = tmp_path / "run"

    def fails(*_: object, **__: object) -> None:
        raise ValueError("a reason")

    monkeypatch.setattr("smd_jax.commands.train.save_checkpoint", fails)
    said = error_of(["grpo", "--model", str(model), *RUN, "--output-dir", str(run)], capsys)
    assert "The run is complete, and its checkpoints are saved. Its export failed: a reason" in said
    assert "To repeat it: smd-export" in said
    assert (run / "training.png").is_file()
    smd_export([str(run), "--out", str(tmp_path / "again")])
    load_checkpoint(tmp_path / "again")


def test_what_the_export_needs_is_checked_before_the_first_rollout(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.move(model / "tokenizer.json", tmp_path / "tokenizer.json")
    (model / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    words = ["grpo", "--model", str(model), *RUN, "--output-dir", str(tmp_path / "run")]
    for more in ([], ["--dry-run"]):
        assert "itself, because the export copies it; got a link to" in error_of([*words, *more], capsys)
    assert not (tmp_path / "run").exists()


def test_prompts_with_a_token_that_has_no_row(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Gemma 3 1B has a token for images beyond its embedding."""
    tokenizer = load_tokenizer(model)
    tokenizer.add_tokens(["<image>", *(f"<{i}>" for i in range(10))], special_tokens=True)
    tokenizer.save_pretrained(model)
    rows = tmp_path / "rows.jsonl"
    words = ["grpo", "--model", str(model), *RUN, "--dataset", str(rows), "--reward", "math_answer", "--dry-run"]
    words += ["--output-dir", str(tmp_path / "run")]
    words = [word for word in words if word not in ("--dataset-parameters", "num_digits=3", "num_distractors=4")]
    rows.write_text('{"prompt": "One?", "answer": "1"}\n{"prompt": "Two?", "answer": "2"}\n')
    main(words)
    rows.write_text('{"prompt": "One?", "answer": "1"}\n{"prompt": "A <9>?", "answer": "2"}\n')
    assert "got '<9>' in row 1, outside its embedding of 264 rows" in error_of(words, capsys)
