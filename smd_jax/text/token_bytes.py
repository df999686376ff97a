"""The bytes of UTF-8 that every token of a vocabulary adds to a text, without decoding any text.

A token may hold a part of a character, so a text is followed in bytes. What a token stands for is the business of the
tokenizer's decoder, of which there are two kinds in use:

    byte level     GPT-2, Qwen, Llama 3: every character of a token stands for a byte        "ĠGr", "Ã¼"   -> " Gr", "ü"
    sentencepiece  Llama 2, Gemma: characters, "▁" for a blank, and a token for every byte   "▁Gr", "<0xC3>"

The bytes of any other tokenizer are what the token adds to a text before it, and must not depend on its neighbours.
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
# Decoders of the sentencepiece kind. Only after `Fuse`, which joins all tokens, does `Strip` take from the text's ends.
_SENTENCEPIECE = re.compile("((Replace|Metaspace) )+(ByteFallback )?(Fuse (Strip )?)?")


@runtime_checkable
class TextTokenizer(Tokenizer, Protocol):
    """What we ask of a tokenizer to know the bytes of its tokens: a subset of `PreTrainedTokenizerBase` again."""

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]: ...

    def convert_tokens_to_string(self, tokens: list[str]) -> str: ...


@runtime_checkable
class FastTokenizer(Protocol):
    """A tokenizer that runs on the `tokenizers` library: `PreTrainedTokenizerFast` and all that come from it."""

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer: ...


def as_text_tokenizer(tokenizer: Tokenizer) -> TextTokenizer:
    """The same tokenizer, known to have what we need.

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
    """The bytes that each id from 0 to `vocab_size - 1` adds to a text, wherever in the text but at its start.

    None for special tokens, which completions leave out, and for ids that no token has. A decoder of the sentencepiece
    kind drops a blank at the start of all text; here it counts, because a completion goes on a prompt.

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
    """Id -> content of the tokens that are no part of a completion's text."""
    return {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte -> the byte.

    Bytes that are printable in Latin-1 stand for themselves; the others are, in order, the characters from 256 on.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # The characters from 256 on sort behind Latin-1, in the order of the bytes that they stand for.
    hidden = iter(sorted(set(range(256)) - {ord(character) for character in alphabet}))
    return {character: ord(character) if ord(character) < 256 else next(hidden) for character in alphabet}


def _ordinary_tokens(tokenizer: TextTokenizer) -> dict[int, str]:
    """Id -> token as the decoder gets it, in the order of ids, without special tokens."""
    special = set(special_tokens(tokenizer).values())
    by_id = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    return {token_id: token for token_id, token in by_id if token not in special}


def _reader(tokenizer: TextTokenizer) -> Callable[[str], bytes] | None:
    """From a token to its bytes, by the kind of the decoder; None for a kind that we do not know."""
    steps = _decoder_steps(tokenizer.backend_tokenizer) if isinstance(tokenizer, FastTokenizer) else []
    kinds = "".join(f"{step['type']} " for step in steps)
    if kinds == "ByteLevel ":
        return _byte_level()
    # A pattern may also be a regular expression, which `str.replace` cannot follow.
    known_patterns = all("String" in step["pattern"] for step in steps if step["type"] == "Replace")
    return _sentencepiece(steps) if known_patterns and _SENTENCEPIECE.fullmatch(kinds) else None


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder as it stands in tokenizer.json, one entry a step; [] if there is none."""
    if tokenizer.decoder is None:
        return []
    alone = tokenizers.Tokenizer(models.BPE())  # the vocabulary of the whole one is long to write
    alone.decoder = tokenizer.decoder
    decoder = json.loads(alone.to_str())["decoder"]
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_level() -> Callable[[str], bytes]:
    """A token with a character outside the alphabet, which somebody added, stands for itself as a whole."""
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
    """What each token adds behind a first one, which decoders often treat in their own way."""
    first = tokens[:1]
    before = tokenizer.convert_tokens_to_string(first)
    texts = [tokenizer.convert_tokens_to_string([*first, token])[len(before) :] for token in tokens]

    def adds_up(order: slice) -> bool:
        whole = tokenizer.convert_tokens_to_string([*first, *tokens[order]])
        return whole == "".join([before, *texts[order]])

    # Forwards and backwards, so that every token is tried with other neighbours.
    if not (adds_up(slice(None)) and adds_up(slice(None, None, -1))):
        raise ValueError(
            "expected a tokenizer whose tokens add the same text behind any other (a byte-level or sentencepiece "
            f"decoder, or one like them); got {type(tokenizer).__name__}, whose tokens depend on their neighbours"
        )
    return [text.encode() for text in texts]
