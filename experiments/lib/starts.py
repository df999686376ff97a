"""Starts of the studies: the supervised parameters that all arms of a seed share.

A start is one safetensors file. Files under `experiments/starts` are committed, so that every machine continues from
the same parameters. A start without a file is made when a run needs it, and written under the folder of the runs. Every
row records the hash of its start; `check_one_start` refuses arms of one seed that have two.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from safetensors import safe_open
from safetensors.numpy import save_file

import smd_jax as smd
from lib.files import ROOT, Row
from lib.lookup import Lookup, evaluator_of, examples_of_lookup
from lib.problems import Problem, tokenizer
from lib.samplers import FULL_CACHE
from smd_jax.message.sampling import SamplingConfig
from smd_jax.runs import checkpoint
from smd_jax.tasks.task import batch_indices
from smd_jax.testing import random_params
from smd_jax.text.prompts import Tokenizer
from smd_jax.train.evaluation import Decode
from smd_jax.train.supervised import Examples, encode_examples, make_supervised_update

STORED = ROOT / "experiments" / "starts"


@dataclass(frozen=True)
class StartLevel:
    """When the supervised training of a start ends: at the first evaluation with at least this full-cache reward.

    Attributes:
      greedy: whether the reward is decoded greedily; otherwise at temperature 1. A start at a high temperature-1 reward
        leaves nothing to gain by a lower entropy; one at a low greedy reward lacks skill.
      every: supervised steps between two evaluations; None: the problem's.
      most_steps: supervised steps after which the start fails.
    """

    reward: float = 0.97
    greedy: bool = False
    every: int | None = None
    rows: int = 512
    most_steps: int = 4_000

    @property
    def label(self) -> str:
        return f"{'greedy' if self.greedy else 'dense'}-{self.reward:g}"


def start(problem: Problem, seed: int, level: StartLevel, made: Path) -> Any:
    """Parameters of a start: from its file under `experiments/starts` or `made`, or made now.

    Training keeps a checkpoint at every evaluation, so that a killed process continues from there.

    Args:
      made: folder of the starts that are not committed.

    Raises:
      RuntimeError: if the reward is not reached.
    """
    problem = problem.start_problem
    name = f"{problem.label}-{level.label}-seed-{seed}.safetensors"
    path = next((folder / name for folder in (STORED, made) if (folder / name).exists()), None)
    if path is None:
        params = _trained(problem, seed, level, made / f"{name}.unfinished")
        path = made / name
        write_start(path, params, level)
        shutil.rmtree(made / f"{name}.unfinished", ignore_errors=True)
    return read_start(path, random_params(problem.model_config(), seed), level)


def start_hash(params: Any) -> str:
    """The first 16 digits of the SHA-256 of all names and values."""
    digest = hashlib.sha256()
    for name, value in sorted(_named(params)):
        digest.update(name.encode() + value.tobytes())
    return digest.hexdigest()[:16]


def write_start(path: Path, params: Any, level: StartLevel) -> None:
    """Writes the file in one move, with its hash and its level."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    save_file(dict(_named(params)), temporary, {"hash": start_hash(params), "level": repr(level)})
    os.replace(temporary, path)


def read_start(path: Path, template: Any, level: StartLevel) -> Any:
    """Parameters with the names and shapes of `template`.

    Raises:
      ValueError: if names or shapes are others, the values do not have the hash that the file records, or the file
        records another level; older files record none.
    """
    with safe_open(path, "numpy") as file:
        found = {name: file.get_tensor(name) for name in list(file.keys())}
        metadata = file.metadata() or {}
    recorded, trained_to = metadata.get("hash"), metadata.get("level", repr(level))
    if trained_to != repr(level):
        raise ValueError(f"expected in {path.name} a start trained to {level}; got one trained to {trained_to}")
    shapes = {name: value.shape for name, value in found.items()}
    expected = {name: value.shape for name, value in _named(template)}
    if shapes != expected:
        differ = sorted(set(shapes.items()) ^ set(expected.items()))[:4]
        raise ValueError(f"expected in {path.name} the parameters of the model; got other names or shapes: {differ}")
    params = jax.tree.unflatten(
        jax.tree.structure(template), [jax.numpy.asarray(found[name]) for name, _ in _named(template)]
    )
    if start_hash(params) != recorded:
        raise ValueError(f"expected in {path.name} parameters with the hash {recorded}; got {start_hash(params)}")
    return params


def check_one_start(rows: Iterable[Row]) -> None:
    """Raises ValueError if two rows of one cell and seed began from different starts.

    Old rows without a hash are distinguished by the reward of the start under the cell's sampler.
    """
    starts: dict[tuple[object, ...], set[object]] = {}
    for row in rows:
        cell = tuple(row.get(name) for name in ("task", "policy", "budget", "seed", "pilot", "length"))
        starts.setdefault(cell, set()).add(row.get("start", row.get("sparse_before")))
    if two := [cell[:4] for cell, found in starts.items() if len(found) > 1]:
        raise ValueError(f"expected one start for all arms of a cell and seed; got two or more in {two[:5]}")


def examples_of(problem: Problem, step: int, seed: int, tokens: Tokenizer) -> Examples:
    """The examples of a supervised step."""
    lesson, size = problem.lesson(step)
    rows = lesson.rows("train")
    # Other rows than those of the first rollouts, which use the seed itself.
    batch = [rows[int(i)] for i in batch_indices(len(rows), size, step, 10_000 + seed)]
    if isinstance(lesson, Lookup):
        return examples_of_lookup(lesson, batch, tokens)
    pairs = [row["prompt"] for row in batch], [row["answer"] for row in batch]
    examples = encode_examples(tokens, *pairs, width=lesson.prompt_width + lesson.response_width)
    if lesson.length == problem.length:
        return examples
    # A shorter answer is the beginning of a longer one: its end is no target.
    return examples.replace(targets=examples.targets.at[:, -1].set(False))


def _trained(problem: Problem, seed: int, level: StartLevel, unfinished: Path) -> Any:
    tokens = tokenizer()
    config = problem.model_config()
    model = smd.Decoder(config)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(problem.schedule()))
    update = make_supervised_update(model, optimizer)
    decode = Decode("dense", FULL_CACHE, sampling=SamplingConfig(temperature=0.0) if level.greedy else None)
    rows = problem.rows("validation", level.rows)
    evaluator = evaluator_of(model, problem, rows, problem.rollout(), (decode,))
    settings = (problem, config, level)
    state = smd.init_state(random_params(config, seed), optimizer, jax.random.key(seed))
    if checkpoint.latest_step(unfinished) is not None:
        state = checkpoint.restore(unfinished, state, config=settings).state
    every = level.every or problem.start_every
    reward = 0.0
    for step in range(int(state.step), level.most_steps):
        state, _ = update(state, examples_of(problem, step, seed, tokens))
        if (step + 1) % every == 0:
            reward = evaluator.run(state.params)[0].reward
            print(
                f"start of {problem.label}, seed {seed}: {level.label}, {reward:.3f} after {step + 1} steps", flush=True
            )
            if reward >= level.reward:
                return state.params
            with checkpoint.Writer(unfinished, max_to_keep=1) as writer:
                writer.save(step + 1, state, config=settings)
    raise RuntimeError(
        f"expected a reward of {level.label} of {problem.label} within {level.most_steps} supervised steps of seed "
        f"{seed}; got {reward:.3f}"
    )


def _named(params: Any) -> Iterator[tuple[str, np.ndarray]]:
    for path, value in jax.tree_util.tree_leaves_with_path(params):
        yield jax.tree_util.keystr(path, simple=True, separator="."), np.asarray(value)
