"""The arithmetic that benchmarks hold against their machine's limit, by other counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import limits
from bench.engines.common import Sizes, model_sizes
from smd_jax.message.masks import Segments
from smd_jax.testing import random_evictions

pytestmark = pytest.mark.study


@pytest.mark.parametrize(("prompt", "new", "budget", "buffer"), [(7, 20, 6, 4), (3, 20, 8, 3), (5, 9, 30, 4)])
def test_visible_keys_are_those_of_a_mask(prompt: int, new: int, budget: int, buffer: int):
    mask = random_evictions(prompt + new, Segments(prompt, buffer, budget))
    assert limits.visible_keys(prompt, new, budget, buffer) == np.asarray(mask.to_boolean()).sum()
    total = prompt + new
    assert limits.visible_keys(prompt, new, None, None) == total * (total + 1) / 2


# The model of the small benchmarks, and one whose sizes are all others: no biases, three queries to a KV head.
SIZES = (
    model_sizes(),
    Sizes(hidden=96, layers=3, heads=6, kv_heads=2, head_dim=16, ffn=160, vocabulary=512, qkv_bias=False, tied=True),
)
EVERY_SIZE = pytest.mark.parametrize("sizes", SIZES, ids=("small", "other"))


@EVERY_SIZE
def test_arithmetic_of_an_update_by_the_compilers_count(sizes: Sizes):
    """A model of these sizes in plain products, dense and not causal, as XLA counts its flops."""
    rows, tokens, prompt = 2, 16, 4
    matrices = [jnp.ones(sides) for sides in sizes.layer_products()]
    head = jnp.ones(sizes.head_product())

    def loss(matrices: list[jax.Array], head: jax.Array, x: jax.Array) -> jax.Array:
        q, k, v, o, gate, up, down = matrices
        for _ in range(sizes.layers):
            groups = sizes.heads // sizes.kv_heads
            queries = (x @ q).reshape(rows, tokens, sizes.kv_heads, groups, sizes.head_dim)
            keys, values = ((x @ m).reshape(rows, tokens, sizes.kv_heads, sizes.head_dim) for m in (k, v))
            scores = jnp.einsum("btkgd,bskd->bkgts", queries, keys)
            x = jnp.einsum("bkgts,bskd->btkgd", scores, values).reshape(rows, tokens, -1) @ o
            x = ((x @ gate) * (x @ up)) @ down
        return jnp.sum(x[:, prompt:] @ head)

    x = jnp.ones((rows, tokens, sizes.hidden))
    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(matrices, head, x).compile()
    row = {"sequences": rows, "tokens": tokens, "prompt": prompt, "budget": None, "buffer": None}
    analysis = program.cost_analysis()
    assert analysis is not None
    hidden = rows * tokens * (tokens - 1) / 2  # pairs that a causal mask hides
    expected = limits.update_flops(row, sizes) + 3 * limits.attention_flops(hidden, sizes)
    assert expected == pytest.approx(analysis["flops"], rel=0.01)


@EVERY_SIZE
def test_a_rollout_reads_what_it_draws(sizes: Sizes):
    """Every token but the last: a prompt of one and two drawn tokens are two passes and two heads."""
    row = {"batch": 3, "prompt": 1, "new_tokens": 2, "budget": None, "buffer": None}
    pairs = 1 + 2
    attention = 4 * pairs * sizes.layers * sizes.heads * sizes.head_dim
    expected = 3 * (2 * 2 * (sizes.layer_weights() + sizes.head_weights()) + attention)
    assert limits.rollout_flops(row, sizes) == expected


def test_shares():
    row = {"engine": "ours", "batch": 3, "prompt": 1, "new_tokens": 2, "budget": None, "buffer": None, "seconds": 0.5}
    [found] = limits.with_limits([{"engine": "product", "gflops_per_second": 2.0}, row])
    assert found["limit_share"] == pytest.approx(limits.rollout_flops(row, model_sizes()) / 0.5 / 2e9)
    assert found["product_gflops_per_second"] == 2.0
