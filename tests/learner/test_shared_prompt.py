"""A prompt that is read once for all of its responses: the same states, gradients and metrics as in rows of its own."""

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
from smd_jax.model.decoder import Decoder
from smd_jax.model.shared_prompt import SharedAttend, SharedPrompt, shared_prompt
from smd_jax.testing import tiny_model_config
from smd_jax.text.prompts import PromptBatch
from tests import toy_loop
from tests.tiny_update import RECORD, spread_params

PROMPTS, GROUP, WIDTH, LENGTH = 4, 4, 8, 10
ROWS = PROMPTS * GROUP
# Two layers: what a prompt's tokens see in the first one is in their keys of the second.
CONFIG = tiny_model_config(vocab_size=32, max_positions=32, num_layers=2)
MODEL = Decoder(CONFIG)
PARAMS, REFERENCE = spread_params(0, CONFIG), spread_params(1, CONFIG)


def rolled_out(policy=smd.eviction.H2O(), budget: int = 5, model: Decoder = MODEL, params=PARAMS, quant=None):  # noqa: B008
    """Four prompts of unequal length, four responses each."""
    rng = np.random.default_rng(0)
    valid = jnp.asarray(np.arange(WIDTH)[None] >= np.array([0, 3, 5, 7])[:, None])
    prompts = PromptBatch(jnp.where(valid, jnp.asarray(rng.integers(0, 32, valid.shape), jnp.int32), 0), valid)
    config = smd.RolloutConfig(LENGTH, budget, 2, eos_token_id=5, sampling=SamplingConfig(temperature=0.9), quant=quant)
    return smd.rollout(model, params, prompts, jax.random.key(54), policy=policy, config=config, group_size=GROUP)


# --- where tokens go


def test_by_hand():
    once = SharedAttend(lambda q, k, v, layer, sinks=None: (q, layer), rows=2, columns=2)
    rows = jnp.asarray([[1, 2, 3], [1, 2, 4], [5, 6, 7], [5, 6, 8]])
    together = jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 8]])
    np.testing.assert_array_equal(once.together(rows), together)
    np.testing.assert_array_equal(once.apart(together), rows)


def test_a_model_sees_a_prompt_once():
    seen = []

    class Watched(Decoder):
        def hidden(self, params, tokens, positions, attend, layers):
            seen.append(tokens.shape)
            return super().hidden(params, tokens, positions, attend, layers)

    response_hidden(shared_prompt(Watched(CONFIG), GROUP, WIDTH), PARAMS, rolled_out(), rolled_out().mask)
    assert seen == [(PROMPTS, WIDTH + GROUP * LENGTH)]
    assert shared_prompt(MODEL, 1, WIDTH) is MODEL


def test_rows_of_one_prompt_stay_in_a_microbatch():
    rows = jnp.arange(12)
    parts = split(rows, 2, 3)
    # Groups 0 and 2, then 1 and 3: each device, which has neighbours, has a part in both.
    assert parts.tolist() == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    np.testing.assert_array_equal(merge(parts, 3), rows)


# --- the same states

POLICIES = {
    "h2o": smd.eviction.H2O(),
    "snapkv": smd.eviction.SnapKV(window=2),
    "random": smd.eviction.Random(),
    "dense": smd.eviction.Dense(),
}


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "budget"), [*((policy, 5) for policy in POLICIES), ("h2o", 12)])
def test_log_probabilities_are_those_of_the_sampler(policy: str, budget: int):
    """With 5 keys the prompt itself is compressed, with 12 only what follows."""
    one = rolled_out(POLICIES[policy], budget)
    again = replay(SharedPrompt(MODEL, GROUP, WIDTH), PARAMS, one).logprobs
    mask = one.response_mask
    np.testing.assert_allclose(again[mask], one.logprobs[mask], atol=1e-5)
    if POLICIES[policy].evicts:
        dense = replay(MODEL, PARAMS, one, one.dense_mask()).logprobs
        assert float(abs(dense - again)[mask].max()) > 0.01, "nothing that matters was evicted"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("impl", "windows"),
    [("segments", ()), *((impl, (4, None)) for impl in ("reference", "xla", "interval", "segments"))],
)
def test_every_attention(impl, windows):
    config = replace(CONFIG, sliding_windows=windows) if windows else CONFIG
    one = rolled_out(model=Decoder(config))
    model = Decoder(config, impl=impl)
    plain = response_hidden(model, PARAMS, one, one.mask)
    once = response_hidden(shared_prompt(model, GROUP, WIDTH), PARAMS, one, one.mask)
    np.testing.assert_allclose(once, plain, atol=2e-5)


@pytest.mark.slow
def test_a_quantised_cache():
    one = rolled_out(quant=QuantConfig(bits=8, group=2))
    again = replay(SharedPrompt(MODEL, GROUP, WIDTH), PARAMS, one).logprobs
    np.testing.assert_allclose(again[one.response_mask], one.logprobs[one.response_mask], atol=1e-5)


# --- the same step

ANCHOR = DistillConfig(direction="anchor", coef=0.5)
CONFIGS: dict[str, UpdateConfig] = {
    "gspo": UpdateConfig(loss=LossConfig(ratio_level="geometric")),
    "many terms": UpdateConfig(loss=LossConfig(beta=0.1), entropy_coef=0.01, top_entropy_quantile=0.5, distill=ANCHOR),
    "tis, dense": UpdateConfig(visibility="dense", correction=TIS()),
    "published": UpdateConfig(distill=DistillConfig(direction="published", coef=0.5)),
    "both learners": UpdateConfig(dense_learner=DenseLearner(0.5)),
}
ADVANTAGES = jnp.asarray(np.random.default_rng(1).normal(size=ROWS), jnp.float32)


