"""Packs several sequences into one row of a learner batch instead of padding.

    row 0    [prompt a | response a | prompt b | response b | · ]        columns 0 … T-1
    row 1    [prompt c | response c                 | · · · · · ]        · padding

An interval mask separates them: when a sequence ends, all of its keys are evicted. So `evicted_at` of a key is at most
the first column after its sequence, and attention needs no change.

Sequences with equal beginnings can share them, as branches of a tree (`smd_jax.message.tree`). Then a key is evicted at
the end of its subtree, and the hidden state that predicts a token may belong to an earlier column. In depth-first order
the branches of a shared key are consecutive. Its recorded interval can end before the branches part, or after the last
of them. A key that one branch evicts and the next one sees would come back:

    p p p a a b b        key 0 of p
    1 1 1 1 1 1 1        stays in both branches: shared
    1 1 . . . . .        evicted before they part: shared
    1 1 1 1 . 1 1        branch a evicts it, branch b sees it: no interval, so p is in the row twice

The inputs of the loss are packed as well: `K` entries per row for response tokens. A shared token has one entry per
sequence, but its logits are computed once.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from smd_jax.message.masks import NEVER
from smd_jax.pytrees import PyTreeNode


class Packing(PyTreeNode):
    """Layout of the sequences of a packed trajectory.

    Attributes:
      positions: int32 `[rows, T]` position of each token in its own sequence; 0 for padding.
      ends: int32 `[rows, T]` first column after the token's sequence or subtree; 0 for padding.
      columns: int32 `[rows, K]` column of each response token, at least 1; 1 for empty entries.
      sources: int32 `[rows, K]` column whose hidden state predicts the token; 0 for empty entries.
      response: `[rows, K]` false for empty entries.
      distinct: int32 `[rows, U]` one of the K entries of every token, 0 for empty ones. None: no two entries have the
        same token.
      same: int32 `[rows, K]` index in `distinct` of each entry's token; None with it.
      longest: longest possible sequence; rows may be longer than a model's context. Static.
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
        """The layout of only the distinct tokens, U entries instead of K."""
        if self.distinct is None:
            return self
        columns, sources, response = (
            jnp.take_along_axis(x, self.distinct, axis=1) for x in (self.columns, self.sources, self.response)
        )
        return self.replace(columns=columns, sources=sources, response=response, distinct=None, same=None)


def shared_beginning(
    left: Int[np.ndarray, " n"],
    right: Int[np.ndarray, " m"],
    evicted: tuple[Int[np.ndarray, "layers kv_heads n"], Int[np.ndarray, "layers kv_heads m"]],
    routing: tuple[Int[np.ndarray, "n mixtures per_token"], Int[np.ndarray, "m mixtures per_token"]] | None = None,
) -> int:
    """Number of first tokens of two sequences that one row can hold once.

    Args:
      left, right: ids.
      evicted: `evicted_at` of each in positions, its length or more for keys that were never evicted.
      routing: experts of each token; tokens of other experts differ. None: no experts, or none recorded.
    """
    shortest = min(len(left), len(right))
    differs = left[:shortest] != right[:shortest]
    if routing is not None:
        differs |= (routing[0][:shortest] != routing[1][:shortest]).any((1, 2))
    shared = int(differs.argmax()) if differs.any() else shortest
    if shared == 0:
        return shared
    first, second = (
        np.where(at < tokens, at, NEVER)[..., :shared]
        for at, tokens in zip(evicted, map(len, (left, right)), strict=True)
    )
    # A query can be shared only if it sees the same keys in both sequences.
    parts = np.minimum(first, second)
    shared = min(shared, int(parts[first != second].min(initial=NEVER)) - 1)
    # A key that is evicted later is evicted in one branch while another may still see it.
    last = np.where(parts == NEVER, 0, parts).max(axis=(0, 1))
    while (later := np.flatnonzero(last[:shared] > shared)).size:
        shared = int(later[0])
    return shared
