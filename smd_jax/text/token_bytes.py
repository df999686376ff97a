"""The UTF-8 bytes that every token of a vocabulary adds to a text, without decoding any text.

A token may hold a part of a character, so texts are followed in bytes. Two kinds of decoders are read:

    byte level     GPT-2, Qwen, Llama 3: every character of a token represents a byte        "ĠGr", "Ã¼"   -> " Gr", "ü"
    sentencepiece  Llama 2, Gemma: characters, "▁" for a blank, and a token for every byte   "▁Gr", "<0xC3>"
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import pre_tokenizers

from smd_jax.text.prompts import Tokenizer, check_ordinary_ids

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
# Decoders of the sentencepiece kind. `Strip` applies to the text's ends only after `Fuse`, which joins all tokens.
_SENTENCEPIECE = re.compile("((Replace|Metaspace) )+(ByteFallback )?(Fuse (Strip )?)?")


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes that each id from 0 to `vocab_size - 1` adds inside of a text.

    Special tokens and ids without a token add none. A sentencepiece decoder drops a blank at the start of a text; here
    it counts, because a completion continues a prompt.

    Raises:
      ValueError: a token id outside an embedding of `vocab_size` rows; a decoder of another kind.
    """
    check_ordinary_ids(tokenizer, vocab_size)
    read = _reader(tokenizer)
    special = set(special_tokens(tokenizer).values())
    found = {token_id: read(token) for token, token_id in tokenizer.get_vocab().items() if token not in special}
    return [found.get(token_id, b"") for token_id in range(vocab_size)]


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Id -> content of special tokens, which completions leave out."""
    return {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character of every byte -> the byte.

    Printable bytes of Latin-1 stand for themselves; the others are the characters from 256 on, in order.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # The characters from 256 on sort after Latin-1, in the order of their bytes.
    hidden = iter(sorted(set(range(256)) - {ord(character) for character in alphabet}))
    return {character: ord(character) if ord(character) < 256 else next(hidden) for character in alphabet}


def _reader(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """A function from a token to its bytes, by the kind of the decoder."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    state = {"type": "Sequence", "decoders": []} if decoder is None else json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = "".join(f"{step['type']} " for step in steps)
    if kinds == "ByteLevel ":
        return _byte_level()
    # A pattern may also be a regular expression, which `str.replace` cannot follow.
    plain_patterns = all("String" in step["pattern"] for step in steps if step["type"] == "Replace")
    if plain_patterns and _SENTENCEPIECE.fullmatch(kinds):
        return _sentencepiece(steps)
    raise ValueError(
        "expected a tokenizer of transformers with a byte-level or sentencepiece decoder, to know the bytes of its "
        f"tokens; got {type(tokenizer).__name__} with the decoder {kinds.split()}"
    )


def _byte_level() -> Callable[[str], bytes]:
    """Reads tokens of the byte alphabet; an added token with other characters is its own text."""
    alphabet = byte_alphabet()

    def read(token: str) -> bytes:
        known = all(character in alphabet for character in token)
        return bytes(map(alphabet.__getitem__, token)) if known else token.encode()

    return read


def _sentencepiece(steps: list[dict[str, Any]]) -> Callable[[str], bytes]:
    replacements = [_replacement(step) for step in steps if step["type"] in ("Replace", "Metaspace")]
    byte_tokens = any(step["type"] == "ByteFallback" for step in steps)

    def read(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if byte_tokens else None
        return token.encode() if byte is None else bytes.fromhex(byte[1])

    return read


def _replacement(step: dict[str, Any]) -> tuple[str, str]:
    return (step["replacement"], " ") if step["type"] == "Metaspace" else (step["pattern"]["String"], step["content"])
