"""One run of a study: train from the shared start of a seed, evaluate, keep one row.

A kept row is not made again; one with other settings raises.
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
from lib.arms import Arm
from lib.files import Row, fingerprint, number, read_kept, settings_text, write_kept
from lib.lookup import Lookup, LookupEvaluator, evaluator_of
from lib.problems import Problem, Split, tokenizer
from lib.provenance import clean_commit, commit, provenance
from lib.samplers import FULL_CACHE, Sampler, decodings
from lib.starts import StartLevel, start, start_hash
from smd_jax.eviction.policies import LearnedGate
from smd_jax.monitor.metrics_log import MetricsWriter, read_metrics
from smd_jax.train.evaluation import Evaluator

# Limit for every rollout if learner and sampler are one policy, in nats, float32.
MAX_MISMATCH_KL = 1e-6
QUANT_GROUP = 8  # tokens that share the range of a quantised key channel
# Decodings of an evaluation: under the budget and with the full cache, at the sampler's temperature and greedily.
DECODINGS = ("sparse", "dense", "sparse_greedy", "dense_greedy")
# Metrics whose means over the rollouts are in the row.
MEASURED = (
    "reward",
    "entropy",
    "grad_norm",
    "clip_ratio/region_mean",
    "mismatch_kl",
    "rollout_corr/chi2_token",
    "rollout_corr/eff_sample_size",
    "rollout_corr/agreement_p5",
    "rollout_corr/rollout_rs_masked_fraction",
    "sampling/sampling_logp_difference/max",
    "evictions/logp_difference/max",
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run.

    Attributes:
      warmup: rollouts over which the learning rate rises.
      last: number of evaluations at the end whose mean is the reward of the run.
      minibatches: optimizer steps per rollout.
    """

    rollouts: int = 100
    prompts: int = 32
    group: int = 8
    minibatches: int = 1
    warmup: int = 10
    evaluate_every: int = 25
    evaluation_rows: int = 512
    last: int = 1
    start: StartLevel = StartLevel()


