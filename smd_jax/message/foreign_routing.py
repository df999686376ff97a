"""Expert routing as inference engines report it -> the routing of a Trajectory.

vLLM      routed_experts [n or n - 1, layers, k] of a request: prompt and response, the last token often left out
sglang    the same numbers, flat
Tunix     [width, layers, k], -1 where there is no token
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from smd_jax.message.foreign_tokens import PaddedRows

NONE = -1


class ExpertSizes(NamedTuple):
    """The experts of a model.

    Attributes:
      layers: number of layers with experts. count: experts per layer. per_token: experts per token.
    """

    layers: int
    count: int
    per_token: int


def routing_by_column(
    routed: Sequence[np.ndarray] | None, rows: PaddedRows, sizes: ExpertSizes | None
) -> np.ndarray | None:
    """`[batch, T, layers, per_token]` in the smallest integers, -1 where nothing was reported; None without routing.

    Raises:
      ValueError: one of the two arguments without the other; routing of another number of rows, tokens, layers or
        experts; an expert that the model does not have, or twice for a token; only some of a token's experts. The
        message names row, token and layer.
    """
    if routed is None and sizes is None:
        return None
    if routed is None or sizes is None:
        given = "None" if routed is None else f"of {len(routed)} rows"
        raise ValueError(f"expected experts and routed_experts together; got experts={sizes} and {given}")
    if len(routed) != len(rows.lengths):
        raise ValueError(f"expected routed_experts of {len(rows.lengths)} rows; got {len(routed)}")
    kind = np.int8 if sizes.count <= 2**7 else np.int16
    found = np.full((*rows.tokens.shape, sizes.layers, sizes.per_token), NONE, kind)
    for row, given in enumerate(routed):
        experts = _of_row(np.asarray(given), row, int(rows.lengths[row]), sizes)
        start = int(rows.start[row])
        found[row, start : start + len(experts)] = experts
    return found


def _of_row(given: np.ndarray, row: int, tokens: int, sizes: ExpertSizes) -> np.ndarray:
    """`[tokens or one less, layers, per_token]`, checked."""
    if given.dtype.kind not in "iu":
        raise ValueError(f"expected routed_experts as integers; got {given.dtype} in row {row}")
    each = (sizes.layers, sizes.per_token)
    if given.ndim == 1 and given.size % (sizes.layers * sizes.per_token) == 0:
        given = given.reshape(-1, *each)
    if given.ndim != 3 or given.shape[1:] != each:
        raise ValueError(
            f"expected routed_experts [tokens, layers, experts of a token] of {each[0]} layers and {each[1]} experts; "
            f"got {given.shape} in row {row}"
        )
    given = given.astype(np.int64)
    # An engine's padding after the row's last token.
    if (given[tokens:] != NONE).any() or len(given) < tokens - 1:
        raise ValueError(
            f"expected routed_experts of {tokens} tokens, or of {tokens - 1} without the last; got {len(given)} in row "
            f"{row}"
        )
    given = given[:tokens]
    for token, layer, place in np.argwhere((given < NONE) | (given >= sizes.count))[:1]:
        raise ValueError(
            f"expected experts from 0 to {sizes.count - 1}, or {NONE}; got {given[token, layer, place]} in row {row}, "
            f"token {token}, layer {layer}"
        )
    ordered = np.sort(given, axis=-1)
    twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != NONE)).any(-1)
    some = (given == NONE).any(-1) & (given != NONE).any(-1)
    for token, layer in np.argwhere(twice | some)[:1]:
        raise ValueError(
            f"expected {sizes.per_token} different experts of a token, or none; got {given[token, layer].tolist()} in "
            f"row {row}, token {token}, layer {layer}"
        )
    return given
