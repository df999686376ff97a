"""Replay of sampling filters and minimum lengths: losses use the sampler's drawable tokens."""

import functools
import tracemalloc
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smd_jax.certify.record import arrays_of
from smd_jax.corrections import TIS, Shadow
from smd_jax.eviction.policies import H2O
from smd_jax.learner.config import UpdateConfig, Visibility
from smd_jax.learner.distill import distill_term
from smd_jax.learner.forward import replay, response_hidden
from smd_jax.learner.state import TrainBatch, init_state
from smd_jax.learner.update import make_update
from smd_jax.losses.distillation import DistillConfig, divergence, kl_divergence
from smd_jax.losses.policy import LossConfig
from smd_jax.message.drawable_tokens import OUTSIDE, DrawableTokens
from smd_jax.message.quantization import pack
from smd_jax.message.sampling import SamplingConfig
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.model.teacher_forced import apply_model
from smd_jax.ratios import overlap
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.testing import tiny_model_config
from tests.tiny_update import RECORD, copied, distance, spread_params
from tests.under_test import gap, left_padded, records_of, replay_jitted

ROWS, WIDTH, LENGTH, VOCAB, EOS, MINIMUM = 4, 8, 10, 300, 5, 4
MODEL = Decoder(tiny_model_config(vocab_size=VOCAB, max_positions=32, num_layers=1))
PARAMS, REFERENCE = spread_params(0, MODEL.config), spread_params(1, MODEL.config)

# Name -> filters, minimum length, dtype of the recorded sets (int32: token ids; uint8: bits).
SAMPLERS: dict[str, tuple[SamplingConfig, int, Any]] = {
    "top-k": (SamplingConfig(temperature=0.9, top_k=9), 0, jnp.int32),
    "top-k as bits": (SamplingConfig(temperature=0.9, top_k=60), 0, jnp.uint8),
    "top-p": (SamplingConfig(temperature=0.9, top_p=0.7), 0, jnp.uint8),
    "min-p": (SamplingConfig(temperature=0.9, min_p=0.1), 0, jnp.uint8),
    "minimum length": (SamplingConfig(temperature=0.9), MINIMUM, None),
    "all": (SamplingConfig(temperature=0.9, top_k=9, top_p=0.95, min_p=0.05), MINIMUM, jnp.int32),
}


@functools.cache
def sampled(name: str) -> Trajectory:
    """A rollout with unequal prompts and responses, under a budget of half their length."""
    sampling, minimum, _ = SAMPLERS[name]
    config = RolloutConfig(
        max_new_tokens=LENGTH, budget=5, buffer=2, eos_token_id=EOS, sampling=sampling, min_new_tokens=minimum
    )
    prompts = left_padded([8, 3, 5, 1], WIDTH, VOCAB)
    # If the first caller is traced, its tracers must not enter the cache.
    with jax.ensure_compile_time_eval():
        return rollout(MODEL, PARAMS, prompts, jax.random.key(3), policy=H2O(), config=config)


@functools.cache
def drawable_by_hand(name: str) -> np.ndarray:
    """The recorded sets, unpacked with NumPy: `[ROWS, LENGTH, VOCAB]`, true in the padding."""
    drawable, ids = np.ones((ROWS, LENGTH, VOCAB), bool), np.arange(VOCAB)
    recorded = sampled(name).drawable
    assert recorded is not None
    if recorded.sets is not None and recorded.sets.dtype == jnp.uint8:
        drawable &= np.unpackbits(np.asarray(recorded.sets), axis=-1, bitorder="little")[..., :VOCAB] == 1
    elif recorded.sets is not None:
        drawable &= (np.asarray(recorded.sets)[..., None] == ids).any(-2)
    drawable[:, : recorded.min_new_tokens, EOS] = False
    return drawable | ~np.asarray(sampled(name).valid)[:, WIDTH:, None]


