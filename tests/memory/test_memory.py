"""Memory of a loop's compiled programs, and sizes that fit a device."""

from dataclasses import replace
from decimal import localcontext
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from smd_jax.byte_sizes import parse_bytes, show_bytes
from smd_jax.devices.sharding import make_mesh, shard_tree
from smd_jax.eviction.policies import SnapKV
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.state import TrainState, init_state
from smd_jax.memory import compiled, fit
from smd_jax.memory.compiled import LoopMemory, RolloutMemory, loop_memory, param_shapes, tree_bytes
from smd_jax.memory.fit import fit_evaluator, fit_loop
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.engine import Engine
from smd_jax.testing import random_params, tiny_model_config
from smd_jax.train.async_rollout import with_sampler_params
from smd_jax.train.evaluation import Decode, EvaluationConfig, Evaluator
from smd_jax.train.grpo import GRPOLoop
from smd_jax.train.online_dpo import OnlineDPOConfig, OnlineDPOLoop
from tests.toy_loop import CONFIG, MODEL, ROLLOUT, SIZES, TASK, TOKENIZER, new_loop, new_state, optimizer, own_loop

LARGER_CONFIG = replace(CONFIG, prompts_per_step=8)  # 32 rows


def pair_loop(minibatches: int = 1) -> OnlineDPOLoop:
    return OnlineDPOLoop(MODEL, TASK, TOKENIZER, optimizer(), OnlineDPOConfig(**SIZES, minibatches=minibatches))


@pytest.fixture(scope="module")
def shapes() -> TrainState:
    return jax.eval_shape(lambda: init_state(random_params(MODEL.config), optimizer(), jax.random.key(0)))


# --- compiled programs


@pytest.mark.slow
@pytest.mark.parametrize("decode_rows", [None, 4])
def test_a_loop_needs_more_than_its_state(decode_rows: int | None):
    loop, state = own_loop(replace(CONFIG, decode_rows=decode_rows)), new_state()
    memory = loop_memory(loop, state)
    # The parameters and two moments of each, besides a few scalars.
    assert 2.9 < memory.held / tree_bytes(state.params) < 3.1
    assert memory.held < memory.rollout < 100 * memory.held and memory.held < memory.update < 100 * memory.held
    assert memory == loop_memory(loop, jax.eval_shape(lambda: state)), "shapes are enough"
    if decode_rows is not None:  # an engine decodes with a copy of the parameters
        assert memory.rollout > memory.held + tree_bytes(state.params)


@pytest.mark.slow
def test_sharded_loops_need_less_per_device():
    alone, shared = (loop_memory(own_loop(sizes=sizes), new_state()) for sizes in ((1, 1, 1), (1, 2, 1, 2)))
    assert shared.held < 0.7 * alone.held
    state = shard_tree(new_state(), make_mesh(1, 2))
    local_bytes = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.params))
    assert tree_bytes(state.params, make_mesh(1, 2)) == local_bytes


def test_rollouts_ahead_and_the_update_add_up():
    ahead = new_loop(replace(CONFIG, rollouts_ahead=1))
    assert LoopMemory.of(ahead, 10, 13, 17) == LoopMemory(10, 20, 20)
    memory = LoopMemory.of(new_loop(), 10, 13, 2**20)
    assert memory == LoopMemory(10, 13, 2**20)
    assert memory.rows()[1] == ("everything else", "3 B", "1023.99 KiB")
    assert memory.rows()[-1] == ("sum", "13 B", "1.00 MiB")


def test_minibatches_keep_the_whole_batch(shapes: TrainState, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "program_bytes", lambda lowered: 0)
    loop = new_loop(replace(CONFIG, minibatches=2))
    trajectory = new_loop().collect(new_state(), 0).trajectory
    batch = loop.learner_batch(new_state().params, trajectory, jnp.zeros(8), jnp.ones(8, bool))
    assert compiled.update_memory(new_loop(), shapes) == 0, "the arguments of the program"
    assert compiled.update_memory(loop, shapes) == tree_bytes(batch) > 0
    assert compiled.update_memory(replace(loop, mesh=make_mesh(2)), shapes) == tree_bytes(batch) // 2


