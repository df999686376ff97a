"""The engine: rows equal those of a fixed batch on any schedule, and caches are updated in place."""

import re
from dataclasses import replace
from functools import cache, partial
from inspect import unwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from smd_jax.devices.sharding import make_mesh
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import H2O, Dense, KeyDiff, Knorm
from smd_jax.learner.forward import replay
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.sampling import SamplingConfig
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.sampler import engine as engine_module
from smd_jax.sampler.config import cache_bytes
from smd_jax.sampler.engine import Engine, Progress, Rollout, buckets
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.sampler.keys import row_keys
from smd_jax.sampler.prefill import Prefilled, prefill
from smd_jax.sampler.seats import empty
from smd_jax.sampler.static import Sampler
from smd_jax.testing import count_compilations, tiny_model_config
from smd_jax.text.prompts import PromptBatch
from smd_jax.text.stop_strings import StopTable
from tests.under_test import POLICIES, eviction_times, gap, left_padded, make_params

SHAPE = tiny_model_config(vocab_size=40, num_layers=1, tie_embeddings=False)
MODEL, WIDTH, GROUP = Decoder(SHAPE), 20, 2
TWO_LAYERS = Decoder(replace(SHAPE, num_layers=2))
LENGTHS = [20, 3, 9, 1, 16, 11]
ROWS = GROUP * len(LENGTHS)
SIZES = RolloutConfig(max_new_tokens=30, budget=8, buffer=4, eos_token_id=7)
LIMITS = np.array([30, 3, 17, 22, 1, 9, 30, 28, 5, 6, 7, 21])


def prompts() -> PromptBatch:
    return left_padded(LENGTHS, WIDTH, SHAPE.vocab_size)


def run(policy: EvictionPolicy, sizes: RolloutConfig = SIZES, model: Decoder = MODEL, **options: Any) -> Rollout:
    engine = Engine(model, policy, sizes, decode_rows=3, prefill_rows=2)
    return engine.run(make_params(model.config), prompts(), jax.random.key(1), group_size=GROUP, **options)


def fixed(policy: EvictionPolicy, sizes: RolloutConfig = SIZES, model: Decoder = MODEL, **options: Any) -> Trajectory:
    """The same rows in one batch."""
    params = make_params(model.config)
    return rollout(
        model, params, prompts(), jax.random.key(1), policy=policy, config=sizes, group_size=GROUP, **options
    )


def check_equal(got: Any, expected: Any) -> None:
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_array_equal(got.valid, expected.valid)
    np.testing.assert_array_equal(got.terminated, expected.terminated)
    np.testing.assert_array_equal(eviction_times(got), eviction_times(expected))
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_allclose(got.entropy, expected.entropy, atol=1e-5)
    if expected.drawable is not None:
        inside = np.asarray(expected.response_mask)[..., None]
        one, other = (np.where(inside, np.asarray(x.drawable.sets), 0) for x in (got, expected))
        np.testing.assert_array_equal(one, other)


def check_alike(policy: EvictionPolicy, sizes: RolloutConfig, model: Decoder = MODEL) -> Trajectory:
    """Checks that rows of the engine equal a fixed batch, and that the learner replays them."""
    done = run(policy, sizes, model, limits=LIMITS).trajectory
    check_equal(done, fixed(policy, sizes, model, limits=LIMITS))
    assert gap(model, done).max() <= 2e-5
    return done


