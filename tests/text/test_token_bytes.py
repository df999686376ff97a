"""The bytes of tokens: byte level, sentencepiece and others, against the text that transformers decodes."""

from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models
from transformers import LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from smd_jax.testing import byte_tokenizer
from smd_jax.text.token_bytes import TextTokenizer, as_text_tokenizer, byte_alphabet, token_bytes
from tests.stop_tokenizers import SENTENCEPIECE, reload, sentencepiece_tokenizer, trained_tokenizer

TEXTS = ["Größe 日本語", "🦊🦊 a", "x  y\n\n", "no è, ça"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return reload(trained_tokenizer(), tmp_path_factory.mktemp("trained"))


def with_decoder(decoder: decoders.Decoder | None, tokens: list[str]) -> PreTrainedTokenizerFast:
    """A vocabulary of whole words; only its way of decoding matters."""
    words = {token: index for index, token in enumerate(["[UNK]", *tokens])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    if decoder is not None:
        tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", clean_up_tokenization_spaces=False)


def bytes_of(tokenizer: PreTrainedTokenizerFast) -> list[bytes]:
    return token_bytes(as_text_tokenizer(tokenizer), len(tokenizer))


def test_a_transformers_tokenizer_has_what_we_need():
    tokenizer = byte_tokenizer()
    assert isinstance(tokenizer, TextTokenizer) and as_text_tokenizer(tokenizer) is tokenizer


def test_the_alphabet_names_every_byte():
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert [byte_alphabet()[character] for character in "aĠĊÃ"] == [ord("a"), ord(" "), ord("\n"), 0xC3]


def test_the_byte_tokenizer():
    pieces = token_bytes(as_text_tokenizer(byte_tokenizer()), 264)
    assert pieces[:256] == [bytes([byte]) for byte in range(256)]
    assert pieces[256:] == [b""] * 8  # three special tokens, five spare rows


@pytest.mark.parametrize("text", TEXTS)
def test_a_trained_byte_level_tokenizer(trained: PreTrainedTokenizerFast, text: str):
    pieces = bytes_of(trained)
    assert b"".join(pieces[token] for token in trained.encode(text)) == text.encode()


def test_a_trained_tokenizer_has_long_tokens_and_parts_of_characters(trained: PreTrainedTokenizerFast):
    """Or the other tests would not test much."""
    pieces = bytes_of(trained)
    assert max(map(len, pieces)) >= 5
    assert any(len(piece) > 1 and b"\xef\xbf\xbd" in piece.decode(errors="replace").encode() for piece in pieces)


def test_added_tokens_pass_through_the_alphabet_if_they_can(trained: PreTrainedTokenizerFast):
    """As in the `tokenizers` library: "é" is the stand-in of byte 0xE9; a blank is no stand-in."""
    pieces, ids = bytes_of(trained), trained.get_vocab()
    for token, expected in {"<tool>": b"<tool>", "\u00e9 b": "\u00e9 b".encode(), "\u00e9": b"\xe9"}.items():
        assert pieces[ids[token]] == expected
        assert trained.decode([ids[token]]) == expected.decode(errors="replace")


def test_special_tokens_add_nothing(trained: PreTrainedTokenizerFast):
    pieces = bytes_of(trained)
    assert [pieces[token] for token in trained.all_special_ids] == [b"", b""]


def test_sentencepiece(tmp_path: Path):
    tokenizer = reload(sentencepiece_tokenizer(), tmp_path)
    pieces, ids = bytes_of(tokenizer), tokenizer.get_vocab()
    assert {token: pieces[ids[token]] for token in SENTENCEPIECE} == SENTENCEPIECE
    assert pieces[ids["<0xE6>"]] == b"\xe6" and pieces[ids["<0x0A>"]] == b"\n"
    assert [pieces[ids[token]] for token in ("<unk>", "</s>")] == [b"", b""]
    for text in TEXTS:
        assert b"".join(pieces[token] for token in tokenizer.encode(text)) == (" " + text).encode()


def test_the_classes_of_transformers():
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
        decoders.Sequence([decoders.Replace(Regex("▁+"), " "), decoders.Fuse()]),  # not a decoder that we read
    ],
    ids=lambda decoder: str(decoder)[:60],
)
def test_blanks_of_sentencepiece(decoder: decoders.Decoder):
    tokenizer = with_decoder(decoder, ["x", "▁a", "b▁c", "日"])
    assert bytes_of(tokenizer) == [b"", b"x", b" a", b"b c", "日".encode()]
    assert tokenizer.decode([1, 2, 3, 4]) == "x ab c日"


def test_decoders_of_other_kinds_are_asked_for_text():
    assert bytes_of(with_decoder(decoders.WordPiece(), ["a", "##b", "c"])) == [b"", b" a", b"b", b" c"]
    assert bytes_of(with_decoder(None, ["a", "b"])) == [b"", b" a", b" b"]


def test_a_tokenizer_without_a_backend_is_asked_for_text():
    class Plain:
        """What transformers declares for every tokenizer, and no more."""

        inner = with_decoder(decoders.Metaspace(), ["x", "▁a", "b▁c"])
        special_tokens_map = inner.special_tokens_map
        added_tokens_decoder = inner.added_tokens_decoder
        chat_template = None
        __len__ = inner.__len__
        get_vocab = inner.get_vocab
        encode = inner.encode
        decode = inner.decode
        convert_tokens_to_ids = inner.convert_tokens_to_ids
        convert_tokens_to_string = inner.convert_tokens_to_string
        apply_chat_template = inner.apply_chat_template

    assert token_bytes(as_text_tokenizer(Plain()), 4) == [b"", b"x", b" a", b"b c"]


def test_tokens_that_depend_on_their_neighbours_are_refused():
    """An end-of-word mark is a blank, but not at the end of the text."""
    with pytest.raises(ValueError, match="tokens add the same text behind any other .* got .*, whose tokens depend"):
        bytes_of(with_decoder(decoders.BPEDecoder("</w>"), ["a", "b</w>", "c"]))


def test_a_word_that_was_made_special_adds_nothing():
    tokenizer = with_decoder(decoders.Metaspace(), ["x", "y"])
    tokenizer.add_special_tokens({"pad_token": "x"})
    assert bytes_of(tokenizer) == [b"", b"", b"y"]
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == "y"


def test_the_embedding_must_hold_the_tokens():
    with pytest.raises(ValueError, match="at least 256 rows, because the tokenizer has .*; got vocab_size 255"):
        token_bytes(as_text_tokenizer(byte_tokenizer()), 255)
    # Special tokens have no text, and need no row as long as no prompt has them.
    assert len(token_bytes(as_text_tokenizer(byte_tokenizer()), 257)) == 257