def test_pairs_are_copies_beside_the_rollout(shapes: TrainState, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "program_bytes", lambda lowered: 0)
    trajectory, advantage = new_loop().collect(new_state(), 0).trajectory, 4  # bytes of a row's
    rollout, state = tree_bytes(trajectory) + 8 * advantage, shapes.replace(reference=shapes.params)
    assert compiled.update_memory(pair_loop(), state) == rollout, "the pairs are the program's arguments"
    assert compiled.update_memory(pair_loop(minibatches=2), state) == rollout + rollout // 2, "two rows of each four"


def test_dynamic_sampling_keeps_earlier_rollouts(shapes: TrainState, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "program_bytes", lambda lowered: 0)
    one, four = (
        compiled.rollout_memory(new_loop(replace(CONFIG, dynamic_sampling=extra)), shapes).most for extra in (None, 3)
    )
    assert four - one == 3 * tree_bytes(new_loop().collect(new_state(), 0).trajectory)


def test_packed_rows_are_not_measured(shapes: TrainState):
    packed = new_loop(replace(CONFIG, update=UpdateConfig(microbatch_size=1, pack_columns=28)))
    for refuse in (lambda: fit_loop(packed, shapes, 2**40), lambda: loop_memory(packed, shapes)):
        with pytest.raises(ValueError, match="expected pack_columns None, because packed .*; got 28: set the sizes"):
            refuse()


def loop_with_long_prompts(decode_rows: int | None) -> tuple[GRPOLoop, TrainState]:
    """A loop whose prompts have 256 columns and whose cache has 7 slots, and the shapes of its state."""
    model = Decoder(tiny_model_config(max_positions=512, num_layers=1))
    config = replace(LARGER_CONFIG, prompt_width=256, decode_rows=decode_rows, policy=SnapKV(window=2))
    loop = GRPOLoop(model, TASK, TOKENIZER, optimizer(), config, make_mesh())
    return loop, jax.eval_shape(lambda: init_state(random_params(model.config), optimizer(), jax.random.key(0)))


def test_prefill_includes_the_cache_of_the_decode_rows():
    """Compiled: here a prefill is larger than a segment. It counts together with the waiting cache."""
    loop, state = loop_with_long_prompts(decode_rows=4)
    memory = compiled.rollout_memory(loop, state)
    program: Any = loop.rollouts.engine.prefill_program(state.params, 256).compile().memory_analysis()
    cache = compiled.segment_memory(loop.rollouts.engine, state.params, 256).state
    assert memory.reading > 2 * memory.decoding
    assert memory.reading >= tree_bytes(state) + program.temp_size_in_bytes + cache
    # At most the prompts of a step are read.
    more = replace(loop, config=replace(loop.config, prefill_rows=64))
    assert compiled.rollout_memory(more, state) == memory


@pytest.mark.parametrize("decode_rows", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_prefill_rows_are_lowered_to_fit(decode_rows: int | None, monkeypatch: pytest.MonkeyPatch):
    """The limit is between the memory of decoding and that of reading."""
    loop, state = loop_with_long_prompts(decode_rows)
    monkeypatch.setattr(fit, "update_memory", lambda loop, state: tree_bytes(state))
    measured = compiled.rollout_memory(loop_with_long_prompts(4)[0], state)
    limit = (measured.decoding + measured.reading) // 2
    fitted, memory = fit_loop(loop, state, limit)
    assert memory.rollout == compiled.rollout_memory(fitted, state).most <= limit
    assert fitted.config.prefill_rows < 8 and (decode_rows is None or fitted.config.decode_rows == 4)
    with pytest.raises(ValueError, match="for reading prompts with prefill_rows 1. Lower prefill_chunk, prompt_width"):
        fit_loop(loop, state, tree_bytes(state) + 2**16)


def test_waiting_caches_are_divided_over_the_devices():
    """Four devices with four times the rows need as much per device as one."""
    model, sizes = Decoder(tiny_model_config(num_layers=1)), replace(ROLLOUT, budget=64)
    params = jax.eval_shape(lambda: random_params(model.config))
    alone = Engine(model, SnapKV(window=2), sizes, decode_rows=2, prefill_rows=4)
    shared = replace(alone, decode_rows=8, prefill_rows=16, mesh=make_mesh(4))
    assert compiled.segment_memory(shared, params, 80) == compiled.segment_memory(alone, params, 80)


def test_param_shapes_equal_those_of_initialized_parameters():
    fresh = jax.tree.map(lambda x: (x.shape, x.dtype), random_params(MODEL.config))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), param_shapes(MODEL)) == fresh


