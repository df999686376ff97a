"""Drawable tokens: the tokens that the sampler's filters allow at every step, for the learner's softmax.

Filters (top-k, top-p, min-p) and a minimum length remove tokens from the sampler's distribution. The rest depends on
its logits to the last bit, so it is recorded in the trajectory instead of recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt8

from smd_jax.message.foreign import Ints, check_sampled, check_width, whole_numbers
from smd_jax.message.quantization import packed_size, unpack
from smd_jax.message.sampling import ID_BYTES, among, is_one_of
from smd_jax.pytrees import PyTreeNode

# A finite substitute for -inf, which gives NaN in differences and products with 0. exp() of it is 0 in every dtype.
OUTSIDE = -1e30


class DrawableTokens(PyTreeNode):
    """The drawable tokens of every response column.

    Attributes:
      sets: the tokens that pass the filters, in the form of `smd_jax.message.sampling.drawable_form`: int32 ids
        `[batch, R, k]`, filled with -1; or bits, uint8 `[batch, R, ceil(vocab / 8)]`. None without filters.
      min_new_tokens: number of first columns without end tokens. Static.
      eos_token_id: the end token, or several; None without one. Static.
    """

    sets: Int[Array, "batch R k"] | UInt8[Array, "batch R bytes"] | None
    min_new_tokens: int = struct.field(pytree_node=False, default=0)
    eos_token_id: int | tuple[int, ...] | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def from_csr(
        cls,
        support: Sequence[tuple[Ints, Ints]],
        responses: Sequence[Ints],
        sampled: Sequence[Sequence[bool] | np.ndarray] | None = None,
        *,
        response_width: int | None = None,
        vocab_size: int | None = None,
    ) -> DrawableTokens:
        """The sampling support that another engine reports, in compressed rows.

        Args:
          support: `(token_ids, offsets)` of each row; response token t could be any of
            `token_ids[offsets[t]:offsets[t + 1]]`.
          responses: the response ids of each row.
          sampled: which response tokens the policy sampled; the others have no set. None: all.
          response_width: columns R; None: as the longest row needs.
          vocab_size: vocabulary size; if given, ids are checked, and large sets are stored as bits.

        Raises:
          ValueError: no rows, an empty response, a wrong number of rows or offsets, an empty set, a set without the
            sampled token, an id outside the vocabulary, with the row and the token; a response_width below the longest
            response.
        """
        if len(support) != len(responses):
            raise ValueError(f"expected the sampling support of {len(responses)} rows; got {len(support)}")
        if not len(responses) or not all(map(len, responses)):
            raise ValueError("expected at least one response, of at least one token each; got none, or an empty one")
        flags = check_sampled(sampled, responses)
        by_row = [
            checked_support(*sets, responses[row], vocab_size, f" of row {row}", flags[row])
            for row, sets in enumerate(support)
        ]
        width = check_width("response_width", response_width, [len(sizes) for _, sizes in by_row])
        # A power of two: the longest set differs from batch to batch, and every width is a program of the update.
        most = 1 << (max(1, *(int(sizes.max()) for _, sizes in by_row)) - 1).bit_length()
        size = ID_BYTES * most if vocab_size is None else packed_size(vocab_size, 1)
        if as_bits := ID_BYTES * most > size:
            found = np.zeros((len(by_row), width, size), np.uint8)
        else:
            found = np.full((len(by_row), width, most), -1, np.int32)
        for row, (ids, sizes) in enumerate(by_row):
            columns = np.repeat(np.arange(len(sizes)), sizes)
            if as_bits:
                np.bitwise_or.at(found[row], (columns, ids // 8), np.left_shift(1, ids % 8).astype(np.uint8))
            else:
                places = np.arange(len(ids)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
                found[row, columns, places] = ids
        return cls(jnp.asarray(found))

    def first_columns(self, columns: int) -> DrawableTokens:
        """The sets of the first `columns` columns of the response."""
        return self.replace(sets=None if self.sets is None else self.sets[:, :columns])

    def to_boolean(
        self, vocab: int, columns: Int[Array, " columns"]
    ) -> Bool[Array, "batch columns vocab"] | Bool[Array, "1 columns vocab"]:
        """The sets of some response columns. Without filters all rows have the same sets, and the batch axis is 1.

        Raises:
          ValueError: if the sets are bits of another vocabulary.
        """
        if self.sets is None:
            drawable = jnp.ones((1, columns.shape[0], vocab), bool)
        elif self.sets.dtype != jnp.uint8:  # ids, not bits
            drawable = among(self.sets[:, columns], vocab)
        elif (size := self.sets.shape[-1]) == (expected := packed_size(vocab, 1)):
            drawable = unpack(self.sets[:, columns], 1, vocab) == 1
        else:
            raise ValueError(f"expected {expected} bytes of bits for a vocabulary of {vocab}; got {size} bytes")
        if self.eos_token_id is None or self.min_new_tokens == 0:
            return drawable
        # Without filters only the minimum length removes tokens.
        ends = is_one_of(jnp.arange(vocab)[None, None], self.eos_token_id)
        return drawable & ~(ends & (columns < self.min_new_tokens)[None, :, None])

    def apply(
        self, logits: Float[Array, "batch columns vocab"], columns: Int[Array, " columns"]
    ) -> Float[Array, "batch columns vocab"]:
        """The logits with `OUTSIDE` for tokens that are not drawable, which then have no probability and no gradient.

        Args:
          columns: response columns of the logits.
        """
        return jnp.where(self.to_boolean(logits.shape[-1], columns), logits, OUTSIDE)


def checked_support(
    ids: Ints, offsets: Ints, tokens: Ints, vocab_size: int | None, where: str, sampled: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The ids of the sampled tokens' sets, one set after the other, and the size of each token's set.

    Arguments and errors are those of `DrawableTokens.from_csr`, for one row.

    Args:
      where: suffix of "sampling support" in messages.
      sampled: the sets of other tokens may be empty; they are left out, with size 0.
    """
    ids = whole_numbers(ids, f"token ids of the sampling support{where}")
    offsets = whole_numbers(offsets, f"offsets of the sampling support{where}")
    count, sizes = len(tokens), np.diff(offsets)
    if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != len(ids) or (sizes < sampled).any():
        raise ValueError(
            f"expected {count + 1} rising offsets from 0 to {len(ids)} in the sampling support{where}, one more than "
            f"response tokens; got {np.array2string(offsets, threshold=8)}"
        )
    most = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    for place in np.flatnonzero((ids < 0) | (ids >= most))[:1]:
        raise ValueError(f"expected ids from 0 to {most - 1} in the sampling support{where}; got {ids[place]}")
    token_of_id = np.repeat(np.arange(count), sizes)
    has_token = np.zeros(count, bool)
    has_token[token_of_id[ids == np.asarray(tokens)[token_of_id]]] = True
    for place in np.flatnonzero(sampled & ~has_token)[:1]:
        raise ValueError(
            f"expected the sampled token {int(tokens[place])} in its sampling support{where}; it is missing (response "
            f"token {place})"
        )
    return ids[sampled[token_of_id]], np.where(sampled, sizes, 0)