# Prefill chunks and filters are independent, so two cases have both.
FILTERED = replace(
    SIZES, sampling=SamplingConfig(temperature=0.8, top_k=6, top_p=0.9), min_new_tokens=6, prefill_chunk=5
)
SHORT = replace(SIZES, buffer=3)  # shorter than SnapKV's window, which still has prompt queries after the first segment
CASES: dict[str, tuple[EvictionPolicy, RolloutConfig]] = {
    "SnapKV": (POLICIES["SnapKV"], SHORT),
    "Random": (POLICIES["Random"], SHORT),
    "Pyramid of H2O": (POLICIES["Pyramid of H2O"], SHORT),
    "quantised, dense": (Dense(), replace(SIZES, quant=QuantConfig(bits=4, group=2))),
    "filtered, in chunks": (H2O(), FILTERED),
    "filtered by bits, in chunks, dense": (
        Dense(),
        replace(SIZES, sampling=SamplingConfig(top_p=0.7, min_p=0.02), buffer=5, prefill_chunk=5),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_rows_equal_those_of_a_fixed_batch(name: str):
    policy, sizes = CASES[name]
    done = check_alike(policy, sizes, TWO_LAYERS if name.startswith("Pyramid") else MODEL)
    lengths, ended = np.asarray(done.lengths()), np.asarray(done.terminated)
    assert (lengths[~ended] == LIMITS[~ended]).all() and not ended.all()
    assert ended.any() or sizes.min_new_tokens, "choose another key: some rows should end by themselves"
    if policy.evicts:
        assert done.mask.segments
        done.mask.with_segments(done.mask.segments)  # raises unless the mask fits its segments


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(1, WIDTH), min_size=4, max_size=4),
    limits=st.lists(st.integers(1, 30), min_size=8, max_size=8),
    seed=st.integers(0, 2**31 - 1),
)
@settings(deadline=None, max_examples=12)
def test_rows_on_any_schedule_equal_those_of_a_fixed_batch(lengths: list[int], limits: list[int], seed: int):
    """Not under Knorm: norms do not depend on the position, so equal tokens nearly tie in the first layer."""
    batch, params = left_padded(lengths, WIDTH, SHAPE.vocab_size, seed), make_params(SHAPE)
    key, bounds = jax.random.key(seed), np.array(limits)
    engine = Engine(MODEL, KeyDiff(), SIZES, decode_rows=3, prefill_rows=2)
    done = engine.run(params, batch, key, group_size=2, limits=bounds)
    check_equal(
        done.trajectory,
        rollout(MODEL, params, batch, key, policy=KeyDiff(), config=SIZES, group_size=2, limits=jnp.asarray(bounds)),
    )
    assert done.stats.tokens == done.trajectory.lengths().sum()


NO_MATCH = jnp.zeros((3, SHAPE.vocab_size), jnp.uint8)
STOP = StopTable(NO_MATCH.at[:2, 9].set(1).at[1, :5].set(2).at[2].set(2))


@pytest.mark.slow
@pytest.mark.parametrize("shortest", [0, 5])
def test_stop_strings(shortest: int):
    """A 9, then a token from 0 to 4, not before the minimum length. A reused decode row restarts the match."""
    sizes = replace(SIZES, eos_token_id=None, min_new_tokens=shortest, max_new_tokens=60)
    warm = replace(sizes, sampling=SamplingConfig(temperature=1.0, top_k=12))
    done, expected = run(H2O(), warm, stop=STOP).trajectory, fixed(H2O(), warm, stop=STOP)
    check_equal(done, expected)
    stopped = 0
    for tokens, length, ended in zip(*map(np.asarray, (done.response, done.lengths(), done.terminated)), strict=True):
        pairs = [i + 2 for i in range(shortest, length - 1) if tokens[i] == 9 and tokens[i + 1] < 5]
        assert (pairs == [length]) if ended else (not pairs and length == 60)
        stopped += int(ended)
    assert stopped > 0, "choose another key: some rows should stop"
    with pytest.raises(ValueError, match="vocabulary of 40 tokens; got a table of 39"):
        run(H2O(), warm, stop=StopTable(STOP.next_state[:, :39]))


def test_a_row_with_its_own_key_does_not_depend_on_the_order():
    params, batch, key = make_params(SHAPE), prompts(), jax.random.key(1)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(6))
    order = np.array([3, 5, 0, 1, 4, 2])
    engine = Engine(MODEL, Knorm(), SIZES, decode_rows=3, prefill_rows=2)
    expected = engine.run(params, batch, key).trajectory
    reordered = engine.run(params, jax.tree.map(lambda x: x[order], batch), keys[order]).trajectory
    np.testing.assert_array_equal(reordered.tokens, np.asarray(expected.tokens)[order])
    with pytest.raises(ValueError, match=r"one for each of 6 rows; got keys of shape \(5,\)"):
        engine.run(params, batch, keys[:5])
    with pytest.raises(ValueError, match="expected threefry keys.* got rbg"):
        engine.run(params, batch, jax.random.key(0, impl="rbg"))
    with pytest.raises(ValueError, match=r"expected threefry keys.* got uint32\[2\]"):
        unwrap(row_keys)(jax.random.PRNGKey(0), 6)  # without the type checks of tests
    with pytest.raises(ValueError, match="expected threefry keys.* got int32"):
        unwrap(row_keys)(7, 6)


