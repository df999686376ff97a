"""Eviction policies: scores against NumPy formulas, and whole rollouts against a NumPy simulation."""

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.eviction import TriAttention
from smd_jax.eviction.base import CacheView, EvictionPolicy, check_budget, check_policy
from smd_jax.eviction.policies import H2O, RKV, TOVA, Dense, KeyDiff, Knorm, Random, Recent, SnapKV, StreamingLLM
from smd_jax.eviction.statistics import CacheShape, NewestQueries, ReceivedAttention
from smd_jax.eviction.wrappers import Protect, Pyramid
from smd_jax.message.masks import NEVER
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.config import plan
from smd_jax.sampler.engine import Engine
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout
from smd_jax.sampler.keys import prompt_keys, row_keys
from smd_jax.sampler.prefill import prefill
from smd_jax.sampler.static import Sampler
from smd_jax.testing import tiny_model_config
from smd_jax.text.prompts import PromptBatch, repeat_prompts
from tests import numpy_decoder, numpy_policies
from tests.numpy_policies import FORMULAS, Row
from tests.query_centers import drawn_centers
from tests.under_test import POLICIES, SHAPES, eviction_times, left_padded, make_params

WITH_FORMULA = {name: policy for name, policy in POLICIES.items() if type(policy) in FORMULAS}
WITH_FORMULA["TOVA of each head"] = TOVA(shared=False)
WITH_FORMULA["TriAttention"] = TriAttention(drawn_centers(heads=12, half=4), sinks=2)
BATCH, KV_HEADS, SLOTS, D, BUDGET = 4, 2, 14, 8, 8
EMPTY_SLOTS = [0, 3, 5, 12]  # of each row; the last row has two keys and is shorter than every window


def make_view(policy: EvictionPolicy) -> CacheView:
    """A cache in the middle of a rollout: some older keys, the newest four, random queries."""
    rng = np.random.default_rng(0)
    shape = (BATCH, KV_HEADS, SLOTS)
    last = [40, 30, 8, 1]
    positions = np.full(shape, -1)
    for b, h in np.ndindex(BATCH, KV_HEADS):
        newest = np.arange(max(last[b] - 3, 0), last[b] + 1)
        older = rng.choice(newest[0], SLOTS - EMPTY_SLOTS[b] - len(newest), replace=False) if newest[0] else []
        positions[b, h, EMPTY_SLOTS[b] :] = [*np.sort(older), *newest]
    sizes = CacheShape(BATCH, 2 * KV_HEADS, KV_HEADS, SLOTS, D, "float32")
    forms = jax.eval_shape(lambda: tuple(statistic.init(sizes) for statistic in policy.statistics))
    return CacheView(
        keys=jnp.asarray(rng.normal(size=(*shape, D)), jnp.float32),
        values=jnp.asarray(rng.normal(size=(*shape, D)), jnp.float32),
        valid=jnp.asarray(positions >= 0),
        positions=jnp.asarray(positions, jnp.int32),
        newest=jnp.asarray(last, jnp.int32),
        number=jnp.asarray(int(rng.integers(50, 100)), jnp.int32),
        states=tuple(
            jnp.asarray(rng.random(x.shape) if statistic.per_slot else rng.normal(size=x.shape), jnp.float32)
            for statistic, x in zip(policy.statistics, forms, strict=True)
        ),
        rng=jax.random.split(jax.random.key(0), BATCH),
        budget=BUDGET,
        declared=policy.statistics,
        parameters=policy.parameters({}, 0),
    )


def row_of_view(view: CacheView, b: int) -> Row:
    """One row without its empty slots and without queries from before its start."""
    empty = np.zeros((view.keys.shape[1], SLOTS, 0))
    keys, positions = np.asarray(view.keys, np.float64)[b], np.asarray(view.positions)[b]
    received, queries, query_positions = empty, empty, np.zeros(0, int)
    for statistic, state in zip(view.declared, view.states, strict=True):
        if isinstance(statistic, ReceivedAttention):
            received = np.asarray(state, np.float64)[b]
        if isinstance(statistic, NewestQueries):
            # Query n is at index n % window.
            number, window = int(view.number), statistic.window
            numbers = [n for n in range(number - window + 1, number + 1) if int(view.newest[b]) - (number - n) >= 0]
            queries = np.asarray(state, np.float64)[b][:, [n % window for n in numbers]]
            query_positions = np.array([int(view.newest[b]) - (number - n) for n in numbers])
    slots = slice(EMPTY_SLOTS[b], None)
    return Row(keys[:, slots], positions[:, slots], received[:, slots], queries, query_positions, view.budget)


