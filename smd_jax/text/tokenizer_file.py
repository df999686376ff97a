"""Tokenizers of transformers that split text as their tokenizer.json says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

PARTS = ("normalizer", "pre_tokenizer", "decoder")
# Settings of a BPE that change ids.
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
    like_file = {"version": "1.0", "added_tokens": [], **parts, "model": {**(model if is_bpe else {}), **NO_MODEL}}
    wanted = Tokenizer.from_str(json.dumps(like_file))
    same_model = not is_bpe or all(
        getattr(own.model, name, None) == getattr(wanted.model, name, None) for name in BPE_SETTINGS
    )
    return same_model and _parts(own) == _parts(wanted)


def _parts(tokenizer: Tokenizer) -> list[bytes | None]:
    """The serialised parts, without their settings of offsets, which choose no ids."""
    found = [getattr(tokenizer, name) for name in PARTS]
    return [None if part is None else re.sub(rb'"trim_offsets":\w+', b"", part.__getstate__()) for part in found]
