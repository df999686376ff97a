"""Text to token ids and back: prompts are left-padded to one width, so that every batch has the shape of the first.

A row of a batch is `[pad pad pad | prompt]`: the last column is the newest token in every row, and sampling writes the
response from column `width` on, whatever the length of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from smd_jax.process_rows import rows_here
from smd_jax.pytrees import any_leaves

MAX_SPARE_ROWS = 512  # embedding rows without a token that pass for padding; Qwen2.5, the largest we know, has 399

T = TypeVar("T")


@any_leaves
class PromptBatch(struct.PyTreeNode):
    """Left-padded prompts.

    Attributes:
      tokens: int32 `[batch, width]`; the pad id where `valid` is False.
      valid: bool `[batch, width]`; True on the prompt's own tokens, which end in the last column.
    """

    tokens: Int[Array, "batch width"]
    valid: Bool[Array, "batch width"]


@runtime_checkable
class Tokenizer(Protocol):
    """What we ask of a tokenizer: a subset of transformers' `PreTrainedTokenizerBase`, only members it declares.

    (Its `pad_token_id` and `eos_token_id` are made up on access; the functions of that name below read them.)
    """

    def __len__(self) -> int: ...

    @property
    def special_tokens_map(self) -> dict[str, str]: ...

    def get_vocab(self) -> dict[str, int]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str | list[str]: ...

    def convert_tokens_to_ids(self, tokens: str) -> int | list[int]: ...

    @property
    def chat_template(self) -> str | dict[str, str] | None: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> object: ...


def encode_prompts(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    width: int | None = None,
    max_positions: int | None = None,
    add_special_tokens: bool = False,
) -> PromptBatch:
    """Encodes `texts` and pads them on the left.

    Args:
      tokenizer: a transformers tokenizer with a pad token.
      texts: one prompt per row, chat template already applied.
      width: columns of the batch, in tokens. Give the same one to every batch of a run and everything jitted compiles
        once. None means the longest prompt of this batch.
      max_positions: the model's context, in tokens.
      add_special_tokens: let the tokenizer put its own in front (a BOS token). Wanted for plain text; False after a
        chat template, which has written them already.

    Returns:
      A PromptBatch `[len(texts), width]`.

    Raises:
      ValueError: no prompts; an empty prompt or one that is too long (naming its row); `width` outside the context; a
        tokenizer without a pad token.
    """
    pad = pad_token_id(tokenizer)
    rows = [encode_prompt(tokenizer, text, add_special_tokens=add_special_tokens) for text in texts]
    limit, reason = _limit(width, max_positions)
    _check_lengths([len(row) for row in rows], limit, reason)
    return _pad_left(rows, max(map(len, rows)) if width is None else width, pad)


def encode_prompt(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """The tokens of one prompt: special tokens of the tokenizer go in front of the text, and never behind it.

    Tokenizers that were saved for fine-tuning append EOS, which would end the text before the model answers. A text
    that begins with what the tokenizer would put in front has it once.
    """
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if not add_special_tokens:
        return tokens
    front = _front(tokenizer, text or "a")  # of no text it cannot be told from what goes behind
    return tokens if tokens[: len(front)] == front else front + tokens


def wants_special_tokens(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer must add its own to a prompt: a chat template has written them already."""
    return tokenizer.chat_template is None


def check_prompts(prompts: PromptBatch, vocab_size: int) -> None:
    """Raises ValueError for prompts that `encode_prompts` would not make; reads the values, of several processes each
    its own rows.

    A row must end in the last column and have no padding inside: the first response token follows the last column. All
    ids must be the vocabulary's, those of the padding too: a look-up outside of the embedding gives NaN, or for
    negative ids another token's row, and a NaN spreads even from a key that has no weight.
    """
    if prompts.valid.ndim != 2 or prompts.valid.shape != prompts.tokens.shape or not prompts.valid.size:
        raise ValueError(
            "expected tokens and valid of one shape [prompts, width], with at least one prompt; got "
            f"{prompts.tokens.shape} and {prompts.valid.shape}"
        )
    valid, tokens = rows_here((prompts.valid, prompts.tokens))
    lengths = valid.sum(axis=1)
    if not lengths.all():
        raise ValueError(f"expected at least one token in every prompt; prompt {np.argmin(lengths)} is all padding")
    # Either a token with padding right behind it, or padding in the last column.
    gaps = (valid[:, :-1] & ~valid[:, 1:]).any(axis=1) | ~valid[:, -1]
    if gaps.any():
        row = int(np.argmax(gaps))
        raise ValueError(
            f"expected prompts padded on the left alone, ending in the last column; got prompt {row} valid in columns "
            f"{np.flatnonzero(valid[row]).tolist()} of {valid.shape[1]}"
        )
    outside = np.argwhere((tokens < 0) | (tokens >= vocab_size))
    if len(outside):
        row, column = outside[0]
        what = "token" if valid[row, column] else "padding"
        raise ValueError(
            f"expected prompt ids from 0 to {vocab_size - 1}, the model's vocabulary; got {what} "
            f"{tokens[row, column]} in prompt {row}, column {column}"
        )