def query_window(policy: EvictionPolicy) -> int:
    """Number of newest queries that the policy reads."""
    return sum(x.window for x in policy.statistics if isinstance(x, NewestQueries))


@pytest.mark.parametrize("name", WITH_FORMULA)
def test_score_in_float64(name: str):
    """No step casts to float32."""
    policy = WITH_FORMULA[name]
    view = make_view(policy)
    exact = jax.tree.map(np.asarray, view.replace(rng=None))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, np.float64 if x.dtype == np.float32 else x.dtype), exact)
        got = np.asarray(jax.jit(policy.score)(wide.replace(rng=jax.random.split(jax.random.key(0), BATCH))))
    if name in ("Recent", "StreamingLLM"):
        return  # positions: integers in float32
    for b in range(BATCH):
        expected = numpy_policies.scores(policy, row_of_view(view, b))
        np.testing.assert_allclose(got[b, :, EMPTY_SLOTS[b] :], expected, rtol=1e-9, atol=1e-12)


def test_views_contain_the_hard_cases():
    """Some keys are similar beyond R-KV's threshold, and a row has fewer keys than its window."""
    row = row_of_view(make_view(POLICIES["RKV"]), 0)
    keys = row.keys[0] / np.linalg.norm(row.keys[0], axis=-1, keepdims=True)
    assert ((keys @ keys.T - np.eye(len(keys))) > 0.5).sum() > 4
    assert row_of_view(make_view(POLICIES["SnapKV"]), 3).keys.shape[1] == 2


# Whole rollouts of one layer, whose queries and keys depend only on the tokens.


@dataclass(frozen=True)
class Run:
    policy: EvictionPolicy
    config: RolloutConfig
    trajectory: Trajectory

    @property
    def evicted_at(self) -> np.ndarray:
        """`[batch, kv_heads, T]`."""
        mask: Any = self.trajectory.mask
        return np.asarray(mask.evicted_at)[:, 0]

    def projections(self, b: int) -> tuple[int, np.ndarray, np.ndarray]:
        """First column, queries and keys of one row, indexed by position."""
        start = int(np.argmax(self.trajectory.valid[b]))
        tokens = np.asarray(self.trajectory.tokens[b, start:])
        params = make_params(ONE_LAYER)
        x = np.asarray(params["embed"]["embedding"], np.float64)[tokens]
        q, k, _ = numpy_decoder.projections(x, np.arange(len(x)), params["layers_0"], ONE_LAYER)
        return start, q, k


WIDTH, RESPONSE = 11, 32
SEGMENTS_OF_THREE = RolloutConfig(max_new_tokens=RESPONSE, budget=9, buffer=3)  # the last segment is partial
# A vocabulary so large that no row repeats a token: equal tokens have keys of equal norm.
ONE_LAYER = tiny_model_config(vocab_size=20_000, num_layers=1, tie_embeddings=False)


@cache
def run_one_layer(policy: EvictionPolicy, config: RolloutConfig = SEGMENTS_OF_THREE) -> Run:
    prompts, model = left_padded([11, 2, 7], WIDTH, ONE_LAYER.vocab_size), Decoder(ONE_LAYER)
    trajectory = rollout(model, make_params(ONE_LAYER), prompts, jax.random.key(4), policy=policy, config=config)
    return Run(policy, config, trajectory)


