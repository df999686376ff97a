"""Which tokens the sampler could draw at every step: the learner takes its softmax over the same ones.

Filters (top-k, top-p, min-p) and a minimum length take tokens out of the sampler's distribution. What is left depends
on its logits to the last bit, so it travels in the trajectory instead of being found again.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt8

from smd_jax.message.quantization import packed_size, unpack
from smd_jax.message.sampling import among, is_one_of
from smd_jax.pytrees import any_leaves

# In place of -inf, which makes NaN of a difference and of a product with 0. exp() of it is 0 in every dtype.
OUTSIDE = -1e30


@any_leaves
class DrawableTokens(struct.PyTreeNode):
    """The tokens that could be drawn, for every column of the response.

    Attributes:
      sets: the tokens that filters left, in the form of `smd_jax.message.sampling.drawable_form`: int32 ids
        `[batch, R, k]`, -1 where there are fewer; or bits, uint8 `[batch, R, ceil(vocab / 8)]`. None without filters.
      min_new_tokens: no end token is in the sets of the first so many columns. Static.
      eos_token_id: the end token, or several; None without one. Static.
    """

    sets: Int[Array, "batch R k"] | UInt8[Array, "batch R bytes"] | None
    min_new_tokens: int = struct.field(pytree_node=False, default=0)
    eos_token_id: int | tuple[int, ...] | None = struct.field(pytree_node=False, default=None)

    def first_columns(self, columns: int) -> DrawableTokens:
        """The sets of the first `columns` columns of the response alone."""
        return self.replace(sets=None if self.sets is None else self.sets[:, :columns])

    def to_boolean(
        self, vocab: int, columns: Int[Array, " columns"]
    ) -> Bool[Array, "batch columns vocab"] | Bool[Array, "1 columns vocab"]:
        """The sets of some columns of the response; without filters they are the same in all rows, and come once.

        Raises:
          ValueError: if the sets are bits of another vocabulary.
        """
        drawable = jnp.ones((1, columns.shape[0], vocab), bool)
        if self.sets is not None:
            drawable = _to_boolean(self.sets[:, columns], vocab)
        if self.eos_token_id is None or self.min_new_tokens == 0:
            return drawable
        # Without filters there are no sets, and the minimum length is all that takes a token out.
        ends = is_one_of(jnp.arange(vocab)[None, None], self.eos_token_id)
        return drawable & ~(ends & (columns < self.min_new_tokens)[None, :, None])

    def apply(
        self, logits: Float[Array, "batch columns vocab"], columns: Int[Array, " columns"]
    ) -> Float[Array, "batch columns vocab"]:
        """The logits, with `OUTSIDE` for tokens that could not be drawn: no probability, and no gradient.

        Args:
          columns: those of the response to which the logits belong.
        """
        return jnp.where(self.to_boolean(logits.shape[-1], columns), logits, OUTSIDE)


def _to_boolean(sets: Array, vocab: int) -> Bool[Array, "batch columns vocab"]:
    # The dtype tells the form: bits are uint8, ids int32.
    if sets.dtype != jnp.uint8:
        return among(sets, vocab)
    if sets.shape[-1] != packed_size(vocab, 1):
        raise ValueError(
            f"expected {packed_size(vocab, 1)} bytes of bits for a vocabulary of {vocab}; got {sets.shape[-1]} bytes"
        )
    return unpack(sets, 1, vocab) == 1
