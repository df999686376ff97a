"""Exported tokenizer files: end tokens of training, files of the source, transformers 4 and 5."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from smd_jax.commands.model_source import end_token_ids, load_tokenizer
from smd_jax.model.tokenizer_files import token_ids
from smd_jax.model.weights import check_export_source, load_checkpoint, save_checkpoint
from smd_jax.testing import byte_tokenizer, tiny_model_config, write_random_checkpoint

CONFIG = tiny_model_config(num_layers=1)
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "transformers_version": "4.51.0"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A chat model as on the Hub, with several end tokens and sampling defaults."""
    write_random_checkpoint(tmp_path / "source", config=CONFIG)
    edit(tmp_path / "source" / "config.json", eos_token_id=258)
    edit(tmp_path / "source" / "generation_config.json", eos_token_id=[258, 256], **SAMPLING)
    return tmp_path / "source"


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def exported(source: Path, name: str = "out", **options: Any) -> Path:
    save_checkpoint(source.parent / name, load_checkpoint(source)[1], CONFIG, tokenizer_from=source, **options)
    return source.parent / name


def written_end_ids(folder: Path) -> list[Any]:
    return [read(folder / name).get("eos_token_id") for name in ("config.json", "generation_config.json")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "written"), [((256, 258), [258, 256]), ((258,), 258), ((257, 258), [257, 258]), ((256,), 256)]
)
def test_both_files_have_the_end_tokens_of_training(source: Path, ends: tuple[int, ...], written: object):
    for tokenizer in (None, load_tokenizer(source)):
        out = exported(source, tokenizer=tokenizer, end_token_ids=ends)
        assert written_end_ids(out) == [written, written]
        # The sampling defaults of the source stay.
        assert read(out / "generation_config.json").items() >= SAMPLING.items()
        assert GenerationConfig.from_pretrained(out).eos_token_id == written


def test_end_tokens_default_to_those_of_the_source(source: Path):
    assert written_end_ids(exported(source)) == [258, [258, 256]]
    # A tokenizer with another EOS adds it, as a rollout does.
    tokenizer = byte_tokenizer()
    assert written_end_ids(exported(source, tokenizer=tokenizer)) == [[258, 256]] * 2
    tokenizer.eos_token = "<|im_start|>"
    assert written_end_ids(exported(source, tokenizer=tokenizer)) == [[258, 256, 257]] * 2