def simulate(run: Run, b: int, window: int) -> np.ndarray:
    """Simulates `evicted_at [kv_heads, T]` of one row; the policy reads the newest `window` queries."""
    budget, chunk = run.config.budget, run.config.prefill_chunk or WIDTH
    start, q, k = run.projections(b)
    kv_heads, total, _ = k.shape
    group = len(q) // kv_heads
    received = np.zeros((kv_heads, total))
    kept = [list[int]() for _ in range(kv_heads)]
    evicted_at = np.full((kv_heads, total), NEVER)
    for t in range(total - 1):  # the last token is never read
        for h in range(kv_heads):
            kept[h].append(t)
            for head in range(h * group, (h + 1) * group):
                received[h, kept[h]] += numpy_decoder.softmax(k[h, kept[h]] @ q[head, t] / np.sqrt(k.shape[-1]))
        decoded = t + 1 - (WIDTH - start)  # negative within the prompt, whose chunks are counted from its end
        if decoded % (chunk if decoded < 0 else run.config.buffer) or len(kept[0]) <= budget:
            continue
        queries = np.arange(max(t + 1 - window, 0), t + 1)
        keys = np.stack([k[h, kept[h]] for h in range(kv_heads)])
        attention = np.stack([received[h, kept[h]] for h in range(kv_heads)])
        row = Row(keys, np.array(kept), attention, q[:, queries], queries, budget)
        scores = numpy_policies.scores(run.policy, row)
        for h in range(kv_heads):
            best = sorted(range(len(kept[h])), key=lambda i, h=h: (-scores[h, i], i))[:budget]
            for i in set(range(len(kept[h]))) - set(best):
                evicted_at[h, kept[h][i]] = start + t + 1
            kept[h] = [kept[h][i] for i in sorted(best)]
    return np.concatenate([np.zeros((kv_heads, start), int), evicted_at], axis=1)


# These read only positions, as StreamingLLM does, or equal their inner policy in a single layer.
REDUNDANT = ("Recent", "Protect of StreamingLLM", "Pyramid", "Pyramid of H2O")


@pytest.mark.parametrize("name", [name for name in WITH_FORMULA if name not in REDUNDANT])
def test_rollouts_match_the_simulation(name: str):
    """The rollout passes the right keys, queries and statistics to the policy at the right times."""
    run = run_one_layer(WITH_FORMULA[name])
    for b in range(3):
        tokens = np.asarray(run.trajectory.tokens)[b][np.asarray(run.trajectory.valid)[b]]
        assert len(set(tokens)) == len(tokens), "choose another key: two keys may have equal scores"
        np.testing.assert_array_equal(run.evicted_at[b], simulate(run, b, query_window(run.policy)))


# Budgets and protections.


