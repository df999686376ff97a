"""The UTF-8 bytes that every token of a vocabulary adds to a text, without decoding any text.

A token may hold a part of a character, so texts are followed in bytes. Two kinds of decoders are common:

    byte level     GPT-2, Qwen, Llama 3: every character of a token represents a byte        "ĠGr", "Ã¼"   -> " Gr", "ü"
    sentencepiece  Llama 2, Gemma: characters, "▁" for a blank, and a token for every byte   "▁Gr", "<0xC3>"

For other tokenizers the bytes of a token are the text that it adds after another token, which must not depend on that
token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from smd_jax.text.prompts import Tokenizer, check_ordinary_ids

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
# Decoders of the sentencepiece kind. `Strip` applies to the text's ends only after `Fuse`, which joins all tokens.
_SENTENCEPIECE = re.compile("((Replace|Metaspace) )+(ByteFallback )?(Fuse (Strip )?)?")


@runtime_checkable
class TextTokenizer(Tokenizer, Protocol):
    """The part of `PreTrainedTokenizerBase` that tells the bytes of tokens."""

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]: ...

    def convert_tokens_to_string(self, tokens: list[str]) -> str: ...


@runtime_checkable
class FastTokenizer(Protocol):
    """A tokenizer of the `tokenizers` library, such as `PreTrainedTokenizerFast`."""

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer: ...


def as_text_tokenizer(tokenizer: Tokenizer) -> TextTokenizer:
    """The tokenizer, checked to be a TextTokenizer.

    Raises:
      TypeError: not a transformers tokenizer.
    """
    if isinstance(tokenizer, TextTokenizer):
        return tokenizer
    raise TypeError(
        "expected a transformers tokenizer (with added_tokens_decoder and convert_tokens_to_string), to know the bytes "
        f"of its tokens; got {type(tokenizer).__name__}"
    )


def token_bytes(tokenizer: TextTokenizer, vocab_size: int) -> list[bytes]:
    """The bytes that each id from 0 to `vocab_size - 1` adds inside of a text.

    Special tokens and ids without a token add none. A sentencepiece decoder drops a blank at the start of a text; here
    it counts, because a completion continues a prompt.

    Raises:
      ValueError: a token id outside an embedding of `vocab_size` rows; tokens whose bytes depend on their neighbours.
    """
    check_ordinary_ids(tokenizer, vocab_size)
    tokens = _ordinary_tokens(tokenizer)
    read = _reader(tokenizer)
    ordered = list(tokens.values())
    pieces = _added_text(tokenizer, ordered) if read is None else [read(token) for token in ordered]
    found = dict(zip(tokens, pieces, strict=True))
    return [found.get(token_id, b"") for token_id in range(vocab_size)]


def special_tokens(tokenizer: TextTokenizer) -> dict[int, str]:
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


def _ordinary_tokens(tokenizer: TextTokenizer) -> dict[int, str]:
    """Id -> token in the decoder's spelling, in the order of ids, without special tokens."""
    special = set(special_tokens(tokenizer).values())
    by_id = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    return {token_id: token for token_id, token in by_id if token not in special}


def _reader(tokenizer: TextTokenizer) -> Callable[[str], bytes] | None:
    """A function from a token to its bytes, by the kind of the decoder; None for an unknown kind."""
    steps = _decoder_steps(tokenizer.backend_tokenizer) if isinstance(tokenizer, FastTokenizer) else []
    kinds = "".join(f"{step['type']} " for step in steps)
    if kinds == "ByteLevel ":
        return _byte_level()
    # A pattern may also be a regular expression, which `str.replace` cannot follow.
    known_patterns = all("String" in step["pattern"] for step in steps if step["type"] == "Replace")
    return _sentencepiece(steps) if known_patterns and _SENTENCEPIECE.fullmatch(kinds) else None


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The steps of the decoder as in tokenizer.json; [] without a decoder."""
    if tokenizer.decoder is None:
        return []
    without_vocabulary = tokenizers.Tokenizer(models.BPE())  # is faster to write
    without_vocabulary.decoder = tokenizer.decoder
    decoder = json.loads(without_vocabulary.to_str())["decoder"]
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_level() -> Callable[[str], bytes]:
    """Reads tokens of the byte alphabet; an added token with other characters is its own text."""
    alphabet = byte_alphabet()
    to_latin = str.maketrans({character: chr(byte) for character, byte in alphabet.items()})

    def read(token: str) -> bytes:
        known = all(character in alphabet for character in token)
        return token.translate(to_latin).encode("latin-1") if known else token.encode()

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


def _added_text(tokenizer: TextTokenizer, tokens: list[str]) -> list[bytes]:
    """The text that each token adds after a first one, which decoders may treat specially."""
    first = tokens[:1]
    before = tokenizer.convert_tokens_to_string(first)
    texts = [tokenizer.convert_tokens_to_string([*first, token])[len(before) :] for token in tokens]

    def adds_up(order: slice) -> bool:
        whole = tokenizer.convert_tokens_to_string([*first, *tokens[order]])
        return whole == "".join([before, *texts[order]])

    # Forwards and backwards, so that every token has two different neighbours.
    if not (adds_up(slice(None)) and adds_up(slice(None, None, -1))):
        raise ValueError(
            "expected a tokenizer whose tokens add the same text behind any other (a byte-level or sentencepiece "
            f"decoder, or one like them); got {type(tokenizer).__name__}, whose tokens depend on their neighbours"
        )
    return [text.encode() for text in texts]