def test_padding_ids_outside_of_the_embedding_are_not_written(source: Path):
    """transformers makes the id the embedding's padding_idx, and refuses one outside of the embedding."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<{i}>" for i in range(CONFIG.vocab_size - len(tokenizer))])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == CONFIG.vocab_size
    names = ("config.json", "generation_config.json")
    for id_of_source in (None, CONFIG.vocab_size):
        for name in names:
            edit(source / name, pad_token_id=id_of_source)
        out = exported(source, tokenizer=tokenizer)
        assert [read(out / name).get("pad_token_id") for name in names] == [None, None]
        assert AutoTokenizer.from_pretrained(out).pad_token == "[PAD]"


def test_generation_config_keeps_its_own_padding_and_bos(source: Path):
    edit(source / "config.json", pad_token_id=-1, bos_token_id=7)
    edit(source / "generation_config.json", pad_token_id=5, bos_token_id=6)
    out = exported(source, end_token_ids=(256,))
    written, generation = read(out / "config.json"), read(out / "generation_config.json")
    assert (written["pad_token_id"], written["bos_token_id"], written["eos_token_id"]) == (None, 7, 256)
    assert (generation["pad_token_id"], generation["bos_token_id"], generation["eos_token_id"]) == (5, 6, 256)
    # Missing values come from config.json.
    edit(source / "generation_config.json", pad_token_id=-1, bos_token_id=None)
    edit(source / "config.json", pad_token_id=4)
    generation = read(exported(source, end_token_ids=(256,)) / "generation_config.json")
    assert (generation["pad_token_id"], generation["bos_token_id"]) == (4, 7)
    # An explicit tokenizer replaces its padding token, and has no BOS.
    edit(source / "generation_config.json", pad_token_id=5, bos_token_id=6)
    generation = read(exported(source, tokenizer=byte_tokenizer(), end_token_ids=(256,)) / "generation_config.json")
    assert (generation["pad_token_id"], generation["bos_token_id"]) == (256, 6)


def test_a_tokenizer_alone_is_its_own_source(tmp_path: Path, source: Path):
    save_checkpoint(tmp_path / "out", load_checkpoint(source)[1], CONFIG, tokenizer=byte_tokenizer())
    assert written_end_ids(tmp_path / "out") == [258, 258]
    assert read(tmp_path / "out" / "config.json")["pad_token_id"] == 256


@pytest.mark.slow
@pytest.mark.parametrize("copied", [True, False])
def test_named_chat_templates_survive_and_a_second_export_replaces_the_first(source: Path, copied: bool):
    templates = {"default": "one", "tool_use": "two {{ messages }}"}
    tokenizer = load_tokenizer(source)
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(source)
    for _ in range(2):
        out = exported(source, tokenizer=None if copied else tokenizer)
        assert AutoTokenizer.from_pretrained(out).chat_template == templates
    # Old templates are removed.
    out = exported(source, tokenizer=byte_tokenizer())
    assert isinstance(AutoTokenizer.from_pretrained(out).chat_template, str)
    # Other files in the folder of templates are kept.
    exported(source)
    (out / "additional_chat_templates" / "notes.md").touch()
    with pytest.raises(FileExistsError, match="also holds additional_chat_templates"):
        exported(source)


@pytest.mark.slow
@pytest.mark.parametrize("copied", [True, False])
def test_transformers_4_can_open_the_tokenizer(source: Path, copied: bool):
    """Only transformers 5 knows the class TokenizersBackend and extra_special_tokens as a list."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(source)
    before = read(source / "tokenizer_config.json")
    assert before["tokenizer_class"] == "TokenizersBackend" and before["extra_special_tokens"] == ["<|im_start|>"]
    out = exported(source, tokenizer=None if copied else tokenizer)
    config = read(out / "tokenizer_config.json")
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["additional_special_tokens"] == ["<|im_start|>"] and "extra_special_tokens" not in config
    found, expected = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(source)
    text = "Hé <|im_start|>user\n<|im_end|>"
    assert type(found) is type(expected) and found.encode(text) == expected.encode(text)
    assert found.special_tokens_map == expected.special_tokens_map


def test_a_class_that_transformers_4_knows_is_kept(source: Path):
    edit(source / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer", extra_special_tokens={})
    before = (source / "tokenizer_config.json").read_bytes()
    assert (exported(source) / "tokenizer_config.json").read_bytes() == before


def test_exported_end_tokens_are_read_back(source: Path):
    for ends in ((256, 258), (257, 258)):
        out = exported(source, end_token_ids=ends)
        assert end_token_ids(out, load_tokenizer(out), ()) == ends


def test_invalid_sources_are_refused_before_the_export(source: Path):
    check_export_source(CONFIG, source)
    check_export_source(CONFIG, source, byte_tokenizer())
    (source / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match="generation_config.json is not JSON"):
        check_export_source(CONFIG, source, byte_tokenizer())
    (source / "generation_config.json").unlink()
    (source / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="expected tokenizer.json, tokenizer.model or vocab.json in"):
        check_export_source(CONFIG, source)


def test_token_ids_are_an_id_or_a_list():
    for value, ids in ((None, []), (3, [3]), ([3, 1], [3, 1]), (-1, []), ([], [])):
        assert token_ids({"eos_token_id": value}, "eos_token_id", "file") == ids
    assert token_ids({}, "eos_token_id", "file") == []
    for value in (True, "3", [None], -2):
        with pytest.raises(ValueError, match="expected eos_token_id in file as an id, or a list of ids; got "):
            token_ids({"eos_token_id": value}, "eos_token_id", "file")
