"""Tokenizers of transformers that split text as their tokenizer.json says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

PARTS = ("normalizer", "pre_tokenizer", "decoder")
# Settings of a BPE that change ids, and have defaults if a file leaves them out.
BPE_SETTINGS = ("ignore_merges", "byte_fallback", "fuse_unk", "unk_token", "dropout")
NO_MODEL = {"type": "BPE", "vocab": {}, "merges": []}


def open_tokenizer(directory: str | Path) -> Any:
    """Opens the tokenizer of a checkpoint directory with transformers, without running code of the directory.

    transformers 5 rebuilds some classes, such as GPT2Tokenizer, from the vocabulary and the merges alone, and drops a
    splitting of digits or the setting `ignore_merges`, for example. With mistral-common installed it takes another
    implementation. Such a tokenizer is opened from its file instead.

    Raises:
      Exception: of any type, as transformers and tokenizers raise for files that they cannot parse.
    """
    # Imported here, because it takes seconds.
    from smd_jax.text.hugging_face import AutoTokenizer, PreTrainedTokenizerFast

    # Explicit: without it transformers asks at the terminal.
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    if splits_as_file(tokenizer, Path(directory) / "tokenizer.json"):
        return tokenizer
    return PreTrainedTokenizerFast.from_pretrained(directory)


def splits_as_file(tokenizer: Any, file: Path) -> bool:
    """Whether a tokenizer normalises, splits and decodes text as this tokenizer.json; true without such a file.

    A wrong "no" does no harm: the tokenizer is then opened from the file.
    """
    if not file.is_file():
        return True
    own = getattr(tokenizer, "backend_tokenizer", None)
    if own is None:
        return False
    content = json.loads(file.read_text(encoding="utf-8"))
    # Without the vocabulary, which takes a second to read. Older files leave out defaults, which this fills in.
    parts = {name: content.get(name) for name in PARTS}
    model = content.get("model")
    is_bpe = isinstance(model, dict) and "merges" in model
    settings = {name: model[name] for name in BPE_SETTINGS if name in model} if is_bpe else {}
    like_file = {"version": "1.0", "added_tokens": [], **parts, "model": NO_MODEL | settings}
    wanted = Tokenizer.from_str(json.dumps(like_file))
    same_model = not is_bpe or _settings(own.model) == _settings(wanted.model)
    return same_model and _parts(own) == _parts(wanted)


def _settings(model: Any) -> list[Any]:
    """The settings of a BPE; those that another model does not have are None."""
    return [getattr(model, name, None) for name in BPE_SETTINGS]


def _parts(tokenizer: Tokenizer) -> list[Any]:
    found = [getattr(tokenizer, name) for name in PARTS]
    return [None if part is None else _ids_alone(json.loads(part.__getstate__())) for part in found]


def _ids_alone(state: Any) -> Any:
    """The settings that choose ids: not those of offsets."""
    if isinstance(state, dict):
        return {name: _ids_alone(value) for name, value in state.items() if name != "trim_offsets"}
    return [_ids_alone(each) for each in state] if isinstance(state, list) else state
