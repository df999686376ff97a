"""What fits into the memory of a device: the largest sizes whose plan does, and what stays as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest

from smd_jax.devices.sharding import make_mesh
from smd_jax.eviction.policies import H2O, RKV, Dense
from smd_jax.learner.config import UpdateConfig
from smd_jax.losses.distillation import DistillConfig
from smd_jax.memory import fit
from smd_jax.memory.fit import fit_decode_rows, fit_loop, usable_memory
from smd_jax.memory.plan import Workload, check_memory, parse_bytes, plan_memory, show_bytes, workload_of
from tests.memory.test_memory import MODEL, SIZES, WORK, FakeDevice, param_shapes
from tests.toy_loop import CONFIG as LOOP
from tests.toy_loop import MODEL as LOOP_MODEL
from tests.toy_loop import new_loop


@pytest.mark.slow
def test_as_many_rows_as_fit():
    work = Workload(MODEL, RKV(window=4), SIZES, 64, rows=100, prefill_rows=8)
    params = param_shapes(MODEL)
    needed = {slots: plan_memory(work, params, slots).total for slots in (1, 2, 13, 14, 64, 80, 96, 100)}
    assert list(needed.values()) == sorted(set(needed.values()))
    for slots, more in ((1, 2), (13, 14), (64, 80), (80, 96), (96, 100)):
        assert fit_decode_rows(needed[slots], work, params) == slots
        assert fit_decode_rows(needed[more] - 1, work, params) == slots
    assert fit_decode_rows(10 * needed[100], work, params) == 100, "not more than there are"


def test_rows_that_fit_divide_over_the_devices():
    mesh = make_mesh(2, 2)
    work = Workload(MODEL, H2O(), SIZES, 64, rows=128, prefill_rows=8, mesh=mesh)
    params = param_shapes(MODEL)
    available = plan_memory(work, params, 64).total
    assert fit_decode_rows(available + 1000, work, params) == 64
    assert fit_decode_rows(available - 1, work, params) == 60


def test_too_little_memory_says_what_helps():
    params = param_shapes(MODEL)
    work = replace(WORK, policy=H2O(), rows=8)
    with pytest.raises(
        ValueError, match=r"expected a plan of at most 8\.00 MiB on each device; got one of .* MiB in"
    ) as e:
        fit_decode_rows(parse_bytes("8MiB"), work, params)
    planned = plan_memory(work, params, 1)
    assert f"{show_bytes(planned.total - 8 * 2**20)} more than there is" in str(e.value)
    assert "1 decode rows" in str(e.value)
    assert f"activations, {show_bytes(planned.activations)}: lower microbatch_size of the update" in str(e.value)
    sampling = Workload(MODEL, Dense(), replace(SIZES, max_new_tokens=8000), 64, rows=64)
    with pytest.raises(ValueError, match=r"Largest part: cache, .*: lower budget or buffer .* or decode_rows"):
        check_memory(plan_memory(sampling, params), parse_bytes("64MiB"))
    check_memory(planned, planned.total)


def test_a_loop_gets_its_decode_rows():
    loop = new_loop(replace(LOOP, prompts_per_step=8, update=UpdateConfig(microbatch_size=1)))
    params = param_shapes(LOOP_MODEL)
    same, planned = fit_loop(loop, params, None)
    assert same is loop and planned.decode_rows == 32
    work = workload_of(loop)
    # All rows at once are one program; a byte less, and rows move up.
    whole = plan_memory(work, params).total
    same, planned = fit_loop(loop, params, whole)
    assert same is loop and planned == plan_memory(work, params)
    update = planned.update
    assert update < whole, "else there is nothing to choose"
    fitted, planned = fit_loop(loop, params, whole - 1)
    assert fitted.config.decode_rows == planned.decode_rows == 32 and planned.total < whole
    fitted, planned = fit_loop(loop, params, update)
    assert fitted.config.decode_rows == planned.decode_rows < 32 and planned.total <= update
    with pytest.raises(ValueError, match="more than there is"):
        fit_loop(loop, params, 1000)


def test_decode_rows_that_are_set_stay():
    loop = new_loop(replace(LOOP, prompts_per_step=8, decode_rows=4, update=UpdateConfig(microbatch_size=4)))
    params = param_shapes(LOOP_MODEL)
    planned = plan_memory(workload_of(loop), params, 4)
    assert fit_loop(loop, params, planned.total) == (loop, planned)
    assert fit_loop(loop, params, 2**40) == (loop, planned)
    with pytest.raises(ValueError, match="more than there is"):
        fit_loop(loop, params, planned.total - 1)


def test_what_a_run_takes_unless_it_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fit, "device_memory", lambda: 1000)
    assert (usable_memory(1), usable_memory(2)) == (800, 400), "a CPU is shared, by programs and by devices of the mesh"
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeDevice("gpu", None)])
    assert usable_memory(2) == 1000
    monkeypatch.setattr(fit, "device_memory", lambda: None)
    assert usable_memory(1) is None


def test_a_loop_gets_its_microbatch():
    loop = new_loop(replace(LOOP, prompts_per_step=8))
    params = param_shapes(LOOP_MODEL)
    work = workload_of(loop)

    def update(microbatch: int | None) -> int:
        return plan_memory(replace(work, microbatch_size=microbatch), params, 1).update

    def chosen(loop: Any, memory_bytes: int) -> tuple[int | None, int]:
        fitted, planned = fit_loop(loop, params, memory_bytes)
        return fitted.config.update.microbatch_size, planned.microbatch

    assert update(4) < update(8) < update(16) < update(None)
    assert chosen(loop, update(None)) == (None, 32)
    assert chosen(loop, update(16)) == (16, 16) and chosen(loop, update(16) - 1) == (8, 8)
    # A half of the rows of a microbatch must be whole; a microbatch that is set stays.
    halves = new_loop(replace(LOOP, prompts_per_step=8, update=UpdateConfig(distill=DistillConfig(fraction=0.5))))
    assert list(fit._microbatches(halves, 32)) == [32, 16, 8, 4, 2]
    groups = replace(halves, config=replace(halves.config, update=UpdateConfig(rows_per_prompt=4)))
    assert list(fit._microbatches(groups, 32)) == [32, 16, 8, 4], "rows that share a prompt stay together"
    on_two = replace(new_loop(replace(groups.config, prompts_per_step=6)), mesh=make_mesh(2))
    assert list(fit._microbatches(on_two, 24)) == [24, 8], "every device has whole groups"
    fixed = new_loop(replace(LOOP, prompts_per_step=8, update=UpdateConfig(microbatch_size=8)))
    assert chosen(fixed, update(16)) == (8, 8)
    with pytest.raises(ValueError, match="more than there is"):
        fit_loop(fixed, params, update(8) - 1)


def test_rollouts_ahead_need_room_beside_the_update():
    params = param_shapes(LOOP_MODEL)
    one, ahead = (plan_memory(workload_of(new_loop(replace(LOOP, rollouts_ahead=count))), params) for count in (0, 1))
    assert ahead.weights_behind == one.weights and ahead.trajectory == 2 * one.trajectory
    shared = one.weights + one.sampler_weights + one.optimizer + one.reference + one.trajectory
    together = one.rollout + one.update - shared + one.weights + one.trajectory
    assert ahead.rollout == ahead.update == ahead.total == together
    assert [row[1:] for row in ahead.rows() if row[0] == "activations"] == [(show_bytes(one.activations),) * 2]


def test_a_loop_that_cannot_fit_the_device_is_refused(monkeypatch: pytest.MonkeyPatch):
    loop = new_loop()
    monkeypatch.setattr(fit, "device_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"expected a plan of at most 1000 B on each device"):
        fit_loop(loop, param_shapes(LOOP_MODEL), None)
    monkeypatch.setattr(fit, "device_memory", lambda: None)
    fit_loop(loop, param_shapes(LOOP_MODEL), None)
