"""FLOP/s of the model as a share of the rate of bare matrix products.

    limit_share = model FLOP of a turn / seconds / rate of the products        (both of one run, on one core)

Counts what the model's definition needs: the products of all tokens, the scores and weighted values of visible keys,
the logits of the response; twice as much for the backward pass. Softmax, norms, rotations, sampling, the optimizer and
recomputation are not counted. The products are XLA's, with as many rows as a decoding step or a microbatch has, so a
library with faster products could exceed 1.
"""

from __future__ import annotations

from bench.engines.common import MODEL, Sizes
from bench.turns import Row


def visible_keys(prompt: int, new_tokens: int, budget: int | None, buffer: int | None) -> float:
    """Number of pairs of a query and a visible key. A query of the prompt sees the prompt up to itself; one of the
    response sees the keys kept at the start of its segment, and the segment up to itself."""
    seen = prompt * (prompt + 1) / 2
    held = prompt
    for step in range(new_tokens):
        if budget is not None and buffer is not None and step % buffer == 0:
            held = min(held, budget)
        held += 1
        seen += held
    return seen


def rollout_flops(row: Row, sizes: Sizes) -> float:
    """FLOP of a turn: every token but the last of a response is read, every response token is sampled."""
    attended = visible_keys(row["prompt"], row["new_tokens"] - 1, row["budget"], row["buffer"])
    read = row["prompt"] + row["new_tokens"] - 1
    products = read * sizes.layer_weights() + row["new_tokens"] * sizes.head_weights()
    return row["batch"] * (2 * products + attention_flops(attended, sizes))


def update_flops(row: Row, sizes: Sizes) -> float:
    """FLOP of all sequences, forward and backward; hidden states of a prompt get no logits."""
    response = row["tokens"] - row["prompt"]
    attended = visible_keys(row["prompt"], response, row["budget"], row["buffer"])
    products = row["tokens"] * sizes.layer_weights() + response * sizes.head_weights()
    return 3 * row["sequences"] * (2 * products + attention_flops(attended, sizes))


def attention_flops(pairs: float, sizes: Sizes) -> float:
    """FLOP of scores and weighted values of `pairs` of a query and a key, in all heads and layers."""
    return 4 * pairs * sizes.num_layers * sizes.num_heads * sizes.head_dim


def with_limits(rows: list[Row], update: bool = False) -> list[Row]:
    """Adds `limit_share` and the rate of the products to the rows, and drops the row of `product`.

    Args:
      rows: of one run with the model of `engines/common.py` and `engines/product.py`.
    """
    [product] = [row for row in rows if row["engine"] == "product"]
    rate = product["gflops_per_second"]
    found = []
    for row in rows:
        if row is not product:
            flops = update_flops(row, MODEL) if update else rollout_flops(row, MODEL)
            share = flops / row["seconds"] / 1e9 / rate
            found.append(row | {"limit_share": share, "product_gflops_per_second": rate})
    return found
