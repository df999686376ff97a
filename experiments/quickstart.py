"""The main job: a language model trained by RL with a KV cache of fixed size, sampler and learner exactly one policy.

Task       Sort the 8 digits that hide among 16 letters: "k3xq7ab0cd1efg3hi2jk9m8p=" -> "01233789". Reward 1 for the
           exact answer, else 0. A head keeps 18 keys of up to 34 (H2O, + 2 of buffer): the sampler forgets 4 of 10.
Steps      1. Warm start: supervised, dense, until the model sorts with its full cache.
           2. GRPO: rollouts under the budget, the learner under the recorded shadow mask, and a distillation whose
              teacher is the warm start with its full context ("anchor").
Command    make run            or    python experiments/quickstart.py [--correction none] [--seeds 3] [--help]
Cost       about 3 minutes a seed on two CPU cores
Result     experiments/results/quickstart.json and docs/results.md; a run's own files lie under runs/quickstart.
           The committed rows were made on 2026-11-21 by code from before commit 603eaf4, as each row says, on a CPU
           that was not recorded. Since then tokens are drawn by inverse CDF: the same keys draw other tokens, and later
           code gives other rewards: seed 0 starts at 0.242 in sparse decoding, where the committed rows have 0.217.

`--correction none` is the naive baseline: the same sparse sampler, a dense learner that pretends nothing was evicted.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
import tyro

import smd_jax as smd
from flags import explained, stopped_in_order
from provenance import provenance
from smd_jax.commands.compilation_cache import keep_programs
from smd_jax.losses.distillation import Direction
from smd_jax.memory.compiled import loop_memory
from smd_jax.memory.fit import fit_evaluation, fit_loop
from smd_jax.memory.plan import param_shapes, parse_bytes
from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.monitor.plots import plot_training
from smd_jax.monitor.progress import summary_table, training_progress
from smd_jax.sampler.fixed_batch import cache_bytes
from smd_jax.tasks.reasoning_gym import ReasoningGymTask
from smd_jax.tasks.task import batch_indices
from smd_jax.testing import byte_tokenizer, random_params
from smd_jax.text.prompts import eos_token_id, pad_token_id
from smd_jax.train import checkpoint
from smd_jax.train.journal import EVALUATIONS_FILE
from smd_jax.train.run import RunConfig, check_directory, train
from smd_jax.train.settings import split_settings
from smd_jax.train.supervised import encode_examples, make_supervised_update

DIGITS = 8
DISTRACTORS = 16
PROMPT = DIGITS + DISTRACTORS + 1  # ends with "="
RESPONSE = DIGITS + 1  # ends with the end of sequence
TOKENIZER = byte_tokenizer(chat=False)
EVALUATION_ROWS = 512


@dataclass(frozen=True)
class Args:
    """Trains one policy a seed, and prints and keeps what came of it."""

    correction: Literal["shadow", "none"] = "shadow"  # the learner sees what the sampler saw, or everything
    distill: Direction | Literal["none", "auto"] = "auto"  # second track; auto: anchor with shadow masks, else none
    distill_coef: float = 0.5  # its weight in the loss
    distill_fraction: float = 1.0  # share of the rows that get the dense teacher's forward pass
    policy: Literal["h2o", "dense"] = "h2o"  # of the sampler; dense never evicts: the upper bound
    seeds: int = 1  # seeds 0, 1, … are run one after another
    steps: int = 400  # rollouts
    warm_start_steps: int = 300  # supervised steps before them
    learning_rate: float = 3e-4  # of GRPO; rises for 20 steps, then falls to a tenth along a cosine
    budget: int = 18  # keys kept per layer and KV head
    buffer: int = 2  # queries between two compressions
    prompts: int = 16  # per rollout
    group: int = 8  # completions per prompt
    microbatch: int | None = None  # rows of one forward and backward pass; all by default
    memory: str | None = None  # of a device, such as 64MiB: chooses microbatch and completions decoded at once
    runs: Path = Path("runs/quickstart")  # where metrics, plots and checkpoints go
    resume: bool = False  # continue a run that was stopped
    results: Path | None = None  # JSON file to merge the result rows into


@dataclass(frozen=True)
class Result:
    """One seed's rewards on held-out rows; sparse decodes under the budget, dense with the full cache."""

    correction: str
    distill: str
    seed: int
    sparse_before: float
    sparse_after: float
    dense_before: float
    dense_after: float
    steps: int
    learning_rate: float
    max_abs_dlogp: float
    mean_abs_dlogp: float
    command: str
    date: str
    commit: str
    cpu: str
    versions: dict[str, str]
    device: str


