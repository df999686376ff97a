"""Memory plans against the compiled programs: what has a name is exact, what is worked with is near.

Estimated over compiled temporary memory, as measured (jax 0.10.2, CPU, float32): updates 0.94 to 1.25, up to 1.4 where
gradients are as large as the activations; rollouts 1.0 to 1.2, up to 1.4 for prompts shorter than the cache.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import localcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

from smd_jax.cache import row_parts
from smd_jax.config import ModelConfig
from smd_jax.devices.sharding import AXES, make_mesh, shard_tree
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import H2O, RKV, Dense, StreamingLLM
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.state import TrainBatch, init_state
from smd_jax.learner.storage import stored
from smd_jax.learner.update import make_update
from smd_jax.losses.distillation import DistillConfig
from smd_jax.memory import plan as memory
from smd_jax.memory.plan import (
    MemoryPlan,
    Workload,
    device_memory,
    parse_bytes,
    plan_memory,
    show_bytes,
)
from smd_jax.memory.sampler import SamplerPass, cast_bytes, tree_bytes
from smd_jax.message.masks import Segments, ShadowMask
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.sampling import SamplingConfig
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.model.families import FAMILIES
from smd_jax.sampler import engine
from smd_jax.sampler.config import RolloutConfig, cache_bytes
from smd_jax.sampler.fixed_batch import rollout_program
from smd_jax.sampler.seats import empty
from smd_jax.sampler.static import Sampler
from smd_jax.testing import random_params, tiny_model_config
from smd_jax.text.prompts import PromptBatch

SHAPE = tiny_model_config(
    vocab_size=256, hidden_size=128, intermediate_size=384, num_layers=2, num_heads=4, head_dim=32, max_positions=8192
)
# Norms of what is added, GeGLU, and a layer whose attention goes by the segments of its window.
GEMMA3 = replace(
    SHAPE,
    **FAMILIES["gemma3_text"].always,
    qkv_bias=False,
    local_rope_theta=1e4,
    sliding_windows=(48, None),
)
MODEL, OPTIMIZER = Decoder(SHAPE), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
SIZES = RolloutConfig(max_new_tokens=448, budget=64, buffer=32)
# XLA's scheduler for CPUs recomputes early, so that remat saves nothing; this one is nearer to those of accelerators.
SPARING: Any = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def param_shapes(model: Decoder) -> Any:
    return shapes_of(model.config)


@cache
def shapes_of(config: ModelConfig) -> Any:
    """The library's, which traces the model anew at every call."""
    return memory.param_shapes(Decoder(config))