def plain_logprobs(name: str, params: Any, visibility: Visibility) -> jax.Array:
    """Log-probabilities `[ROWS, LENGTH, VOCAB]` over the drawable tokens, from the model's plain call; -inf outside."""
    t = sampled(name)
    mask = t.mask if visibility == "shadow" else t.dense_mask()
    return masked_logprobs(params, t.tokens, t.positions, mask, drawable_by_hand(name), t.temperature)


@jax.jit
def masked_logprobs(
    params: Any, tokens: jax.Array, positions: jax.Array, mask: Any, drawable: jax.Array, temperature: float
) -> jax.Array:
    logits = apply_model(MODEL, params, tokens, positions, mask)[:, WIDTH - 1 : -1]
    return jax.nn.log_softmax(jnp.where(drawable, logits / temperature, -jnp.inf))


def plain_token_logprobs(name: str, params: Any, visibility: Visibility) -> jax.Array:
    logprobs = plain_logprobs(name, params, visibility)
    return jnp.take_along_axis(logprobs, sampled(name).response[..., None], -1)[..., 0]


def max_difference(trajectory: Trajectory) -> float:
    """Largest |log p_sampler - log p_learner|."""
    return float(gap(MODEL, trajectory, params=PARAMS).max())


# --- the sets


to_boolean = jax.jit(DrawableTokens.to_boolean, static_argnums=1)