def repeat_prompts(prompts: PromptBatch, group_size: int) -> PromptBatch:
    """`[batch, width]` to `[batch * group_size, width]`; the copies of a prompt lie together: a a a b b b."""
    return jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), prompts)


def repeat_each(items: Sequence[T], group_size: int) -> list[T]:
    """`repeat_prompts` for what stays on the host (rows, texts): the same order."""
    return [item for item in items for _ in range(group_size)]


def decode_completions(
    tokenizer: Tokenizer,
    tokens: Int[Array, "batch length"] | Int[np.ndarray, "batch length"],
    mask: Bool[Array, "batch length"] | Bool[np.ndarray, "batch length"],
) -> list[str]:
    """The text of every row where `mask` (the response mask) is True, without special tokens such as EOS."""
    return [_decode(tokenizer, row[keep]) for row, keep in zip(np.asarray(tokens), np.asarray(mask), strict=True)]


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Tokenizer and embedding must belong together.

    Checkpoints pad their embedding beyond the tokenizer (Qwen2.5: 151,936 or 152,064 rows for 151,665 tokens), so spare
    rows are allowed: up to `MAX_SPARE_ROWS`, and up to half of the tokenizer's size, whichever is less. More means that
    the two were not made for each other: most samples of the model would be ids that no token has.

    Raises:
      ValueError: a token id outside the embedding, or more spare rows than padding explains.
    """
    # Ids may have holes, and then the largest one exceeds the number of tokens.
    needed = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
    if needed > vocab_size:
        raise ValueError(
            f"tokenizer and embedding have different sizes: expected an embedding of at least {needed} rows, because "
            f"the tokenizer has {len(tokenizer)} tokens with ids up to {needed - 1}; got vocab_size {vocab_size}"
        )
    spare = min(MAX_SPARE_ROWS, needed // 2)
    if vocab_size - needed > spare:
        raise ValueError(
            f"tokenizer and embedding have different sizes: expected an embedding of {needed} to {needed + spare} rows "
            f"for a tokenizer of {len(tokenizer)} tokens; got vocab_size {vocab_size}"
        )


def pad_token_id(tokenizer: Tokenizer) -> int:
    """The id that fills the left of a batch. It may equal EOS: `valid` tells padding from tokens, the id never does."""
    return _special_id(tokenizer, "pad_token", "set tokenizer.pad_token = tokenizer.eos_token")


def eos_token_id(tokenizer: Tokenizer) -> int:
    """The id that ends a response."""
    return _special_id(tokenizer, "eos_token", "set tokenizer.eos_token")


def _special_id(tokenizer: Tokenizer, name: str, remedy: str) -> int:
    token = tokenizer.special_tokens_map.get(name)
    if token is None:
        raise ValueError(
            f"expected a tokenizer with a {name}; got special tokens {tokenizer.special_tokens_map}; {remedy}"
        )
    token_id = tokenizer.convert_tokens_to_ids(token)
    if not isinstance(token_id, int):
        raise ValueError(f"expected one id for the {name} {token!r}; got {token_id}")
    return token_id


def _front(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens that the tokenizer puts in front of this text."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    framed = tokenizer.encode(text, add_special_tokens=True)
    # The last place: special tokens that the text itself begins with stay in it.
    for start in range(len(framed) - len(tokens), -1, -1):
        if framed[start : start + len(tokens)] == tokens:
            return framed[:start]
    return []


def _limit(width: int | None, max_positions: int | None) -> tuple[int | None, str]:
    """The longest prompt allowed, in tokens, and the name of what limits it."""
    if width is None:
        return max_positions, "the model's context"
    if width < 1 or (max_positions is not None and width > max_positions):
        raise ValueError(f"expected a width from 1 to the model's context of {max_positions} tokens; got {width}")
    return width, "the width of the batch"


def _check_lengths(lengths: list[int], limit: int | None, reason: str) -> None:
    if not lengths:
        raise ValueError("expected at least one prompt; got none")
    for row, length in enumerate(lengths):
        if length == 0:
            raise ValueError(f"expected at least one token in every prompt; prompt {row} is empty")
        if limit is not None and length > limit:
            raise ValueError(f"expected prompts of at most {limit} tokens ({reason}); prompt {row} has {length}")


def _pad_left(rows: list[list[int]], width: int, pad: int) -> PromptBatch:
    lengths = np.array([len(row) for row in rows])
    valid = np.arange(width) >= width - lengths[:, None]
    tokens = np.full(valid.shape, pad, np.int32)
    tokens[valid] = np.concatenate(rows)  # row-major on both sides: row i's tokens land at the end of row i
    return PromptBatch(tokens=jnp.asarray(tokens), valid=jnp.asarray(valid))


def _decode(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
    if not isinstance(text, str):
        raise TypeError(f"expected tokenizer.decode to give one string; got {type(text).__name__}")
    return text