@dataclass(frozen=True)
class Job:
    """One run. Equal jobs make equal rows on one kind of machine.

    Attributes:
      pilot: whether its row only chooses a learning rate, on validation rows.
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
        """All settings that determine the numbers of the run."""
        return settings_text((self, self.sampler.eviction, self.problem.model_config()))

    @property
    def cell(self) -> tuple[str, str]:
        return self.problem.label, self.sampler.label

    def folder(self, runs: Path) -> Path:
        of_seed = f"{'pilot-' if self.pilot else ''}seed-{self.seed}"
        return runs.joinpath(*self.cell, self.arm.name, f"lr-{self.learning_rate:g}", of_seed)

    @property
    def identity(self) -> Row:
        """The fields of the row that describe the job."""
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
            "minibatches": self.sizes.minibatches,
            "prompts": self.sizes.prompts,
            "pilot": self.pilot,
            "start_level": self.sizes.start.label,
            "settings": fingerprint(self.settings),
        }


def kept_row(job: Job, runs: Path) -> Row | None:
    """The kept row of a job; None without one.

    Raises:
      ValueError: if the run had other settings.
    """
    return read_kept(job.folder(runs) / "run.json", job.settings)


def keep(job: Job, runs: Path, row: Row) -> None:
    """Keeps a row for `kept_row`."""
    write_kept(job.folder(runs) / "run.json", job.settings, row)


def finished(job: Job, runs: Path, command: str, clean: bool = True) -> Row:
    """The kept row, or a new one. `command` makes this row only.

    Raises:
      RuntimeError: with `clean`, if tracked files differ from the commit before the run or after it.
    """
    row = kept_row(job, runs)
    if row is not None:
        return row
    before = clean_commit() if clean else commit()
    row = execute(job, runs) | {"command": command}
    if clean and row["commit"] != before:
        raise RuntimeError(f"expected the commit {before} until the end of the run; got {row['commit']}")
    keep(job, runs, row)
    rewards = ", ".join(f"{kind} {row[f'{kind}_before']:.3f} -> {row[kind]:.3f}" for kind in DECODINGS)
    print(f"{'/'.join(job.folder(Path()).parts)}: {rewards} ({row['cpu_seconds']:.0f} s)", flush=True)
    return row


def execute(job: Job, runs: Path) -> Row:
    """Trains from the seed's start and evaluates on the way.

    Raises:
      RuntimeError: if learner and sampler must be one policy and a rollout shows a difference.
    """
    began = time.process_time()
    sizes = job.sizes
    params = start(job.problem, job.seed, sizes.start, runs.parent / "starts")
    found = start_hash(params)
    evaluator = make_evaluator(make_loop(job), job.problem, job.sampler, job.split, sizes.evaluation_rows)
    curve: list[Row] = []
    agreement: list[float] = []  # of sampler and learner, since the last evaluation
    path = job.folder(runs) / "metrics.jsonl"
    state, done = None, 0
    with MetricsWriter(path, next_step=0) as writer:  # an interrupted run starts over
        for arm, rollouts in job.arm.phases(sizes.rollouts):
            loop = make_loop(replace(job, arm=arm))
            params = arm.with_own_parameters(params, loop.model.shape)
            reference = params if loop.config.update.needs_reference else None
            step = 0 if state is None else state.step
            state = smd.init_state(params, loop.optimizer, jax.random.key(job.seed), reference)
            state = state.replace(step=state.step + step)  # the prompts continue
            if not curve:
                curve.append({"step": 0} | evaluated(evaluator, state.params))
            for _ in range(rollouts):
                done += 1
                state, metrics = loop.step(state)
                if arm.is_exact and not metrics["mismatch_kl"] <= MAX_MISMATCH_KL:
                    raise RuntimeError(
                        f"expected mismatch_kl <= {MAX_MISMATCH_KL} in rollout {done} of {arm.name}, whose learner "
                        f"replays what its sampler saw; got {metrics['mismatch_kl']}"
                    )
                writer.write(done, metrics)
                agreement.append(metrics["rollout_corr/agreement_p5"])
                if done == sizes.rollouts or done % sizes.evaluate_every == 0:
                    point = {"step": done, "agreement_p5": float(np.mean(agreement))}
                    curve.append(point | evaluated(evaluator, state.params))
                    agreement.clear()
            params = state.params
    row = job.identity | {kind: number(float(np.mean([p[kind] for p in curve[-sizes.last :]]))) for kind in DECODINGS}
    row |= {f"{kind}_before": number(curve[0][kind]) for kind in DECODINGS} | {"start": found}
    row |= measured(read_metrics(path)) if done else {}
    row["curve"] = [{name: number(value) for name, value in point.items()} for point in curve]
    origin = provenance()
    row |= {name: origin[name] for name in ("date", "commit", "cpu", "versions")}
    return row | {"cpu_seconds": round(time.process_time() - began, 1)}


def measured(history: Sequence[Row]) -> Row:
    """Means over the rollouts; `name/end`: over their last tenth."""
    row: Row = {}
    for name in MEASURED:
        values = np.array([metrics[name] for metrics in history if name in metrics])
        if len(values):
            row |= {name: number(values.mean()), f"{name}/end": number(values[-max(len(values) // 10, 1) :].mean())}
    return row


def make_loop(job: Job, quant_group: int = QUANT_GROUP) -> smd.GRPOLoop:
    """The loop of a job; `quant_group`: tokens that share the range of a quantised key channel."""
    sizes = job.sizes
    rollout = job.problem.rollout(job.sampler.budget, job.sampler.buffer)
    if job.arm.cache_bits is not None:
        quant = smd.QuantConfig(bits=job.arm.cache_bits, group=quant_group)
        rollout = replace(rollout, buffer=quant_group, quant=quant)
    config = smd.GRPOConfig(
        prompts_per_step=sizes.prompts,
        group_size=sizes.group,
        prompt_width=job.problem.prompt_width,
        policy=FULL_CACHE if job.arm.full_cache else job.sampler.eviction,
        rollout=rollout,
        update=job.arm.update,
        minibatches=sizes.minibatches,
        seed=job.seed,
    )
    parts = smd.Decoder(job.problem.model_config()), job.problem.rows("train"), tokenizer(), make_optimizer(job), config
    environment = job.problem.environment() if isinstance(job.problem, Lookup) else None
    return smd.GRPOLoop(*parts, environment=environment)


def make_optimizer(job: Job) -> optax.GradientTransformation:
    """Adam with a warm-up. The rate is in the state, so one program is compiled for all rates."""
    steps = job.sizes.warmup * job.sizes.minibatches
    rise = optax.scale_by_schedule(optax.linear_schedule(1 / steps, 1.0, steps - 1))

    def adam(factor: float) -> optax.GradientTransformation:
        adam = optax.inject_hyperparams(optax.adam)(learning_rate=factor * job.learning_rate)
        return optax.chain(optax.clip_by_global_norm(1.0), adam, rise)

    return job.arm.optimizer(adam)


def make_evaluator(
    loop: smd.GRPOLoop, problem: Problem, sampler: Sampler, split: Split, rows: int
) -> Evaluator | LookupEvaluator:
    """Evaluates with `decodings`."""
    decodes = decodings(sampler.eviction)
    if isinstance(sampler.eviction, LearnedGate):
        # Tokens and evictions without chance; only in the curve.
        decodes += (replace(decodes[2], name="sparse_decided", policy=replace(sampler.eviction, greedy=True)),)
    return evaluator_of(loop.model, problem, problem.rows(split, rows), loop.config.rollout, decodes)


def evaluated(evaluator: Evaluator | LookupEvaluator, params: Any) -> dict[str, float]:
    """Decoding -> mean reward."""
    return {result.name: result.reward for result in evaluator.run(params)}
