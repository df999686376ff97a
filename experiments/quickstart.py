"""Trains a small language model by GRPO with a fixed-size KV cache.

Task       Sort 8 digits hidden among 16 letters: "k3xq7ab0cd1efg3hi2jk9m8p=" -> "01233789". Reward 1 for the
           exact answer, else 0. A head keeps 18 keys of up to 34 (H2O, + 2 of buffer).
Steps      1. Warm start, here: supervised, dense, until a tiny model sorts with its full cache.
           2. GRPO, by `smd-train grpo --preset sorting`: rollouts under the budget, the learner under the recorded
              shadow mask, and a distillation whose teacher is the warm start with its full context ("anchor").
Command    make run            or    python experiments/quickstart.py [--correction none] [--seeds 3] [--help]
           Other options: smd-train on the warm start, which is kept:
           smd-train grpo --preset sorting --model runs/quickstart/warm-start-300/seed-0 --budget 12
Cost       about 3 minutes a seed on two CPU cores
Result     a table of rewards and differences; the files of the runs are under runs/quickstart

`--correction none` is the naive baseline: the same sampler, and a dense learner that ignores the evictions.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
import tyro

import smd_jax as smd
from smd_jax.commands.arguments import Distillation
from smd_jax.commands.compilation_cache import keep_programs
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

    correction: Literal["shadow", "none"] = "shadow"  # visibility of the learner
    distill: Distillation = "auto"  # second track; auto: anchor with shadow masks, else none
    distill_coef: float = 0.5  # weight of the second track in the loss
    policy: Literal["h2o", "dense"] = "h2o"  # eviction policy of the sampler; dense never evicts: the upper bound
    seeds: int = 1  # seeds 0, 1, … are run one after another
    steps: int = 400  # rollouts
    warm_start_steps: int = 300  # supervised steps before them
    learning_rate: float = 3e-4  # of GRPO; rises for a twentieth of the steps, then falls to a tenth along a cosine
    memory: str | None = None  # memory per device, such as 64MiB: chooses microbatch and decode rows
    runs: Path = Path("runs/quickstart")  # folder of warm starts and runs
    resume: bool = False  # continue a run that was stopped

    @property
    def teacher(self) -> str:
        """The direction of the distillation, or "none"."""
        if self.distill != "auto":
            return self.distill
        return "anchor" if self.correction == "shadow" and self.policy != "dense" else "none"

    @property
    def name(self) -> str:
        """The name of the arm, and of its folder."""
        if self.policy == "dense":
            return "dense-cache"
        return self.correction if self.teacher == "none" else f"{self.correction}-{self.teacher}"

    def run(self, seed: int) -> Path:
        return self.runs / self.name / f"seed-{seed}"

    def model(self, seed: int) -> Path:
        """The warm start, which all arms of a seed share."""
        return self.runs / f"warm-start-{self.warm_start_steps}" / f"seed-{seed}"


def main(args: Args) -> None:
    keep_programs()
    check(args)
    rows = []
    for seed in range(args.seeds):
        warm_start(args, seed)
        smd_train(command(args, seed, args.model(seed)))
        rows.append(result(args, seed))
    columns = (
        "seed",
        "sparse_before",
        "sparse_after",
        "dense_before",
        "dense_after",
        "max_abs_dlogp",
        "mean_abs_dlogp",
    )
    cells = [(str(row["seed"]), *(row[column] for column in columns[1:])) for row in rows]
    title = f"{args.name}: reward on held-out rows, |Δ log p| of sampler and learner"
    summary_table(title, [column.replace("_", " ") for column in columns], cells)
    print(f"metrics, plots, checkpoints and trained models: {args.runs / args.name}")


def check(args: Args) -> None:
    """A dry run with an untrained model, so that bad flags fail before the warm start."""
    try:
        for seed in range(args.seeds):
            check_directory(args.run(seed), args.resume)
            check_export(args.model(seed), 0)
    except OSError as error:
        print_box("error", f"{error}\nIn flags: resume is --resume, directory is --runs.")
        raise SystemExit(2) from None
    with tempfile.TemporaryDirectory() as place:
        write_model(Path(place) / "model", random_params(CONFIG))
        smd_train([*command(args, 0, Path(place) / "model"), "--dry-run"])


def command(args: Args, seed: int, model: Path) -> list[str]:
    """The arguments of `smd-train`."""
    words = ["grpo", "--preset", "sorting", "--model", str(model), "--output-dir", str(args.run(seed))]
    words += ["--seed", str(seed), "--max-steps", str(args.steps), "--learning-rate", str(args.learning_rate)]
    words += ["--correction", "naive" if args.correction == "none" else args.correction, "--eviction", args.policy]
    words += ["--distill", args.teacher, "--distill-coef", str(args.distill_coef)]
    words += ["--eval-decode", "h2o:18+2", "dense"]  # for every sampler
    words += [] if args.memory is None else ["--memory", args.memory]
    return [*words, "--resume"] if args.resume else words


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
            batch = [rows[int(i)] for i in batch_indices(len(rows), 128, step, seed)]
            pairs = [row["prompt"] for row in batch], [row["answer"] for row in batch]
            state, _ = update(state, encode_examples(TOKENIZER, *pairs, width=WIDTH))
            show(step + 1, {})
    write_model(args.model(seed), state.params)


def write_model(directory: Path, params: Any) -> None:
    smd.save_checkpoint(directory, params, CONFIG, dtype="float32", tokenizer=TOKENIZER)


def result(args: Args, seed: int) -> dict[str, Any]:
    """Rewards of one seed: sparse decodes under the budget, dense with the full cache."""
    history = read_metrics(args.run(seed) / "metrics.jsonl")
    before, *_, after = read_metrics(args.run(seed) / EVALUATIONS_FILE)
    differences = [row["sampling/sampling_logp_difference/mean"] for row in history]
    return {
        "correction": args.correction if args.policy == "h2o" else "dense cache",
        "distill": args.teacher,
        "seed": seed,
        "sparse_before": before["eval/h2o-18-2/reward"],
        "sparse_after": after["eval/h2o-18-2/reward"],
        "dense_before": before["eval/dense/reward"],
        "dense_after": after["eval/dense/reward"],
        "steps": args.steps,
        "learning_rate": args.learning_rate,
        "max_abs_dlogp": max(row["sampling/sampling_logp_difference/max"] for row in history),
        "mean_abs_dlogp": float(np.mean(differences)),
        "device": jax.devices()[0].device_kind,
    }


if __name__ == "__main__":
    main(tyro.cli(Args))
