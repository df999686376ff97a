"""Several sequences in one row of a learner's batch instead of padding.

    row 0    [prompt a | response a | prompt b | response b | · ]        columns 0 … T-1
    row 1    [prompt c | response c                 | · · · · · ]        · padding

An interval mask says it at once: when a sequence ends, all of its keys are evicted. So `evicted_at` of a key is at most
the first column behind its sequence, and attention needs nothing new.

Sequences with equal beginnings can share them, as branches of a tree (`smd_jax.message.tree`). Then a key goes at the
end of its subtree, and the hidden state that predicts a token need not be that of the column before it.

What the loss looks at is one behind the other, too: `K` places a row for the tokens of its responses. A token that
several sequences share has a place for each of them, and its logits once.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from smd_jax.pytrees import any_leaves


@any_leaves
class Packing(struct.PyTreeNode):
    """Where the sequences of a packed trajectory lie.

    Attributes:
      positions: int32 `[rows, T]` place of each token in its own sequence; 0 for padding.
      ends: int32 `[rows, T]` first column behind the sequence of each token, or its subtree; 0 for padding.
      columns: int32 `[rows, K]` column of each response token, at least 1; 1 where there is none.
      sources: int32 `[rows, K]` column whose hidden state predicts the token; 0 where there is none.
      response: `[rows, K]` which response tokens there are.
      distinct: int32 `[rows, U]` one of the K places of every token, 0 where there is none. None: no two places share a
        token.
      same: int32 `[rows, K]` which entry of `distinct` has the token of each place; None with it.
      longest: most tokens that a sequence can have; rows may be longer than a model's context. Static.
    """

    positions: Int[Array, "rows T"]
    ends: Int[Array, "rows T"]
    columns: Int[Array, "rows K"]
    sources: Int[Array, "rows K"]
    response: Bool[Array, "rows K"]
    distinct: Int[Array, "rows U"] | None
    same: Int[Array, "rows K"] | None
    longest: int = struct.field(pytree_node=False)

    def once(self) -> Packing:
        """The distinct tokens alone: U places in place of K."""
        if self.distinct is None:
            return self
        columns, sources, response = (
            jnp.take_along_axis(x, self.distinct, axis=1) for x in (self.columns, self.sources, self.response)
        )
        return self.replace(columns=columns, sources=sources, response=response, distinct=None, same=None)