# --- sizes that fit


def use_linear_memory(monkeypatch: pytest.MonkeyPatch, held: int) -> list[tuple[str, int]]:
    """Replaces compiled memory by `held` and 100 bytes a row; returns the list of tried sizes."""
    tried = []

    def update(loop: Any, state: Any) -> int:
        rows = loop.config.update.microbatch_size or loop.config.completions_per_step
        tried.append(("update", rows))
        return held + 100 * rows

    def rollout(loop: Any, state: Any) -> RolloutMemory:
        rows = loop.config.decode_rows or loop.config.completions_per_step
        tried.append(("rollout", rows))
        return RolloutMemory(held + 100 * rows)

    def evaluation(evaluator: Any, params: Any, decode: Decode) -> int:
        rows = evaluator.prompts_at_once * evaluator.config.group_size
        tried.append((decode.name, rows))
        return tree_bytes(params) + (200 if decode.name == "dense" else 100) * rows

    monkeypatch.setattr(fit, "update_memory", update)
    monkeypatch.setattr(fit, "rollout_memory", rollout)
    monkeypatch.setattr(fit, "evaluation_memory", evaluation)
    return tried


def test_sizes_are_halved_until_they_fit(shapes: TrainState, monkeypatch: pytest.MonkeyPatch):
    held = tree_bytes(shapes)
    tried = use_linear_memory(monkeypatch, held)
    loop = new_loop(LARGER_CONFIG)
    assert fit_loop(loop, shapes, held + 3200) == (loop, LoopMemory(held, held + 3200, held + 3200))
    assert tried == [("update", 32), ("rollout", 32)]
    fitted, memory = fit_loop(loop, shapes, held + 1700)
    assert (fitted.config.update.microbatch_size, fitted.config.decode_rows) == (16, 16)
    assert memory == LoopMemory(held, held + 1600, held + 1600)
    fitted, _ = fit_loop(loop, shapes, held + 700)
    assert (fitted.config.update.microbatch_size, fitted.config.decode_rows) == (4, 4)
    both = new_loop(replace(LARGER_CONFIG, decode_rows=8, update=UpdateConfig(microbatch_size=8)))
    assert fit_loop(both, shapes, held + 800)[0] is both, "sizes that are set stay"
    with pytest.raises(ValueError, match=r"got .*, 100 B too much, for an update\. Lower microbatch_size"):
        fit_loop(both, shapes, held + 700)
    rows_set = new_loop(replace(LARGER_CONFIG, decode_rows=8))
    with pytest.raises(ValueError, match=r"100 B too much, for a rollout\. Lower decode_rows"):
        fit_loop(rows_set, shapes, held + 700)
    with pytest.raises(ValueError, match=r"expected at most 1000 B on each device; got .* for weights, optimizer and"):
        fit_loop(loop, shapes, 1000)
    with pytest.raises(ValueError, match=r"expected the memory of one device, .* at most 64.00 TiB; got 900.00 TiB"):
        fit_loop(loop, shapes, 900 * 2**40)


def test_a_rollout_ahead_fits_beside_the_update(shapes: TrainState, monkeypatch: pytest.MonkeyPatch):
    state = jax.eval_shape(with_sampler_params, shapes)
    held = tree_bytes(state)
    use_linear_memory(monkeypatch, held)
    fitted, memory = fit_loop(new_loop(replace(LARGER_CONFIG, rollouts_ahead=1)), state, held + 3300)
    assert (fitted.config.update.microbatch_size, fitted.config.decode_rows) == (None, 1)
    assert memory.rollout == memory.update == held + 3300