def array(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


class Compiled(NamedTuple):
    """Bytes of a compiled program."""

    arguments: int
    outputs: int
    temporary: int


def sizes_of(compiled: Any) -> Compiled:
    found: Any = compiled.memory_analysis()
    return Compiled(found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes)


# --- the update


def train_batch(work: Workload) -> TrainBatch:
    rows, width, response = work.rows, work.prompt_width, work.config.max_new_tokens
    shape, columns = work.model.config, width + response
    segments = Segments(width, work.config.buffer, work.config.budget)
    evicted_at = array(rows, shape.num_layers, shape.num_kv_heads, columns, dtype=jnp.int32)
    trajectory = Trajectory(
        tokens=array(rows, columns, dtype=jnp.int32),
        valid=array(rows, columns, dtype=bool),
        logprobs=array(rows, response),
        terminated=array(rows, dtype=bool),
        mask=ShadowMask(evicted_at, (segments,) * shape.num_layers if work.policy.evicts else ()),
    )
    return TrainBatch(trajectory, array(rows), array(rows, response))


def compiled_update(work: Workload, options: Any = None, params: Any = None) -> Compiled:
    optimizer, reference = work.optimizer or OPTIMIZER, work.reference
    config = UpdateConfig(distill=work.distill, microbatch_size=work.microbatch_size)
    key = jax.random.key(0)
    state = jax.eval_shape(
        lambda params: init_state(params, optimizer, key, params if reference else None),
        param_shapes(work.model) if params is None else params,
    )
    return sizes_of(make_update(work.model, optimizer, config).lower(state, train_batch(work)).compile(options))


WORK = Workload(MODEL, Dense(), SIZES, prompt_width=64, rows=4, optimizer=OPTIMIZER)
EVICTING = replace(WORK, policy=StreamingLLM(), config=replace(SIZES, max_new_tokens=1984), rows=2)
WIDE = replace(WORK, model=Decoder(replace(SHAPE, vocab_size=4096, num_layers=1)))
ANCHOR = DistillConfig(direction="anchor", fraction=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "options"),
    [
        (WORK, None),
        (EVICTING, None),
        (replace(EVICTING, model=Decoder(SHAPE, remat=True), microbatch_size=1, platform="tpu"), SPARING),
        (replace(EVICTING, model=Decoder(SHAPE, remat="dots"), microbatch_size=1, platform="tpu"), SPARING),
        (replace(WIDE, distill=ANCHOR, reference=True), None),
        (replace(WORK, model=Decoder(GEMMA3)), None),
    ],
    ids=[
        *("dense", "segments", "microbatches with remat", "microbatches with remat of dots", "distillation"),
        "gemma with a window",
    ],
)
def test_an_update_needs_what_was_planned(work: Workload, options: Any):
    planned, compiled = plan_memory(work, param_shapes(work.model)), compiled_update(work, options)
    named = planned.weights + planned.optimizer + planned.reference + planned.trajectory
    assert abs(named - compiled.arguments) < 128, "all but a few scalars"
    worked = planned.gradients + planned.activations + planned.logits + planned.sampler_weights
    assert 0.9 < worked / compiled.temporary < 1.25, (planned, compiled)
    assert planned.update == named + worked


@pytest.mark.slow
def test_an_update_of_narrow_parameters_needs_what_was_planned():
    """In bfloat16 without masters: half as many bytes for them, as many for the optimizer, and gradients in float32."""
    work = replace(WORK, microbatch_size=2)
    narrow = jax.eval_shape(partial(stored, dtype="bfloat16"), param_shapes(MODEL))
    planned, compiled = plan_memory(work, narrow), compiled_update(work, params=narrow)
    named = planned.weights + planned.optimizer + planned.trajectory
    assert abs(named - compiled.arguments) < 128, "all but a few scalars"
    worked = planned.gradients + planned.activations + planned.logits + planned.sampler_weights
    assert 0.9 < worked / compiled.temporary < 1.25, (planned, compiled)
    wide = plan_memory(work, param_shapes(MODEL))
    assert planned.optimizer == wide.optimizer and planned.weights < 0.51 * wide.weights


def test_a_sharded_update_needs_what_was_planned():
    """Every axis of the mesh; bytes of one device."""
    mesh = AbstractMesh((2, 2, 1, 2), AXES, axis_types=(AxisType.Auto,) * 4)
    planned = plan_memory(replace(WORK, mesh=mesh), param_shapes(MODEL))
    params = random_params(SHAPE)
    placed = shard_tree(params, make_mesh(2, 2, 2))
    here = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(placed))
    assert planned.weights == here < tree_bytes(params) / 2
    assert planned.optimizer == pytest.approx(2 * here, abs=8)
    whole = plan_memory(WORK, param_shapes(MODEL))
    assert planned.trajectory == whole.trajectory / 4
    assert planned.cache == whole.cache / 8, "rows over two axes, heads over the third"
    assert planned.logits == whole.logits / 8
    assert planned.sampler_weights > 0 == whole.sampler_weights, "gathered from the fsdp axis"


