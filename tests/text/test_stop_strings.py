"""The stop-string table, compared with its definition: decode the text so far and search it for the strings."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from smd_jax.testing import byte_tokenizer
from smd_jax.text import StopTable, compile_stop_strings
from smd_jax.text.stop_strings import advance
from tests.stop_tokenizers import SENTENCEPIECE, sentencepiece_tokenizer, trained_tokenizer

BYTES = byte_tokenizer()
TRAINED = trained_tokenizer()
PIECES = sentencepiece_tokenizer()
VOCAB = 264
WIDTH = 40  # tokens that a property test reads at most


@jax.jit
def stopped_after(table: StopTable, tokens: jax.Array) -> jax.Array:
    """`[batch, length]`: whether a row has stopped, after every token."""

    def step(state: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        return advance(table, state, token)

    return jax.lax.scan(step, jnp.zeros(len(tokens), jnp.int32), tokens.T)[1].T


def stop_lengths(tokenizer: PreTrainedTokenizerFast, strings: Sequence[str], rows: list[list[int]]) -> list[int | None]:
    """Number of tokens of each row when it stops; None if it never does."""
    pad = tokenizer.get_vocab()[str(tokenizer.pad_token)]
    table = compile_stop_strings(tokenizer, strings, len(tokenizer) + 3)
    tokens = np.array([row + [pad] * (WIDTH - len(row)) for row in rows], np.int32)
    stopped = np.asarray(stopped_after(table, jnp.asarray(tokens)))
    np.testing.assert_array_equal(np.sort(stopped, axis=1), stopped)  # once stopped, always stopped
    return [int(np.argmax(row)) + 1 if row.any() else None for row in stopped]


def reference_length(texts: Sequence[str] | Sequence[bytes], strings: Sequence[str] | Sequence[bytes]) -> int | None:
    """The definition: the smallest number of tokens whose text contains a stop string."""
    hits = (length for length, text in enumerate(texts) if any(string in text for string in strings))  # type: ignore[operator]
    return next(hits, None)


def decoded(tokenizer: PreTrainedTokenizerFast, row: list[int]) -> list[str]:
    """The text of the first 0, 1, 2 … tokens, as a completion has it."""
    return [str(tokenizer.decode(row[:length], skip_special_tokens=True)) for length in range(len(row) + 1)]


# A part of a row: a token by its number, a text as the tokenizer writes it, or a text byte by byte.
LETTERS = "aab b本日🦊ß\n<"
PARTS = st.one_of(
    st.integers(0, 10_000),
    st.tuples(st.booleans(), st.text(LETTERS, min_size=1, max_size=4)),
    st.tuples(st.booleans(), st.sampled_from(["</answer>", "Question", "日本語", "ça"])),
)
ROWS = st.lists(PARTS, min_size=1, max_size=8)
# A stop string: a part of the row's text, or another text.
STRINGS = st.lists(
    st.one_of(st.tuples(st.integers(0, 40), st.integers(1, 6)), st.text(LETTERS, min_size=1, max_size=4))
)


def build_row(tokenizer: PreTrainedTokenizerFast, parts: list, names: list[str]) -> list[int]:
    """`names`: the tokens of the 256 bytes."""
    row: list[int] = []
    ids = tokenizer.get_vocab()
    for part in parts:
        if isinstance(part, int):
            row.append(part % (len(tokenizer) + 3))  # also special ones, and spare rows that no token has
        elif part[0]:
            row += tokenizer.encode(part[1], add_special_tokens=False)
        else:
            row += [ids[names[byte]] for byte in part[1].encode()]
    return row[:WIDTH]


def build_strings(text: str, specs: list) -> list[str]:
    strings = [spec if isinstance(spec, str) else text[spec[0] :][: spec[1]] for spec in specs]
    strings = [string.replace("\ufffd", "") for string in strings]  # the decoder's replacement for invalid bytes
    return [string for string in strings if string] or ["aab"]


@settings(deadline=None, max_examples=150)
@given(parts=ROWS, specs=STRINGS)
def test_byte_level_tokens_stop_as_their_text_does(parts: list, specs: list):
    names = [str(BYTES.convert_ids_to_tokens(byte)) for byte in range(256)]
    row = build_row(TRAINED, parts, names)
    known = [token for token in row if token < len(TRAINED)]
    strings = build_strings(str(TRAINED.decode(known, skip_special_tokens=True)), specs)
    pieces = [token if token < len(TRAINED) else len(TRAINED) - 1 for token in row]  # a special token adds no more
    assert stop_lengths(TRAINED, strings, [row]) == [reference_length(decoded(TRAINED, pieces), strings)]


@settings(deadline=None, max_examples=75)
@given(parts=ROWS, specs=STRINGS)
def test_sentencepiece_tokens_stop_as_their_bytes_do(parts: list, specs: list):
    """In bytes, because this decoder replaces a whole run of byte tokens if one of them is invalid."""
    bytes_of = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)} | SENTENCEPIECE
    row = build_row(PIECES, parts, [f"<0x{byte:02X}>" for byte in range(256)])
    tokens = [str(PIECES.convert_ids_to_tokens(token)) for token in row]  # "None" for a spare row
    pieces = [bytes_of.get(token, b"") for token in tokens]
    texts = [b"".join(pieces[:length]) for length in range(len(row) + 1)]
    strings = build_strings(texts[-1].decode(errors="ignore"), specs)
    assert stop_lengths(PIECES, strings, [row]) == [reference_length(texts, [string.encode() for string in strings])]


@pytest.mark.parametrize(
    ("strings", "text", "length"),
    [
        (["aab", "ab"], "caab", 4),
        (["aab", "ab"], "cab", 3),
        (["aab"], "aaaab", 5),  # the match restarts at a later a
        (["abcabd"], "abcabcabd", 9),  # falls back in the middle
        (["abcd", "bc"], "abcd", 3),  # the shorter string ends first
        (["abcd", "bcx"], "abcx", 4),  # switches from one string to the other
        (["b", "a"], "xa", 2),
        (["ab"], "a b", None),
        (["日本"], "日日本", 9),
    ],
)
def test_hand_worked_cases(strings: list[str], text: str, length: int | None):
    assert stop_lengths(BYTES, strings, [list(text.encode())]) == [length]


def test_strings_within_a_token_and_across_tokens():
    ids = PIECES.get_vocab()
    answer, blank, a, b, middle = (ids[token] for token in ("</answer>x", "▁", "a", "b", "a▁b"))
    rows = [[a, answer, b], [b, blank, a, answer], [a, b, middle]]
    assert stop_lengths(PIECES, ["answer"], rows) == [2, 4, None]
    assert stop_lengths(PIECES, ["a</", "xb", "ba b"], rows) == [2, 4, 3]
    assert stop_lengths(PIECES, [" a"], rows) == [None, 3, None]


def test_the_table_of_two_letters():
    table = compile_stop_strings(BYTES, ["ab"], VOCAB)
    expected = np.zeros((3, VOCAB), np.uint8)
    expected[:, ord("a")] = 1
    expected[1, ord("b")] = 2
    expected[1, 256:] = 1  # special tokens and spare rows
    expected[2] = 2
    np.testing.assert_array_equal(table.next_state, expected)
    assert table.next_state.dtype == jnp.uint8


@pytest.mark.parametrize(("length", "dtype"), [(255, jnp.uint8), (256, jnp.uint16)])
def test_states_are_counted_in_the_smallest_integers(length: int, dtype: jnp.dtype):
    table = compile_stop_strings(BYTES, ["a" * length], VOCAB)
    assert table.next_state.shape == (length + 1, VOCAB) and table.next_state.dtype == dtype
    assert stopped_after(table, jnp.full((1, length), ord("a")))[0].tolist() == [False] * (length - 1) + [True]


def test_rows_are_independent():
    table = compile_stop_strings(BYTES, ["ab", "c"], VOCAB)
    state, stopped = advance(table, jnp.zeros(3, jnp.int32), jnp.array(list(b"abc")))
    assert state.tolist() == [1, 0, 2] and stopped.tolist() == [False, False, True]
    state, stopped = advance(table, state, jnp.array(list(b"bbb")))
    assert stopped.tolist() == [True, False, True]
    assert (state.dtype, stopped.dtype) == (jnp.int32, jnp.bool_)


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        ([], "at least one stop string; got none"),
        (["a", ""], "at least one character; got ''"),
        (["a", "b\ud800"], r"stop strings that UTF-8 can encode; got 'b\\ud800'"),
        (["x", "a<|im_end|>"], r"got 'a<\|im_end\|>', .* special token '<\|im_end\|>'; .* make it the eos_token_id"),
    ],
)
def test_bad_strings_raise(strings: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        compile_stop_strings(BYTES, strings, VOCAB)


def test_a_single_string_raises():
    with pytest.raises(TypeError, match=r"such as \['stop'\]; got the one string 'stop'"):
        compile_stop_strings(BYTES, "stop", VOCAB)