@pytest.mark.parametrize(
    ("policy", "budget", "needed"),
    [
        (StreamingLLM(sinks=4), 4, 5),
        (SnapKV(), 31, 32),
        (RKV(), 7, 8),
        (Protect(Knorm(), sinks=4, recent=8), 11, 12),
        (Protect(SnapKV(window=8), sinks=4), 11, 12),
        (Protect(SnapKV(window=8), recent=20), 27, 28),
        (Protect(StreamingLLM(sinks=4), recent=12), 16, 17),
        (Recent(), 0, 1),
    ],
)
def test_budgets_below_the_protected_keys_are_refused(policy: EvictionPolicy, budget: int, needed: int):
    check_budget(policy, needed, num_layers=2)
    message = rf"at least {needed} keys \(sinks \+ window that .*\); got {budget} in layer 0 \(budget {budget}\)"
    with pytest.raises(ValueError, match=message):
        check_budget(policy, budget, num_layers=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StreamingLLM(sinks=-3), r"StreamingLLM\.sinks >= 0; got -3"),
        (lambda: H2O(recent=-1.0), r"H2O\.recent from 0 to 1, because it is a share; got -1.0"),
        (lambda: H2O(recent=1.5), r"H2O\.recent from 0 to 1.*; got 1\.5"),
        (lambda: H2O(recent=float("nan")), r"H2O\.recent from 0 to 1.*; got nan"),
        (lambda: SnapKV(window=-1), r"SnapKV\.window >= 1; got -1"),
        (lambda: SnapKV(kernel=0), r"SnapKV\.kernel >= 1; got 0"),
        (lambda: RKV(window=0), r"RKV\.window >= 1; got 0"),
        (lambda: RKV(kernel=0), r"RKV\.kernel >= 1; got 0"),
        (lambda: RKV(weight=1.01), r"RKV\.weight from 0 to 1.*; got 1\.01"),
        (lambda: Protect(Knorm(), recent=-4), r"Protect\.recent >= 0; got -4"),
        (lambda: Protect(Knorm(), sinks=-1), r"Protect\.sinks >= 0; got -1"),
        (lambda: Protect(Dense(), sinks=1), r"Protect\.inner to be a policy that evicts; got Dense\(\)"),
        (lambda: Pyramid(Dense()), r"Pyramid\.inner to be a policy that evicts; got Dense\(\)"),
        (lambda: Pyramid(Knorm(), beta=0.0), r"Pyramid\.beta >= 1; got 0.0"),
        (lambda: Pyramid(Knorm(), beta=float("nan")), r"Pyramid\.beta >= 1; got nan"),
    ],
)
def test_invalid_numbers_are_refused(make: Any, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_pyramid_budgets_by_hand():
    """Budget 20, window 4, beta 4: 16 beyond the window on average, from 28 down to 4."""
    assert Pyramid(SnapKV(window=4), beta=4.0).layer_budgets(20, 4) == (32, 24, 16, 8)
    assert Pyramid(Knorm(), beta=2.0).layer_budgets(8, 3) == (12, 8, 4)
    assert Pyramid(Knorm()).layer_budgets(8, 1) == (8,)


def test_pyramid_layers_below_the_protected_keys_are_refused():
    @dataclass(frozen=True)
    class Greedy(EvictionPolicy):
        """Protects more than Pyramid takes into account."""

        def protected(self, budget: int) -> int:
            return 6 if budget < 10 else 2

    with pytest.raises(ValueError, match=r"at least 6 keys .* got 5 in layer 2 \(budget 11\)"):
        check_budget(Pyramid(Greedy(), beta=3.0), 11, 3)


@dataclass(frozen=True)
class Budgets(EvictionPolicy):
    sizes: Any

    def layer_budgets(self, budget: int, num_layers: int) -> Any:
        return self.sizes


class ListedBudgets(Budgets):
    def layer_budgets(self, budget: int, num_layers: int) -> Any:
        return list(self.sizes)


@pytest.mark.parametrize("sizes", [(8,), (8, 8, 8), (8, 7.5), (8, True), "88", 8])
def test_invalid_layer_budgets_are_refused(sizes: Any):
    """With too few budgets, the other layers would not be sampled."""
    check_budget(Budgets((8, 6)), 8, num_layers=2)
    assert plan(
        ListedBudgets((8, 6)), RolloutConfig(max_new_tokens=4, budget=8, buffer=4), num_layers=2, prompt_width=4
    ) == ((8, 6), 4)
    message = "expected layer_budgets of Budgets as a tuple of 2 whole numbers, one for each layer; got "
    with pytest.raises(ValueError, match=re.escape(f"{message}{sizes!r}")):
        check_budget(Budgets(sizes), 8, num_layers=2)


@pytest.mark.parametrize("wrap", [Pyramid, Protect])
def test_wrappers_use_the_inner_policy(wrap: Any):
    for inner in (H2O(), SnapKV(window=5), TOVA(), Knorm()):
        assert wrap(inner).statistics == inner.statistics
    assert wrap(H2O(recent=0.25)).protected(40) == 10
    assert Protect(Pyramid(Knorm(), beta=2.0)).layer_budgets(8, 3) == (12, 8, 4)
    view = make_view(RKV(window=4))
    inner, outer = (np.asarray(p.score(view))[np.asarray(view.valid)] for p in (RKV(window=4), wrap(RKV(window=4))))
    np.testing.assert_array_equal(inner, outer)


def test_defaults_are_those_of_the_papers():
    assert (StreamingLLM().sinks, SnapKV().window, SnapKV().kernel, H2O().recent) == (4, 32, 5, 0.5)
    assert (RKV().window, RKV().kernel, RKV().weight, RKV().threshold) == (8, 7, 0.1, 0.5)
    assert Pyramid(SnapKV()).beta == 20.0


def test_equal_policies_are_equal_and_hashable():
    """They are static arguments: equal ones share a compiled program."""
    for policy in POLICIES.values():
        assert replace(policy) == policy and hash(replace(policy)) == hash(policy)
    assert len(set(POLICIES.values())) == len(POLICIES)
    assert SnapKV(window=4) != SnapKV(window=5) and Protect(Knorm(), sinks=1) != Protect(KeyDiff(), sinks=1)


def test_random_differs_by_row_and_head_and_repeats_for_equal_keys():
    view, score = make_view(Random()), jax.jit(Random().score)
    first = np.asarray(score(view))
    np.testing.assert_array_equal(first, Random().score(view))
    inside = first[np.asarray(view.valid)]
    assert len(np.unique(inside)) == inside.size and (first >= 0).all() and (first < 1).all()
    swapped = score(view.replace(rng=view.rng[::-1], positions=view.positions[::-1]))
    np.testing.assert_array_equal(swapped, first[::-1])


@pytest.mark.slow
def test_random_evictions_differ_by_row_layer_head_and_seed():
    config = replace(SHAPES["GQA"], num_layers=2)
    prompts = left_padded([WIDTH] * 2, WIDTH, config.vocab_size)
    sizes = RolloutConfig(max_new_tokens=RESPONSE, budget=8, buffer=8)
    runs = [
        rollout(Decoder(config), make_params(config), prompts, jax.random.key(seed), policy=Random(), config=sizes)
        for seed in (0, 0, 1)
    ]
    times = [eviction_times(run) for run in runs]
    np.testing.assert_array_equal(times[0], times[1])
    assert (times[0] != times[2]).any()
    choices = [times[0][b, layer, h, :WIDTH] for b in range(2) for layer in range(2) for h in range(2)]
    assert len({choice.tobytes() for choice in choices}) == len(choices)


def test_prompt_evictions_do_not_depend_on_the_batch():
    """Prefill uses the PRNG key of the prompt's first row."""
    wide = left_padded([5, 9, 9, 2], 9, ONE_LAYER.vocab_size)
    alone = PromptBatch(wide.tokens[:1, 4:], wide.valid[:1, 4:])

    def read(prompts: PromptBatch, keys: Any) -> np.ndarray:
        sampler = Sampler(Decoder(ONE_LAYER), Random(), RolloutConfig(max_new_tokens=4, budget=3, buffer=2), 9)
        prefilled = jax.jit(lambda params: prefill(sampler, params, prompts, keys))
        return np.asarray(prefilled(make_params(ONE_LAYER)).records[0].evicted_at)

    keys = row_keys(jax.random.key(0), 8)
    together = read(wide, prompt_keys(keys, 2))
    assert (together[0] == 9).sum() == 2 * 2, "of five keys in two heads three stay"
    np.testing.assert_array_equal(read(alone, prompt_keys(keys[:1], 1))[0, :, 4:], together[0, :, 4:])


def prompt_evictions(key: Any, prompts: PromptBatch, **options: Any) -> np.ndarray:
    """Which prompt keys are evicted before the first response query."""
    sizes = RolloutConfig(max_new_tokens=2, budget=4, buffer=2)
    run = rollout(Decoder(ONE_LAYER), make_params(ONE_LAYER), prompts, key, policy=Random(), config=sizes, **options)
    return eviction_times(run)[..., :WIDTH] == WIDTH


@pytest.mark.slow
def test_prompt_evictions_differ_by_seed_and_rollout():
    """Also between equal prompts, except within a group, which shares one prefill."""
    prompts = PromptBatch(jnp.ones((4, WIDTH), jnp.int32), jnp.ones((4, WIDTH), bool))
    seeds = [prompt_evictions(jax.random.key(seed), prompts) for seed in range(3)]
    rollouts = [prompt_evictions(jax.random.fold_in(jax.random.key(0), index), prompts) for index in range(3)]
    drawn = [row.tobytes() for batch in seeds + rollouts for row in batch]
    assert len(set(drawn)) == len(drawn)
    grouped = prompt_evictions(jax.random.key(0), prompts, group_size=2)
    np.testing.assert_array_equal(grouped[::2], grouped[1::2])
    assert len({row.tobytes() for row in grouped}) == 4


@pytest.mark.slow
def test_copies_of_a_prompt_evict_the_same_keys():
    """A group's prompt may be read several times to divide over a mesh, or by the engine."""
    prompts = left_padded([WIDTH, WIDTH - 2], WIDTH, ONE_LAYER.vocab_size)
    key = jax.random.key(4)
    whole = prompt_evictions(key, prompts, group_size=4)
    for copies in (2, 4):
        repeated = repeat_prompts(prompts, copies)
        split = prompt_evictions(key, repeated, group_size=4 // copies, prompt_copies=copies)
        np.testing.assert_array_equal(split, whole)
    engine = Engine(
        Decoder(ONE_LAYER), Random(), RolloutConfig(max_new_tokens=2, budget=4, buffer=2), decode_rows=3, prefill_rows=1
    )
    run = engine.run(make_params(ONE_LAYER), prompts, key, group_size=4).trajectory
    np.testing.assert_array_equal(eviction_times(run)[..., :WIDTH] == WIDTH, whole)
    with pytest.raises(ValueError, match="expected prompt_copies that divide 2 prompts; got 3"):
        prompt_evictions(key, prompts, prompt_copies=3)


def test_missing_statistics_are_named():
    bare = make_view(Knorm())
    with pytest.raises(ValueError, match=r"that the policy declares in `statistics`: none; got ReceivedAttention\(\)"):
        H2O().score(bare)
    other = make_view(SnapKV(window=4))
    with pytest.raises(ValueError, match=r"`statistics`: NewestQueries\(window=4\); got NewestQueries\(window=5\)"):
        SnapKV(window=5).score(other)
    with pytest.raises(TypeError, match="Dense has no score"):
        Dense().score(bare)


class Undecorated(EvictionPolicy):
    """Equal to every other object of its class, because `sign` is no field."""

    def __init__(self, sign: int):
        self.sign = sign


@dataclass(frozen=True)
class HoldsAnArray(EvictionPolicy):
    weights: Any


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (H2O, r"expected an eviction policy, an instance.*H2O'>: H2O\(\)\?"),
        ("h2o", "expected an eviction policy, an instance of an EvictionPolicy; got 'h2o'"),
        (Undecorated(1), "expected Undecorated to be a frozen dataclass.*got attributes that are no fields: sign"),
        (HoldsAnArray(np.ones(2)), "expected a hashable eviction policy.*got HoldsAnArray.*unhashable type"),
    ],
)
def test_invalid_policies_are_refused(policy: Any, message: str):
    with pytest.raises(TypeError, match=message):
        check_policy(policy)


