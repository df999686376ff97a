"""The longest beginning that two sequences can share in one row under recorded evictions.

In depth-first order the branches of a shared key are consecutive. Its interval can end before the branches part, or
after the last of them. A key that one branch evicts and the next one sees would come back:

    p p p a a b b        key 0 of p
    1 1 1 1 1 1 1        stays in both branches: shared
    1 1 . . . . .        evicted before they part: shared
    1 1 1 1 . 1 1        branch a evicts it, branch b sees it: no interval, so p is in the row twice

NumPy only.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from smd_jax.message.masks import NEVER


def shared_beginning(
    left: Int[np.ndarray, " n"],
    right: Int[np.ndarray, " m"],
    evicted: tuple[Int[np.ndarray, "layers kv_heads n"], Int[np.ndarray, "layers kv_heads m"]] | None = None,
    routing: tuple[Int[np.ndarray, "n mixtures per_token"], Int[np.ndarray, "m mixtures per_token"]] | None = None,
) -> int:
    """Number of first tokens of two sequences that one row can hold once.

    Args:
      left, right: ids.
      evicted: `evicted_at` of each in positions, its length or more for keys that were never evicted; None without
        evictions.
      routing: experts of each token; tokens of other experts differ. None: no experts, or none recorded.
    """
    shortest = min(len(left), len(right))
    differs = left[:shortest] != right[:shortest]
    if routing is not None:
        differs |= (routing[0][:shortest] != routing[1][:shortest]).any((1, 2))
    shared = int(differs.argmax()) if differs.any() else shortest
    if evicted is None or shared == 0:
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
