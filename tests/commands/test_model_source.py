"""Models and tokenizers as commands read them: files fetched from the Hub, missing special tokens, broken files."""

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from smd_jax.commands.arguments import DataArgs, ModelSource, SamplingArgs
from smd_jax.commands.errors import UserError
from smd_jax.commands.export import main as smd_export
from smd_jax.commands.model_source import (
    end_token_ids,
    load_tokenizer,
    model_directory,
    open_model,
    tokenizer_to_export,
)
from smd_jax.commands.train import main
from smd_jax.model.weights import load_checkpoint
from smd_jax.testing import byte_tokenizer, tiny_model_config, write_random_checkpoint
from smd_jax.text.hugging_face import AutoTokenizer
from smd_jax.text.tokenizer_file import splits_as_file
from tests.command_errors import error_of
from tests.commands.conftest import MakeArgv


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_random_checkpoint(tmp_path / "model", config=tiny_model_config(num_layers=1, max_positions=2048))
    return tmp_path / "model"


def edit(file: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if key not in drop}))


@pytest.mark.parametrize(
    ("repository_files", "fetched"),
    [
        (["model.safetensors", "consolidated.safetensors", "onnx/model.safetensors"], ["model.safetensors"]),
        (
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "consolidated.safetensors"],
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ),
        (["a.safetensors", "b.safetensors", "c.safetensors"], ["a.safetensors", "b.safetensors"]),
        (["pytorch_model.bin"], []),
    ],
)
def test_only_the_weights_that_are_read_are_fetched(
    repository_files: list[str], fetched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    patterns: list[str] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        patterns.extend(allow_patterns)
        return str(tmp_path)

    (tmp_path / "config.json").write_text("{}")
    if len(fetched) > 1:
        weight_map = {f"tensor {number}": shard for number, shard in enumerate(fetched)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    monkeypatch.setattr("smd_jax.commands.model_source.snapshot_download", download)
    assert model_directory("owner/name", "main") == tmp_path
    texts = ["tokenizer.json", "additional_chat_templates/tools.jinja", "model.safetensors.index.json"]
    downloaded = [file for file in [*texts, *repository_files] if any(fnmatch(file, pattern) for pattern in patterns)]
    assert downloaded == [*texts, *fetched]


def test_a_tokenizer_splits_text_as_its_file(model: Path):
    """transformers 5 rebuilds this class from vocabulary and merges, without the digits of SmolLM2's file."""
    file = Tokenizer.from_file(str(model / "tokenizer.json"))
    digits = pre_tokenizers.Digits(individual_digits=True)
    file.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    file.save(str(model / "tokenizer.json"))
    edit(model / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    edit(model / "config.json", model_type="llama")
    loaded = load_tokenizer(model)
    assert splits_as_file(loaded, model / "tokenizer.json")
    assert not splits_as_file(AutoTokenizer.from_pretrained(model), model / "tokenizer.json"), "or nothing was tested"
    assert loaded.encode("x   512") == file.encode("x   512").ids and loaded.chat_template is not None


@pytest.mark.parametrize(
    "setting",
    [{"ignore_merges": True}, {"byte_fallback": True}, {"fuse_unk": True}, {"unk_token": "a"}, {"dropout": 0.5}, {}],
    ids=lambda setting: "".join(setting) or "decoder",
)
def test_a_tokenizer_has_the_settings_of_its_file(setting: dict[str, Any], model: Path):
    """Some tokenizer classes of transformers 5 ignore them; vocabulary and splitting are the same."""
    AutoTokenizer.from_pretrained(model).save_pretrained(model)
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"] |= setting
    if not setting:
        content["decoder"] = {"type": "Fuse"}
    (model / "tokenizer.json").write_text(json.dumps(content))
    rebuilt, loaded = AutoTokenizer.from_pretrained(model), load_tokenizer(model)
    assert not splits_as_file(rebuilt, model / "tokenizer.json"), "or nothing was tested"
    assert splits_as_file(loaded, model / "tokenizer.json")
    for name, value in setting.items():
        assert getattr(loaded.backend_tokenizer.model, name) == value


def test_a_class_that_splits_as_its_file_is_kept(model: Path):
    original = AutoTokenizer.from_pretrained(model)
    original.save_pretrained(model)
    content = (model / "tokenizer.json").read_text()
    assert type(original).__name__ == "Qwen2Tokenizer" and type(load_tokenizer(model)) is type(original)
    # trim_offsets changes no ids; only some versions of tokenizers write it.
    assert content.count('"trim_offsets": true') == 2, "in the pre-tokenizer and the decoder"
    for other in ('"trim_offsets": false', '"trim_offsets": true'):
        (model / "tokenizer.json").write_text(content.replace('"trim_offsets": true', other))
        assert type(load_tokenizer(model)) is type(original)


def test_missing_eos_and_pad_tokens_come_from_the_model(model: Path):
    # A Llama, because Qwen's tokenizer class has its own EOS token.
    write_random_checkpoint(model, config=tiny_model_config(num_layers=1, qkv_bias=False))
    edit(model / "tokenizer_config.json", drop=("eos_token", "pad_token"), tokenizer_class="PreTrainedTokenizerFast")
    edit(model / "generation_config.json", eos_token_id=[257, 258], pad_token_id=256)
    tokenizer = load_tokenizer(model)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_start|>", "<|endoftext|>")
    edit(model / "config.json", eos_token_id=[258, 256])
    assert end_token_ids(model, tokenizer, ()) == (257, 258), "from the first file that has one"
    edit(model / "generation_config.json", eos_token_id=None)
    assert end_token_ids(model, tokenizer, ()) == (256, 257, 258)
    (model / "generation_config.json").unlink()
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


def test_eos_ids_outside_the_embedding_are_left_out(model: Path):
    tokenizer = byte_tokenizer()
    assert end_token_ids(model, tokenizer, (), vocab_size=259) == (258,)
    edit(model / "generation_config.json", eos_token_id=[256, 258, 10**9])
    assert end_token_ids(model, tokenizer, (), vocab_size=259) == (256, 258)
    assert end_token_ids(model, tokenizer, (), vocab_size=258) == (256,)
    with pytest.raises(UserError, match=r"ids \[256, 258, 1000000000\], and an embedding of 256 rows"):
        end_token_ids(model, tokenizer, (), vocab_size=256)
    with pytest.raises(UserError, match="expected --eos-token as tokens of the tokenizer"):
        end_token_ids(model, tokenizer, ("<|im_end|>",), vocab_size=258)


def test_a_pad_token_outside_the_embedding_is_replaced(model: Path):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]", "additional_special_tokens": [f"<{i}>" for i in range(9)]})
    tokenizer.pad_token = "<8>"
    tokenizer.save_pretrained(model)
    source = ModelSource(model=str(model), tokenizer=str(model))  # a named tokenizer is exported
    opened = open_model(source, DataArgs(dataset="gsm8k"), SamplingArgs())
    exported: Any = opened.exported_tokenizer
    assert exported.pad_token_id >= opened.config.vocab_size and opened.tokenizer.pad_token_id == 0


def test_an_exported_tokenizer_has_the_eos_token_of_training(model: Path):
    tokenizer = byte_tokenizer()
    assert tokenizer_to_export(tokenizer, True, (256, 258)) is None
    assert tokenizer_to_export(tokenizer, False, (256, 258)) is tokenizer
    changed = tokenizer_to_export(tokenizer, True, (256,))
    assert (changed.eos_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert changed.encode("a<|im_end|>") == tokenizer.encode("a<|im_end|>")
    # The first --eos-token becomes EOS.
    ends = end_token_ids(model, tokenizer, ("<|im_start|>", "<|endoftext|>", "<|im_start|>"))
    assert ends == (257, 256) and tokenizer_to_export(tokenizer, True, ends).eos_token == "<|im_start|>"
    # A chat template that writes EOS must not change the prompts.
    tokenizer.chat_template = "{{ messages[0].content + eos_token }}"
    assert tokenizer_to_export(tokenizer, True, (256,)) is None


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "null"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", "\x00"),
        ("tokenizer_config.json", '{"tokenizer_class": 7}'),
        ("tokenizer_config.json", '{"eos_token": 7}'),
        ("special_tokens_map.json", '{"eos_token": 7}'),
    ],
)
def test_broken_tokenizer_files(file: str, content: str, model: Path):
    """Loads or raises one error: transformers accepts some of these values and ignores them."""
    (model / file).write_text(content)
    try:
        tokenizer = load_tokenizer(model)
    except UserError as error:
        assert str(model) in str(error) and len(str(error)) < 600
    else:
        assert tokenizer.encode("a") == [97] and isinstance(tokenizer.pad_token, str)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("content", ["{", "[1]", *(f'{{"eos_token_id": {ids}}}' for ids in ('"x"', "[true]", "[1.5]"))])
def test_invalid_eos_ids_name_their_file(file: str, content: str, model: Path):
    tokenizer = load_tokenizer(model)
    (model / "generation_config.json").unlink()
    (model / file).write_text(content)
    with pytest.raises(ValueError, match=f"{file}") as caught:
        end_token_ids(model, tokenizer, ())
    assert len(str(caught.value)) < 400


@pytest.mark.slow
def test_the_eos_token_of_a_run_is_exported(train_argv: MakeArgv, tmp_path: Path):
    run = tmp_path / "run"
    main(train_argv("--eos-token", "<|endoftext|>"))
    smd_export([str(run), "--out", str(tmp_path / "again")])
    for folder in (run / "model", tmp_path / "again"):
        for name in ("config.json", "generation_config.json"):
            assert json.loads((folder / name).read_text())["eos_token_id"] == 256
        assert end_token_ids(folder, load_tokenizer(folder), ()) == (256,)
        load_checkpoint(folder)


def test_files_to_export_are_checked_before_the_first_rollout(
    model: Path, train_argv: MakeArgv, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.move(model / "tokenizer.json", tmp_path / "tokenizer.json")
    (model / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    assert "itself, because the export copies it; got a link to" in error_of(train_argv("--model", str(model)), capsys)
    assert not (tmp_path / "run").exists()
