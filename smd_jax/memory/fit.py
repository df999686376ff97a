"""Chooses rows of a microbatch, decode rows and rows of an evaluation so that they fit a device.

    loop, plan = fit_loop(loop, params, parse_bytes("80GiB"))
    decode_rows = fit_decode_rows(parse_bytes("80GiB"), work, params)

A loop that fits stays as it is. Otherwise first the microbatch gets smaller, then the rows decoded at once. Sizes that
are set stay.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import jax

from smd_jax.cache.row_parts import PARTS
from smd_jax.devices.sharding import row_ways, sampling_ways
from smd_jax.learner.config import check_rows_of
from smd_jax.memory.plan import (
    MemoryPlan,
    Workload,
    check_bytes,
    check_memory,
    device_memory,
    plan_memory,
    planned_model,
    workload_of,
)
from smd_jax.model.protocol import Params
from smd_jax.train.evaluation import Evaluator
from smd_jax.train.policy_loop import PolicyLoop

L = TypeVar("L", bound=PolicyLoop)

# Default share of a machine's memory for a run on its CPU: the system and other programs need the rest.
CPU_SHARE = 0.8


def usable_memory(devices: int) -> int | None:
    """Default bytes of one device for a run: all of an accelerator, CPU_SHARE of a CPU's memory; None: not known.

    Args:
      devices: of the mesh; CPU devices share the memory.
    """
    available = device_memory()
    if available is None or jax.local_devices()[0].platform != "cpu":
        return available
    return int(CPU_SHARE * available) // devices


def fit_decode_rows(memory_bytes: int, work: Workload, params: Params) -> int:
    """The most rows decoded at once, up to all, whose plan needs at most `memory_bytes` a device.

    A multiple of the devices that share the rows; from 16 rows a device on of 16 times as many (or all rows), because a
    cache is compressed in 16 parts.

    Raises:
      ValueError: if one row a device or the update does not fit; names the largest part and what lowers it.
    """
    ways = sampling_ways(work.mesh)
    most = max(work.rows // ways, 1)

    def needed(each: int) -> int:
        return plan_memory(work, params, each * ways).total

    # Raises unless one row a device fits: below there is always a choice.
    check_memory(plan_memory(work, params, ways), memory_bytes)
    if needed(most) <= memory_bytes:
        return most * ways
    choices = [*range(1, min(most, PARTS)), *range(PARTS, most, PARTS)]
    # Bytes grow with the rows, so the choices can be bisected.
    return choices[bisect_right(choices, memory_bytes, key=needed) - 1] * ways


def fit_loop(loop: L, params: Params, memory_bytes: int | None) -> tuple[L, MemoryPlan]:
    """The loop with the largest microbatch and most decode rows that fit into `memory_bytes` a device, and its plan.

    Sizes that are set stay. None are set where all rows fit, so that the rollout is one program. Without `memory_bytes`
    the loop stays as it is.

    Raises:
      ValueError: if one row a device, or a size that is set, does not fit; without `memory_bytes`, if the plan exceeds
        the device's memory.
    """
    available = device_memory() if memory_bytes is None else memory_bytes
    if memory_bytes is not None:
        check_bytes(memory_bytes)
        loop = _with_microbatch(loop, params, memory_bytes)
        work = workload_of(loop)
        if loop.config.decode_rows is None and plan_memory(work, params).total > memory_bytes:
            loop = _with_decode_rows(loop, work, params, memory_bytes)
    planned = plan_memory(workload_of(loop), params, loop.config.decode_rows)
    if available is not None:
        check_memory(planned, available)
    return loop, planned


def fit_evaluator(evaluator: Evaluator, params: Params, memory_bytes: int | None, loop: PolicyLoop | None) -> Evaluator:
    """The evaluator with the most rows at once, up to its own number, that fit into `memory_bytes` a device under each
    of its ways of decoding; None leaves their number.

    Args:
      loop: the run in which it evaluates, with optimizer and reference; None: only parameters are held.

    Raises:
      ValueError: if one prompt a device does not fit; for a model that is no Decoder.
    """
    if memory_bytes is None:
        return evaluator
    check_bytes(memory_bytes)
    model = planned_model(evaluator.model, "`rows`")
    config = evaluator.config
    works = [
        Workload(
            model,
            decode.policy,
            decode.rollout(config.rollout),
            config.prompt_width,
            rows=0,
            optimizer=None if loop is None else loop.optimizer,
            reference=loop is not None and loop.config.update.needs_reference,
            reference_follows=loop is not None and loop.config.update.reference_sync is not None,
            rollouts_ahead=loop is not None and loop.config.samples_ahead,
            learns=False,
            mesh=evaluator.mesh,
        )
        for decode in config.decodes
    ]
    # One prompt on every device, with all of its completions.
    least = config.group_size * sampling_ways(evaluator.mesh)

    def planned(work: Workload, times: int) -> MemoryPlan:
        return plan_memory(replace(work, rows=least * times, prefill_rows=least * times // config.group_size), params)

    times = max(config.rows // least, 1)
    for work in works:
        check_memory(planned(work, 1), memory_bytes)
        choices = range(1, times + 1)
        times = choices[bisect_right(choices, memory_bytes, key=lambda n, work=work: planned(work, n).total) - 1]
    return replace(evaluator, config=replace(config, rows=least * times))


def _with_microbatch(loop: L, params: Params, memory_bytes: int) -> L:
    """The loop with the largest microbatch whose update fits, else the smallest."""
    update = loop.config.update
    if update.microbatch_size is not None:
        return loop
    minibatch = loop.config.completions_per_step // loop.config.minibatches
    work = workload_of(loop)
    chosen = minibatch
    for chosen in _microbatches(loop, minibatch):
        size = None if chosen == minibatch else chosen
        if plan_memory(replace(work, microbatch_size=size), params, row_ways(loop.mesh)).update <= memory_bytes:
            break
    if chosen == minibatch:
        return loop
    return replace(loop, config=replace(loop.config, update=replace(update, microbatch_size=chosen)))


def _microbatches(loop: PolicyLoop, minibatch: int) -> Iterator[int]:
    """Sizes into which a minibatch can be split, largest first; a device has whole groups."""
    least = loop.config.update.rows_per_prompt * row_ways(loop.mesh)
    for rows in range(minibatch, 0, -1):
        if minibatch % rows == 0 and rows % least == 0 and _splits(loop, minibatch, rows):
            yield rows


def _splits(loop: PolicyLoop, minibatch: int, rows: int) -> bool:
    """Whether a microbatch has whole shares of the distillation, and whole groups of rows that share a prompt."""
    try:
        update = replace(loop.config.update, microbatch_size=rows)
        check_rows_of(update, minibatch, loop.config.rollout.max_new_tokens)
    except ValueError:
        return False
    return True


def _with_decode_rows(loop: L, work: Workload, params: Params, memory_bytes: int) -> L:
    ways = sampling_ways(loop.mesh)
    # Up to a number that divides over the devices.
    prefill_rows = -(-loop.config.prefill_rows // ways) * ways
    work = replace(work, prefill_rows=prefill_rows)
    decode_rows = fit_decode_rows(memory_bytes, work, params)
    config = replace(loop.config, decode_rows=decode_rows, prefill_rows=prefill_rows)
    return replace(loop, config=config)
