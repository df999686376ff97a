"""Text to token ids and back. Prompts are left-padded to one width, so that all batches have one shape.

A row of a batch is `[pad pad pad | prompt]`: the last column is the newest token of every row, and responses begin at
column `width`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from smd_jax.devices.process_rows import rows_here
from smd_jax.pytrees import PyTreeNode
from smd_jax.shapes import check_array

T = TypeVar("T")


class PromptBatch(PyTreeNode):
    """Left-padded prompts.

    Attributes:
      tokens: int32 `[batch, width]`; the pad id where `valid` is False.
      valid: bool `[batch, width]`; True on the prompt's tokens, which end in the last column.
    """

    tokens: Int[Array, "batch width"]
    valid: Bool[Array, "batch width"]


@runtime_checkable
class Tokenizer(Protocol):
    """The part of transformers' `PreTrainedTokenizerBase` that we use.

    It does not declare `pad_token_id` and `eos_token_id`; the functions of these names below read them.
    """

    def __len__(self) -> int: ...

    @property
    def special_tokens_map(self) -> dict[str, str]: ...

    def get_vocab(self) -> dict[str, int]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str | list[str]: ...

    def convert_tokens_to_ids(self, tokens: str) -> int | list[int]: ...

    @property
    def added_tokens_decoder(self) -> dict[int, Any]: ...

    @property
    def chat_template(self) -> str | dict[str, str] | None: ...

    def get_chat_template(self, *, tools: Any) -> str: ...


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
      texts: one prompt per row, after the chat template.
      width: columns of the batch, in tokens. One width for all batches of a run compiles everything once. None: the
        longest prompt of this batch.
      max_positions: the model's context, in tokens.
      add_special_tokens: let the tokenizer put its special tokens (BOS) in front. For plain text; a chat template has
        written them already.

    Returns:
      A PromptBatch `[len(texts), width]`.

    Raises:
      ValueError: no prompts; an empty prompt or one that is too long (naming its row); `width` outside the context; a
        tokenizer without a pad token.
      TypeError: one text instead of a list, or prompts that are no texts.
    """
    if isinstance(texts, str):
        # A text is a sequence of texts, one for each character.
        raise TypeError(f"expected a list of texts; got one text, {texts[:80]!r}")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(
                f"expected texts; got {type(text).__name__} as prompt {index}. Chat messages become text by "
                "tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)"
            )
    pad = pad_token_id(tokenizer)
    rows = [encode_prompt(tokenizer, text, add_special_tokens=add_special_tokens) for text in texts]
    longest, reason = (max_positions, "the model's context") if width is None else (width, "the prompt width")
    if width is not None and (width < 1 or (max_positions is not None and width > max_positions)):
        most = "" if max_positions is None else f" to the model's context of {max_positions} tokens"
        raise ValueError(f"expected a width from 1{most}; got {width}")
    if not rows:
        raise ValueError("expected at least one prompt; got none")
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"expected at least one token in every prompt; prompt {index} is empty")
        if longest is not None and len(row) > longest:
            raise ValueError(
                f"expected prompts of at most {longest} tokens ({reason}; a chat template adds tokens); prompt {index} "
                f"has {len(row)}"
            )
    return pad_left(rows, max(map(len, rows)) if width is None else width, pad)


def encode_prompt(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Encodes one prompt, with special tokens in front of the text and never after it.

    Tokenizers saved for fine-tuning append EOS, which would end the text before the model answers. A text that already
    begins with the special tokens gets no second ones.
    """
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if not add_special_tokens:
        return tokens
    front = _front(tokenizer, text or "a")  # without text, tokens in front and after it look the same
    return tokens if tokens[: len(front)] == front else front + tokens


def encode_continuation(tokenizer: Tokenizer, text: str, last: str = "") -> list[int]:
    """Encodes a text that continues another one, without special tokens.

    Sentencepiece tokenizers put a blank in front of every text, which would be wrong between two.

    Args:
      last: text of the preceding special token, after which some tokenizers encode as at the start of a text.
    """

    def encoded(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def behind(before: str, text: str) -> list[int] | None:  # None if a token holds parts of both
        first, whole = encoded(before), encoded(before + text)
        return whole[len(first) :] if whole[: len(first)] == first else None

    if behind("\n", "a") in (None, encoded("a")):
        return encoded(text)
    # Either stands for the text before; a newline may be one token with a newline at the start of the text.
    found = (behind(before + last, text) for before in "\na")
    return next((tokens for tokens in found if tokens is not None), encoded(text))


def wants_special_tokens(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer must add special tokens to a prompt; a chat template writes them itself."""
    return tokenizer.chat_template is None


def check_prompt_batch(prompts: object) -> None:
    """Raises TypeError unless the object is a PromptBatch of whole numbers and booleans, also under a trace."""
    if not isinstance(prompts, PromptBatch):
        raise TypeError(f"expected prompts as a PromptBatch, as encode_prompts gives; got {type(prompts).__name__}")
    check_array("tokens", prompts.tokens)
    check_array("valid", prompts.valid)
    tokens, valid = jnp.result_type(prompts.tokens), jnp.result_type(prompts.valid)
    if not jnp.issubdtype(tokens, jnp.integer) or valid != jnp.bool_:
        raise TypeError(
            f"expected tokens of whole numbers, and valid of booleans; got {tokens} and {valid}. For a transformers "
            "batch: valid=attention_mask.astype(bool)"
        )


def check_prompts(prompts: PromptBatch, vocab_size: int) -> None:
    """Raises ValueError for prompts that `encode_prompts` would not make, and TypeError as `check_prompt_batch`. Reads
    the values of this process's rows.

    A row must end in the last column and have no padding inside, because responses begin after the last column. All
    ids, also of the padding, must be in the vocabulary: a lookup outside of the embedding gives NaN, or another token's
    row for negative ids, and a NaN spreads even from a key without weight.
    """
    check_prompt_batch(prompts)
    if prompts.valid.ndim != 2 or prompts.valid.shape != prompts.tokens.shape or not prompts.valid.size:
        raise ValueError(
            "expected tokens and valid of one shape [prompts, width], with at least one prompt; got "
            f"{prompts.tokens.shape} and {prompts.valid.shape}"
        )
    valid, tokens = rows_here((prompts.valid, prompts.tokens))
    lengths = valid.sum(axis=1)
    if not lengths.all():
        raise ValueError(f"expected at least one token in every prompt; prompt {np.argmin(lengths)} is all padding")
    # Either a token that padding follows, or padding in the last column.
    gaps = (valid[:, :-1] & ~valid[:, 1:]).any(axis=1) | ~valid[:, -1]
    if gaps.any():
        row = int(np.argmax(gaps))
        raise ValueError(
            f"expected prompts padded only on the left, ending in the last column; got prompt {row} valid in columns "
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
    """`[batch, width]` to `[batch * group_size, width]`, in the order a a a b b b."""
    return jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), prompts)


