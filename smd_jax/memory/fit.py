"""Chooses rows of a microbatch, decode and prefill rows, and rows of an evaluation so that they fit a device.

    loop, memory = fit_loop(loop, state, parse_bytes("80GiB"))

A loop that fits is unchanged. Otherwise first the microbatch is reduced, then the rows decoded at once and the prompts
read at once; a microbatch or decode rows that are set stay. Each tried size is compiled, and is at most half of the one
before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from smd_jax.byte_sizes import UNITS, show_bytes
from smd_jax.cache.row_parts import PARTS
from smd_jax.devices.sharding import row_ways, sampling_ways
from smd_jax.learner.state import TrainState
from smd_jax.memory.compiled import (
    LoopMemory,
    RolloutMemory,
    evaluation_memory,
    rollout_memory,
    tree_bytes,
    update_memory,
)
from smd_jax.train.evaluation import Decode, Evaluator
from smd_jax.train.loop import Loop

L = TypeVar("L", bound=Loop)

# More than any device has: such a number has the wrong unit.
MOST_BYTES = 64 * UNITS["TiB"]


def fit_loop(loop: L, state: TrainState, memory_bytes: int) -> tuple[L, LoopMemory]:
    """The loop with microbatch, decode rows and prefill rows that fit into `memory_bytes` per device, and its memory.

    Args:
      state: of the run, or its shapes (`jax.ShapeDtypeStruct`).

    Raises:
      ValueError: if one row per device, or a given size, does not fit; names the options to lower. An environment or
        pack_columns, whose programs are not measured.
    """
    if loop.environment is not None:
        raise ValueError("expected single completions, whose programs are measured; got an environment: set the sizes")
    held = tree_bytes(state, loop.mesh)
    if not 0 < memory_bytes <= MOST_BYTES:
        raise ValueError(
            f"expected the memory of one device, more than 0 and at most {show_bytes(MOST_BYTES)}; "
            f"got {show_bytes(memory_bytes)}"
        )
    if held > memory_bytes:
        what = "weights, optimizer and reference: spread it over more devices (fsdp or tensor of make_mesh)"
        raise _too_much(memory_bytes, held, what)
    loop, update = _fit_microbatch(loop, state, memory_bytes)
    # With rollouts ahead, rollout and update share the memory.
    left = memory_bytes - (update - held if loop.config.samples_ahead else 0)
    loop, rollout = _fit_rollout(loop, state, left)
    found = LoopMemory.of(loop, held, rollout.most, update)
    if update > memory_bytes:
        what = "an update. Lower microbatch_size, or spread it over more devices (make_mesh)"
        raise _too_much(memory_bytes, update, what)
    if found.rollout > memory_bytes:
        what = "a rollout. Lower decode_rows, budget, buffer or prefill_chunk"
        if rollout.reading > rollout.decoding:
            at_once = f"prefill_rows {loop.config.prefill_rows}"
            what = f"reading prompts with {at_once}. Lower prefill_chunk, prompt_width, decode_rows or budget"
        raise _too_much(memory_bytes, found.rollout, what)
    return loop, found


def fit_evaluator(evaluator: Evaluator, state: TrainState, memory_bytes: int) -> Evaluator:
    """The evaluator with as many rows at once, up to its own number, as fit into `memory_bytes` a device under each of
    its ways of decoding.

    Args:
      state: of the run in which it evaluates, or its shapes.

    Raises:
      ValueError: if one prompt a device does not fit.
    """
    for decode in evaluator.config.decodes:
        evaluator = _fit_decode(evaluator, state, decode, memory_bytes)
    return evaluator


def _fit_decode(evaluator: Evaluator, state: TrainState, decode: Decode, memory_bytes: int) -> Evaluator:
    """The evaluator with as many rows at once as fit under one way of decoding."""
    config = evaluator.config
    held = tree_bytes(state, evaluator.mesh)
    if not evaluator.placement.has_own_mesh:  # the program's arguments include the weights
        held -= tree_bytes(state.params, evaluator.mesh)

    def sized(rows: int) -> Evaluator:
        return replace(evaluator, config=replace(config, rows=rows))

    # One prompt on every device with all of its completions; at most as many prompts as the task has.
    least = config.group_size * sampling_ways(evaluator.mesh)
    sizes = range(max(evaluator.prompts_at_once * config.group_size, least), least - 1, -least)
    rows, needed = _first_fitting(
        sizes, lambda rows: held + evaluation_memory(sized(rows), state.params, decode), memory_bytes
    )
    if needed > memory_bytes:
        raise _too_much(memory_bytes, needed, f"an evaluation of {decode.name!r}. Lower its budget or its lengths")
    return evaluator if rows == sizes[0] else sized(rows)


def _first_fitting(sizes: Sequence[int], needed: Callable[[int], int], memory_bytes: int) -> tuple[int, int]:
    """The first of descending sizes that fits, and its bytes; the last if none fits. Each size that is tried is at most
    half of the one before."""
    size = sizes[0]
    while (found := needed(size)) > memory_bytes and size > sizes[-1]:
        size = _half(sizes, size)
    return size, found


def _half(sizes: Sequence[int], size: int) -> int:
    """The next of descending sizes that is at most half of `size`; the last if there is none."""
    return next((smaller for smaller in sizes if smaller <= size // 2), sizes[-1])


def _fit_microbatch(loop: L, state: TrainState, memory_bytes: int) -> tuple[L, int]:
    """The loop with the microbatch that fits, and the bytes of its update."""
    minibatch = loop.config.learner_rows // loop.config.minibatches
    if loop.config.update.microbatch_size is not None:
        return loop, update_memory(loop, state)

    def sized(rows: int) -> L:
        if rows == minibatch:
            return loop
        return replace(loop, config=replace(loop.config, update=replace(loop.config.update, microbatch_size=rows)))

    rows, needed = _first_fitting(
        _microbatches(loop, minibatch), lambda rows: update_memory(sized(rows), state), memory_bytes
    )
    return sized(rows), needed


def _microbatches(loop: Loop, minibatch: int) -> list[int]:
    """Sizes into which a minibatch can be split, largest first; a device has whole groups."""
    least = loop.config.update.rows_together * row_ways(loop.mesh)
    return [rows for rows in range(minibatch, 0, -1) if minibatch % rows == 0 and rows % least == 0]


def _fit_rollout(loop: L, state: TrainState, memory_bytes: int) -> tuple[L, RolloutMemory]:
    """The loop with the decode and prefill rows that fit, and the bytes of its rollout; one program where all rows
    fit."""
    needed = rollout_memory(loop, state)
    if needed.most <= memory_bytes:
        return loop, needed
    decode_sizes, prefill_sizes = _decode_sizes(loop), _prefill_sizes(loop)
    rows, prompts = decode_sizes[0], prefill_sizes[0]
    while True:
        config = replace(loop.config, decode_rows=rows, prefill_rows=prompts)
        found = needed if config == loop.config else rollout_memory(replace(loop, config=config), state)
        can_read_fewer, can_decode_fewer = prompts > prefill_sizes[-1], rows > decode_sizes[-1]
        if found.most <= memory_bytes or not (can_read_fewer or can_decode_fewer):
            return replace(loop, config=config), found
        # Halves the size of the phase that needs more.
        if can_read_fewer and (found.reading > found.decoding or not can_decode_fewer):
            prompts = _half(prefill_sizes, prompts)
        else:
            rows = _half(decode_sizes, rows)


def _decode_sizes(loop: Loop) -> list[int]:
    """Possible `decode_rows`, descending; if they are set, these only."""
    if loop.config.decode_rows is not None:
        return [loop.config.decode_rows]
    ways = sampling_ways(loop.mesh)
    most = max(loop.config.completions_per_step // ways, 1)
    # A cache is compressed in PARTS parts, so larger numbers are multiples of it.
    each_device = [most, *range(most - most % PARTS, PARTS, -PARTS), *range(min(most, PARTS), 0, -1)]
    return [each * ways for each in each_device]


def _prefill_sizes(loop: Loop) -> list[int]:
    """Possible `prefill_rows`, descending: as many prompts as a step has, rounded up to divide over the devices."""
    ways = sampling_ways(loop.mesh)
    most = -(-min(loop.config.prefill_rows, loop.config.prompts_per_step) // ways)
    return [each * ways for each in range(most, 0, -1)]


def _too_much(memory_bytes: int, needed: int, what: str) -> ValueError:
    more = show_bytes(needed - memory_bytes)
    return ValueError(
        f"expected at most {show_bytes(memory_bytes)} on each device; got {show_bytes(needed)}, {more} too much, for "
        f"{what}"
    )