def test_an_accelerator_keeps_gathered_weights_while_it_samples():
    """All matrices in float32, of which an update has two parts at a time."""
    mesh = AbstractMesh((1, 4, 1, 1), AXES, axis_types=(AxisType.Auto,) * 4)
    alone, shared = (
        plan_memory(replace(WORK, mesh=mesh, rows=rows, platform="gpu"), param_shapes(MODEL))
        for mesh, rows in ((None, WORK.rows // 4), (mesh, WORK.rows))
    )
    matrices = sum(x.nbytes for x in jax.tree.leaves(random_params(SHAPE)) if x.ndim == 2)
    assert shared.sampler_weights + shared.rollout_work - alone.rollout_work == matrices > shared.sampler_weights


def test_remat_is_no_help_to_a_cpu():
    """As compiled; an accelerator keeps one layer."""
    plans = {
        (remat, platform): plan_memory(
            replace(WORK, model=Decoder(replace(SHAPE, num_layers=12), remat=remat), platform=platform),
            param_shapes(MODEL),
        ).activations
        for remat in (False, True)
        for platform in ("cpu", "gpu")
    }
    assert plans[True, "cpu"] == plans[False, "cpu"] > 3 * plans[True, "gpu"]


def test_scores_of_all_keys_count():
    """Booleans, and attention that makes all scores: quadratic in the columns."""
    short, long = (replace(WORK, config=replace(SIZES, max_new_tokens=columns - 64)) for columns in (512, 4096))

    def grows(**changed: Any) -> float:
        before, after = (plan_memory(replace(x, **changed), param_shapes(MODEL)).activations for x in (short, long))
        return after / before

    assert 7.9 < grows() < 8.1
    assert grows(model=Decoder(SHAPE, impl="xla")) > 16


# --- the rollout


def prompts(rows: int, width: int) -> PromptBatch:
    return PromptBatch(array(rows, width, dtype=jnp.int32), array(rows, width, dtype=bool))


def keys(rows: int) -> Any:
    return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "width", "config"),
    [
        (H2O(), 256, replace(SIZES, budget=128)),
        (StreamingLLM(), 512, replace(SIZES, budget=128)),
        (StreamingLLM(), 16, RolloutConfig(2048, 512, 128)),
        (StreamingLLM(), 16, RolloutConfig(4096, 16, 16)),
    ],
    ids=["attention observed", "long prompts", "long responses", "mostly records"],
)
def test_a_rollout_needs_what_was_planned(policy: EvictionPolicy, width: int, config: RolloutConfig):
    work = Workload(MODEL, policy, config, width, rows=16)
    planned = plan_memory(work, param_shapes(MODEL))
    lowered = rollout_program.lower(
        MODEL, param_shapes(MODEL), prompts(16, width), keys(16), policy=policy, config=config
    )
    compiled = sizes_of(lowered.compile())
    assert abs(planned.trajectory - compiled.outputs) < 128
    worked = planned.cache + planned.rollout_work + planned.sampler_weights
    assert 0.9 < worked / compiled.temporary < 1.25, (planned, compiled)
    assert planned.rollout == planned.weights + planned.trajectory + worked
    assert planned.update == planned.weights + planned.trajectory, "nothing is learnt"


@cache
def seats(policy: EvictionPolicy, config: RolloutConfig, width: int, rows: int) -> tuple[Any, Any, Any]:
    """A sampler, its prefilled prompts, and its state."""
    sampler = Sampler(MODEL, policy, config, width)
    prefilled = jax.eval_shape(
        lambda params: engine._prefill(sampler, params, prompts(8, width), keys(8)), param_shapes(MODEL)
    )
    return sampler, prefilled, jax.eval_shape(lambda x: empty(x, rows), prefilled)


