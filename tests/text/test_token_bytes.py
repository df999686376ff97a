"""Bytes of tokens: byte-level, sentencepiece and other tokenizers, against the text that transformers decodes."""

import pytest
from tokenizers import Regex, Tokenizer, decoders, models
from transformers import LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from smd_jax.testing import byte_tokenizer
from smd_jax.text.token_bytes import byte_alphabet, token_bytes
from tests.stop_tokenizers import SENTENCEPIECE, sentencepiece_tokenizer, trained_tokenizer

TRAINED = trained_tokenizer()
TEXTS = ["Größe 日本語", "🦊🦊 a", "x  y\n\n", "no è, ça"]


def with_decoder(decoder: decoders.Decoder | None, tokens: list[str]) -> PreTrainedTokenizerFast:
    """A word-level tokenizer with this decoder."""
    words = {token: index for index, token in enumerate(["[UNK]", *tokens])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    if decoder is not None:
        tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", clean_up_tokenization_spaces=False)


def bytes_of(tokenizer: PreTrainedTokenizerFast) -> list[bytes]:
    return token_bytes(tokenizer, len(tokenizer))


def test_the_alphabet_names_every_byte():
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert [byte_alphabet()[character] for character in "aĠĊÃ"] == [ord("a"), ord(" "), ord("\n"), 0xC3]


def test_the_byte_tokenizer():
    pieces = token_bytes(byte_tokenizer(), 264)
    assert pieces[:256] == [bytes([byte]) for byte in range(256)]
    assert pieces[256:] == [b""] * 8  # three special tokens, five spare rows


@pytest.mark.parametrize("text", TEXTS)
def test_a_trained_byte_level_tokenizer(text: str):
    pieces = bytes_of(TRAINED)
    assert b"".join(pieces[token] for token in TRAINED.encode(text)) == text.encode()


def test_added_tokens_are_decoded_by_the_byte_alphabet_if_possible():
    """As in the `tokenizers` library: "é" stands for byte 0xE9, and a space for no byte."""
    pieces, ids = bytes_of(TRAINED), TRAINED.get_vocab()
    for token, expected in {"<tool>": b"<tool>", "\u00e9 b": "\u00e9 b".encode(), "\u00e9": b"\xe9"}.items():
        assert pieces[ids[token]] == expected
        assert TRAINED.decode([ids[token]]) == expected.decode(errors="replace")


def test_sentencepiece():
    tokenizer = sentencepiece_tokenizer()
    pieces, ids = bytes_of(tokenizer), tokenizer.get_vocab()
    assert {token: pieces[ids[token]] for token in SENTENCEPIECE} == SENTENCEPIECE
    assert pieces[ids["<0xE6>"]] == b"\xe6" and pieces[ids["<0x0A>"]] == b"\n"
    assert [pieces[ids[token]] for token in ("<unk>", "</s>")] == [b"", b""]
    for text in TEXTS:
        assert b"".join(pieces[token] for token in tokenizer.encode(text)) == (" " + text).encode()


def test_tokenizer_classes_of_transformers():
    tokens = ["<unk>", "<s>", "</s>", "▁a", "<0xC3>", "Ġa", "Ã"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    llama, qwen = (kind(vocab=vocabulary, merges=[]) for kind in (LlamaTokenizer, Qwen2Tokenizer))
    assert bytes_of(llama)[3:] == [b" a", b"\xc3", "Ġa".encode(), "Ã".encode()]
    assert bytes_of(qwen)[3:7] == ["▁a".encode(), b"<0xC3>", b" a", b"\xc3"]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Replace("▁", " "),
    ],
    ids=lambda decoder: str(decoder)[:60],
)
def test_spaces_of_sentencepiece(decoder: decoders.Decoder):
    tokenizer = with_decoder(decoder, ["x", "▁a", "b▁c", "日"])
    assert bytes_of(tokenizer) == [b"", b"x", b" a", b"b c", "日".encode()]
    assert tokenizer.decode([1, 2, 3, 4]) == "x ab c日"


@pytest.mark.parametrize(
    "decoder",
    [None, decoders.WordPiece(), decoders.Sequence([decoders.Replace(Regex("▁+"), " "), decoders.Fuse()])],
    ids=["none", "word pieces", "regex"],
)
def test_decoders_of_other_kinds_are_refused(decoder: decoders.Decoder | None):
    with pytest.raises(ValueError, match="a byte-level or sentencepiece decoder, .*; got TokenizersBackend with"):
        bytes_of(with_decoder(decoder, ["a", "b"]))


def test_a_word_made_special_has_no_bytes():
    tokenizer = with_decoder(decoders.Metaspace(), ["x", "y"])
    tokenizer.add_special_tokens({"pad_token": "x"})
    assert bytes_of(tokenizer) == [b"", b"", b"y"]
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == "y"


def test_the_embedding_must_hold_the_tokens():
    with pytest.raises(ValueError, match="at least 256 rows, because the tokenizer has .*; got vocab_size 255"):
        token_bytes(byte_tokenizer(), 255)
    # Special tokens have no text, so they may be outside the embedding.
    assert len(token_bytes(byte_tokenizer(), 257)) == 257
