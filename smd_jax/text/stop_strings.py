"""Stop strings as a table over tokens: the decode loop finds the first stop string without decoding text.

    strings ──► automaton over bytes ──► next_state[state, token] ──► state = next_state[state, token]   (each step)

The state of Aho and Corasick's automaton (Efficient string matching, 1975) is the longest suffix of the text that
begins a stop string. Running it over the bytes of every token, from every state, gives a table over tokens. So a stop
string may begin and end inside of tokens and span any number of them. The last state means that a stop string was
found, and is never left.

The match is exact on the bytes of the response, without the prompt and without special tokens. The token that completes
a stop string is the last of the response. The stop string stays in the completion, as in transformers' `generate` and
in TRL; vLLM removes it by default.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Integer

from smd_jax.pytrees import PyTreeNode
from smd_jax.text.prompts import Tokenizer
from smd_jax.text.token_bytes import special_tokens, token_bytes


class StopTable(PyTreeNode):
    """Transitions of the automaton. State 0 has seen no part of a stop string, the last state a whole one.

    Attributes:
      next_state: `[states, vocab]`, in the smallest unsigned type. A stop string of n bytes has n + 1 states:
        "</answer>" takes 1.5 MB with the 152,064 rows of Qwen2.5.
    """

    next_state: Integer[Array, "states vocab"]


def compile_stop_strings(tokenizer: Tokenizer, strings: Sequence[str], vocab_size: int) -> StopTable:
    """Compiles stop strings; the first one in the text ends the response.

    Args:
      tokenizer: a transformers tokenizer.
      strings: stop strings, compared as UTF-8 bytes without normalisation.
      vocab_size: rows of the model's embedding. Rows without a token keep the state.

    Raises:
      TypeError: one string instead of a sequence.
      ValueError: no strings; an empty one; one that UTF-8 cannot encode; one that the tokenizer encodes with a special
        token, which is no text; see also `token_bytes`.
    """
    if isinstance(strings, str):
        raise TypeError(f"expected a sequence of stop strings, such as [{strings!r}]; got the one string {strings!r}")
    if not strings:
        raise ValueError("expected at least one stop string; got none")
    for string in strings:
        if not string:
            raise ValueError("expected stop strings of at least one character; got ''")
        try:
            string.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"expected stop strings that UTF-8 can encode; got {string[:100]!r}") from error
        _check_ordinary(string, tokenizer)
    steps = _automaton([string.encode() for string in strings])
    table = _run_over_tokens(steps, token_bytes(tokenizer, vocab_size))
    return StopTable(next_state=jnp.asarray(table.astype(np.min_scalar_type(len(table) - 1))))


def stop_table(tokenizer: Tokenizer, strings: Sequence[str], vocab_size: int) -> StopTable | None:
    """`compile_stop_strings`, or None without strings."""
    return compile_stop_strings(tokenizer, strings, vocab_size) if strings else None


def check_stop_table(table: StopTable, vocab_size: int) -> None:
    """Raises ValueError for a table of another vocabulary."""
    if table.next_state.shape[1] != vocab_size:
        raise ValueError(
            f"expected stop strings compiled for the model's vocabulary of {vocab_size} tokens; got a table of "
            f"{table.next_state.shape[1]}"
        )


def advance(
    table: StopTable, state: Int[Array, " batch"], token: Int[Array, " batch"]
) -> tuple[Int[Array, " batch"], Bool[Array, " batch"]]:
    """Advances by one token per row. The initial state is 0.

    Returns:
      The new state, int32, and whether the response has a whole stop string.
    """
    state = table.next_state[state, token].astype(jnp.int32)
    return state, state == table.next_state.shape[0] - 1


def _automaton(patterns: Sequence[bytes]) -> np.ndarray:
    """Aho and Corasick's automaton, `[states, 256]`: the state after a byte. The last state is absorbing.

    A state is the longest end of the text that begins a pattern.
    """
    beginnings = {pattern[:length] for pattern in patterns for length in range(len(pattern))}
    # Those that contain a whole pattern are left out, because a response stops before it gets there.
    alive = [text for text in beginnings if not any(pattern in text for pattern in patterns)]
    state_of = {text: state for state, text in enumerate(sorted(alive, key=lambda text: (len(text), text)))}
    stop = len(state_of)
    steps = np.zeros((stop + 1, 256), np.int32)  # a byte of no pattern leads to state 0, that of no text
    steps[stop] = stop
    for text, state in state_of.items():
        for byte in set(b"".join(patterns)):
            longer = text + bytes([byte])
            longest = next(longer[first:] for first in range(len(longer) + 1) if longer[first:] in state_of)
            steps[state, byte] = stop if longer.endswith(tuple(patterns)) else state_of[longest]
    return steps


def _run_over_tokens(steps: np.ndarray, pieces: list[bytes]) -> np.ndarray:
    """`[states, vocab]`: the state after all bytes of a token, from every state."""
    states = np.repeat(np.arange(len(steps), dtype=np.int32)[:, None], len(pieces), axis=1)
    lengths = np.array([len(piece) for piece in pieces])
    for position in range(lengths.max()):
        tokens = np.flatnonzero(lengths > position)
        column = np.array([pieces[token][position] for token in tokens])
        states[:, tokens] = steps[states[:, tokens], column]
    return states


def _check_ordinary(string: str, tokenizer: Tokenizer) -> None:
    """Raises ValueError for the text of a special token, which a model never writes with other tokens."""
    special = special_tokens(tokenizer)
    inside = [special[token] for token in tokenizer.encode(string, add_special_tokens=False) if token in special]
    inside = [token for token in inside if token in string]  # not the unknown token
    if inside:
        raise ValueError(
            f"expected stop strings that the tokenizer can produce as text; got {string!r}, which it writes with the "
            f"special token {inside[0]!r}; completions leave those out. To stop there, make it the eos_token_id"
        )
