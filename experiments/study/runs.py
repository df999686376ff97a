"""One run of a study: from the start that all arms of a seed share, train, evaluate, keep one row.

A row that is kept is not made again; one that was made with other settings is refused.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import smd_jax as smd
from provenance import provenance
from smd_jax.eviction.learned import LearnedGate
from smd_jax.monitor.metrics_log import MetricsWriter, read_metrics
from smd_jax.sampling import SamplingConfig
from smd_jax.tasks.task import batch_indices
from smd_jax.testing import random_params
from smd_jax.text.prompts import Tokenizer, eos_token_id, pad_token_id
from smd_jax.train import checkpoint
from smd_jax.train.decoding import Decode
from smd_jax.train.evaluation import EvaluationConfig, Evaluator
from smd_jax.train.supervised import Examples, encode_examples, make_supervised_update
from study.arms import Arm
from study.files import Row, fingerprint, number, read_kept, write_kept
from study.problems import Problem, Split, tokenizer
from study.samplers import FULL_CACHE, Sampler

# Of every rollout, where learner and sampler are one policy: nats, float32.
MAX_MISMATCH_KL = 1e-6
# Ways of decoding an evaluation has: under the budget and with the full cache, at the sampler's temperature and greedy.
DECODINGS = ("sparse", "dense", "sparse_greedy", "dense_greedy")
# Means over the rollouts of a run go into its row.
MEASURED = (
    "reward",
    "entropy",
    "grad_norm",
    "clip_ratio/region_mean",
    "mismatch_kl",
    "rollout_corr/chi2_token",
    "rollout_corr/eff_sample_size",
    "rollout_corr/rollout_rs_masked_fraction",
    "sampling/sampling_logp_difference/max",
    "evictions/logp_difference/max",
)


@dataclass(frozen=True)
class Sizes:
    """What a run costs, and how it learns.

    Attributes:
      dense_start: dense reward at temperature 1 at which the supervised start ends: a sharp one leaves no gain to a
        lower entropy alone.
      start_steps: supervised steps after which a start that is not there yet is given up.
      warmup: rollouts over which the learning rate rises.
      minibatches: optimizer steps per rollout.
    """

    rollouts: int = 100
    prompts: int = 32
    group: int = 8
    minibatches: int = 1
    warmup: int = 10
    evaluate_every: int = 25
    evaluation_rows: int = 512
    dense_start: float = 0.97
    start_steps: int = 4_000


@dataclass(frozen=True)
class Job:
    """One run. Equal jobs make equal rows on one kind of machine.

    Attributes:
      pilot: its row chooses a learning rate, and is judged on validation rows; nothing is ever chosen on the rows that
        the others are evaluated on.
    """

    problem: Problem
    sampler: Sampler
    arm: Arm
    learning_rate: float
    seed: int
    pilot: bool
    sizes: Sizes

    @property
    def split(self) -> Split:
        return "validation" if self.pilot else "evaluation"

    @property
    def settings(self) -> str:
        """Everything that the numbers of the run depend on, but for the code."""
        return repr((self, self.sampler.eviction, self.problem.model_config()))

    @property
    def minibatches(self) -> int:
        """Optimizer steps per rollout."""
        return self.arm.minibatches or self.sizes.minibatches

    @property
    def cell(self) -> tuple[str, str]:
        return self.problem.label, self.sampler.label

    def folder(self, runs: Path) -> Path:
        of_seed = f"{'pilot-' if self.pilot else ''}seed-{self.seed}"
        return runs.joinpath(*self.cell, self.arm.name, f"lr-{self.learning_rate:g}", of_seed)

    @property
    def identity(self) -> Row:
        """What the row says of the job."""
        return {
            "arm": self.arm.name,
            "seed": self.seed,
            "task": self.problem.label,
            "policy": self.sampler.policy,
            "budget": self.sampler.budget,
            "buffer": self.sampler.buffer,
            "length": self.problem.prompt_width + self.problem.response_width,
            "learning_rate": self.learning_rate,
            "rollouts": self.sizes.rollouts,
            "minibatches": self.minibatches,
            "prompts": self.sizes.prompts,
            "pilot": self.pilot,
            "settings": fingerprint(self.settings),
        }


def kept_row(job: Job, runs: Path) -> Row | None:
    """The row of a job that has been run, None of one that has not.

    Raises:
      ValueError: if it was run with other settings.
    """
    return read_kept(job.folder(runs) / "run.json", job.settings)


def keep(job: Job, runs: Path, row: Row) -> None:
    """For `kept_row`."""
    write_kept(job.folder(runs) / "run.json", job.settings, row)


def finished(job: Job, runs: Path, command: str) -> Row:
    """The row as it was kept, or else made now. `command` makes this row alone."""
    row = kept_row(job, runs)
    if row is not None:
        return row
    row = execute(job, runs) | {"command": command}
    keep(job, runs, row)
    rewards = ", ".join(f"{kind} {row[f'{kind}_before']:.3f} -> {row[kind]:.3f}" for kind in DECODINGS)
    print(f"{'/'.join(job.folder(Path()).parts)}: {rewards} ({row['cpu_seconds']:.0f} s)", flush=True)
    return row


def execute(job: Job, runs: Path) -> Row:
    """Trains from the seed's start, and evaluates on the way.

    Raises:
      RuntimeError: learner and sampler are to be one policy, and a rollout shows that they are not.
    """
    began = time.process_time()
    sizes = job.sizes
    loop = make_loop(job)
    params = start(job.problem, job.seed, sizes, runs.parent / "starts")
    params = job.arm.with_own_parameters(params, loop.model.shape)
    reference = params if loop.config.update.needs_reference else None
    state = smd.init_state(params, loop.optimizer, jax.random.key(job.seed), reference)
    evaluator = make_evaluator(loop, job.problem, job.sampler, job.split, sizes.evaluation_rows)
    before = evaluated(evaluator, state.params)
    curve = [{"step": 0} | before]
    path = job.folder(runs) / "metrics.jsonl"
    rollouts = sizes.rollouts if job.arm.trains else 0
    with MetricsWriter(path, next_step=0) as writer:  # a run that was stopped begins anew
        for done in range(1, rollouts + 1):
            state, metrics = loop.step(state)
            if job.arm.is_exact and not metrics["mismatch_kl"] <= MAX_MISMATCH_KL:
                raise RuntimeError(
                    f"expected mismatch_kl <= {MAX_MISMATCH_KL} in rollout {done} of {job.arm.name}, whose learner "
                    f"replays what its sampler saw; got {metrics['mismatch_kl']}"
                )
            writer.write(done, metrics)
            if done == rollouts or done % sizes.evaluate_every == 0:
                curve.append({"step": done} | evaluated(evaluator, state.params))
    after = curve[-1]
    row = job.identity | {kind: number(after[kind]) for kind in DECODINGS}
    row |= {f"{kind}_before": number(before[kind]) for kind in DECODINGS}
    row |= measured(read_metrics(path)) if rollouts else {}
    row["curve"] = [{name: number(value) for name, value in point.items()} for point in curve]
    origin = provenance()
    row |= {name: origin[name] for name in ("date", "commit", "cpu", "versions")}
    return row | {"cpu_seconds": round(time.process_time() - began, 1)}


def measured(history: Sequence[Row]) -> Row:
    """Means over the rollouts, and over their last tenth as `name/end`."""
    row: Row = {}
    for name in MEASURED:
        values = np.array([metrics[name] for metrics in history if name in metrics])
        if len(values):
            row |= {name: number(values.mean()), f"{name}/end": number(values[-max(len(values) // 10, 1) :].mean())}
    return row


def make_loop(job: Job) -> smd.GRPOLoop:
    sizes = job.sizes
    tokens = tokenizer()
    config = smd.GRPOConfig(
        prompts_per_step=sizes.prompts,
        group_size=sizes.group,
        prompt_width=job.problem.prompt_width,
        policy=FULL_CACHE if job.arm.full_cache else job.sampler.eviction,
        rollout=job.sampler.config(job.problem.response_width, eos_token_id(tokens), pad_token_id(tokens)),
        update=job.arm.update,
        minibatches=job.minibatches,
        seed=job.seed,
    )
    parts = smd.Decoder(job.problem.model_config()), job.problem.rows("train"), tokens, make_optimizer(job), config
    return smd.GRPOLoop(*parts)


def make_optimizer(job: Job) -> optax.GradientTransformation:
    """Adam after a warm-up. The rate lies in the state, not in the program, which is compiled once for all rates."""
    steps = job.sizes.warmup * job.minibatches
    rise = optax.scale_by_schedule(optax.linear_schedule(1 / steps, 1.0, steps - 1))

    def adam(factor: float) -> optax.GradientTransformation:
        adam = optax.inject_hyperparams(optax.adam)(learning_rate=factor * job.learning_rate)
        return optax.chain(optax.clip_by_global_norm(1.0), adam, rise)

    return job.arm.optimizer(adam)


def make_evaluator(loop: smd.GRPOLoop, problem: Problem, sampler: Sampler, split: Split, rows: int) -> Evaluator:
    """Under the sampler's budget and with the full cache, at the sampler's temperature and greedy."""
    greedy = SamplingConfig(temperature=0.0)
    decodes = (
        Decode("sparse", sampler.eviction),
        Decode("dense", FULL_CACHE),
        Decode("sparse_greedy", sampler.eviction, sampling=greedy),
        Decode("dense_greedy", FULL_CACHE, sampling=greedy),
    )
    if isinstance(sampler.eviction, LearnedGate):
        # Tokens and evictions without chance; stands in the curve alone.
        decodes += (Decode("sparse_decided", replace(sampler.eviction, greedy=True), sampling=greedy),)
    config = EvaluationConfig(decodes, loop.config.rollout, problem.prompt_width, rows=rows, seed=7)
    return Evaluator(loop.model, problem.rows(split, rows), loop.tokenizer, config)


def evaluated(evaluator: Evaluator, params: Any) -> dict[str, float]:
    """Mean rewards by way of decoding."""
    return {result.name: result.reward for result in evaluator.run(params)}


def start(problem: Problem, seed: int, sizes: Sizes, starts: Path) -> Any:
    """Parameters of a policy whose dense reward on validation rows has just reached `dense_start`.

    Supervised, with the full cache. Kept, so that all arms of all studies begin there; one for all problems that share
    a `start_problem`.

    Raises:
      RuntimeError: if it does not get there.
    """
    problem = problem.start_problem
    folder = starts / problem.label / f"dense-{sizes.dense_start:g}" / f"seed-{seed}"
    settings = (problem, problem.model_config(), sizes.dense_start, sizes.evaluation_rows, sizes.start_steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(problem.schedule()))
    config = problem.model_config()
    state = smd.init_state(random_params(config, seed), optimizer, jax.random.key(seed))
    if checkpoint.latest_step(folder) is not None:
        return checkpoint.restore(folder, state, config=settings).state.params
    model = smd.Decoder(config)
    tokens = tokenizer()
    rollout = smd.RolloutConfig(problem.response_width, 1, 1, eos_token_id(tokens), pad_token_id(tokens))
    evaluation = EvaluationConfig(
        (Decode("dense", FULL_CACHE),), rollout, problem.prompt_width, rows=sizes.evaluation_rows, seed=7
    )
    evaluator = Evaluator(model, problem.rows("validation", sizes.evaluation_rows), tokens, evaluation)
    update = make_supervised_update(model, optimizer)
    reward = 0.0
    for step in range(sizes.start_steps):
        state, _ = update(state, examples_of(problem, step, seed, tokens))
        if (step + 1) % problem.start_every == 0:
            reward = evaluated(evaluator, state.params)["dense"]
            print(f"start of {problem.label}, seed {seed}: dense {reward:.3f} after {step + 1} steps", flush=True)
            if reward >= sizes.dense_start:
                if checkpoint.latest_step(folder) is None:  # another study may have been as fast
                    checkpoint.save(folder, step + 1, state, data_position={}, config=settings)
                return state.params
    raise RuntimeError(
        f"expected a dense reward of {sizes.dense_start} of {problem.label} within {sizes.start_steps} supervised "
        f"steps of seed {seed}; got {reward:.3f}"
    )


def examples_of(problem: Problem, step: int, seed: int, tokens: Tokenizer) -> Examples:
    """What a supervised step of the start learns from."""
    lesson, size = problem.lesson(step)
    rows = lesson.rows("train")
    # Other rows than those of the rollouts' first steps, which go by the seed itself.
    batch = [rows[int(i)] for i in batch_indices(len(rows), size, step, 10_000 + seed)]
    pairs = [row["prompt"] for row in batch], [row["answer"] for row in batch]
    examples = encode_examples(tokens, *pairs, width=lesson.prompt_width + lesson.response_width)
    if lesson.length == problem.length:
        return examples
    # A shorter answer is the beginning of a longer one, and must not teach to end there.
    return examples.replace(targets=examples.targets.at[:, -1].set(False))


def of_pilot(job: Job, seed: int) -> Job:
    """The same job on a seed that is not reported."""
    return replace(job, seed=seed, pilot=True)
