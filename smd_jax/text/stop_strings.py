"""Stop strings as a table over tokens: the decode loop ends a response at its first stop string, without decoding text.

    strings ──► automaton over bytes ──► next_state[state, token] ──► state = next_state[state, token]   (each step)

The automaton of Aho and Corasick (Efficient string matching, 1975) keeps, as its state, the longest end of the text so
far that begins a stop string. Running it over the bytes of every token, from every state, gives a table over tokens: a
stop string may begin and end inside tokens, lie within one, or be spread over many. The last state is for a text that
has had a stop string; nothing leaves it.

The match is exact on the bytes of the response: those of the prompt do not count, nor do special tokens, which
completions leave out. The token that completes a stop string is the last of the response, and the stop string stays in
the completion, as in transformers' `generate` and in TRL; vLLM cuts it off unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int, Integer

from smd_jax.pytrees import any_leaves
from smd_jax.text.prompts import Tokenizer
from smd_jax.text.token_bytes import TextTokenizer, as_text_tokenizer, special_tokens, token_bytes


@any_leaves
class StopTable(struct.PyTreeNode):
    """Where each token leads; state 0 has seen nothing of a stop string, the last state has seen one whole.

    Attributes:
      next_state: `[states, vocab]`, in the smallest unsigned integers that can count the states. A stop string of n
        bytes has n + 1 of them: "</answer>" takes 1.5 MB with the 152,064 rows of Qwen2.5.
    """

    next_state: Integer[Array, "states vocab"]


def compile_stop_strings(tokenizer: Tokenizer, strings: Sequence[str], vocab_size: int) -> StopTable:
    """The table of several stop strings; whichever comes first ends the response.

    Args:
      tokenizer: a transformers tokenizer.
      strings: stop strings, compared byte by byte in UTF-8, without normalisation.
      vocab_size: rows of the model's embedding. Rows that no token has leave the state as it is.

    Raises:
      TypeError: one string in place of a sequence; not a transformers tokenizer.
      ValueError: no strings; an empty one; one that the tokenizer cannot produce, because no sequence of tokens has its
        bytes or because it writes it with a special token, which is no text; what `token_bytes` raises.
    """
    patterns = _encode(strings)
    text_tokenizer = as_text_tokenizer(tokenizer)
    vocabulary = _Vocabulary(token_bytes(text_tokenizer, vocab_size))
    for string, pattern in zip(strings, patterns, strict=True):
        # One at a time, to name the string that cannot be reached.
        _check_reachable(string, vocabulary.run(_automaton([pattern])), text_tokenizer)
        _check_ordinary(string, text_tokenizer)
    table = vocabulary.run(_automaton(patterns))
    return StopTable(next_state=jnp.asarray(table.astype(np.min_scalar_type(len(table) - 1))))


def stop_table(tokenizer: Tokenizer, strings: Sequence[str], vocab_size: int) -> StopTable | None:
    """`compile_stop_strings`, or None where there are no strings."""
    return compile_stop_strings(tokenizer, strings, vocab_size) if strings else None


def check_stop_table(table: StopTable, vocab_size: int) -> None:
    """Raises ValueError for a table of another vocabulary."""
    if table.next_state.shape[1] != vocab_size:
        raise ValueError(
            f"expected stop strings compiled for the model's vocabulary of {vocab_size} tokens; got a table of "
            f"{table.next_state.shape[1]}"
        )


def start(batch: int) -> Int[Array, " batch"]:
    """The state of rows that have no response yet, int32."""
    return jnp.zeros((batch,), jnp.int32)


def advance(
    table: StopTable, state: Int[Array, " batch"], token: Int[Array, " batch"]
) -> tuple[Int[Array, " batch"], Bool[Array, " batch"]]:
    """Reads one token a row.

    Returns:
      The new state, int32, and whether a stop string has ended, with this token or an earlier one.
    """
    state = table.next_state[state, token].astype(jnp.int32)
    return state, state == table.next_state.shape[0] - 1


def _encode(strings: Sequence[str]) -> list[bytes]:
    if isinstance(strings, str):
        raise TypeError(f"expected a sequence of stop strings, such as [{strings!r}]; got the one string {strings!r}")
    if not strings:
        raise ValueError("expected at least one stop string; got none")
    for string in strings:
        # Surrogates by themselves have no encoding in UTF-8.
        if not string or any("\ud800" <= character <= "\udfff" for character in string):
            raise ValueError(f"expected stop strings of at least one character of Unicode; got {string!r}")
    return [string.encode() for string in strings]


def _automaton(patterns: Sequence[bytes]) -> np.ndarray:
    """Aho and Corasick's automaton, `[states, 256]`: the state after a byte. The last state absorbs."""
    state_of = _states(patterns)
    stop = len(state_of)
    steps = np.zeros((stop + 1, 256), np.int32)
    steps[stop] = stop
    fallback = np.zeros(stop, np.int32)  # state of the longest proper end of a text that is a state too
    # Shortest first: the fallback of a state is shorter than its text, so its row is complete when it is copied.
    for text, state in state_of.items():
        if len(text) > 1:
            fallback[state] = steps[fallback[state_of[text[:-1]]], text[-1]]
        if text:
            steps[state] = steps[fallback[state]]
        for longer in {pattern[: len(text) + 1] for pattern in patterns if pattern.startswith(text)}:
            # A beginning that is no state is a whole stop string, or has one inside.
            steps[state, longer[-1]] = state_of.get(longer, stop)
    return steps