def stepped(config: UpdateConfig, mesh=None):
    """Gradients, as RECORD keeps them, and metrics."""
    one = rolled_out()
    # A dense learner asks itself for the old policy, in a pass before the update.
    batch = TrainBatch(one, ADVANTAGES, one.logprobs if config.visibility == "shadow" else None)
    state = init_state(jax.tree.map(jnp.copy, PARAMS), RECORD, jax.random.key(0), REFERENCE)
    update = make_update(MODEL, RECORD, config)
    if mesh is None:
        state, metrics = update(state, batch)
    else:
        with jax.set_mesh(mesh):
            state, metrics = update(shard_tree(state, mesh), shard_batch(batch, mesh))
    return jax.device_get(state.opt_state), {name: float(value) for name, value in metrics.items()}


@functools.cache
def plain_step(name: str):
    """`stepped` with every response in a row of its own: several tests compare with it."""
    return stepped(CONFIGS[name])


def assert_equal_steps(got, expected):
    for metric, value in expected[1].items():
        # Rounding alone, as much as the CPU makes: squares of products over responses, and the worst log-probability.
        rounding = ("rollout_corr/chi2_seq", "sampling/sampling_logp_difference/max")
        most = 3e-6 if metric in rounding else 1e-6
        assert got[1][metric] == pytest.approx(value, rel=1e-5, abs=most), metric
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(expected[0]), jax.tree.leaves(got[0]), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-4, atol=2e-6, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_step_is_the_same(name: str):
    assert_equal_steps(stepped(replace(CONFIGS[name], rows_per_prompt=GROUP)), plain_step(name))


@pytest.mark.slow
@pytest.mark.parametrize(("microbatch", "rows"), [(8, 4), (4, 2)])
def test_microbatches(microbatch: int, rows: int):
    """Of two prompts, and of half of one."""
    shared = replace(CONFIGS["many terms"], microbatch_size=microbatch, rows_per_prompt=rows)
    assert_equal_steps(stepped(shared), plain_step("many terms"))


@pytest.mark.slow
def test_on_a_mesh():
    """Four devices with a prompt each, and two of them halved by the tensor axis."""
    for sizes in ((2, 2, 1), (2, 1, 2)):
        got = stepped(replace(CONFIGS["many terms"], rows_per_prompt=GROUP), make_mesh(*sizes))
        assert_equal_steps(got, plain_step("many terms"))


@pytest.mark.slow
def test_a_run_is_the_same():
    """Two rollouts of a loop with minibatches, whose old policy is replayed."""
    config = replace(toy_loop.CONFIG, minibatches=2, update=UpdateConfig(visibility="dense", correction=TIS()))
    shared = replace(config, update=replace(config.update, microbatch_size=4, rows_per_prompt=4))
    told = [toy_loop.run(toy_loop.own_loop(of), toy_loop.new_state(), 2)[1] for of in (config, shared)]
    for plain, once in zip(*told, strict=True):
        assert plain.keys() == once.keys()
        for metric, value in plain.items():
            assert once[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric


def test_a_replay_in_microbatches():
    one = rolled_out()
    plain = make_replay(MODEL, "dense")(PARAMS, one)
    np.testing.assert_allclose(make_replay(MODEL, "dense", 8, GROUP)(PARAMS, one), plain, atol=1e-5)


# --- what does not go together


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows_per_prompt": 0}, "expected rows_per_prompt >= 1"),
        ({"rows_per_prompt": 4, "microbatch_size": 6}, "that divide microbatch_size 6; got 4"),
    ],
)
def test_choices_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        UpdateConfig(**options)


def test_rows_without_a_common_prompt_are_refused():
    one = rolled_out()
    update = make_update(MODEL, RECORD, UpdateConfig(rows_per_prompt=GROUP))

    def refused(trajectory, said: str) -> None:
        state = init_state(jax.tree.map(jnp.copy, PARAMS), RECORD, jax.random.key(3))
        with pytest.raises(ValueError, match=f"expected rows_per_prompt=4 consecutive rows to have one prompt.*{said}"):
            update(state, TrainBatch(trajectory, jnp.ones(ROWS), old_logprobs=one.logprobs))

    refused(one.replace(tokens=one.tokens.at[5, 7].add(1)), "other tokens in row 5, column 7, than in row 4")
    other_padding = TrainBatch(one.replace(tokens=one.tokens.at[5, 0].add(1)), jnp.ones(ROWS), one.logprobs)
    state = init_state(jax.tree.map(jnp.copy, PARAMS), RECORD, jax.random.key(3))
    jax.jit(lambda state: update(state, other_padding))(state)  # also as a constant of a jit
    shuffled = jax.tree.map(lambda x: x[np.arange(ROWS).reshape(GROUP, -1).T.ravel()], one)
    refused(shuffled, "other tokens in row 1")
    # As after a prompt that was read in other chunks. Evictions behind the prompt's end may differ.
    at = one.mask.evicted_at
    early = one.mask.replace(evicted_at=at.at[3, 1, 0, 6].set(7))
    refused(one.replace(mask=early), "other mask in row 3, column 6, than in row 0")
    refused(one.replace(mask=early.to_boolean()), "other mask in row 3, column 6, than in row 0")
    with pytest.raises(ValueError, match="other tokens in row 1"):
        make_replay(MODEL, "shadow", rows_per_prompt=GROUP)(PARAMS, shuffled)


def test_rows_that_do_not_divide():
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
        stepped(UpdateConfig(rows_per_prompt=3))
