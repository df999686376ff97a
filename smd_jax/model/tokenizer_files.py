"""Tokenizer, chat template and generation files of an exported checkpoint.

The end tokens of the training run are written to config.json and generation_config.json, so that other libraries stop
at the same tokens. Tokenizer, chat templates and sampling defaults come from the source.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smd_jax.model.stored_tensors import read_json, shown

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATES = "additional_chat_templates"  # folder with one file per named template
GENERATION = "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# transformers 5 writes the first of these; 4 and 5 read the second.
_CLASS_OF_5, _CLASS_OF_BOTH = "TokenizersBackend", "PreTrainedTokenizerFast"


def write_tokenizer(
    target: Path, source: Path | None, tokenizer: Any, end_token_ids: Sequence[int] | None, vocab_size: int
) -> dict[str, Any]:
    """Writes the tokenizer and generation_config.json of a checkpoint; arguments as `save_checkpoint`.

    Args:
      vocab_size: rows of the embedding. The tokenizer may have a padding token without a row; its id is left out of the
        configurations, because transformers does not open a model with such an id. So is -1, of older Llamas.

    Returns:
      The ids of special tokens for config.json.

    Raises:
      FileNotFoundError: no tokenizer, also not in `source`.
      ValueError: a file of `source` that is not JSON.
    """
    config, generation = _source_of_ids(source)
    ids = {key: config[key] for key in TOKEN_IDS if key in config}
    chosen = dict[str, Any]()  # by an explicit tokenizer
    if tokenizer is not None:
        tokenizer.save_pretrained(target)
        own = {key: getattr(tokenizer, key) for key in TOKEN_IDS}
        chosen = {key: value for key, value in own.items() if value is not None and key != "eos_token_id"}
        ids |= chosen
        if end_token_ids is None:
            key = "eos_token_id"
            named = token_ids(generation, key, GENERATION) or token_ids(config, key, "config.json")
            end_token_ids = named if own[key] is None or own[key] in named else [*named, own[key]]
    elif source is not None:
        for name in tokenizer_files(source):
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(own_file(source, name), target / name)
    _make_portable(target / "tokenizer_config.json")
    if end_token_ids:
        known = token_ids(generation, "eos_token_id", GENERATION)
        # Keeps the order of the source if it names the same tokens.
        ends = known if sorted(known) == sorted(end_token_ids) else list(end_token_ids)
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
        chosen["eos_token_id"] = ids["eos_token_id"]
    for content in (ids, generation, chosen):
        pad = content.get("pad_token_id")
        if isinstance(pad, int) and not 0 <= pad < vocab_size:
            del content["pad_token_id"]
    if end_token_ids:
        # generation_config.json of the source may have another padding token and BOS than its config.json.
        own_ids = {key: generation[key] for key in TOKEN_IDS if generation.get(key) is not None}
        generation |= {key: value for key, value in {**ids, **own_ids, **chosen}.items() if value is not None}
    if generation:
        _write(target / GENERATION, generation)
    return ids


def check_tokenizer(source: Path | None, tokenizer: Any, vocab_size: int) -> None:
    """Raises the errors of `write_tokenizer` for these sources, without writing files."""
    _source_of_ids(source)
    if tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:
            write_tokenizer(Path(folder), source, tokenizer, None, vocab_size)
    elif source is not None:
        for name in tokenizer_files(source):
            own_file(source, name)


def tokenizer_files(source: Path) -> list[str]:
    """The tokenizer files of a directory, as paths in it.

    Raises:
      FileNotFoundError: no tokenizer among them.
    """
    present = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not {"tokenizer.json", "tokenizer.model", "vocab.json"} & set(present):
        raise FileNotFoundError(f"expected tokenizer.json, tokenizer.model or vocab.json in {source}; got {present}")
    return present + sorted(f"{TEMPLATES}/{file.name}" for file in (source / TEMPLATES).glob("*.jinja"))


def own_file(directory: Path, name: str) -> Path:
    """A file of a checkpoint.

    Raises:
      ValueError: a link that leads out of the checkpoint, because an exported copy may be shared.
    """
    directory, file = directory.resolve(), (directory / name).resolve()
    # The Hub's cache has its files in blobs/ and links in snapshots/REVISION/.
    places = [directory, *([directory.parents[1] / "blobs"] if directory.parent.name == "snapshots" else [])]
    if not any(file.is_relative_to(place) for place in places):
        raise ValueError(
            f"expected {name} in {directory} itself, because the export copies it; got a link to {file}. Put a copy "
            "of the file instead of the link"
        )
    return file


def token_ids(content: Mapping[str, Any], key: str, file: str | Path) -> list[int]:
    """The ids under `key` in a configuration: an id or a list of ids; none for null, -1 and an absent key.

    Args:
      file: path of the configuration, for the error.

    Raises:
      ValueError: any other value.
    """
    value = content.get(key)
    ids = list[int]()
    for item in value if isinstance(value, list) else [] if value is None else [value]:
        # bool is a subclass of int.
        if isinstance(item, bool) or not isinstance(item, int) or item < -1:
            raise ValueError(f"expected {key} in {file} as an id, or a list of ids; got {shown(value)}")
        ids += [item] if item >= 0 else []
    return ids


def _source_of_ids(source: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json of a checkpoint; empty if missing."""

    def content(name: str) -> dict[str, Any]:
        return read_json(own_file(source, name)) if source is not None and (source / name).is_file() else {}

    return content("config.json"), content(GENERATION)


def _make_portable(file: Path) -> None:
    """Rewrites fields of transformers 5's tokenizer_config.json that transformers 4 cannot read."""
    if not file.is_file():
        return
    config = read_json(file)
    changed = dict(config)
    if config.get("tokenizer_class") == _CLASS_OF_5:
        changed["tokenizer_class"] = _CLASS_OF_BOTH
    # In transformers 4 this is an object, and the list has another name.
    if isinstance(config.get("extra_special_tokens"), list):
        changed["additional_special_tokens"] = changed.pop("extra_special_tokens")
    if changed != config:
        _write(file, changed)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
