"""The decoder against a NumPy implementation, with interval and boolean masks."""

import re
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.config import check_model_sizes
from smd_jax.devices.sharding import make_mesh, shard_tree
from smd_jax.message.masks import NEVER, Mask, ShadowMask, dense_mask, positions
from smd_jax.model.decoder import Decoder
from smd_jax.model.stacked_params import stack_params
from smd_jax.model.teacher_forced import apply_model
from smd_jax.testing import count_compilations, tiny_model_config
from smd_jax.text.prompts import PromptBatch
from tests import numpy_decoder
from tests.families import FAMILY_CONFIGS
from tests.under_test import SHAPES, left_padded, make_params

BATCH, T = 3, 9
CONFIGS = {name: replace(shape, vocab_size=40, num_layers=2) for name, shape in SHAPES.items()}


@cache
def params_of(config: Any) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), make_params(config))


def prompts() -> PromptBatch:
    """Rows of 9, 5 and 2 tokens."""
    return left_padded([9, 5, 2], T, 40)


def evicted_at(config: Any, seed: int = 0) -> np.ndarray:
    """`[batch, layers, kv_heads, T]`: some keys are never evicted, some before any query sees them."""
    rng = np.random.default_rng(seed)
    shape = (BATCH, config.num_layers, config.num_kv_heads, T)
    ends = np.where(rng.random(shape) < 0.3, NEVER, rng.integers(0, T + 1, shape))
    return np.where(np.asarray(prompts().valid)[:, None, None], ends, 0).astype(np.int32)


def random_causal_mask(config: Any) -> np.ndarray:
    """Causal booleans that are no intervals; some queries see no key."""
    shape = (BATCH, config.num_layers, config.num_kv_heads, T, T)
    return (np.random.default_rng(1).random(shape) < 0.4) & np.tril(np.ones((T, T), bool))


def apply(params: Any, model: Decoder, mask: Mask, batch: PromptBatch) -> jax.Array:
    return apply_model(model, params, batch.tokens, positions(batch.valid), mask)


apply_jitted = jax.jit(apply, static_argnums=1)


def logits(model: Decoder, mask: Mask, batch: PromptBatch | None = None) -> jax.Array:
    return apply_jitted(params_of(model.config), model, mask, prompts() if batch is None else batch)


def loss(params: Any, model: Decoder, mask: Mask) -> jax.Array:
    """Of every output, including padding."""
    out = apply(params, model, mask, prompts())
    return jnp.sum(jnp.sin(out) * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))


jitted_loss = jax.jit(loss, static_argnums=1)
gradients = jax.jit(jax.grad(loss), static_argnums=1)


def assert_trees_close(one: Any, other: Any, *, relative: float) -> None:
    """Within a share of each array's largest entry."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=relative * float(jnp.abs(b).max()))


@pytest.mark.parametrize(("heads", "kind"), [("MHA", "booleans"), ("GQA", "intervals")])
def test_logits_against_numpy(heads: str, kind: str):
    """With padded rows, another mask per layer and head, and queries that see no key."""
    config = CONFIGS[heads]
    mask = np.asarray(ShadowMask(jnp.array(evicted_at(config))).to_boolean())
    mask = mask if kind == "intervals" else random_causal_mask(config)
    got = logits(Decoder(config), jnp.array(mask))
    assert got.shape == (BATCH, T, 40) and got.dtype == jnp.float32
    batch = prompts()
    where = np.asarray(positions(batch.valid))
    for b in range(BATCH):
        expected = numpy_decoder.logits(params_of(config), config, np.asarray(batch.tokens)[b], where[b], mask[b])
        np.testing.assert_allclose(got[b], expected, atol=2e-5)


def test_gradients_match_finite_differences():
    """Along a random direction; some queries see no key."""
    config = CONFIGS["GQA"]
    params, mask = params_of(config), jnp.array(random_causal_mask(config))
    gradient = gradients(params, Decoder(config), mask)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    rng = np.random.default_rng(3)
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
    with jax.enable_x64(True):
        model = Decoder(replace(config, dtype="float64"))
        losses = [
            jitted_loss(jax.tree.map(lambda x, d, h=h: jnp.asarray(x, float) + h * d, params, direction), model, mask)
            for h in (1e-6, -1e-6)
        ]
        expected = (losses[0] - losses[1]) / 2e-6
    dot = jax.tree.map(lambda g, d: float((np.asarray(g, np.float64) * d).sum()), gradient, direction)
    assert sum(jax.tree.leaves(dot)) == pytest.approx(float(expected), rel=1e-4)


def test_masks_shared_by_layers_and_heads():
    config = CONFIGS["GQA"]
    shared = evicted_at(config)[:, :1, :1]
    spread = np.broadcast_to(shared, (BATCH, config.num_layers, config.num_kv_heads, T))
    expected = logits(Decoder(config), ShadowMask(jnp.array(spread)))
    for mask in (ShadowMask(jnp.array(shared)), ShadowMask(jnp.array(shared)).to_boolean()):
        np.testing.assert_allclose(logits(Decoder(config), mask), expected, atol=3e-6)
    own = logits(Decoder(config), ShadowMask(jnp.array(evicted_at(config))))
    assert float(jnp.abs(own - expected).max()) > 1e-2


def test_left_padding_changes_nothing():
    """A row has the same logits with padding as without, whatever tokens the padding holds."""
    batch, model = prompts(), Decoder(CONFIGS["GQA"])
    got = logits(model, dense_mask(batch.valid))
    for b, length in enumerate([9, 5, 2]):
        alone = PromptBatch(batch.tokens[b : b + 1, T - length :], jnp.ones((1, length), bool))
        np.testing.assert_allclose(got[b, T - length :], logits(model, dense_mask(alone.valid), alone)[0], atol=1e-5)
    other = PromptBatch(jnp.where(batch.valid, batch.tokens, 17), batch.valid)
    again = logits(model, dense_mask(other.valid), other)
    np.testing.assert_allclose(got[batch.valid], again[batch.valid], atol=1e-5)


@pytest.mark.parametrize(("heads", "remat"), [("MHA", True), ("GQA", "dots")])
def test_remat_changes_nothing(heads: str, remat: Any):
    config = CONFIGS[heads]
    mask = ShadowMask(jnp.array(evicted_at(config)))
    one = gradients(params_of(config), Decoder(config), mask)
    other = gradients(params_of(config), Decoder(config, remat=remat), mask)
    assert_trees_close(one, other, relative=1e-5)


def equations_of(jaxpr: Any, primitive: str) -> list[dict[str, Any]]:
    """Parameters of every equation of this primitive, including those of called functions."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            found.append(equation.params)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                found += equations_of(inner, primitive)
            elif hasattr(inner, "jaxpr"):
                found += equations_of(inner.jaxpr, primitive)
    return found


