"""The benchmarks: JSON rows in tiny sizes, yardsticks, and the arithmetic of a machine's limit."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import attention, limits
from bench.engines import generation
from bench.engines.common import MODEL, Sizes
from smd_jax.message.masks import Segments
from smd_jax.testing import random_evictions
from tests.paths import ROOT

pytestmark = pytest.mark.study

BENCH = ROOT / "experiments" / "bench"


def run_benchmark(script: str, out: Path, *words: str) -> list[dict[str, Any]]:
    """Runs a benchmark and returns the rows that it prints."""
    command = [sys.executable, str(BENCH / script), "--out", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


# --- attention, after a check against the reference


def test_rows_of_the_attention_benchmark(tmp_path: Path):
    sizes = ["--device", "cpu", "--lengths", "256", "--budgets", "32", "--buffer", "32", "--rounds", "1", "--check"]
    lines = run_benchmark("attention.py", tmp_path / "rows.json", *sizes)
    checks, rows = ([line for line in lines if ("check" in line) == checked] for checked in (True, False))
    assert {line["check"] for line in checks} >= {"mask", "stock mask", "interval", "segments"}
    assert all(line["same_bits"] for line in checks)
    fields = {"device", "impl", "T", "budget", "buffer", "heads", "head_dim", "dtype"}
    fields |= {"fwd_ms", "fwd_bwd_ms", "temp_bytes", "speedup_vs_mask", "temp_vs_mask"}
    assert all(row.keys() >= fields for row in rows)
    by_name = {row["impl"]: row for row in rows}
    assert by_name["segments"]["temp_bytes"] < by_name["mask"]["temp_bytes"]
    assert max(by_name[name]["speedup_vs_mask"] for name in ("mask", "stock mask")) == 1
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["rows"] == rows and written.keys() >= {"date", "device", "command"}


def test_another_device_is_refused():
    words = [sys.executable, str(BENCH / "attention.py"), "--device", "gpu"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode and "expected JAX to run on 'gpu'" in done.stderr


def test_exponents_compare_rows_of_one_budget():
    """The time is T times budget: exponent 1 at one budget, but 2 if T and budget grow together."""
    rows = [
        {"impl": impl, "T": tokens, "budget": budget, "fwd_bwd_ms": tokens * budget / 1e3}
        for budget in (512, 256)
        for tokens in (4096, 8192)
        for impl in ("segments", "interval")
    ]
    assert attention.exponents(rows) == pytest.approx({"interval": 1.0, "segments": 1.0})
    assert attention.exponents(rows[:2]) == {} and attention.exponents([]) == {}


@pytest.mark.parametrize(("device", "shapes"), [
    ("cpu", [(8 * 2, 4 * 32, 16), (8 * 2, 16, 64 + 32)]),
    ("gpu", [(1, 48, 48), (1, 48, 48)]),
    ("tpu", [(1, 48, 48), (1, 48, 48)]),
])  # fmt: skip
def test_an_accelerators_yardstick_is_a_square_product(monkeypatch: pytest.MonkeyPatch, device: Any, shapes: Any):
    """Products with a short inner axis would measure the accelerator's memory."""
    monkeypatch.setattr(attention, "SQUARE", 48)
    args = attention.Args(device, buffer=32, heads=8, kv_heads=2, head_dim=16, dtype="float32")
    product, operands, flops = attention.yardstick(args, 1024, 64)
    assert [x.shape for x in operands] == shapes
    (_, rows, inner), (count, _, columns) = shapes
    assert flops == 2 * count * rows * inner * columns * len(product(*operands))


# --- rollouts, without the peers


def test_rows_of_the_rollout_benchmark(tmp_path: Path):
    # There is no interpreter for hf, so it is left out.
    (row,) = run_benchmark("rollout.py", tmp_path / "rows.json", "--quick", "--engine", "ours", "hf")
    assert row.keys() >= {"device", "temp_bytes", "peak_bytes", "versions", "ms_per_step_late"}
    assert (row["engine"], row["batch"], row["prompt"], row["new_tokens"]) == ("ours", 4, 8, 48)
    # 2 · layers · KV heads · (budget + buffer) · head_dim · bytes · rows
    assert row["expected_cache_bytes"] == 2 * 4 * 2 * (16 + 8) * 32 * 4 * 4
    assert row["expected_cache_bytes"] <= row["cache_bytes"] <= 1.05 * row["expected_cache_bytes"]
    assert 0 < row["max_abs_dlogp"] < 2e-5 and row["limit_share"] > 0
    assert row["tokens_per_s"] > 0 and row["ms_per_step_early"] > 0
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written.keys() >= {"date", "command"} and written["rows"] == [row]


def marks_of(turn: list[tuple[int, float]]) -> generation.Marks:
    marks = generation.Marks()
    marks.turns = [[(n, seconds, seconds / 2) for n, seconds in turn]]
    return marks