@pytest.mark.parametrize("policy", [Dense(), H2O(), RKV(window=4), StreamingLLM()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("quant", [None, QuantConfig(bits=4)], ids=["", "quantised"])
def test_a_cache_is_as_large_as_planned(policy: EvictionPolicy, quant: QuantConfig | None):
    config = replace(SIZES, quant=quant)
    _, _, state = seats(policy, config, 64, 16)
    planned = SamplerPass(SHAPE, policy, config, 64, "cpu").cache(16)
    assert planned == tree_bytes(state.cache)
    statistics = [(layer.columns, layer.states) for layer in state.cache]
    assert planned == cache_bytes(SHAPE, policy, config, 64, 16) + tree_bytes(statistics)
    assert planned == plan_memory(Workload(MODEL, policy, config, 64, 32), param_shapes(MODEL), 16).cache


@pytest.mark.parametrize(
    "config",
    [
        SIZES,
        replace(SIZES, sampling=SamplingConfig(top_k=20)),
        replace(SIZES, sampling=SamplingConfig(top_p=0.9)),
        replace(SIZES, quant=QuantConfig(bits=4)),
        RolloutConfig(20, 8, 4, mask_storage="boolean"),
    ],
    ids=["", "top-k", "top-p", "quantised", "boolean"],
)
def test_a_trajectory_is_as_large_as_planned(config: RolloutConfig):
    trajectory = jax.eval_shape(
        lambda params, given, rng: rollout_program(MODEL, params, given, rng, policy=StreamingLLM(), config=config),
        param_shapes(MODEL),
        prompts(6, 32),
        keys(6),
    )
    planned = plan_memory(Workload(MODEL, StreamingLLM(), config, 32, 6), param_shapes(MODEL))
    assert planned.trajectory == tree_bytes(trajectory)


def test_an_engine_needs_what_was_planned():
    """A segment that draws from a large vocabulary, with a policy that compares all keys with all."""
    shape = replace(SHAPE, vocab_size=8192)
    work = Workload(Decoder(shape), RKV(window=4), SIZES, 64, rows=64, prefill_rows=8)
    sampler = Sampler(work.model, work.policy, SIZES, 64)
    prefill = engine._prefill.lower(sampler, param_shapes(work.model), prompts(8, 64), keys(8))
    state = jax.eval_shape(lambda x: empty(x, 32), prefill.out_info)
    segment = sizes_of(engine._segment.lower(sampler, param_shapes(work.model), state, None).compile())
    held = tree_bytes(state.cache) + tree_bytes(prefill.out_info)
    read, planned = sizes_of(prefill.compile()), plan_memory(work, param_shapes(work.model), 32)
    worked = max(segment.temporary, read.temporary)
    assert 0.9 < (planned.cache + planned.rollout_work) / (held + worked) < 1.25
    assert planned.decode_rows == 32
    step = SamplerPass(shape, work.policy, SIZES, 64, "cpu").decode(32)
    assert 0.9 < step / segment.temporary < 1.25, (step, segment)


@pytest.mark.parametrize("rows", [1, 16, 100, 127, 128])
def test_rows_are_worked_on_in_the_parts_that_are_planned(rows: int):
    """A prime number of rows needs no more than the next even one."""
    seen = []

    def work(x: Any) -> Any:
        seen.append(x.shape[0])
        return x

    jax.eval_shape(lambda x: row_parts.apart(work, x), array(rows, 3))
    assert max(seen) == row_parts.rows_at_once(rows, devices=1) == -(-rows // 16)
    planned = SamplerPass(SHAPE, RKV(window=4), replace(SIZES, budget=512), 64, "cpu")
    assert planned.decode(127) <= planned.decode(128) < 2 * planned.decode(113)


@pytest.mark.parametrize("policy", [H2O(), RKV(window=4)], ids=["attention observed", "keys compared"])
def test_whole_prompts_need_their_squares_a_few_rows_at_a_time(policy: EvictionPolicy):
    width, rows = 1024, 16
    sampler = Sampler(MODEL, policy, SIZES, width)
    lowered = engine._prefill.lower(sampler, param_shapes(MODEL), prompts(rows, width), keys(rows))
    squares = rows * SHAPE.num_heads * width * width * 4
    needed = sizes_of(lowered.compile()).temporary
    assert needed < squares / 2
    assert 0.5 < SamplerPass(SHAPE, policy, SIZES, width, "cpu").prefill(rows) / needed < 2


def test_chunks_make_the_memory_independent_of_the_prompt():
    def work(width: int, chunk: int | None) -> int:
        config = replace(SIZES, prefill_chunk=chunk)
        return SamplerPass(SHAPE, StreamingLLM(), config, width, "cpu").prefill(8)

    assert work(1024, 64) == work(8192, 64) < work(1024, None) < work(8192, None)


def test_weights_are_cast_once():
    half = replace(SHAPE, dtype="bfloat16")
    params = param_shapes(MODEL)
    scales = sum(x.size for path, x in jax.tree.leaves_with_path(params) if path[-1].key == "scale")
    count = sum(x.size for x in jax.tree.leaves(params)) - scales
    assert cast_bytes(params, SHAPE, "gpu") == 0
    assert cast_bytes(params, half, "gpu") == 2 * count
    assert cast_bytes(params, half, "cpu") == 6 * count, "in float32 too, in which a CPU multiplies"


def test_shapes_of_parameters():
    fresh = jax.tree.map(lambda x: (x.shape, x.dtype), random_params(SHAPE))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), param_shapes(MODEL)) == fresh


# --- tables, units, devices

PLAN = MemoryPlan(
    weights=4 * 2**30,
    sampler_weights=2 * 2**30,
    weights_behind=0,
    optimizer=8 * 2**30,
    reference=0,
    trajectory=2**20,
    cache=3 * 2**30,
    rollout_work=2**29,
    gradients=4 * 2**30,
    activations=2**30,
    logits=6 * 2**30,
    decode_rows=64,
    microbatch=8,
)


def test_the_larger_phase_counts():
    """14 GiB and a MiB are common; 3.5 GiB more while sampling, 11 GiB while learning."""
    common = 14 * 2**30 + 2**20
    assert (PLAN.rollout, PLAN.update, PLAN.total) == (common + 7 * 2**29, common + 11 * 2**30, common + 11 * 2**30)
    assert PLAN.largest == "optimizer"
    assert replace(PLAN, cache=100 * 2**30).largest == "cache"


def test_a_plan_reads_as_a_table():
    rows = PLAN.rows()
    assert ("cache", "3.00 GiB", "-") in rows and ("logits", "-", "6.00 GiB") in rows
    assert rows[0] == ("weights", "4.00 GiB", "4.00 GiB") and rows[-1] == ("sum", "17.50 GiB", "25.00 GiB")
    title, *lines = str(PLAN).splitlines()
    assert title == PLAN.title == "memory of a device: 64 rows decoded at once, 8 rows in a microbatch"
    assert replace(PLAN, microbatch=0).title == "memory of a device: 64 rows decoded at once"
    assert lines[0].split() == ["rollout", "update"] and len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GiB", 80 * 2**30),
        ("1.5 KiB", 1536),
        ("2MiB", 2**21),
        ("1TiB", 2**40),
        ("3kB", 3000),
        ("7MB", 7 * 10**6),
        ("141GB", 141 * 10**9),
        ("0.5TB", 5 * 10**11),
        ("1234567890123456789", 1234567890123456789),
        ("12B", 12),
    ],
)
def test_bytes_are_read(text: str, count: int):
    with localcontext(prec=12):  # reasoning-gym leaves such a context behind
        assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "80 gib", "80G", "-1GiB", "1e9", "0GiB", "0.1B", "1,5GiB", "80GiB!"])
def test_bad_bytes_are_refused(text: str):
    with pytest.raises(ValueError, match=r"expected a positive number of bytes .*KiB.*TB.*; got "):
        parse_bytes(text)


def test_bytes_are_shown():
    assert [show_bytes(x) for x in (0, 1023, 1024, 3 * 2**29, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 GiB",
        "5.00 TiB",
    ]


class FakeDevice(NamedTuple):
    platform: str
    stats: dict[str, int] | None

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


def test_memory_of_a_device(monkeypatch: pytest.MonkeyPatch):
    lines = Path("/proc/meminfo").read_text().splitlines()
    (total,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))
    assert device_memory() == pytest.approx(total, rel=0.01)
    for device, expected in (
        (FakeDevice("gpu", {"bytes_limit": 123, "bytes_in_use": 4}), 123),
        (FakeDevice("gpu", None), None),
        (FakeDevice("tpu", {"bytes_in_use": 4}), None),
    ):
        monkeypatch.setattr(jax, "local_devices", lambda device=device: [device])
        assert device_memory() == expected