def _prefilled() -> Prefilled:
    params, batch = make_params(SHAPE), left_padded(LENGTHS[:4], WIDTH, SHAPE.vocab_size)
    rng = jax.random.split(jax.random.key(0), 4)
    return engine_module._prefill(Sampler(MODEL, H2O(), SIZES, WIDTH), params, batch, rng)


@pytest.mark.slow
def test_rows_on_a_mesh_equal_those_of_a_fixed_batch():
    """Rows over four devices, KV heads over two."""
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    engine = Engine(MODEL, H2O(), SIZES, decode_rows=4, prefill_rows=4, mesh=mesh)
    done = engine.run(make_params(SHAPE), prompts(), jax.random.key(1), group_size=GROUP, limits=LIMITS)
    check_equal(done.trajectory, fixed(H2O(), limits=LIMITS))
    tokens: Any = done.trajectory.tokens
    assert tokens.sharding.spec == PartitionSpec(("data", "fsdp"))
    with jax.set_mesh(mesh):
        state: Any = engine_module._empty(_prefilled(), 4)
    assert {state.cache[0].keys.sharding.spec, state.cache[0].columns.sharding.spec} == {
        PartitionSpec(("data", "fsdp"), "tensor")
    }
    with pytest.raises(
        ValueError, match=r"a cache of decode_rows that divides over data axis \* fsdp axis = 4; got 6 rows"
    ):
        replace(engine, decode_rows=6)


# Statistics.


def test_utilisation_by_hand():
    """Three decode rows, segments of four. Rows of 8, 2, 7 and 3: the last replaces the second after four steps."""
    engine = Engine(MODEL, Knorm(), SIZES, decode_rows=3, prefill_rows=2)
    batch = left_padded([3, 3, 3, 3], WIDTH, SHAPE.vocab_size)
    stats = engine.run(make_params(SHAPE), batch, jax.random.key(0), limits=np.array([8, 2, 7, 3])).stats
    assert stats.tokens == 20, "choose another key: no row should end by itself"
    assert (stats.steps, stats.segments, stats.prefills) == (8, 2, 2)
    assert stats.utilisation == 20 / 24


def test_progress():
    reports: list[Progress] = []
    stats = run(Knorm(), limits=LIMITS, report=reports.append).stats
    assert len(reports) == stats.segments and reports[-1].tokens == stats.tokens
    assert reports[-1].finished == reports[-1].rows == ROWS
    assert all(before.tokens < after.tokens for before, after in zip(reports, reports[1:], strict=False))
    assert all(1 <= progress.live <= progress.decode_rows == 3 for progress in reports)


def test_buckets():
    assert buckets(100) == [13, 25, 50, 100] and buckets(16) == [16] and buckets(5) == [5]


# Memory.

WIDE = tiny_model_config(vocab_size=64, num_layers=2, hidden_size=64, head_dim=32)
SLOTS = 17  # does not divide into the 16 parts of `row_parts`


@cache
def compiled_segment(policy: EvictionPolicy) -> Any:
    """The program of a segment, with 17 rows of 96 + 16 keys (Dense: 256)."""
    sampler = Sampler(Decoder(WIDE), policy, RolloutConfig(max_new_tokens=248, budget=96, buffer=16), 8)
    params = jax.eval_shape(lambda: make_params(WIDE))
    batch = jax.eval_shape(lambda: left_padded([8, 8], 8, WIDE.vocab_size))
    rng = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
    prefilled = jax.eval_shape(partial(prefill, sampler), params, batch, rng)
    state = jax.eval_shape(lambda x: empty(x, SLOTS), prefilled)
    return engine_module._segment.lower(sampler, params, state, None).compile()


def cache_copies(hlo: str, shape: str) -> list[str]:
    """Operations that create an array of a layer's keys or values, other than in-place updates."""
    made = re.findall(rf"^\s*(ROOT )?%(\S+) = {re.escape(shape)}\S* (\w[\w-]*)\((.*)$", hlo, re.MULTILINE)
    updates = {name for _, name, kind, _ in made if kind == "dynamic-update-slice"}
    in_place = {"parameter", "get-tuple-element", "bitcast", "dynamic-update-slice"}

    def is_in_place(kind: str, rest: str) -> bool:
        """A fusion is in place if its root is an update."""
        called = re.search(r"calls=%(\S+?),", rest)
        if kind != "fusion" or called is None:
            return kind in in_place
        body = hlo[hlo.index(f"%{called[1]} ") :]
        root = re.search(r"ROOT %(\S+) =", body)
        return root is not None and root[1] in updates

    assert updates, "nothing is written into the cache"
    return [name for _, name, kind, rest in made if not is_in_place(kind, rest)]


