"""The arithmetic that benchmarks hold against their machine's limit, by other counts."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.masks import Segments
from smd_jax.testing import random_evictions

with mock.patch.object(sys, "path", [str(Path(__file__).resolve().parents[1] / "experiments"), *sys.path]):
    from bench import limits
    from bench.engines import common


@pytest.mark.parametrize(("prompt", "new", "budget", "buffer"), [(7, 20, 6, 4), (3, 20, 8, 3), (5, 9, 30, 4)])
def test_visible_keys_are_those_of_a_mask(prompt: int, new: int, budget: int, buffer: int):
    mask = random_evictions(prompt + new, Segments(prompt, buffer, budget))
    assert limits.visible_keys(prompt, new, budget, buffer) == np.asarray(mask.to_boolean()).sum()
    total = prompt + new
    assert limits.visible_keys(prompt, new, None, None) == total * (total + 1) / 2


def test_arithmetic_of_an_update_by_the_compilers_count():
    """A model of the benchmark's shapes in plain products, dense and not causal, as XLA counts its flops; attention
    differs by what a causal mask hides, and counts little here."""
    rows, tokens, prompt = 2, 16, 4
    matrices = [jnp.ones(sides) for sides in common.layer_products()]
    head = jnp.ones((common.HIDDEN, common.VOCABULARY))

    def loss(matrices: list[jax.Array], head: jax.Array, x: jax.Array) -> jax.Array:
        q, k, v, o, gate, up, down = matrices
        for _ in range(common.LAYERS):
            groups = common.HEADS // common.KV_HEADS
            queries = (x @ q).reshape(rows, tokens, common.KV_HEADS, groups, common.HEAD_DIM)
            keys, values = ((x @ m).reshape(rows, tokens, common.KV_HEADS, common.HEAD_DIM) for m in (k, v))
            scores = jnp.einsum("btkgd,bskd->bkgts", queries, keys)
            x = jnp.einsum("bkgts,bskd->btkgd", scores, values).reshape(rows, tokens, -1) @ o
            x = ((x @ gate) * (x @ up)) @ down
        return jnp.sum(x[:, prompt:] @ head)

    x = jnp.ones((rows, tokens, common.HIDDEN))
    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(matrices, head, x).compile()
    row = {"sequences": rows, "tokens": tokens, "prompt": prompt, "budget": None, "buffer": None}
    analysis = program.cost_analysis()
    assert analysis is not None
    assert limits.update_flops(row) == pytest.approx(analysis["flops"], rel=0.02)


def test_arithmetic_of_attention_by_the_compilers_count():
    """Both products of one layer, all queries with all keys."""
    queries = jnp.ones((common.HEADS, 48, common.HEAD_DIM))

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.einsum("hts,hsd->htd", jnp.einsum("htd,hsd->hts", q, k), v)

    analysis = jax.jit(attention).lower(queries, queries, queries).compile().cost_analysis()
    assert analysis is not None
    assert limits.attention_flops(48 * 48) == pytest.approx(common.LAYERS * analysis["flops"], rel=0.01)


def test_a_rollout_reads_what_it_draws():
    """Every token but the last: a prompt of one and two drawn tokens are two passes and two heads."""
    row = {"batch": 3, "prompt": 1, "new_tokens": 2, "budget": None, "buffer": None}
    pairs = 1 + 2
    attention = 4 * pairs * common.LAYERS * common.HEADS * common.HEAD_DIM
    assert limits.rollout_flops(row) == 3 * (2 * 2 * (common.layer_weights() + common.head_weights()) + attention)


def test_shares():
    row = {"engine": "ours", "batch": 3, "prompt": 1, "new_tokens": 2, "budget": None, "buffer": None, "seconds": 0.5}
    [found] = limits.with_limits([{"engine": "product", "gflops_per_second": 2.0}, row])
    assert found["limit_share"] == pytest.approx(limits.rollout_flops(row) / 0.5 / 2e9)
    assert found["product_gflops_per_second"] == 2.0