def test_early_and_late_steps():
    # Steps of 2 ms up to token 1,000 and of 5 ms after it, seen in segments of 32.
    turn = [(n, 0.002 * min(n, 1000) + 0.005 * max(n - 1000, 0)) for n in range(32, 4097, 32)]
    assert generation.early_and_late(marks_of(turn), 4096) == pytest.approx((2, 5))
    assert generation.early_and_late(marks_of(turn), 4096, cpu=True) == pytest.approx((1, 2.5))
    short = [(n, seconds) for n, seconds in turn if n <= 512]
    assert generation.early_and_late(marks_of(short), 512) == pytest.approx((2, 2))
    assert generation.early_and_late(marks_of([]), 512) == (None, None)


def test_one_slow_segment_does_not_count():
    turn, seconds = [], 0.0
    for n in range(32, 1025, 32):
        seconds += 32 * (0.1 if n == 416 else 0.002)
        turn.append((n, seconds))
    assert generation.early_and_late(marks_of(turn), 1024) == pytest.approx((2, 2))


def test_prompts_are_the_same_in_all_engines():
    first, again = (generation.prompts(3, 5, 1024) for _ in range(2))
    assert first == again and [len(row) for row in first] == [5, 5, 5]
    assert all(1 <= token < 1024 for row in first for token in row)


# --- the arithmetic of a machine's limit


@pytest.mark.parametrize(("prompt", "new", "budget", "buffer"), [(7, 20, 6, 4), (3, 20, 8, 3), (5, 9, 30, 4)])
def test_visible_keys_are_those_of_a_mask(prompt: int, new: int, budget: int, buffer: int):
    mask = random_evictions(prompt + new, Segments(prompt, buffer, budget))
    assert limits.visible_keys(prompt, new, budget, buffer) == np.asarray(mask.to_boolean()).sum()
    total = prompt + new
    assert limits.visible_keys(prompt, new, None, None) == total * (total + 1) / 2


# The model of the small benchmarks, and one of other sizes: no biases, three query heads per KV head.
SIZES = (
    MODEL,
    Sizes(
        hidden_size=96, intermediate_size=160, num_layers=3, num_heads=6, head_dim=16, vocab_size=512, qkv_bias=False
    ),
)
EVERY_SIZE = pytest.mark.parametrize("sizes", SIZES, ids=("small", "other"))


@EVERY_SIZE
def test_update_flops_are_those_that_xla_counts(sizes: Sizes):
    """XLA counts a model of these sizes in plain products, with dense attention that is not causal."""
    rows, tokens, prompt = 2, 16, 4
    matrices = [jnp.ones(sides) for sides in sizes.layer_products()]
    head = jnp.ones((sizes.hidden_size, sizes.vocab_size))

    def loss(matrices: list[jax.Array], head: jax.Array, x: jax.Array) -> jax.Array:
        q, k, v, o, gate, up, down = matrices
        for _ in range(sizes.num_layers):
            groups = sizes.num_heads // sizes.num_kv_heads
            queries = (x @ q).reshape(rows, tokens, sizes.num_kv_heads, groups, sizes.head_dim)
            keys, values = ((x @ m).reshape(rows, tokens, sizes.num_kv_heads, sizes.head_dim) for m in (k, v))
            scores = jnp.einsum("btkgd,bskd->bkgts", queries, keys)
            x = jnp.einsum("bkgts,bskd->btkgd", scores, values).reshape(rows, tokens, -1) @ o
            x = ((x @ gate) * (x @ up)) @ down
        return jnp.sum(x[:, prompt:] @ head)

    x = jnp.ones((rows, tokens, sizes.hidden_size))
    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(matrices, head, x).compile()
    row = {"sequences": rows, "tokens": tokens, "prompt": prompt, "budget": None, "buffer": None}
    analysis = program.cost_analysis()
    assert analysis is not None
    hidden = rows * tokens * (tokens - 1) / 2  # pairs that a causal mask hides
    expected = limits.update_flops(row, sizes) + 3 * limits.attention_flops(hidden, sizes)
    assert expected == pytest.approx(analysis["flops"], rel=0.01)


@EVERY_SIZE
def test_rollout_flops_by_hand(sizes: Sizes):
    """One prompt token and two sampled ones are two passes and two heads, because the last token is not read."""
    row = {"batch": 3, "prompt": 1, "new_tokens": 2, "budget": None, "buffer": None}
    pairs = 1 + 2
    attention = 4 * pairs * sizes.num_layers * sizes.num_heads * sizes.head_dim
    expected = 3 * (2 * 2 * (sizes.layer_weights() + sizes.head_weights()) + attention)
    assert limits.rollout_flops(row, sizes) == expected


def test_limit_share():
    row = {"engine": "ours", "batch": 3, "prompt": 1, "new_tokens": 2, "budget": None, "buffer": None, "seconds": 0.5}
    [result] = limits.with_limits([{"engine": "product", "gflops_per_second": 2.0}, row])
    assert result["limit_share"] == pytest.approx(limits.rollout_flops(row, MODEL) / 0.5 / 2e9)
    assert result["product_gflops_per_second"] == 2.0
