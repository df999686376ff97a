"""Trains a small language model by GRPO with a fixed-size KV cache.

Task       Sort 8 digits hidden among 16 letters: "k3xq7ab0cd1efg3hi2jk9m8p=" -> "01233789". Reward 1 for the
           exact answer, else 0. A head keeps 18 keys of up to 34 (H2O, + 2 of buffer).
Steps      1. Warm start, here: supervised, dense, until a tiny model sorts with its full cache.
           2. GRPO, by `smd-train grpo --preset sorting`: rollouts under the budget, the learner under the recorded
              shadow mask, and a distillation whose teacher is the warm start with its full context ("anchor").
Command    make run            or    python experiments/quickstart.py [--correction naive] [--seeds 3]
           Other options: smd-train on the warm start, which is kept:
           smd-train grpo --preset sorting --model runs/quickstart/warm-start-300/seed-0 --budget 12
Cost       two to three minutes a seed on two CPU cores
Result     a table of rewards and differences; the files of the runs are under runs/quickstart

`--correction naive` is the baseline: the same sampler, and a dense learner that ignores the evictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import optax
import tyro

import smd_jax as smd
from smd_jax.commands.compilation_cache import cache_programs
from smd_jax.commands.errors import print_box
from smd_jax.commands.train import main as smd_train
from smd_jax.model.weights import check_export
from smd_jax.monitor.metrics_log import EVALUATIONS_FILE, read_metrics
from smd_jax.monitor.progress import summary_table, training_progress
from smd_jax.runs.run_folder import check_directory
from smd_jax.tasks.reasoning_gym import ReasoningGymTask
from smd_jax.tasks.task import batch_indices
from smd_jax.testing import byte_tokenizer, random_params
from smd_jax.train.supervised import encode_examples, make_supervised_update

TOKENIZER = byte_tokenizer(chat=False)
# A Qwen3-style decoder with about a million parameters.
CONFIG = smd.ModelConfig(
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
ROWS = {"num_digits": 8, "num_distractors": 16}  # as in the preset
WIDTH = 8 + 16 + 1 + 8 + 1  # symbols, "=", digits, end of sequence


@dataclass(frozen=True)
class Args:
    """Trains one policy per seed and prints its rewards."""

    correction: Literal["shadow", "naive"] = "shadow"  # what the learner sees; shadow masks have a teacher, too
    seeds: int = 1  # seeds 0, 1, … are run one after another
    steps: int = 350  # rollouts
    warm_start_steps: int = 300  # supervised steps before them
    runs: Path = Path("runs/quickstart")  # folder of warm starts and runs
    resume: bool = False  # continue runs that were stopped

    @property
    def name(self) -> str:
        """The name of the arm, and of its folder."""
        return "shadow-anchor" if self.correction == "shadow" else self.correction

    def run(self, seed: int) -> Path:
        return self.runs / self.name / f"seed-{seed}"

    def model(self, seed: int) -> Path:
        """The warm start, which all arms of a seed share."""
        return self.runs / f"warm-start-{self.warm_start_steps}" / f"seed-{seed}"


def main(args: Args) -> None:
    cache_programs()
    check(args)
    rows = []
    for seed in range(args.seeds):
        warm_start(args, seed)
        smd_train(command(args, seed))
        rows.append([str(seed), *result(args.run(seed))])
    title = f"{args.name}: reward on held-out rows under the budget and with the full cache, |Δ log p| of the learner"
    summary_table(title, ("seed", "budget: before", "after", "full: before", "after", "max |Δ|", "mean |Δ|"), rows)
    print(f"metrics, plots, checkpoints and trained models: {args.runs / args.name}")


def check(args: Args) -> None:
    """Bad options and folders fail before the warm start."""
    if min(args.seeds, args.warm_start_steps) < 1:
        print_box("error", f"expected --seeds and --warm-start-steps of at least 1; got {args}")
        raise SystemExit(2)
    try:
        for seed in range(args.seeds):
            check_directory(args.run(seed), args.resume)
            check_export(args.model(seed), 0)
    except OSError as error:
        print_box("error", f"{error}\nIn flags: resume is --resume, directory is --runs.")
        raise SystemExit(2) from None


def command(args: Args, seed: int) -> list[str]:
    """The arguments of `smd-train`."""
    words = ["grpo", "--preset", "sorting", "--model", str(args.model(seed)), "--output-dir", str(args.run(seed))]
    words += ["--seed", str(seed), "--max-steps", str(args.steps), "--eval-decode", "h2o:18+2", "dense"]
    words += ["--correction", "naive", "--distill", "none"] if args.correction == "naive" else []
    return [*words, "--resume-if-there"] if args.resume else words


def warm_start(args: Args, seed: int) -> None:
    """Trains on answers and writes a Hugging Face checkpoint with its tokenizer, unless it exists."""
    if (args.model(seed) / "config.json").is_file():
        return
    steps = args.warm_start_steps
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, min(50, steps // 6), steps, 1e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))
    state = smd.init_state(random_params(CONFIG, seed), optimizer, jax.random.key(seed))
    rows = ReasoningGymTask("distractor_sort", 1000 + seed, 100_000, tuple(ROWS.items()))
    update = make_supervised_update(smd.Decoder(CONFIG), optimizer)
    with training_progress(steps, every=50, name=f"warm start, seed {seed}") as show:
        for step in range(steps):
            batch = [rows[int(i)] for i in batch_indices(len(rows), 64, step, seed)]
            pairs = [row["prompt"] for row in batch], [row["answer"] for row in batch]
            state, _ = update(state, encode_examples(TOKENIZER, *pairs, width=WIDTH))
            show(step + 1, {})
    smd.save_checkpoint(args.model(seed), state.params, CONFIG, dtype="float32", tokenizer=TOKENIZER)


def result(run: Path) -> list[float]:
    """Rewards before and after training, under the budget and with the full cache, and |Δ log p|."""
    history = read_metrics(run / "metrics.jsonl")
    before, *_, after = read_metrics(run / EVALUATIONS_FILE)
    difference = "sampling/sampling_logp_difference"
    rewards = [row[f"eval/{decode}/reward"] for decode in ("h2o-18-2", "dense") for row in (before, after)]
    return [
        *rewards,
        max(row[f"{difference}/max"] for row in history),
        float(np.mean([row[f"{difference}/mean"] for row in history])),
    ]


if __name__ == "__main__":
    main(tyro.cli(Args))
