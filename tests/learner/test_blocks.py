"""Logits by blocks of columns: same values and gradients, without the logits of a whole response."""

import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.devices.sharding import make_mesh
from smd_jax.learner import blocks
from smd_jax.learner.blocks import columns_at_once, over_columns
from smd_jax.learner.config import UpdateConfig
from smd_jax.losses.distillation import DistillConfig
from smd_jax.losses.policy import LossConfig
from smd_jax.model.decoder import Decoder
from smd_jax.testing import tiny_model_config
from tests.learner.test_sequence import compiled_program
from tests.tiny_update import MODEL, REFERENCE, ROWS, distance, metrics_and_gradients, recording_update

COLUMN = ROWS * MODEL.config.vocab_size * 4  # bytes of the logits of one column


def column_function(params: Any, columns: Any, x: Any, y: Any) -> dict[str, Any]:
    """Depends on every argument, also on the column index."""
    return {"sum": (x @ params["w"]).sum(-1) + y, "number": jnp.sin(x).sum(-1) * columns[None] * params["b"]}


@pytest.mark.parametrize("size", [1, 3, 5, 7, 9])
def test_block_size_does_not_change_values_or_gradients(size: int):
    """7 columns: sizes that divide 7, that do not, and one above 7."""
    rng = np.random.default_rng(size)
    x, y, ct = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 7, 3), (2, 7), (2, 7)))
    params = {"w": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32), "b": jnp.float32(1.5)}
    columns = jnp.asarray([4, 1, 7, 8, 19, 0, 2])

    def whole(params: Any, x: Any, y: Any) -> Any:
        return column_function(params, columns, x, y)

    def in_blocks(params: Any, x: Any, y: Any) -> Any:
        return over_columns(column_function, params, size, columns, x, y)

    def results(f: Any) -> Any:
        def loss(params: Any, x: Any, y: Any) -> tuple[Any, Any]:
            outputs = f(params, x, y)
            return jnp.sum(ct * outputs["sum"] * outputs["number"]), outputs

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(params, x, y)

    chex.assert_trees_all_close(results(in_blocks), results(whole), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("rows", "columns", "logit_bytes", "expected"),
    [(8, 10, 10 * COLUMN, 10), (8, 10, 9 * COLUMN, 5), (8, 10, 4 * COLUMN, 4), (8, 10, 1, 1), (1, 7, 10 * COLUMN, 7)],
)
def test_block_sizes_are_balanced(
    rows: int, columns: int, logit_bytes: int, expected: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(blocks, "LOGIT_BYTES", logit_bytes)
    assert columns_at_once(MODEL.shape, rows, columns) == expected


ALL_TERMS = UpdateConfig(
    loss=LossConfig(beta=0.1),
    distill=DistillConfig(direction="published", coef=0.3),
    entropy_coef=0.1,
    microbatch_size=4,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [ALL_TERMS, UpdateConfig(distill=DistillConfig(direction="anchor", coef=0.3))],
    ids=["policy and published", "anchor"],
)
def test_blockwise_update_matches_full_update(config: UpdateConfig, monkeypatch: pytest.MonkeyPatch):
    metrics, expected = metrics_and_gradients(config, reference=REFERENCE)
    monkeypatch.setattr(blocks, "LOGIT_BYTES", 3 * COLUMN)
    # The constant is read at compile time, so cached programs are dropped before and after.
    recording_update.cache_clear()
    blockwise, gradients = metrics_and_gradients(config, reference=REFERENCE)
    recording_update.cache_clear()
    assert distance(gradients, expected) <= 1e-6
    for name, value in metrics.items():
        np.testing.assert_allclose(blockwise[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


# --- memory


def largest_array(hlo: str) -> int:
    """Elements of the largest array in a compiled program."""
    shapes = set(re.findall(r"(?:f32|bf16|pred|s32)\[([\d,]+)\]", hlo))
    return max(int(np.prod([int(side) for side in shape.split(",")])) for shape in shapes)


@pytest.mark.slow
def test_blockwise_update_holds_no_logits_of_a_whole_response(monkeypatch: pytest.MonkeyPatch):
    """256 columns, vocabulary 4,096, blocks of 16 columns: the output head becomes the largest array."""
    model = Decoder(tiny_model_config(vocab_size=4096, num_layers=1))
    whole = compiled_program(model, make_mesh(), rows=1, columns=16 + 256, update=True)
    assert largest_array(whole.as_text()) >= 256 * 4096
    monkeypatch.setattr(blocks, "LOGIT_BYTES", 16 * 4096 * 4)
    blockwise = compiled_program(model, make_mesh(), rows=1, columns=16 + 256, update=True)
    assert largest_array(blockwise.as_text()) == model.config.hidden_size * 4096
    whole_bytes, block_bytes = (x.memory_analysis().temp_size_in_bytes for x in (whole, blockwise))
    assert block_bytes < 0.3 * whole_bytes


def test_bfloat16_head_gradients_are_summed_in_float32():
    """Each of 256 blocks adds a small term, which a bfloat16 sum would round away."""
    x = jnp.full((1, 256, 1), 0.01, jnp.bfloat16)
    head = jnp.ones((1, 1), jnp.bfloat16)

    def total(head: Any) -> Any:
        logits = over_columns(lambda head, _, x: (x @ head)[..., 0].astype(jnp.float32), head, 1, jnp.arange(256), x)
        return logits.sum()

    gradient = jax.jit(jax.grad(total))(head)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(gradient), 256 * np.float32(x[0, 0, 0]), rtol=2**-8)
