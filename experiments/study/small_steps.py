"""What a small step does to the sparse reward, against what the gradient under frozen masks says that it does.

The gradient of the mean reward that replayed masks give lets the kept keys stand still. But where the choice of keys
depends on the parameters, a step moves it, too. With common random numbers (prompts, tokens, evictions) the change of
the reward is measured directly:

    realised   (J(θ + ε v) - J(θ - ε v)) / 2 ε         predicted   g · v

v, of length 1, comes from one half of the rollouts and g from the other, or the noise that both have in common would
be predicted as a gain.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from study.coefficients import GROUP
from study.files import Row, fingerprint, number
from study.gradient_runs import KEPT, Measurement, Rollouts, keep, kept, origin
from study.intervals import estimate
from study.starts import start

Blocks = Float[np.ndarray, "blocks size"]
Vector = Float[np.ndarray, " size"]

FIRST_PROMPT = 30_000  # beyond the prompts of the gradients
LEARNED = "exact"
# Matrices from which attention has its weights, and a policy that looks at them its choice.
QUERIES_KEYS = ("q_proj", "k_proj", "q_norm", "k_norm")


@dataclass(frozen=True)
class StepSizes:
    """What steps cost: `batches` of `prompts` x 8 completions, twice for every step.

    Attributes:
      changes: of the mean reward that steps are to make by prediction; the length of a step, in the norm of all
        parameters, follows. Steps of one length would tell nothing: where the gradient is large, rewards are soon at
        their bounds, and where it is small, chance hides them.
      longest: length where too little is predicted. An Adam step at a rate of 1e-4 has 0.03 with 75,000 parameters.
      isotropic: random directions.
    """

    batches: int = 64
    prompts: int = 32
    changes: tuple[float, ...] = (0.01, 0.03, 0.1)
    longest: float = 0.1
    isotropic: int = 2


@dataclass(frozen=True)
class Steps:
    """Steps from the start of a cell, whose gradients have been measured.

    Attributes:
      evicts: False: the same with the full cache, in which nothing is left out: a control of the method.
    """

    of: Measurement
    sizes: StepSizes
    evicts: bool = True

    @property
    def settings(self) -> str:
        return repr((self, self.of.settings))

    @property
    def arm(self) -> str:
        return LEARNED if self.evicts else "full-cache-exact"


def stepped(job: Steps, runs: Path, command: str) -> list[Row]:
    """A row for every direction and length, as they were kept or else made now."""
    folder = job.of.folder(runs)
    path = folder / f"steps-{job.arm}.json"
    rows = kept(path, job.settings)
    if rows is None:
        began = time.process_time()
        means = {name: np.load(folder / f"mean-{name}.npy") for name in KEPT}
        rows = take_steps(job, start(job.of.problem, job.of.seed, job.of.sizes.start, runs.parent / "starts"), means)
        facts = {"settings": fingerprint(job.settings)} | origin()
        facts |= {"command": command, "cpu_seconds": round(time.process_time() - began, 1)}
        rows = [job.of.identity | row | facts for row in rows]
        keep(path, job.settings, rows)
        print(f"{folder.relative_to(runs)}: steps, {facts['cpu_seconds']} s", flush=True)
    return rows


def take_steps(job: Steps, params: Any, means: Mapping[str, Blocks]) -> list[Row]:
    """`means` by arm, of blocks of rollouts."""
    flat, unravel = ravel_pytree(params)
    here = np.asarray(flat, np.float64)
    # Of the second half, so that its noise is not that of the direction.
    half = len(means[job.arm]) // 2
    gradients = means[job.arm][half:]
    roll = Rollouts(job.of.problem, job.of.sampler)
    rows = []
    for name, direction in directions(job, params, means).items():
        predicted = estimate(list(gradients @ direction))
        lengths = (min(change / abs(predicted.mean), job.sizes.longest) for change in job.sizes.changes)
        for length in dict.fromkeys(lengths):  # where too little is predicted, one for all
            there = [unravel(jnp.asarray(here + sign * length * direction, jnp.float32)) for sign in (1, -1)]
            up, down = (rewards(job, roll, params) for params in there)
            realised = estimate(list((up - down) / (2 * length)))
            ratio, ratio_half = quotient(realised.mean, realised.half, predicted.mean, predicted.half)
            row = {"kind": "step", "arm": job.arm, "direction": name, "step": number(length)}
            row |= {"completions": GROUP * len(up)}
            row |= {"predicted": number(predicted.mean), "predicted_half": number(predicted.half)}
            row |= {"realised": number(realised.mean), "realised_half": number(realised.half)}
            row |= {"up": number(up.mean()), "down": number(down.mean())}
            row |= {"ratio": number(ratio), "ratio_half": number(ratio_half)}
            rows.append(row)
    return rows


def directions(job: Steps, params: Any, means: Mapping[str, Blocks]) -> dict[str, Vector]:
    """Of length 1: along the mean gradient of the first blocks, along its share in queries and keys, along what TIS
    and the anchor do, and at random."""
    half = len(means[job.arm]) // 2
    mean = means[job.arm][:half].mean(0)
    found = {"gradient": mean}
    if job.evicts:
        looks = of_leaves(params, QUERIES_KEYS)
        found["queries and keys"] = mean * looks
        found |= {name: means[name][:half].mean(0) for name in ("tis", "anchor")}
    random = np.random.default_rng(job.of.seed)
    found |= {f"random {place}": random.standard_normal(mean.size) for place in range(job.sizes.isotropic)}
    return {name: vector / np.linalg.norm(vector) for name, vector in found.items()}


def of_leaves(params: Any, names: Sequence[str]) -> np.ndarray:
    """Which of the flat parameters belong to modules of these names."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    inside = [any(f"'{name}'" in jax.tree_util.keystr(path) for name in names) for path, _ in leaves]
    if not any(inside):
        raise ValueError(f"expected modules of {list(names)}; got {[jax.tree_util.keystr(path) for path, _ in leaves]}")
    return np.repeat(inside, [leaf.size for _, leaf in leaves])


def rewards(job: Steps, roll: Rollouts, params: Any) -> np.ndarray:
    """float64 mean reward of every prompt, at the same random numbers whatever the parameters."""
    sizes = job.sizes
    found = []
    for batch in range(sizes.batches):
        first = FIRST_PROMPT + batch * sizes.prompts
        key = jax.random.fold_in(jax.random.key(job.of.seed), FIRST_PROMPT + batch)
        rolled = roll(params, roll.rows(range(first, first + sizes.prompts)), key, job.evicts)
        found.append(np.asarray(rolled.rewards, np.float64).sum(1).reshape(sizes.prompts, -1).mean(1))
    return np.concatenate(found)


def quotient(above: float, above_half: float, below: float, below_half: float) -> tuple[float, float]:
    """above / below of two independent estimates, and half the width of its interval to first order."""
    ratio = above / below
    return ratio, float(np.hypot(above_half, ratio * below_half) / abs(below))