def test_rows_divide_over_the_devices(shapes: TrainState, monkeypatch: pytest.MonkeyPatch):
    mesh = make_mesh(2, 2)
    held = tree_bytes(shapes, mesh)
    use_linear_memory(monkeypatch, held)
    loop = replace(new_loop(replace(LARGER_CONFIG, prefill_rows=6)), mesh=mesh)
    fitted, _ = fit_loop(loop, shapes, held + 1500)
    assert (fitted.config.update.microbatch_size, fitted.config.decode_rows) == (8, 8)
    assert fitted.config.prefill_rows == 8


def test_microbatches_have_whole_groups():
    """Rows that share a prompt stay together, and those of a pair."""
    groups = new_loop(replace(LARGER_CONFIG, update=UpdateConfig(rows_per_prompt=4)))
    assert fit._microbatches(groups, 32) == [32, 16, 8, 4]
    on_two = replace(new_loop(replace(groups.config, prompts_per_step=6)), mesh=make_mesh(2))
    assert fit._microbatches(on_two, 24) == [24, 8], "every device has whole groups"
    assert fit._microbatches(pair_loop(), 12) == [12, 6, 4, 2]


def test_evaluation_rows_are_halved_until_they_fit(shapes: TrainState, monkeypatch: pytest.MonkeyPatch):
    """All decodes have the same rows; the optimizer state takes memory, too."""
    config = EvaluationConfig(
        decodes=(Decode("short", CONFIG.policy), Decode("dense")),
        rollout=ROLLOUT,
        prompt_width=9,
        group_size=2,
        rows=64,
    )
    evaluator = Evaluator(MODEL, TASK, TOKENIZER, config)
    held = tree_bytes(shapes)
    tried = use_linear_memory(monkeypatch, held)
    assert fit_evaluator(evaluator, shapes, held + 12800) is evaluator
    assert tried == [("short", 64), ("dense", 64)]
    assert fit_evaluator(evaluator, shapes, held + 12799).config.rows == 32
    assert fit_evaluator(evaluator, shapes, held + 400).config.rows == 2
    with pytest.raises(ValueError, match="1 B too much, for an evaluation of 'dense'"):
        fit_evaluator(evaluator, shapes, held + 399)


@pytest.mark.slow
def test_a_fitted_loop_needs_less(shapes: TrainState):
    loop = new_loop(LARGER_CONFIG)
    needed = loop_memory(loop, shapes)
    limit = max(needed.rollout, needed.update) - 1
    fitted, memory = fit_loop(loop, shapes, limit)
    assert fitted.config != loop.config and max(memory.rollout, memory.update) <= limit
    config = EvaluationConfig(decodes=(Decode("dense"),), rollout=ROLLOUT, prompt_width=9, rows=16)
    evaluator = Evaluator(MODEL, TASK, TOKENIZER, config)
    most = fit.evaluation_memory(evaluator, shapes.params, Decode("dense")) + memory.held - tree_bytes(shapes.params)
    assert fit_evaluator(evaluator, shapes, most) is evaluator
    assert fit_evaluator(evaluator, shapes, most - 1).config.rows == 8


# --- units


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GiB", 80 * 2**30),
        ("1.5 KiB", 1536),
        ("3kB", 3000),
        ("0.5TB", 5 * 10**11),
        ("1234567890123456789", 1234567890123456789),
        ("12B", 12),
    ],
)
def test_bytes_are_read(text: str, count: int):
    with localcontext(prec=12):  # reasoning-gym leaves such a context
        assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "80 gib", "80G", "-1GiB", "1e9", "0GiB", "0.1B", "1,5GiB", "80GiB!"])
def test_bad_bytes_are_refused(text: str):
    with pytest.raises(ValueError, match=r"expected a positive number of bytes .*KiB.*TB.*; got "):
        parse_bytes(text)


def test_bytes_are_shown():
    shown = [show_bytes(x) for x in (0, 1023, 1024, 3 * 2**29, 5 * 2**40)]
    assert shown == ["0 B", "1023 B", "1.00 KiB", "1.50 GiB", "5.00 TiB"]