@pytest.mark.parametrize(("policy", "slots"), [(H2O(), 96 + 16), (Dense(), 256)])
def test_the_cache_is_updated_in_place(policy: EvictionPolicy, slots: int):
    """Neither the loop nor the compression copies a cache. All state is aliased, and temporaries are small."""
    compiled = compiled_segment(policy)
    shape = f"f32[{SLOTS},{WIDE.num_kv_heads},{slots},{WIDE.head_dim}]"
    hlo = compiled.as_text()
    assert shape in hlo and cache_copies(hlo, shape) == []
    sizes: Any = compiled.memory_analysis()
    expected = cache_bytes(WIDE, policy, RolloutConfig(max_new_tokens=248, budget=96, buffer=16), 8, SLOTS)
    assert expected <= sizes.alias_size_in_bytes <= 1.05 * expected
    assert sizes.temp_size_in_bytes <= 0.15 * expected


# Errors.


def test_samples_do_not_depend_on_the_default_prng_implementation():
    key = jax.random.key(1, impl="threefry2x32")
    engine = Engine(MODEL, Knorm(), SIZES, decode_rows=3, prefill_rows=2)
    expected = engine.run(make_params(SHAPE), prompts(), key).trajectory
    with jax.default_prng_impl("rbg"):
        got = engine.run(make_params(SHAPE), prompts(), key).trajectory
    np.testing.assert_array_equal(got.tokens, expected.tokens)


def test_non_finite_logits_are_refused():
    params = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), make_params(SHAPE))
    engine = Engine(MODEL, Knorm(), SIZES, decode_rows=3, prefill_rows=2)
    with pytest.raises(FloatingPointError, match="expected finite logits in the sampler; got NaN .* 3 of 3 rows"):
        engine.run(params, prompts(), jax.random.key(0))


def test_decode_rows_below_one_are_refused():
    with pytest.raises(ValueError, match="decode_rows >= 1, a whole number; got 0"):
        Engine(MODEL, Knorm(), SIZES, decode_rows=0)


def test_a_mesh_with_other_axes_is_refused():
    with pytest.raises(ValueError, match=r"expected a mesh of smd.make_mesh, with the axes .*; got \('x',\)"):
        Engine(MODEL, Knorm(), SIZES, decode_rows=8, mesh=Mesh(np.array(jax.devices()), ("x",)))


def test_a_trajectory_follows_the_parameters_to_their_device():
    device = jax.devices()[1]
    params = jax.device_put(make_params(SHAPE), device)
    done = Engine(MODEL, Knorm(), SIZES, 2).run(params, prompts(), jax.random.key(0))
    assert replay(MODEL, params, done.trajectory).logprobs.devices() == {device}


def test_a_mesh_of_another_process_is_refused(monkeypatch: pytest.MonkeyPatch):
    mesh = make_mesh(data=len(jax.devices()))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ValueError, match=r"give each process a separate engine .* processes \[0\]"):
        Engine(MODEL, Knorm(), SIZES, decode_rows=8, mesh=mesh)


# Compilations.


def test_compiles_once():
    """One program for segments, one to seat rows, one per bucket. The last test of the file: it clears the programs."""
    jitted: list[Any] = [engine_module._segment, engine_module._seat, engine_module._prefill]
    for function in jitted:
        function.clear_cache()
    engine = Engine(MODEL, Knorm(), SIZES, decode_rows=3, prefill_rows=2)
    with count_compilations() as counts:
        for seed, lengths in enumerate([[20, 3, 9], [1, 11, 7, 2], [4, 18]]):
            batch = left_padded(lengths, WIDTH, SHAPE.vocab_size, seed)
            engine.run(make_params(SHAPE), batch, jax.random.key(seed))
    assert counts["_segment"] == counts["_seat"] == 1
    assert counts["_prefill"] == len(buckets(WIDTH)) == 2
