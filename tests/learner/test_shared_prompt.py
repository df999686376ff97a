"""One prompt for several responses: states, gradients and metrics match separate rows."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import smd_jax as smd
from smd_jax.corrections.mismatch import TIS
from smd_jax.devices.sharding import make_mesh, shard_batch, shard_tree
from smd_jax.learner.accumulation import merge, split
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.forward import make_replay, replay, response_hidden
from smd_jax.learner.policy_term import DenseLearner
from smd_jax.learner.state import TrainBatch, init_state
from smd_jax.learner.update import make_update
from smd_jax.losses.distillation import DistillConfig
from smd_jax.losses.policy import LossConfig
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.sampling import SamplingConfig
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.model.shared_prompt import SharedPrompt, shared_prompt
from smd_jax.testing import tiny_model_config
from smd_jax.text.prompts import PromptBatch
from tests import toy_loop
from tests.tiny_update import RECORD, assert_equal_steps, copied, metrics_and_gradients, spread_params

PROMPTS, GROUP, WIDTH, LENGTH = 4, 4, 8, 10
ROWS = PROMPTS * GROUP
# Two layers: attention in the first one changes the prompt's keys in the second.
CONFIG = tiny_model_config(vocab_size=32, max_positions=32, num_layers=2)
MODEL = Decoder(CONFIG)
PARAMS, REFERENCE = spread_params(0, CONFIG), spread_params(1, CONFIG)


def sampled(budget: int = 5, model: Decoder = MODEL, quant: QuantConfig | None = None) -> Trajectory:
    """Four prompts of unequal length, four responses each."""
    rng = np.random.default_rng(0)
    valid = jnp.asarray(np.arange(WIDTH)[None] >= np.array([0, 3, 5, 7])[:, None])
    prompts = PromptBatch(jnp.where(valid, jnp.asarray(rng.integers(0, 32, valid.shape), jnp.int32), 0), valid)
    config = smd.RolloutConfig(
        max_new_tokens=LENGTH,
        budget=budget,
        buffer=2,
        eos_token_id=5,
        sampling=SamplingConfig(temperature=0.9),
        quant=quant,
    )
    arguments = {"policy": smd.eviction.H2O(), "config": config, "group_size": GROUP}
    return smd.rollout(model, PARAMS, prompts, jax.random.key(54), **arguments)


# --- layout


def test_prompt_is_computed_once():
    shapes = []

    class RecordingDecoder(Decoder):
        def hidden(self, params, tokens, positions, attend, layers):
            shapes.append(tokens.shape)
            return super().hidden(params, tokens, positions, attend, layers)

    response_hidden(shared_prompt(RecordingDecoder(CONFIG), GROUP, WIDTH), PARAMS, sampled(), sampled().mask)
    assert shapes == [(PROMPTS, WIDTH + GROUP * LENGTH)]
    assert shared_prompt(MODEL, 1, WIDTH) is MODEL


def test_split_keeps_the_rows_of_a_prompt_together():
    rows = jnp.arange(12)
    parts = split(rows, 2, 3)
    # Groups 0 and 2, then 1 and 3: devices hold adjacent groups, so each has rows in both parts.
    assert parts.tolist() == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    np.testing.assert_array_equal(merge(parts, 3), rows)


# --- hidden states


@pytest.mark.slow
@pytest.mark.parametrize("budget", [5, 12])
def test_logprobs_match_the_sampler(budget: int):
    """A budget of 5 compresses the prompt, too; one of 12 only the response."""
    one = sampled(budget)
    logprobs = replay(SharedPrompt(MODEL, GROUP, WIDTH), PARAMS, one).logprobs
    mask = one.response_mask
    np.testing.assert_allclose(logprobs[mask], one.logprobs[mask], atol=1e-5)
    dense = replay(MODEL, PARAMS, one, one.dense_mask()).logprobs
    assert float(abs(dense - logprobs)[mask].max()) > 0.01, "evictions must matter"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("impl", "windows"),
    [("segments", ()), *((impl, (4, None)) for impl in ("reference", "xla", "interval", "segments"))],
)
def test_attention_implementations_match_separate_rows(impl, windows):
    config = replace(CONFIG, sliding_windows=windows) if windows else CONFIG
    one = sampled(model=Decoder(config))
    model = Decoder(config, impl=impl)
    plain = response_hidden(model, PARAMS, one, one.mask)
    once = response_hidden(shared_prompt(model, GROUP, WIDTH), PARAMS, one, one.mask)
    np.testing.assert_allclose(once, plain, atol=2e-5)


@pytest.mark.slow
def test_quantized_cache_matches_the_sampler():
    one = sampled(quant=QuantConfig(bits=8, group=2))
    logprobs = replay(SharedPrompt(MODEL, GROUP, WIDTH), PARAMS, one).logprobs
    np.testing.assert_allclose(logprobs[one.response_mask], one.logprobs[one.response_mask], atol=1e-5)


# --- updates

ANCHOR = DistillConfig(direction="anchor", coef=0.5)
CONFIGS: dict[str, UpdateConfig] = {
    "gspo": UpdateConfig(loss=LossConfig(ratio_level="geometric")),
    "many terms": UpdateConfig(loss=LossConfig(beta=0.1), entropy_coef=0.01, top_entropy_quantile=0.5, distill=ANCHOR),
    "tis, dense": UpdateConfig(visibility="dense", correction=TIS()),
    "published": UpdateConfig(distill=DistillConfig(direction="published", coef=0.5)),
    "both learners": UpdateConfig(dense_learner=DenseLearner(0.5)),
}
ADVANTAGES = jnp.asarray(np.random.default_rng(1).normal(size=ROWS), jnp.float32)


def batch_of(config: UpdateConfig) -> TrainBatch:
    """A dense learner recomputes the old log-probabilities before the update."""
    one = sampled()
    return TrainBatch(one, ADVANTAGES, one.logprobs if config.learner_visibility == "shadow" else None)


def run_update(config: UpdateConfig):
    return metrics_and_gradients(config, batch_of(config), reference=REFERENCE, model=MODEL, params=PARAMS)


@functools.cache
def unshared_update(name: str):
    """Cached, because several tests compare with it."""
    return run_update(CONFIGS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_update_matches_separate_rows(name: str):
    assert_equal_steps(run_update(replace(CONFIGS[name], rows_per_prompt=GROUP)), unshared_update(name), 2.5e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("microbatch", "rows"), [(8, 4), (4, 2)])
def test_microbatches_match_separate_rows(microbatch: int, rows: int):
    """Rows of a whole prompt, and of half a prompt."""
    shared = replace(CONFIGS["many terms"], microbatch_size=microbatch, rows_per_prompt=rows)
    assert_equal_steps(run_update(shared), unshared_update("many terms"), 2.5e-6)


@pytest.mark.slow
def test_mesh_update_matches_separate_rows():
    """One prompt per pair of devices of the tensor axis."""
    config, mesh = replace(CONFIGS["many terms"], rows_per_prompt=GROUP), make_mesh(2, 2, 2)
    state = init_state(copied(PARAMS), RECORD, jax.random.key(3), copied(REFERENCE))
    with jax.set_mesh(mesh):
        update = make_update(MODEL, RECORD, config)
        state, metrics = update(shard_tree(state, mesh), shard_batch(batch_of(config), mesh))
    assert_equal_steps(jax.device_get((metrics, state.opt_state)), unshared_update("many terms"), 2.5e-6)


def test_replay_in_microbatches():
    one = sampled()
    plain = make_replay(MODEL, "dense")(PARAMS, one)
    np.testing.assert_allclose(make_replay(MODEL, "dense", 8, GROUP)(PARAMS, one), plain, atol=1e-5)


# --- invalid options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows_per_prompt": 0}, "expected rows_per_prompt >= 1"),
        ({"rows_per_prompt": 4, "microbatch_size": 6}, "that divide microbatch_size 6; got 4"),
    ],
)
def test_invalid_rows_per_prompt_raise(options, message):
    with pytest.raises(ValueError, match=message):
        UpdateConfig(**options)


def test_rows_without_a_common_prompt_raise():
    one = sampled()
    update = make_update(MODEL, RECORD, UpdateConfig(rows_per_prompt=GROUP))

    def assert_raises(trajectory, text: str) -> None:
        state = init_state(jax.tree.map(jnp.copy, PARAMS), RECORD, jax.random.key(3))
        with pytest.raises(ValueError, match=f"expected rows_per_prompt=4 consecutive rows to have one prompt.*{text}"):
            update(state, TrainBatch(trajectory, jnp.ones(ROWS), old_logprobs=one.logprobs))

    assert_raises(one.replace(tokens=one.tokens.at[5, 7].add(1)), "other tokens in row 5, column 7, than in row 4")
    other_padding = TrainBatch(one.replace(tokens=one.tokens.at[5, 0].add(1)), jnp.ones(ROWS), one.logprobs)
    state = init_state(jax.tree.map(jnp.copy, PARAMS), RECORD, jax.random.key(3))
    jax.jit(lambda state: update(state, other_padding))(state)  # also traced as a constant
    shuffled = jax.tree.map(lambda x: x[np.arange(ROWS).reshape(GROUP, -1).T.ravel()], one)
    assert_raises(shuffled, "other tokens in row 1")
    # As after another chunking of the prompt. Evictions after the prompt may differ.
    at = one.mask.evicted_at
    early = one.mask.replace(evicted_at=at.at[3, 1, 0, 6].set(7))
    assert_raises(one.replace(mask=early), "other mask in row 3, column 6, than in row 0")
    assert_raises(one.replace(mask=early.to_boolean()), "other mask in row 3, column 6, than in row 0")
    with pytest.raises(ValueError, match="other tokens in row 1"):
        make_replay(MODEL, "shadow", rows_per_prompt=GROUP)(PARAMS, shuffled)


def test_indivisible_rows_raise():
    with pytest.raises(ValueError, match="expected rows_per_prompt that divide group_size 4; got 3"):
        toy_loop.own_loop(
            replace(toy_loop.CONFIG, group_size=4, prompts_per_step=3, update=UpdateConfig(rows_per_prompt=3))
        )
    config = replace(toy_loop.CONFIG, update=UpdateConfig(rows_per_prompt=4))
    with pytest.raises(
        ValueError, match="a microbatch .*, counted in 4 rows of one prompt .*, that divides over .* = 4; got 2"
    ):
        toy_loop.own_loop(config, sizes=(4, 1, 1))
    with pytest.raises(ValueError, match="expected a batch of whole groups of 3 rows with one prompt; got 16 rows"):
        run_update(UpdateConfig(rows_per_prompt=3))
