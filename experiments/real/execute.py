"""One run of the study on a real model: train from checkpoint to checkpoint, evaluate, keep the row."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax

import smd_jax as smd
from lib.files import Row, fingerprint, number
from lib.runs import MAX_MISMATCH_KL, measured
from lib.samplers import FULL_CACHE, decodings
from real.job import Base, Job, keep_row, kept
from smd_jax.metrics import evicted_share
from smd_jax.model.lora import LoraConfig, add_lora
from smd_jax.monitor.metrics_log import METRICS_FILE, read_metrics
from smd_jax.runs import checkpoint
from smd_jax.runs.run import train
from smd_jax.runs.run_config import RunConfig
from smd_jax.runs.run_folder import CHECKPOINTS
from smd_jax.runs.settings import split_settings
from smd_jax.tasks.dataset_task import usable_lengths
from smd_jax.text.prompts import eos_token_id, pad_token_id
from smd_jax.train.evaluation import EvaluationConfig, Evaluator
from smd_jax.train.optimizers import OptimizerConfig, make_optimizer

CURVE = ("reward", "entropy", "completions/mean_length", "mismatch_kl", "grad_norm", "step_time")
CURVE += ("rollout_corr/eff_sample_size",)


def execute(job: Job, base: Base, runs: Path, origin: Row, late: Callable[[], bool]) -> bool:
    """Continues a job and keeps its row every few rollouts; returns whether it is finished.

    Args:
      origin: provenance of this process, with the command of the row.
    """
    folder = job.folder(runs)
    loop = make_loop(job, base)
    before = kept(job, base, runs) or {"commits": [], "evicted_share": None, "cpu_seconds": 0.0}
    began = time.process_time()
    origin = origin | {"commits": list(dict.fromkeys([*before["commits"], origin["commit"]]))}

    def keep(more: Row) -> None:
        row = identity(job, loop) | {"settings": fingerprint(job.settings(base))}
        spent = {"cpu_seconds": round(before["cpu_seconds"] + time.process_time() - began, 1)}
        keep_row(job, base, runs, row | progress(folder / "train") | more | spent | origin)

    state = initial_state(job, base, loop)
    share = before["evicted_share"]
    if share is None:
        trajectory = loop.collect(state, 0).trajectory
        share = number(evicted_share(trajectory.mask.evicted_at, trajectory.valid))
        keep({"finished": False, "evicted_share": share})
    done = checkpoint.latest_step(folder / "train" / CHECKPOINTS) or 0
    compared, metadata = split_settings(loop.config)
    ends = [*range(job.sizes.chunk, job.rollouts, job.sizes.chunk), job.rollouts]
    for end in (end for end in ends if end >= max(done, 1)):
        if late():
            return False
        state = train(
            loop,
            state,
            RunConfig(steps=end, keep=1),
            folder / "train",
            config={"loop": compared, "job": job.settings(base)},
            metadata=metadata,
            resume=True,
            label="/".join(folder.relative_to(runs).parts),
        )
        keep({"finished": False, "evicted_share": share})
        check_exact(job, folder / "train")
    if late():
        return False
    keep({"finished": True, "evicted_share": share} | evaluated(job, base, loop, state))
    return True


def make_loop(job: Job, base: Base) -> smd.GRPOLoop:
    sizes = job.sizes
    task = job.training
    width = max(int(usable_lengths(rows, base.tokenizer).max()) for rows in (task, job.held_out))
    config = smd.GRPOConfig(
        prompts_per_step=sizes.prompts,
        group_size=sizes.group,
        prompt_width=width,
        policy=FULL_CACHE if job.arm.full_cache else job.policy,
        rollout=smd.RolloutConfig(
            max_new_tokens=sizes.response,
            budget=sizes.budget,
            buffer=sizes.buffer,
            eos_token_id=eos_token_id(base.tokenizer),
            pad_token_id=pad_token_id(base.tokenizer),
        ),
        update=replace(job.arm.update, microbatch_size=sizes.microbatch, rows_per_prompt=sizes.group),
        seed=job.seed,
    )
    optimizer = OptimizerConfig(learning_rate=sizes.learning_rate, warmup_steps=sizes.warmup)
    # Microbatches are small enough to keep all activations.
    model = smd.Decoder(base.config)
    steps = max(job.rollouts, sizes.warmup + 1)  # a constant rate depends on no number of steps
    return smd.GRPOLoop(model, task, base.tokenizer, make_optimizer(optimizer, steps), config)


def initial_state(job: Job, base: Base, loop: smd.GRPOLoop) -> smd.TrainState:
    """The state with zero adapters, the same for all arms of a seed. The frozen weights are the teacher."""
    key = jax.random.key(job.seed)
    params = add_lora(base.load(), LoraConfig(rank=job.sizes.rank), jax.random.fold_in(key, 1))
    return smd.init_state(params, loop.optimizer, key)


def evaluated(job: Job, base: Base, loop: smd.GRPOLoop, state: smd.TrainState) -> Row:
    """Evaluates under the budget and with the full cache, at temperature 1 and greedily."""
    rollout, width = loop.config.rollout, loop.config.prompt_width
    config = EvaluationConfig(decodes=decodings(job.policy), rollout=rollout, prompt_width=width, rows=48, seed=7)
    row: Row = {}
    for result in Evaluator(loop.model, job.held_out, base.tokenizer, config).run(loop.policy_params(state.params)):
        row[result.name] = number(result.reward)
        row[f"{result.name}_rewards"] = result.rewards[:, 0].astype(int).tolist()  # one of each question
        row[f"{result.name}_length"] = number(float(result.lengths.mean()))
    return row


def check_exact(job: Job, folder: Path) -> None:
    """Raises RuntimeError if learner and sampler must be one policy and a rollout shows a difference."""
    largest = max((row["mismatch_kl"] for row in history_of(folder)), default=0.0)
    if job.arm.is_exact and not largest <= MAX_MISMATCH_KL:
        raise RuntimeError(
            f"expected mismatch_kl <= {MAX_MISMATCH_KL} in every rollout of {job.arm.name}, whose learner replays what "
            f"its sampler saw; got {largest}"
        )


def identity(job: Job, loop: smd.GRPOLoop) -> Row:
    """The fields of the row that describe the job."""
    sizes = job.sizes
    width = loop.config.prompt_width
    return {
        "arm": job.arm.name,
        "seed": job.seed,
        "task": job.training.label,
        "policy": job.rule,
        "budget": sizes.budget,
        "buffer": sizes.buffer,
        "length": width + sizes.response,
        "prompt_width": width,
        "learning_rate": sizes.learning_rate if job.arm.trains else None,
        "lora_rank": sizes.rank,
        "rollouts": job.rollouts,
        "prompts": sizes.prompts,
        "group": sizes.group,
        "evaluation_rows": len(job.held_out),
    }


def progress(folder: Path) -> Row:
    """Means over the rollouts so far, and the curves of some metrics."""
    history = history_of(folder)
    curve = [{name: number(row[name]) for name in CURVE if name in row} | {"step": row["step"]} for row in history]
    return {"done": len(history), **(measured(history) if history else {}), "curve": curve}


def history_of(folder: Path) -> list[Row]:
    """The rows of metrics, none before the first rollout."""
    path = folder / METRICS_FILE
    return read_metrics(path) if path.exists() else []
