"""Faults inside a step: a non-finite loss, a wrong mask, a broken logger."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from breaking.plain import plain_result, run_captured, unbroken_result
from breaking.run_result import Fault, Outcome, refusal, same, start
from breaking.trained import real_loop, real_result, real_state
from smd_jax.message.masks import ShadowMask
from smd_jax.train.samples import RefusedRolloutError, Samples


def infinite_rewards(first: int, last: int) -> Callable[[int, Samples], Samples]:
    def tamper(index: int, samples: Samples) -> Samples:
        return samples._replace(rewards=samples.rewards + (np.inf if first <= index <= last else 0))

    return tamper


def a_head_is_late(layer: int, head: int) -> Callable[[int, Samples], Samples]:
    """From rollout 1 on, the recorded mask of one head keeps every evicted key for one token too long."""

    def tamper(index: int, samples: Samples) -> Samples:
        mask = samples.trajectory.mask
        if index == 0:
            return samples
        evicted_at = np.array(mask.evicted_at)
        own = evicted_at[:, layer, head]
        own += (own > 0) & (own < 99)
        changed = ShadowMask(jax.device_put(evicted_at, mask.evicted_at.sharding))
        return samples._replace(trajectory=samples.trajectory.replace(mask=changed))

    return tamper


def not_finite(folder: Path, rng: random.Random) -> Iterator[Outcome]:
    """Infinite rewards in one rollout: its update is skipped, and the run finishes."""
    for number in (1, 2):
        directory = folder / str(number)
        loop = replace(real_loop(), tamper=infinite_rewards(number, number))
        with redirect_stdout(said := StringIO()):
            state = start(loop, real_state(), directory, 4)
        finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state.params))
        left = real_result(directory)
        skipped = [row["update/skipped"] for row in left.rows]
        told = f"warning: rollout {number}: the update was left out" in said.getvalue()
        yield Outcome(finite and told and skipped == [float(i == number) for i in range(4)], 0, left.unreadable)


def never_finite(folder: Path, rng: random.Random) -> Iterator[Outcome]:
    """Infinite rewards from rollout 2 on: the run ends, and a resume with finite rewards continues it."""
    directory = folder / "run"
    loop = replace(real_loop(), tamper=infinite_rewards(2, 99))
    message = refusal(lambda: start(loop, real_state(), directory, 9), RefusedRolloutError)
    left = real_result(directory)
    start(real_loop(), real_state(), directory, 6)
    kept = (directory / "refused_4.safetensors").is_file()
    yield Outcome(
        "last of 3 rollouts in a row" in message and kept and real_result(directory).steps[-1] == 6, 1, left.unreadable
    )


def wrong_mask(folder: Path, rng: random.Random) -> Iterator[Outcome]:
    """A wrong mask of one head: the run ends before it trains on the rollout, and names layer and head."""
    for layer, head in ((0, 1), (1, 0)):
        directory = folder / f"{layer} {head}"
        loop = replace(real_loop(), tamper=a_head_is_late(layer, head))
        message = refusal(
            lambda loop=loop, directory=directory: start(loop, real_state(), directory, 4), RefusedRolloutError
        )
        named = f"layer {layer}, KV head {head}" in message and "position" in message
        start(real_loop(), real_state(), directory, 2)
        yield Outcome(named and (directory / "refused_1.safetensors").is_file(), 1, real_result(directory).unreadable)


class BrokenLogger:
    """A logger whose calls all fail, as without a network."""

    def write(self, step: int, metrics: Any) -> None:
        raise OSError("no such host")

    def close(self) -> None:
        raise OSError("no such host")


def broken_logger(folder: Path, rng: random.Random) -> Iterator[Outcome]:
    whole = unbroken_result(folder)
    for number in (1, 2):
        run_captured(folder / str(number), loggers=[BrokenLogger()] * number)
        left = plain_result(folder / str(number))
        yield Outcome(same(left, whole), 0, left.unreadable)


KINDS: dict[str, Fault] = {
    "logger that raises": broken_logger,
    "loss that is not finite": not_finite,
    "losses that are never finite": never_finite,
    "mask of a head that is wrong": wrong_mask,
}
