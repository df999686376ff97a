"""One cell of the study of gradients: a problem, a sampler and a seed. What was measured is kept, like a run.

start ─► rollouts, with and without eviction ─► gradients of all arms ─► Moments ─► rows, kept
                                                                           └─► sums of "exact", for small steps
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import smd_jax as smd
from provenance import provenance
from smd_jax.sampler.fixed_batch import rollout
from smd_jax.tasks.task import Row as TaskRow
from smd_jax.text.prompts import eos_token_id, pad_token_id, repeat_each
from smd_jax.train.grading import encode_rows
from study.coefficients import GROUP, NAMES, REFERENCES, Rolled, arm_gradients, reference_gradients
from study.files import Row, fingerprint, number, write_text
from study.moments import Compared, Moments, Products, Quality, jackknife, quality
from study.problems import Problem, tokenizer
from study.samplers import FULL_CACHE, LEARNS_WHAT_TO_FORGET, Sampler
from study.starts import StartLevel, start
from study.token_rewards import token_rewards

# Sums of arms, which follow from the products of the parts.
MIXES: dict[str, dict[str, float]] = {
    "shadow-anchor": {"shadow": 1.0, "anchor": 0.1},
    "mixed-20": {"shadow": 0.8, "tis": 0.2},
    "mixed-50": {"shadow": 0.5, "tis": 0.5},
    "mixed-80": {"shadow": 0.2, "tis": 0.8},
    "to-go-oracle+anchor": {"to-go-oracle": 1.0, "anchor": 0.1},
}
ROWS = (*NAMES, *MIXES)
# Name of an objective in the rows -> its gradient.
SEEN_FROM = {"sparse": "shadow", "dense": "full-cache", "reward": "exact"}
# Gradients whose means over blocks are kept, for steps along them; of REFERENCES where they are among those.
KEPT = ("exact", "full-cache-exact", "tis", "anchor")


@dataclass(frozen=True)
class GradientSizes:
    """What a cell costs.

    Attributes:
      rollouts: of `prompts` x GROUP completions, with and without eviction, for all arms.
      reference_rollouts: the same of other prompts, for what the arms are compared with.
      blocks: of rollouts; intervals come from leaving one out.
    """

    rollouts: int = 64
    reference_rollouts: int = 512
    prompts: int = 32
    blocks: int = 16
    start: StartLevel = StartLevel()

    def __post_init__(self) -> None:
        for count in (self.rollouts, self.reference_rollouts):
            if count % self.blocks or count < 2 * self.blocks:
                raise ValueError(
                    f"expected rollouts that divide into {self.blocks} blocks of at least two; got {count}"
                )


@dataclass(frozen=True)
class Measurement:
    """The gradients of one cell. Equal ones give equal rows on one kind of machine."""

    problem: Problem
    sampler: Sampler
    seed: int
    sizes: GradientSizes

    @property
    def settings(self) -> str:
        return repr((self, self.sampler.eviction, self.problem.model_config(), ROWS, REFERENCES))

    def folder(self, runs: Path) -> Path:
        return runs.joinpath(self.problem.label, self.sampler.label, f"seed-{self.seed}")

    @property
    def identity(self) -> Row:
        return {
            "seed": self.seed,
            "task": self.problem.label,
            "policy": self.sampler.policy,
            "budget": self.sampler.budget,
            "buffer": self.sampler.buffer,
            "length": self.problem.prompt_width + self.problem.response_width,
            "choice_learns": self.sampler.policy in LEARNS_WHAT_TO_FORGET,
            "prompts": self.sizes.prompts,
        }


class Rollouts:
    """The sampler of a cell at given parameters, with and without eviction."""

    def __init__(self, problem: Problem, sampler: Sampler) -> None:
        tokens = tokenizer()
        self.problem = problem
        self.sampler = sampler
        self.model = smd.Decoder(problem.model_config())
        self.config = sampler.config(problem.response_width, eos_token_id(tokens), pad_token_id(tokens))

    def rows(self, numbers: range) -> list[TaskRow]:
        task = self.problem.rows("train")
        return [task[number] for number in numbers]

    def __call__(self, params: Any, rows: list[TaskRow], key: jax.Array, evicts: bool = True) -> Rolled:
        """GROUP responses to each prompt; equal keys draw equal random numbers, at any parameters."""
        prompts = encode_rows(self.model, tokenizer(), rows, self.problem.prompt_width)
        policy = self.sampler.eviction if evicts else FULL_CACHE
        trajectory = rollout(self.model, params, prompts, key, policy=policy, config=self.config, group_size=GROUP)
        response, mask = np.asarray(trajectory.response), np.asarray(trajectory.response_mask)
        rewards = token_rewards(self.problem, repeat_each(rows, GROUP), response, mask)
        return Rolled(trajectory, jnp.asarray(rewards))


def kept(path: Path, settings: str) -> Any:
    """The rows of a file, None if it is not there.

    Raises:
      ValueError: if they are of other settings.
    """
    if not path.exists():
        return None
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored["settings"] != settings:
        raise ValueError(
            f"expected in {path} what was measured with the present settings {settings}; got {stored['settings']}. "
            "Remove it, or name another folder with --runs"
        )
    return stored["rows"]


def keep(path: Path, settings: str, rows: list[Row]) -> None:
    write_text(path, json.dumps({"settings": settings, "rows": rows}, allow_nan=False))


def measured(job: Measurement, runs: Path, command: str) -> list[Row]:
    """The rows of a cell, one an arm, as they were kept or else made now. `command` makes them alone."""
    path = job.folder(runs) / "gradients.json"
    rows = kept(path, job.settings)
    if rows is None:
        began = time.process_time()
        arms, references, facts = gather(job, runs)
        # Before the rows: where those are, these are.
        for name in KEPT:
            known = name in REFERENCES
            means = references.block_means(REFERENCES.index(name)) if known else arms.block_means(NAMES.index(name))
            np.save(job.folder(runs) / f"mean-{name}.npy", means)
        facts |= {"settings": fingerprint(job.settings)} | origin()
        facts |= {"command": command, "cpu_seconds": round(time.process_time() - began, 1)}
        rows = [job.identity | row | facts for row in rows_of(Compared.of(arms, references))]
        keep(path, job.settings, rows)
        print(f"{job.folder(Path())}: {facts['cpu_seconds']} s", flush=True)
    return rows


def gather(job: Measurement, runs: Path) -> tuple[Moments, Moments, Row]:
    """The gradients of NAMES and of REFERENCES over all rollouts, summed up; and how well the samplers did."""
    sizes = job.sizes
    job.folder(runs).mkdir(parents=True, exist_ok=True)
    params = start(job.problem, job.seed, sizes.start, runs.parent / "starts")
    roll = Rollouts(job.problem, job.sampler)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    arms, references = (Moments.empty(sizes.blocks, len(names), size) for names in (NAMES, REFERENCES))
    rewards = []
    # The references' prompts follow those of the arms.
    for index in range(sizes.rollouts + sizes.reference_rollouts):
        rows = roll.rows(range(index * sizes.prompts, (index + 1) * sizes.prompts))
        key = jax.random.fold_in(jax.random.key(job.seed), index)
        both = [roll(params, rows, key, evicts) for evicts in (True, False)]
        rewards.append([float(rolled.rewards.sum(1).mean()) for rolled in both])
        if index < sizes.rollouts:
            arms.add(index % sizes.blocks, np.asarray(arm_gradients(roll.model, params, *both)))
        else:
            references.add(index % sizes.blocks, np.asarray(reference_gradients(roll.model, params, *both)))
    sparse, dense = np.mean(rewards, axis=0)
    return arms, references, {"sparse": number(sparse), "dense": number(dense)}


def rows_of(compared: Compared) -> list[Row]:
    """Signal, noise and cosines with half the width of their 95 % intervals as `_half`: of every arm as kind
    "gradient", and of the references, from their own rollouts, as kind "reference"."""
    whole = compared.mixed(mixing())
    rows = []
    for index, name in enumerate(ROWS):
        row = {"kind": "gradient", "arm": name, "rollouts": int(whole.arms.counts.sum())}
        row |= _with_halves(whole, partial(_of_arm, index=index))
        row["noise_of_block_mean"] = number(_noise_of_block_mean(whole.arms, index))
        rows.append(row)
    for index, name in enumerate(REFERENCES):
        row = {"kind": "reference", "arm": name, "rollouts": int(whole.references.counts.sum())}
        rows.append(row | _with_halves(whole, partial(_of_reference, index=index)))
    return rows


def _with_halves(compared: Compared, values: Callable[[Compared], dict[str, float]]) -> Row:
    def without(block: int) -> np.ndarray:
        return np.array(list(values(compared.without(block)).values()))

    row: Row = {}
    halves = jackknife(len(compared.across), without)
    for (field, value), half in zip(values(compared).items(), halves, strict=True):
        row |= {field: number(value), f"{field}_half": number(float(half))}
    return row


def _of_arm(compared: Compared, index: int) -> dict[str, float]:
    return _values([compared.quality(index, REFERENCES.index(name)) for name in SEEN_FROM.values()])


def _of_reference(compared: Compared, index: int) -> dict[str, float]:
    return _values([quality(compared.references, index, REFERENCES.index(name)) for name in SEEN_FROM.values()])


def _values(qualities: list[Quality]) -> dict[str, float]:
    """One quality for each of SEEN_FROM."""
    first = qualities[0]
    values = {"signal": first.signal, "noise": first.noise, "snr": first.snr}
    values |= {f"cosine_{name}": each.cosine for name, each in zip(SEEN_FROM, qualities, strict=True)}
    return values | {f"alignment_{name}": each.alignment for name, each in zip(SEEN_FROM, qualities, strict=True)}


def _noise_of_block_mean(products: Products, index: int) -> float:
    """Trace of the covariance of the mean over a block's rollouts, from the blocks alone: noise / rollouts a block."""
    sums = products.between[:, :, index, index]
    blocks, per_block = len(sums), products.counts.mean()
    of_one = np.trace(sums) / blocks
    between = (sums.sum() - np.trace(sums)) / (blocks * (blocks - 1))
    return float((of_one - between) / per_block**2)


def mixing() -> np.ndarray:
    """`[ROWS, NAMES]`: the arms themselves, and the sums of some."""
    table = np.zeros((len(ROWS), len(NAMES)))
    for row, name in enumerate(ROWS):
        for part, weight in MIXES.get(name, {name: 1.0}).items():
            table[row, NAMES.index(part)] = weight
    return table


def origin() -> Row:
    facts = provenance()
    return {name: facts[name] for name in ("date", "commit", "cpu", "versions")}
