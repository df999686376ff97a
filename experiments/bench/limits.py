"""How near an engine is to the limit of its machine: the arithmetic of the model, over that of bare matrix products.

    limit_share = model FLOP of a turn / seconds / rate of the products        (both of one run, on one core)

Counted is what the model's definition needs, whatever an engine computes beside it: the products of all tokens, the
scores and the weighted values of the keys that a query may see, the logits of the response; forward and twice that
again backward. Softmax, norms, rotations, sampling, the optimizer and recomputation count as nothing.

The products are XLA's, of as many rows as a decoding step or a microbatch has. A library whose products are faster
could come above 1, and so could one whose prompts count for much.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from bench.engines import common
from bench.turns import Row


class Model(NamedTuple):
    """What the count needs to know of a model.

    Attributes:
      layers: weights in the matrices of all layers. head: in the output projection.
      pair: arithmetic of a pair of a query and a key, in all heads and layers: scores and weighted values.
    """

    layers: int
    head: int
    pair: int


COMPARED = Model(common.layer_weights(), common.head_weights(), pair=4 * common.LAYERS * common.HEADS * common.HEAD_DIM)


def visible_keys(prompt: int, new_tokens: int, budget: int | None, buffer: int | None) -> float:
    """Pairs of a query and a key that it sees, in a prompt and a response. Every query of the prompt sees the prompt up
    to itself; one of the response what was kept at its segment's beginning, and its own segment up to itself."""
    seen = prompt * (prompt + 1) / 2
    held = prompt
    for step in range(new_tokens):
        if budget is not None and buffer is not None and step % buffer == 0:
            held = min(held, budget)
        held += 1
        seen += held
    return seen


def rollout_flops(row: Row) -> float:
    """Of all tokens of a turn: prompts read once, every token but a response's last read, every one drawn."""
    attended = visible_keys(row["prompt"], row["new_tokens"] - 1, row["budget"], row["buffer"])
    read = row["prompt"] + row["new_tokens"] - 1
    products = read * common.layer_weights() + row["new_tokens"] * common.head_weights()
    return row["batch"] * (2 * products + attention_flops(attended))


def update_flops(row: Row, model: Model = COMPARED) -> float:
    """Of all sequences, forward and backward; hidden states of a prompt get no logits."""
    response = row["tokens"] - row["prompt"]
    attended = visible_keys(row["prompt"], response, row["budget"], row["buffer"])
    products = row["tokens"] * model.layers + response * model.head
    return 3 * row["sequences"] * (2 * products + attention_flops(attended, model))


def attention_flops(pairs: float, model: Model = COMPARED) -> float:
    """Scores and weighted values of so many pairs of a query and a key, in all heads and layers."""
    return pairs * model.pair


def product_command(rows: int, repeats: int, *flags: str) -> list[str]:
    """The command line of the yardstick, to take its turns among the engines."""
    script = Path(__file__).parent / "engines" / "product.py"
    return [sys.executable, str(script), "--rows", str(rows), "--repeats", str(repeats), "--driven", *flags]


def with_limits(rows: list[Row], update: bool = False) -> list[Row]:
    """The rows without the yardstick's own, each with its `limit_share`, and the rate it is a share of.

    Args:
      rows: of one run, in which `engines/product.py` took its turns.
    """
    [product] = [row for row in rows if row["engine"] == "product"]
    rate = product["gflops_per_second"]
    found = []
    for row in rows:
        if row is not product:
            flops = update_flops(row) if update else rollout_flops(row)
            share = flops / row["seconds"] / 1e9 / rate
            found.append(row | {"limit_share": share, "product_gflops_per_second": rate})
    return found