def repeat_each(items: Sequence[T], group_size: int) -> list[T]:
    """`repeat_prompts` for rows or texts on the host."""
    return [item for item in items for _ in range(group_size)]


def decode_completions(
    tokenizer: Tokenizer,
    tokens: Int[Array, "batch length"] | Int[np.ndarray, "batch length"],
    mask: Bool[Array, "batch length"] | Bool[np.ndarray, "batch length"],
) -> list[str]:
    """The text of every row where `mask` (the response mask) is True, without special tokens such as EOS.

    Ids of spare rows of an embedding have no token and no text. Warns if over a tenth of the ids are such.
    """
    tokens, mask = np.asarray(tokens), np.asarray(mask)
    sampled = tokens[mask]
    # The vocabulary takes a tenth of a second, and few tokenizers have ids beyond their length.
    if (sampled >= len(tokenizer)).sum() > len(sampled) / 10:
        unknown = ~np.isin(sampled, [*tokenizer.get_vocab().values()])
        if unknown.sum() > len(sampled) / 10:
            warnings.warn(
                f"expected sampled ids with a token; got {unknown.sum()} of {len(sampled)} without one, such as "
                f"{sampled[unknown][0]}. Was the tokenizer made for this model?",
                stacklevel=2,
            )
    rows = zip(tokens, mask, strict=True)
    return [str(tokenizer.decode(row[keep].tolist(), skip_special_tokens=True)) for row, keep in rows]


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ValueError for a tokenizer that was not made for an embedding of `vocab_size` rows.

    Allows spare rows, up to half of the tokenizer's size: DeepSeek-LLM has 102,400 rows for 100,015 tokens. Also allows
    added tokens outside of the embedding that no prompt has, such as Gemma 3 1B's for images.
    """
    check_ordinary_ids(tokenizer, vocab_size)
    # Ids may have gaps, so the largest one may exceed the number of tokens.
    needed = 1 + max(token_id for token_id in tokenizer.get_vocab().values() if token_id < vocab_size)
    if vocab_size - needed > needed // 2:
        raise ValueError(
            f"tokenizer and embedding have different sizes: expected an embedding of {needed} to "
            f"{needed + needed // 2} rows for a tokenizer of {len(tokenizer)} tokens; got vocab_size {vocab_size}"
        )


def check_ordinary_ids(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ValueError if an ordinary token is outside of an embedding of `vocab_size` rows."""
    added = tokenizer.added_tokens_decoder
    ids = [token_id for token_id in tokenizer.get_vocab().values() if token_id not in added]
    needed = 1 + max(ids, default=-1)
    if needed > vocab_size or not any(token_id < vocab_size for token_id in tokenizer.get_vocab().values()):
        raise ValueError(
            f"tokenizer and embedding have different sizes: expected an embedding of at least {needed} rows, because "
            f"the tokenizer has {len(tokenizer)} tokens with ids up to {needed - 1}; got vocab_size {vocab_size}"
        )


def unreachable_tokens(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """Added tokens outside of an embedding of `vocab_size` rows, which no prompt may contain."""
    return [str(token) for token_id, token in tokenizer.added_tokens_decoder.items() if token_id >= vocab_size]


def pad_token_id(tokenizer: Tokenizer) -> int:
    """The padding id. It may equal EOS, because `valid` marks padding and the id never does."""
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
    """The special tokens that the tokenizer puts in front of this text."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    framed = tokenizer.encode(text, add_special_tokens=True)
    # The last match, so that special tokens at the start of the text stay in the text.
    for start in range(len(framed) - len(tokens), -1, -1):
        if framed[start : start + len(tokens)] == tokens:
            return framed[:start]
    return []


def pad_left(rows: list[list[int]], width: int, pad: int) -> PromptBatch:
    """Rows of ids, none longer than `width`, as prompts."""
    lengths = np.array([len(row) for row in rows])
    valid = np.arange(width) >= width - lengths[:, None]
    tokens = np.full(valid.shape, pad, np.int32)
    tokens[valid] = [token for row in rows for token in row]  # row-major on both sides, so row i's tokens end row i
    return PromptBatch(tokens=jnp.asarray(tokens), valid=jnp.asarray(valid))