def main(args: Args) -> None:
    keep_programs()
    with explained(Args):
        for seed in range(args.seeds):
            check_directory(directory_of(args, seed), args.resume)
    rows = [run_seed(args, seed) for seed in range(args.seeds)]
    columns = ("sparse_before", "sparse_after", "dense_before", "dense_after")
    cells = [(str(row.seed), *(asdict(row)[column] for column in columns)) for row in rows]
    headings = ("seed", *(column.replace("_", " ") for column in columns))
    summary_table(f"{name_of(args)}: mean reward on {EVALUATION_ROWS} held-out rows", headings, cells)
    if args.results is not None:
        merge_results(args.results, rows)


def run_seed(args: Args, seed: int) -> Result:
    """One policy: warm start, GRPO, evaluation before and after."""
    directory = directory_of(args, seed)
    model = smd.Decoder(model_config())
    with explained(Args):
        memory = None if args.memory is None else parse_bytes(args.memory)
        loop, plan = fit_loop(make_loop(args, model, seed), param_shapes(model), memory)
    summary_table(plan.title, ("", "rollout", "update"), plan.rows())
    params = warm_start(args, model, seed)
    reference = params if loop.config.update.needs_reference else None
    initial = smd.init_state(params, loop.optimizer, jax.random.key(seed), reference)
    if memory is not None:
        compiled = loop_memory(loop, initial)
        summary_table(compiled.title, ("", "rollout", "update"), compiled.rows())
    compared, noted = split_settings(loop.config)
    names = ("eval/sparse", "eval/dense")
    train(
        loop,
        initial,
        RunConfig(args.steps, checkpoint_every=100, evaluate_every=100),
        directory,
        config=(model.config, compared, args.learning_rate, args.steps, args.warm_start_steps),
        noted=noted,
        resume=args.resume,
        evaluate=lambda now: dict(zip(names, evaluate(loop, now.params, memory), strict=True)),
        label=f"{name_of(args)}, seed {seed}",
    )
    evaluations = read_metrics(directory / EVALUATIONS_FILE)
    before, after = ((row[names[0]], row[names[1]]) for row in (evaluations[0], evaluations[-1]))
    history = read_metrics(directory / "metrics.jsonl")
    plot_training({name_of(args): history}, directory / "training.png")
    return report(args, loop, seed, before, after, history, directory)


def directory_of(args: Args, seed: int) -> Path:
    return args.runs / name_of(args) / f"seed-{seed}"


def name_of(args: Args) -> str:
    """The name of the arm, and of its folder."""
    if args.policy == "dense":
        return "dense-cache"
    return args.correction if direction_of(args) is None else f"{args.correction}-{direction_of(args)}"


def direction_of(args: Args) -> Direction | None:
    """The direction of the distillation, None where there is none."""
    if args.distill == "auto":
        return "anchor" if args.correction == "shadow" and args.policy != "dense" else None
    return None if args.distill == "none" else args.distill


def model_config() -> smd.ModelConfig:
    """A Qwen3-style decoder with about a million parameters."""
    return smd.ModelConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=160,
        intermediate_size=448,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=40,
        max_positions=64,
        qk_norm=True,
        tie_embeddings=True,
    )


def task(seed: int, size: int) -> ReasoningGymTask:
    return ReasoningGymTask("distractor_sort", seed, size, (("num_digits", DIGITS), ("num_distractors", DISTRACTORS)))