def _states(patterns: Sequence[bytes]) -> dict[bytes, int]:
    """The beginnings of patterns, shortest first, and their numbers, but for the last state.

    Without those that have a whole pattern inside: no text gets there without having stopped.
    """
    beginnings = {pattern[:length] for pattern in patterns for length in range(len(pattern))}
    alive = [text for text in beginnings if not any(pattern in text for pattern in patterns)]
    return {text: state for state, text in enumerate(sorted(alive, key=lambda text: (len(text), text)))}


class _Vocabulary:
    """The bytes of all tokens, column by column, so that an automaton reads a byte of every token at a time."""

    def __init__(self, pieces: list[bytes]) -> None:
        lengths = np.array([len(piece) for piece in pieces])
        self.order = np.argsort(-lengths, kind="stable")  # longest first: column i is of the first tokens alone
        self.columns: list[np.ndarray] = []
        ordered = [pieces[token] for token in self.order]
        for position in range(lengths.max()):
            count = int(np.sum(lengths > position))
            self.columns.append(np.array([piece[position] for piece in ordered[:count]], np.uint8))

    def run(self, steps: np.ndarray) -> np.ndarray:
        """`[states, vocab]`: the state after a token, from every state."""
        states = np.repeat(np.arange(len(steps), dtype=np.int32)[:, None], len(self.order), axis=1)
        for column in self.columns:
            states[:, : len(column)] = steps[states[:, : len(column)], column[None]]
        table = np.empty_like(states)
        table[:, self.order] = states
        return table


def _check_reachable(string: str, table: np.ndarray, tokenizer: TextTokenizer) -> None:
    """Whether any sequence of tokens leads from the first to the last state: a breadth-first search."""
    reached = np.zeros(len(table), bool)
    reached[0] = True
    frontier = reached
    while frontier.any():
        found = np.zeros_like(reached)
        found[table[frontier]] = True
        frontier = found & ~reached
        reached = reached | found
    if not reached[-1]:
        raise ValueError(
            f"expected stop strings that the tokenizer can produce; got {string!r}, whose bytes no sequence of the "
            f"{len(tokenizer)} tokens of {type(tokenizer).__name__} has"
        )


def _check_ordinary(string: str, tokenizer: TextTokenizer) -> None:
    """The text of a special token could be spelled with others, but a model never does."""
    special = special_tokens(tokenizer)
    inside = [special[token] for token in tokenizer.encode(string, add_special_tokens=False) if token in special]
    inside = [token for token in inside if token in string]  # not the unknown token
    if inside:
        raise ValueError(
            f"expected stop strings that the tokenizer can produce as text; got {string!r}, which it writes with the "
            f"special token {inside[0]!r}; completions leave those out. To stop there, make it the eos_token_id"
        )
