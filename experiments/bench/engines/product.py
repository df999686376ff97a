"""The yardstick of `bench/rollout.py` and `update.py`: the rate of bare matrix products of the model's shapes.

One XLA program computes the products of a pass, layer by layer; with `backward` also those of the gradients. A turn
repeats it for about FLOPS_OF_A_TURN. Turns alternate with those of the engines: a machine's rate varies over time.
"""

from __future__ import annotations

import common

common.one_thread()  # before jax is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

FLOPS_OF_A_TURN = 2e10  # about a fifth of a second


def operands(products: list[tuple[int, int]], rows: int, backward: bool) -> list[tuple[jax.Array, jax.Array]]:
    """Operands of these products for `rows` tokens; with `backward` also those of the gradients."""
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


def main() -> None:
    args = common.settings()
    clock = common.Clock(args, warmup=1)
    sizes = common.MODEL
    products = [*(sizes.layer_products() * sizes.num_layers), (sizes.hidden_size, sizes.vocab_size)]
    pairs = operands(products, args.rows, args.backward)
    program = jax.jit(lambda pairs: [left @ right for left, right in pairs])
    flops = sum(2 * left.shape[0] * left.shape[1] * right.shape[1] for left, right in pairs)
    passes = max(round(FLOPS_OF_A_TURN / flops), 1)
    for _ in range(clock.updates):
        clock.begin()
        for _ in range(passes):
            jax.block_until_ready(program(pairs))
        clock.end()
    row = {"engine": "product", "device": "cpu", "rows": args.rows, "backward": args.backward}
    measured = clock.measured(sizes.parameters(), ["jax", "jaxlib"])
    row["gflops_per_second"] = passes * flops / measured["seconds"] / 1e9
    clock.say(row | measured)


if __name__ == "__main__":
    main()