def make_loop(args: Args, model: smd.Decoder, seed: int) -> smd.GRPOLoop:
    config = smd.GRPOConfig(
        prompts_per_step=args.prompts,
        group_size=args.group,
        prompt_width=PROMPT,
        policy=smd.eviction.H2O() if args.policy == "h2o" else smd.eviction.Dense(),
        rollout=smd.RolloutConfig(RESPONSE, args.budget, args.buffer, eos_token_id(TOKENIZER), pad_token_id(TOKENIZER)),
        update=update_config(args),
        seed=seed,
    )
    peak = args.learning_rate
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, min(20, args.steps // 10), args.steps, 0.1 * peak)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    return smd.GRPOLoop(model, task(1000 + seed, 100_000), TOKENIZER, optimizer, config)


def update_config(args: Args) -> smd.UpdateConfig:
    direction = direction_of(args)
    distill = None if direction is None else smd.DistillConfig(direction, args.distill_coef, args.distill_fraction)
    if args.correction == "none":
        return smd.UpdateConfig(
            "dense", correction=smd.corrections.Naive(), distill=distill, microbatch_size=args.microbatch
        )
    return smd.UpdateConfig("shadow", distill=distill, microbatch_size=args.microbatch)


def warm_start(args: Args, model: smd.Decoder, seed: int) -> Any:
    """Parameters after the supervised steps; kept under runs, so that the arms of a seed start from the same policy."""
    steps = args.warm_start_steps
    directory = args.runs / f"warm-start-{steps}" / f"seed-{seed}"
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, min(50, steps // 6), steps, 1e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))
    state = smd.init_state(random_params(model.config, seed), optimizer, jax.random.key(seed))
    config = (model.config, DIGITS, DISTRACTORS, steps, seed)
    if checkpoint.latest_step(directory) is not None:
        return checkpoint.restore(directory, state, config=config).state.params
    rows = task(1000 + seed, 100_000)
    update = make_supervised_update(model, optimizer)
    with training_progress(steps, every=50, name=f"warm start, seed {seed}") as show:
        for step in range(steps):
            batch = [rows[int(i)] for i in batch_indices(len(rows), 128, step, seed)]
            pairs = [row["prompt"] for row in batch], [row["answer"] for row in batch]
            state, _ = update(state, encode_examples(TOKENIZER, *pairs, width=PROMPT + RESPONSE))
            show(step + 1, {})
    checkpoint.save(directory, steps, state, data_position={}, config=config)
    return state.params


def evaluate(loop: smd.GRPOLoop, params: Any, memory: int | None) -> tuple[float, float]:
    """Mean reward under the budget and with the full cache, on rows of their own and at the sampler's temperature;
    as many rows at once as fit."""
    held_out = task(99, EVALUATION_ROWS)
    sampler = smd.eviction.H2O()
    decode = [
        fit_evaluation(loop, params, memory, policy=policy, config=loop.config.rollout).evaluate(
            params, held_out, jax.random.key(7), policy=policy, config=loop.config.rollout
        )
        for policy in (sampler, smd.eviction.Dense())
    ]
    return decode[0], decode[1]


def report(
    args: Args,
    loop: smd.GRPOLoop,
    seed: int,
    before: tuple[float, float],
    after: tuple[float, float],
    history: list[dict[str, Any]],
    directory: Path,
) -> Result:
    """Prints what one seed came to."""
    largest = max(row["sampling/sampling_logp_difference/max"] for row in history)
    mean = float(np.mean([row["sampling/sampling_logp_difference/mean"] for row in history]))
    shape = loop.model.shape
    sizes = (loop.config.rollout, PROMPT, loop.config.decode_rows or loop.config.completions_per_step)
    kept, full = (cache_bytes(shape, policy, *sizes) for policy in (loop.config.policy, smd.eviction.Dense()))
    summary_table(
        f"{name_of(args)}, seed {seed}, {len(history)} rollouts",
        ("", "before", "after"),
        [("reward, sparse decoding", before[0], after[0]), ("reward, dense decoding", before[1], after[1])],
    )
    summary_table(
        "sampler against learner",
        ("", "value"),
        [
            ("max |Δ log p|, nats", largest),
            ("mean |Δ log p|, nats", mean),
            ("KV cache while decoding, bytes", kept),
            ("the same with a dense cache, bytes", full),
        ],
    )
    print(f"metrics, plot and checkpoints: {directory}")
    return Result(
        correction=args.correction if args.policy == "h2o" else "dense cache",
        distill=direction_of(args) or "none",
        seed=seed,
        sparse_before=before[0],
        sparse_after=after[0],
        dense_before=before[1],
        dense_after=after[1],
        steps=args.steps,
        learning_rate=args.learning_rate,
        max_abs_dlogp=largest,
        mean_abs_dlogp=mean,
        device=jax.devices()[0].device_kind,
        **provenance(),
    )


def merge_results(path: Path, rows: list[Result]) -> None:
    """Adds rows to a JSON list, in place of older rows of the same arm, learning rate and seed."""
    old = json.loads(path.read_text()) if path.exists() else []
    new = [asdict(row) for row in rows]

    def arm(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["correction"], row["distill"], -row["learning_rate"], row["seed"]

    replaced = {arm(row) for row in new}
    merged = sorted([row for row in old if arm(row) not in replaced] + new, key=arm)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in merged) + "\n]\n")


if __name__ == "__main__":
    with stopped_in_order():
        main(tyro.cli(Args))
