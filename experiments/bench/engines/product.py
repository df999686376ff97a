"""The yardstick of `bench/rollout.py`, `update.py`, `step.py`: what bare matrix products of the model's shapes reach.

Command    python experiments/bench/engines/product.py --rows 32                  (a step of 32 rows)
           python experiments/bench/engines/product.py --rows 4608 --backward     (8 sequences of 576 tokens)
           python experiments/bench/engines/product.py --rows 64 --model runs/smollm2 --threads 2

A turn makes each product of one pass once, layer by layer with matrices of its own, as one program of XLA that does
nothing else. `--backward` adds those of the gradients, to the activations and to the weights. `--held 2`
takes the matrices of two layers for all, which changes nothing where many rows share a matrix, and saves memory. Takes
its turns among the engines, because the rate of a machine changes while they run.
"""

from __future__ import annotations

import argparse

import common

common.use_threads(common.asked_threads())  # before jax is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

FLOPS_OF_A_TURN = 2e10  # a fifth of a second or so: the clock, and being sent to work, do not count

Operands = list[tuple[jax.Array, jax.Array]]


def operands(products: list[tuple[int, int]], rows: int, backward: bool) -> Operands:
    """The factors of these products for `rows` tokens; of those of their gradients, too."""
    rng = np.random.default_rng(0)
    pairs = []
    for inputs, outputs in products:
        x = rng.standard_normal((rows, inputs), dtype=np.float32)
        w = rng.standard_normal((inputs, outputs), dtype=np.float32)
        pairs.append((x, w))
        if backward:
            dy = rng.standard_normal((rows, outputs), dtype=np.float32)
            pairs += [(dy, w.T.copy()), (x.T.copy(), dy)]
    return [(jnp.asarray(left), jnp.asarray(right)) for left, right in pairs]


def programs_of_a_pass(args: argparse.Namespace, sizes: common.Sizes) -> list[Operands]:
    """The factors of each program of a pass: the layers that are held, again and again; the head in the last."""
    held = sizes.layers if args.held is None else args.held
    if held < 1 or sizes.layers % held:
        raise SystemExit(f"expected --held to divide the {sizes.layers} layers; got {held}")
    layers = operands(sizes.layer_products() * held, args.rows, args.backward)
    head = operands([sizes.head_product()], args.rows, args.backward)
    return [layers] * (sizes.layers // held - 1) + [layers + head]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32, help="tokens of a pass")
    parser.add_argument("--backward", action="store_true", help="the products of the gradients, too")
    parser.add_argument("--untied", action="store_true", help="of a model with an output projection of its own")
    parser.add_argument("--model", default=None, help="of the model of this checkpoint directory")
    parser.add_argument("--held", type=int, default=None, help="layers with matrices of their own; all by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--driven", action="store_true", help="every turn waits for a line on standard input")
    args = parser.parse_args()
    clock = common.Clock(args, warmup=1)
    sizes = common.model_sizes(args.untied) if args.model is None else common.read_sizes(args.model)
    a_pass = programs_of_a_pass(args, sizes)
    program = jax.jit(lambda pairs: [left @ right for left, right in pairs])
    pairs = [pair for program in a_pass for pair in program]
    flops = sum(2 * left.shape[0] * left.shape[1] * right.shape[1] for left, right in pairs)
    passes = max(round(FLOPS_OF_A_TURN / flops), 1)
    for _ in range(clock.updates):
        clock.begin()
        for _ in range(passes):
            for factors in a_pass:
                jax.block_until_ready(program(factors))
        clock.end()
    row = {"engine": "product", "device": "cpu", "rows": args.rows, "backward": args.backward}
    measured = clock.measured(sizes.parameters(), ["jax", "jaxlib"])
    row["gflops_per_second"] = passes * flops / measured["seconds"] / 1e9
    clock.say(row | measured)


if __name__ == "__main__":
    main()