def test_policies_with_attributes_that_are_no_fields_are_refused():
    """Two of them are equal, so the second would run the program of the first."""
    assert Undecorated(1) == Undecorated(-1)
    with pytest.raises(TypeError, match="attributes that are no fields: sign"):
        run_one_layer(Undecorated(1))
    with pytest.raises(TypeError, match="attributes that are no fields: sign"):
        Engine(Decoder(ONE_LAYER), Undecorated(1), RolloutConfig(max_new_tokens=4, budget=4, buffer=2), decode_rows=2)


@dataclass(frozen=True)
class ForgetsHeads(EvictionPolicy):
    def score(self, view: CacheView) -> Any:
        return view.positions[:, 0].astype(jnp.float32)


@dataclass(frozen=True)
class Newest(EvictionPolicy):
    def score(self, view: CacheView) -> Any:
        return view.positions


@dataclass(frozen=True)
class Even(EvictionPolicy):
    def score(self, view: CacheView) -> Any:
        return view.positions % 2 == 0


def test_scores_may_be_integers_or_booleans():
    newest, recent = (eviction_times(run_one_layer(policy).trajectory) for policy in (Newest(), Recent()))
    np.testing.assert_array_equal(newest, recent)
    assert (eviction_times(run_one_layer(Even()).trajectory) != newest).any()


@pytest.mark.parametrize("policy", [ForgetsHeads(), Protect(ForgetsHeads(), sinks=1), Pyramid(ForgetsHeads())])
def test_scores_of_another_shape_are_refused(policy: EvictionPolicy):
    with pytest.raises(ValueError, match=r"expected ForgetsHeads.score to give \[rows, kv_heads, slots\] = .*; got \["):
        run_one_layer(policy)
