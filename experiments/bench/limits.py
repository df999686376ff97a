"""How near an engine is to the limit of its machine: the arithmetic of the model, over that of bare matrix products.

    limit_share = model FLOP of a turn / seconds / rate of the products        (both of one run, on one core)

Counted is what the model's definition needs, whatever an engine computes beside it: the products of all tokens, the
scores and the weighted values of the keys that a query may see, the logits of the response; forward and twice that
again backward. Softmax, norms, rotations, sampling, the optimizer and recomputation count as nothing.

The products are XLA's, of as many rows as a decoding step or a microbatch has. A library whose products are faster
could come above 1, and so could one whose prompts count for much.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from bench.engines.common import Sizes, model_sizes
from bench.turns import Row


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


def rollout_flops(row: Row, sizes: Sizes) -> float:
    """Of all tokens of a turn: prompts read once, every token but a response's last read, every one drawn."""
    attended = visible_keys(row["prompt"], row["new_tokens"] - 1, row["budget"], row["buffer"])
    read = row["prompt"] + row["new_tokens"] - 1
    products = read * sizes.layer_weights() + row["new_tokens"] * sizes.head_weights()
    return row["batch"] * (2 * products + attention_flops(attended, sizes))


def update_flops(row: Row, sizes: Sizes) -> float:
    """Of all sequences, forward and backward; hidden states of a prompt get no logits."""
    response = row["tokens"] - row["prompt"]
    attended = visible_keys(row["prompt"], response, row["budget"], row["buffer"])
    products = row["tokens"] * sizes.layer_weights() + response * sizes.head_weights()
    return 3 * row["sequences"] * (2 * products + attention_flops(attended, sizes))


def attention_flops(pairs: float, sizes: Sizes) -> float:
    """Scores and weighted values of so many pairs of a query and a key, in all heads and layers."""
    return 4 * pairs * sizes.layers * sizes.heads * sizes.head_dim


def product_command(rows: int, repeats: int, *flags: str) -> list[str]:
    """The command line of the yardstick, to take its turns among the engines."""
    script = Path(__file__).parent / "engines" / "product.py"
    return [sys.executable, str(script), "--rows", str(rows), "--repeats", str(repeats), "--driven", *flags]


def with_limits(rows: list[Row], update: bool = False) -> list[Row]:
    """The rows without the yardstick's own, each with its `limit_share`, and the rate it is a share of.

    Args:
      rows: of one run of the model of `engines/common.py`, in which `engines/product.py` took its turns.
    """
    [product] = [row for row in rows if row["engine"] == "product"]
    rate = product["gflops_per_second"]
    sizes = model_sizes()  # an output projection of its own changes no arithmetic
    found = []
    for row in rows:
        if row is not product:
            flops = update_flops(row, sizes) if update else rollout_flops(row, sizes)
            share = flops / row["seconds"] / 1e9 / rate
            found.append(row | {"limit_share": share, "product_gflops_per_second": rate})
    return found


# ---------------------------------------------------------------- whole steps, of rows of any length


def step_flops(step: Row, row: Row, sizes: Sizes) -> tuple[float, float]:
    """Of the rollout and of the update of one GRPO step. In the rollout a group's prompt is read once.

    Args:
      step: with `tokens`, (of the prompt, of the completion) of each completion of the step.
      row: of the engine: `group`, `budget` and `buffer`.
    """
    rollout = update = 0.0
    for prompt, new in step["tokens"]:
        one = {"batch": 1, "sequences": 1, "prompt": prompt, "new_tokens": new, "tokens": prompt + new}
        one |= {"budget": row["budget"], "buffer": row["buffer"]}
        reading = 2 * prompt * sizes.layer_weights() + attention_flops(visible_keys(prompt, 0, None, None), sizes)
        rollout += rollout_flops(one, sizes) - reading * (1 - 1 / row["group"])
        update += update_flops(one, sizes)
    return rollout, update


def with_step_limits(rows: list[Row], sizes: Sizes) -> list[Row]:
    """The rows without the yardsticks', each with the seconds that its arithmetic takes at their rates.

    `limit_seconds` of a step, `update_limit_seconds` of it in the update; `limit_share` is the former over the step's
    seconds: median over the steps, as they are.

    Args:
      rows: of one run, in which `engines/product.py` took its turns in both forms: as many rows as the sampler has, and
        the gradients of a microbatch.
    """
    rates = {row["backward"]: row["gflops_per_second"] * 1e9 for row in rows if row["engine"] == "product"}
    if rates.keys() != {False, True}:
        raise ValueError(f"expected products of a sampler's step and of an update; got backward {sorted(rates)}")
    found = []
    for row in rows:
        if row["engine"] == "product":
            continue
        flops = [step_flops(step, row, sizes) for step in row["steps"]]
        limits = [rollout / rates[False] + update / rates[True] for rollout, update in flops]
        shares = [limit / step["seconds"] for limit, step in zip(limits, row["steps"], strict=True)]
        more: Row = {"limit_share": statistics.median(shares), "limit_seconds": statistics.median(limits)}
        more["update_limit_seconds"] = statistics.median(update / rates[True] for _, update in flops)
        more["product_gflops_per_second"] = {"rollout": rates[False] / 1e9, "update": rates[True] / 1e9}
        found.append(row | more)
    return found