def test_remat_recomputes_the_named_products():
    """Attention's products, which have batch dimensions, are recomputed with "dots" and "full"; products with weights
    only with "full"."""
    config = CONFIGS["GQA"]
    mask = ShadowMask(jnp.array(evicted_at(config)))

    def counts(remat: Any) -> tuple[int, int]:
        model = Decoder(config, remat=remat)
        program = jax.make_jaxpr(lambda params: gradients(params, model, mask))(params_of(config))
        batched = [any(product["dimension_numbers"][1]) for product in equations_of(program.jaxpr, "dot_general")]
        return sum(batched), len(batched) - sum(batched)

    none, dots, full = counts("none"), counts("dots"), counts("full")
    assert none == counts(False) and full == counts(True)
    assert none[0] < dots[0] == full[0]
    assert none[1] == dots[1] < full[1]


def test_prevent_cse_is_off_only_in_a_loop_over_layers():
    """All layers share a boolean mask, which is not stacked: then layers with stacked parameters run one by one."""
    config = replace(CONFIGS["GQA"], num_layers=4)
    params = stack_params(params_of(config), [range(4)])
    tokens, position_ids = jnp.zeros((1, T), jnp.int32), jnp.arange(T)[None]
    evicted = ShadowMask(jnp.full((1, 4, config.num_kv_heads, T), NEVER))

    def barriers(mask: Mask) -> list[bool]:
        model = Decoder(config, remat=True, scan_layers=True)
        program = jax.make_jaxpr(lambda params: model.apply({"params": params}, tokens, position_ids, mask))(params)
        return [layer["prevent_cse"] for layer in equations_of(program.jaxpr, "remat2")]

    assert barriers(evicted) == [False]
    assert barriers(jnp.tril(jnp.ones((T, T), bool))[None, None, None]) == [True] * 4


def test_unknown_remat_is_refused():
    unknown: Any = "layers"
    with pytest.raises(ValueError, match="expected remat to be one of none, full, dots; got 'layers'"):
        Decoder(CONFIGS["GQA"], remat=unknown)


@pytest.mark.parametrize("shape", [(3, 2, 2, 10), (3, 2, 2, 1), (3, 3, 2, 9, 9), (3, 2, 4, 9, 9)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]):
    mask = jnp.ones(shape, bool) if len(shape) == 5 else ShadowMask(jnp.zeros(shape, jnp.int32))
    with pytest.raises(ValueError, match=rf"\(3, 2, 2, 9(, 9)?\).*got {re.escape(str(shape))}"):
        logits(Decoder(CONFIGS["GQA"]), mask)


def test_too_many_tokens_are_refused():
    config = replace(CONFIGS["GQA"], max_positions=T - 1)
    with pytest.raises(ValueError, match=f"at most {T - 1} tokens .*; got {T}"):
        apply(params_of(CONFIGS["GQA"]), Decoder(config), dense_mask(prompts().valid), prompts())