def test_sets_as_ids():
    drawable = DrawableTokens(jnp.array([[[2, -1], [0, 2], [-1, -1]]]), min_new_tokens=1, eos_token_id=2)
    expected = np.array([[[0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]], bool)
    np.testing.assert_array_equal(to_boolean(drawable, 4, np.arange(3)), expected)
    np.testing.assert_array_equal(to_boolean(drawable, 4, np.array([1, 0])), expected[:, [1, 0]])


def test_sets_as_bits():
    inside = np.random.default_rng(0).random((2, 3, 21)) < 0.5
    drawable = DrawableTokens(pack(jnp.asarray(inside, jnp.uint8), 1))
    np.testing.assert_array_equal(to_boolean(drawable, 21, np.arange(3)), inside)
    np.testing.assert_array_equal(to_boolean(drawable, 21, np.array([2])), inside[:, [2]])


def test_a_minimum_length_without_filters_needs_no_array():
    drawable = DrawableTokens(None, min_new_tokens=2, eos_token_id=1)
    assert jax.tree.leaves(drawable) == []
    expected = np.ones((1, 3, 4), bool)
    expected[0, :2, 1] = False
    np.testing.assert_array_equal(drawable.to_boolean(4, jnp.arange(3)), expected)
    logits = jnp.zeros((5, 2, 4))
    assert ((drawable.apply(logits, jnp.array([2, 1])) == OUTSIDE).sum((0, 2)) == jnp.array([0, 5])).all()


def test_bits_of_another_vocabulary_are_refused():
    with pytest.raises(ValueError, match="expected 4 bytes of bits for a vocabulary of 25; got 3 bytes"):
        DrawableTokens(jnp.zeros((1, 2, 3), jnp.uint8)).to_boolean(25, jnp.arange(2))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_softmax_entropy_and_divergences_use_only_drawable_tokens(dtype: str):
    """Values equal those over the drawable tokens; gradients are finite, and exactly 0 outside."""
    rng = np.random.default_rng(1)
    inside = rng.random((2, 3, 17)) < 0.4
    inside[..., 4] = True
    x, y = (np.asarray(30 * rng.normal(size=(2, 3, 17)), dtype) for _ in range(2))
    with jax.enable_x64(dtype == "float64"):
        drawable = DrawableTokens(pack(jnp.asarray(inside, jnp.uint8), 1))

        def quantities(x: jax.Array, y: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
            x, y = (drawable.apply(logits, jnp.arange(3)) for logits in (x, y))
            logprobs = jax.nn.log_softmax(x)
            values = {
                "logprobs": logprobs[..., 4],
                "entropy": -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1),
                "kl": kl_divergence(x, y),
                "overlap": overlap(x, y),
            }
            return jnp.sum(jnp.stack(list(values.values()))), values

        grads, values = jax.jit(jax.grad(quantities, argnums=(0, 1), has_aux=True))(x, y)
    for grad in map(np.asarray, grads):
        assert np.isfinite(grad).all() and (grad[~inside] == 0).all() and (grad != 0).any()
    for b, t in np.ndindex(2, 3):
        allowed = inside[b, t]
        p, q = (np.exp(z[b, t][allowed].astype(np.float64) - z[b, t][allowed].max()) for z in (x, y))
        p, q = p / p.sum(), q / q.sum()
        expected = {
            "logprobs": np.log(p[int(allowed[:4].sum())]),
            "entropy": -(p * np.log(p)).sum(),
            "kl": (p * np.log(p / q)).sum(),
            "overlap": np.minimum(p, q).sum(),
        }
        for name, value in expected.items():
            np.testing.assert_allclose(values[name][b, t], value, rtol=2e-5, atol=1e-5)


# --- identity


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_identity(name: str):
    """The learner reproduces the sampler's log-probabilities and entropies, but only with the drawable tokens."""
    trajectory, (_, minimum, dtype) = sampled(name), SAMPLERS[name]
    assert trajectory.drawable is not None and trajectory.replayable
    assert (None if trajectory.drawable.sets is None else trajectory.drawable.sets.dtype) == dtype
    lengths = np.asarray(trajectory.lengths())
    assert (lengths > minimum).all()
    assert max_difference(trajectory) < 2e-5
    from_host = replay(MODEL, PARAMS, jax.device_get(trajectory)).logprobs
    assert abs(from_host - trajectory.logprobs).max(where=trajectory.response_mask, initial=0) < 2e-5
    mask, entropy = np.asarray(trajectory.response_mask), replay_jitted(MODEL, PARAMS, trajectory).entropy
    np.testing.assert_allclose(np.asarray(trajectory.entropy)[mask], np.asarray(entropy)[mask], rtol=1e-4, atol=1e-5)
    assert not np.asarray(trajectory.entropy)[~mask].any()
    assert max_difference(trajectory.replace(drawable=None)) > (1e-3 if name == "minimum length" else 1e-2)
    assert trajectory.mask is not None and max_difference(trajectory.replace(mask=trajectory.dense_mask())) > 1e-2
    explicit = plain_token_logprobs(name, PARAMS, "shadow")
    np.testing.assert_allclose(np.asarray(trajectory.logprobs)[mask], np.asarray(explicit)[mask], atol=2e-5)


@pytest.mark.slow
def test_padding_has_finite_logprobs():
    """Padding tokens may be outside of the sets, and a row may be cut off before the minimum length."""
    trajectory = sampled("all")
    short = trajectory.valid.at[:, WIDTH + 2 :].set(False)
    tokens = trajectory.tokens.at[:, WIDTH + 2 :].set(EOS)
    scores = replay_jitted(MODEL, PARAMS, trajectory.replace(valid=short, tokens=tokens))
    assert (scores.logprobs > -100).all() and jnp.isfinite(scores.entropy).all()


# --- the sampling support of other engines, in CSR form


def test_csr_support_by_hand():
    support = [([3, 5, 7, 1, 2], [0, 2, 5]), ([9], [0, 1])]
    drawable = DrawableTokens.from_csr(support, [[5, 1], [9]])
    assert drawable.sets is not None and drawable.sets.tolist() == [
        [[3, 5, -1, -1], [7, 1, 2, -1]],
        [[9, -1, -1, -1], [-1, -1, -1, -1]],
    ]


@pytest.mark.slow
@settings(deadline=None)  # new sizes compile
@given(st.lists(st.sets(st.integers(0, 99), min_size=1), min_size=1, max_size=6), st.booleans())
def test_csr_support_round_trips(sets, as_bits):
    ids = [token for tokens in sets for token in sorted(tokens)]
    offsets = np.cumsum([0, *map(len, sets)])
    response = [min(tokens) for tokens in sets]
    vocab_size = 100 if as_bits else None
    drawable = DrawableTokens.from_csr([(ids, offsets)], [response], response_width=6, vocab_size=vocab_size)
    boolean = np.asarray(drawable.to_boolean(100, jnp.arange(6)))[0, : len(sets)]
    assert [set(np.flatnonzero(row).tolist()) for row in boolean] == sets


@pytest.mark.parametrize(
    ("support", "message"),
    [
        ([], "sampling support of 1 rows; got 0"),
        ([([1, 2], [0, 1])], "expected 3 rising offsets from 0 to 2 in the sampling support of row 0"),
        ([([1, 2], [0, 2, 2])], "rising offsets"),
        ([([1, 101], [0, 1, 2])], "expected ids from 0 to 99 in the sampling support of row 0; got 101"),
        ([([1, 4], [0, 1, 2])], r"token 2 in its sampling support of row 0; it is missing \(response token 1\)"),
        ([(np.array([1.5, 2.0]), [0, 1, 2])], "expected whole numbers"),
    ],
)
def test_bad_support_is_refused(support, message):
    with pytest.raises(ValueError, match=message):
        DrawableTokens.from_csr(support, [[1, 2]], vocab_size=100)


@pytest.mark.parametrize("responses", [[], [[]]])
def test_support_without_tokens_is_refused(responses: list[list[int]]):
    with pytest.raises(ValueError, match="expected at least one response, of at least one token each"):
        DrawableTokens.from_csr([([], [0])] * len(responses), responses)


def test_bits_of_more_tokens_than_a_block():
    """Only the first set is large."""
    vocab, tokens = 20_000, 300
    ids = np.concatenate([np.arange(700), np.arange(1, tokens) * 60])
    drawable = DrawableTokens.from_csr([(ids, [0, *range(700, len(ids) + 1)])], [[0, *ids[700:]]], vocab_size=vocab)
    expected = np.zeros((tokens, vocab), bool)
    expected[0, :700] = True
    expected[np.arange(1, tokens), ids[700:]] = True
    assert np.array_equal(np.asarray(drawable.to_boolean(vocab, jnp.arange(tokens)))[0], expected)


def test_bits_are_packed_in_blocks():
    """The booleans of all tokens at once would take 4 MB; the bits take 0.5 MB."""
    vocab, tokens, most = 20_000, 200, 700
    support = [(np.tile(np.arange(most), 4), most * np.arange(5))]

    def packed() -> DrawableTokens:
        return DrawableTokens.from_csr(support, [[0] * 4], response_width=tokens, vocab_size=vocab)

    packed()  # the first call also fills caches
    tracemalloc.start()
    try:
        drawable = packed()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert drawable.sets is not None and drawable.sets.shape == (1, tokens, vocab // 8) and peak < 2e6


def test_a_width_below_the_longest_response_is_refused():
    for vocab_size in (None, 100):
        with pytest.raises(ValueError, match="response_width of at least 2, the tokens of row 0; got 1"):
            DrawableTokens.from_csr([([1, 2], [0, 1, 2])], [[1, 2]], response_width=1, vocab_size=vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["top-k", "top-p"])
def test_a_foreign_record_with_support_is_exact(name: str):
    """Our own rollout in vLLM's format. Without the support the learner is another policy."""
    ours = sampled(name)
    arrays = arrays_of(ours)
    ids, offsets, ends = arrays["support_ids"], arrays["support_offsets"], np.cumsum(ours.lengths())
    support = [
        (ids[offsets[start] : offsets[end]], offsets[start : end + 1] - offsets[start])
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    record = records_of(ours) | {"temperature": ours.temperature, "vocab_size": VOCAB}
    assert max_difference(Trajectory.from_records(**record, support=support)) < 2e-5
    assert max_difference(Trajectory.from_records(**record)) > 1e-2


# --- losses


def one_step(update: Any, batch: Any) -> tuple[dict[str, Any], Any]:
    """Metrics and gradients; the parameters are copied, because a step donates them."""
    params, reference = copied((PARAMS, REFERENCE))
    state, metrics = update(init_state(params, RECORD, jax.random.key(3), reference), batch)
    return jax.device_get(metrics), state.opt_state


ADVANTAGES = jnp.array([1.0, -0.5, 2.0, -1.0])


@functools.cache
def policy_update(config: UpdateConfig) -> Any:
    return make_update(MODEL, RECORD, config)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "visibility"), [("all", "shadow"), ("top-p", "dense")])
def test_policy_gradient_and_kl(name: str, visibility: Visibility):
    """Gradients and KL equal the plain definition over the drawable tokens, with microbatches ("all") and without."""
    trajectory = sampled(name)
    loss = LossConfig(beta=0.2)
    config = UpdateConfig(
        visibility=visibility, loss=loss, correction=Shadow() if visibility == "shadow" else TIS(clip_max=2.0)
    )
    if name == "all":
        config = replace(config, microbatch_size=2)
    batch = TrainBatch(trajectory, ADVANTAGES, trajectory.logprobs if visibility == "shadow" else None)
    metrics, grads = one_step(policy_update(config), batch)
    inside = trajectory.response_mask
    old, reference = (plain_token_logprobs(name, params, visibility) for params in (PARAMS, REFERENCE))
    weights = jnp.where(inside, 1 / inside.sum(1, keepdims=True) / ROWS, 0.0)
    importance = jnp.where(visibility == "shadow", 1.0, jnp.minimum(jnp.exp(old - trajectory.logprobs), 2.0))

    def plain(params: Any) -> jax.Array:
        logprobs = jnp.where(inside, plain_token_logprobs(name, params, visibility), 0.0)
        ratio = jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
        log_ratio = jnp.where(inside, reference - logprobs, 0.0)
        kl = jnp.exp(log_ratio) - log_ratio - 1
        return jnp.sum(weights * (0.2 * kl - ratio * importance * ADVANTAGES[:, None]))

    assert distance(grads, jax.jit(jax.grad(plain))(PARAMS)) < 1e-4
    if visibility == "shadow":
        assert metrics["sampling/sampling_logp_difference/max"] < 2e-5
    log_ratio = np.where(inside, np.asarray(reference) - np.asarray(old), 0.0)
    kl = np.expm1(log_ratio) - log_ratio
    assert metrics["kl"] == pytest.approx(kl.sum() / np.asarray(inside).sum(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "direction"), [("all", "anchor"), ("top-p", "reverse")])
def test_distillation(name: str, direction: Any):
    """Divergence and overlap equal the plain definition over the drawable tokens; gradients are finite."""
    trajectory = sampled(name)
    weights = jnp.where(trajectory.response_mask, jnp.arange(1.0, LENGTH + 1)[None], 0.0)
    dense_logprobs = plain_logprobs(name, REFERENCE if direction == "anchor" else PARAMS, "dense")
    shadow_logprobs = plain_logprobs(name, PARAMS, "shadow")
    dense, shadow = (jnp.where(jnp.isfinite(x), x, -1e30) for x in (dense_logprobs, shadow_logprobs))
    per_token = divergence(dense, shadow, direction)
    value, agreement = distilled(name, DistillConfig(direction=direction), weights)
    np.testing.assert_allclose(value, (weights * per_token).sum(), rtol=1e-4)
    shared = np.minimum(np.exp(dense_logprobs), np.exp(shadow_logprobs)).sum(-1)
    inside = np.asarray(weights > 0)
    np.testing.assert_allclose(np.asarray(agreement)[inside], shared[inside], rtol=1e-4)


def distilled(name: str, config: DistillConfig, weights: Any) -> Any:
    reference = REFERENCE if config.direction == "anchor" else None

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def term(params: Any, reference: Any) -> Any:
        trajectory = sampled(name)
        hidden = response_hidden(MODEL, params, trajectory, trajectory.mask)
        return distill_term(MODEL, config, params, reference, trajectory, hidden, weights)

    result, grads = term(PARAMS, reference)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    return result