def test_eight_devices_give_the_same_logits():
    """Biases are added once."""
    config = replace(FAMILY_CONFIGS["qwen3-bias-window"], mlp_bias=True, num_layers=1, sliding_windows=(8,))
    params, batch = params_of(config), left_padded([12, 12, 5, 3], 12, 96)
    mask = dense_mask(batch.valid)
    expected = apply_jitted(params, Decoder(config), mask, batch)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        found = apply_jitted(shard_tree(params, mesh), Decoder(config), mask, batch)
    valid = np.asarray(batch.valid)
    np.testing.assert_allclose(np.asarray(found)[valid], np.asarray(expected)[valid], atol=2e-5)


# --- precision, windows and invalid input


@pytest.mark.parametrize("impl", ["reference", "xla", "interval"])
def test_float32_is_multiplied_as_float32(impl: Any):
    """Accelerators would use fewer bits; on a CPU only the program shows it. Forward and backward ask for the highest
    precision under any `jax.default_matmul_precision`."""
    config = replace(CONFIGS["GQA"], tie_embeddings=False)
    mask = ShadowMask(jnp.array(evicted_at(config)))
    with jax.default_matmul_precision("bfloat16"):
        program = jax.make_jaxpr(jax.grad(loss), static_argnums=1)(params_of(config), Decoder(config, impl=impl), mask)
    found = [product["precision"] for product in equations_of(program.jaxpr, "dot_general")]
    assert len(found) > 10 * config.num_layers
    highest = jax.lax.Precision.HIGHEST
    assert set(found) == {(highest, highest)}


def test_bfloat16_is_multiplied_in_default_precision():
    config = replace(CONFIGS["GQA"], dtype="bfloat16")
    mask = ShadowMask(jnp.array(evicted_at(config)))
    program = jax.make_jaxpr(loss, static_argnums=1)(params_of(CONFIGS["GQA"]), Decoder(config), mask)
    assert {product["precision"] for product in equations_of(program.jaxpr, "dot_general")} == {None}


def test_sliding_windows():
    """The first layer sees the three newest columns, its own included; the second sees all."""
    config = CONFIGS["GQA"]
    windowed = Decoder(replace(config, sliding_windows=(3, None)))
    near = np.tri(T, dtype=bool) & ~np.tri(T, k=-3, dtype=bool)
    window = np.stack([near, np.ones_like(near)])[None, :, None]
    for mask in (jnp.array(random_causal_mask(config)), ShadowMask(jnp.array(evicted_at(config)))):
        booleans = np.asarray(mask.to_boolean() if isinstance(mask, ShadowMask) else mask)
        expected = logits(Decoder(config), jnp.array(booleans & window))
        np.testing.assert_allclose(logits(windowed, mask), expected, atol=3e-6)
        assert np.abs(expected - logits(Decoder(config), mask)).max() > 1e-2
    # A window that int32 cannot add to a column is none, also in the shape, which the sampler reads.
    wide = Decoder(replace(config, sliding_windows=(2**31 - 1, 2**40)))
    np.testing.assert_allclose(logits(wide, mask), logits(Decoder(config), mask), atol=3e-6)
    assert wide.shape.window(0) == wide.shape.window(1) == 2**30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": -1}, "expected vocab_size >= 1.*got -1"),
        ({"num_layers": 0}, "expected num_layers >= 1.*got 0"),
        ({"intermediate_size": 0}, "expected intermediate_size >= 1, a whole number; got 0"),
        ({"num_kv_heads": 3}, "expected num_heads to be a multiple of num_kv_heads; got 4 and 3"),
        ({"head_dim": 7}, "expected an even head_dim.*got 7"),
        ({"sliding_windows": (4,)}, "a window, or None, for each of 2 layers; got 1"),
        ({"sliding_windows": (4, 0)}, "a window of sliding_windows >= 1.*own key.*got 0"),
    ],
)
def test_invalid_sizes_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        replace(CONFIGS["GQA"], **change)


def test_integer_dtypes_are_refused():
    # Not through the constructor, whose annotation is checked under pytest.
    with pytest.raises(ValueError, match="expected dtype to be one of float32, bfloat16, float16, float64; got 'int8'"):
        check_model_sizes(vars(CONFIGS["GQA"]) | {"dtype": "int8"})


def test_float64_without_x64_is_refused():
    model = Decoder(replace(CONFIGS["GQA"], dtype="float64"))
    with pytest.raises(ValueError, match="expected 64-bit numbers to be enabled.*jax_enable_x64"):
        model.apply({"params": {}}, prompts().tokens, positions(prompts().valid), dense_mask(prompts().valid))


def test_a_call_outside_of_jit_compiles_once():
    """A second call with the same shapes finds the layers' programs."""
    config = tiny_model_config(num_layers=2)
    model, params = Decoder(config), make_params(config)
    tokens = jnp.ones((1, 6), jnp.int32)
    position_ids = jnp.arange(6, dtype=jnp.int32)[None]
    mask = jnp.tril(jnp.ones((6, 6), bool))[None, None, None]
    model.apply({"params": params}, tokens, position_ids, mask)
    with count_compilations() as counts:
        model.apply({"params": params}, tokens, position_ids, mask)
    assert not counts
