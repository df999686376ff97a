"""The runs that experiments/faults.py breaks, and what is compared of them afterwards.

    python experiments/fault_runs.py DIRECTORY STEPS        begins a run, or goes on with it; exit status as smd-train's

`real_loop` trains what a user would: GRPO with the engine, adapters, two passes of two minibatches, shuffled rows.
`PlainLoop` adds numbers: for faults of disks and files, in which nothing has to be sampled.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import optax

from smd_jax.commands.compilation_cache import keep_programs
from smd_jax.eviction.policies import H2O, Dense
from smd_jax.learner.state import TrainState, init_state
from smd_jax.model.decoder import Decoder
from smd_jax.model.lora import LoraConfig, add_lora
from smd_jax.monitor.metrics_log import MACHINE_METRICS, read_metrics
from smd_jax.sampler.config import RolloutConfig
from smd_jax.tasks.reasoning_gym import ReasoningGymTask
from smd_jax.tasks.task import Row
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config
from smd_jax.train import checkpoint
from smd_jax.train.frozen_base import without_base
from smd_jax.train.grpo import GRPOConfig, GRPOLoop
from smd_jax.train.loop import Loop, LoopConfig
from smd_jax.train.run import CHECKPOINTS, RunConfig, train
from smd_jax.train.samples import Samples
from smd_jax.train.settings import split_settings
from smd_jax.train.stop import RunStoppedError

EVERY = 2  # rollouts between two checkpoints
KEEP = 2
EOS, PAD = 258, 256

MODEL = Decoder(tiny_model_config(max_positions=32, num_layers=2))
SORT = (("num_digits", 3), ("num_distractors", 4))
REAL = GRPOConfig(
    prompts_per_step=4,
    group_size=2,
    prompt_width=9,
    policy=H2O(),
    rollout=RolloutConfig(max_new_tokens=8, budget=5, buffer=2, eos_token_id=EOS, pad_token_id=PAD),
    decode_rows=4,
    prefill_rows=2,
    minibatches=2,
    num_iterations=2,
    update_widths=1,
)
PLAIN = LoopConfig(1, 2, 4, Dense(), RolloutConfig(max_new_tokens=4, budget=4, buffer=4))


@dataclass(frozen=True)
class RealLoop(GRPOLoop):
    """GRPO whose samples may be tampered with before they are learnt from."""

    tamper: Callable[[int, Samples], Samples] = field(default=lambda index, samples: samples, kw_only=True)

    def collect(self, state: TrainState, index: int) -> Samples:
        return self.tamper(index, super().collect(state, index))


@functools.cache
def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


@dataclass(frozen=True)
class Checked:
    """Prompts of a task, and a reward that every completion has another of: by its checksum."""

    task: ReasoningGymTask

    def __len__(self) -> int:
        return len(self.task)

    def __getitem__(self, index: int) -> Row:
        return self.task[index]

    def reward(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        return [crc32(completion.encode()) % 7 / 6 for completion in completions]


def real_loop(config: GRPOConfig = REAL) -> RealLoop:
    task = Checked(ReasoningGymTask("distractor_sort", seed=0, size=50, parameters=SORT))
    return RealLoop(MODEL, task, byte_tokenizer(chat=False), optimizer(), config)


def real_state(seed: int = 0) -> TrainState:
    params = add_lora(random_params(MODEL.config), LoraConfig(rank=2), jax.random.key(seed))
    return init_state(params, optimizer(), jax.random.key(seed))


@dataclass(frozen=True)
class PlainLoop(Loop):
    """Adds the number of the rollout to the parameters."""

    model: Any = None
    task: Any = None
    tokenizer: Any = None
    optimizer: Any = None
    config: LoopConfig = PLAIN

    def __post_init__(self) -> None:
        """There is no model and no tokenizer to check."""

    def step(self, state: TrainState) -> tuple[TrainState, dict[str, float]]:
        number = int(state.step)
        metrics = {"reward": float(number)} | {f"metric {i}": number / 3 for i in range(20)}
        return state.replace(step=state.step + 1, params={"w": state.params["w"] + number}), metrics


def plain_state(size: int = 50_000) -> TrainState:
    """Numbers that do not compress."""
    weights = jnp.asarray(np.random.default_rng(0).normal(size=size), jnp.float32)
    return TrainState(jnp.zeros((), jnp.int32), {"w": weights}, (), None, jax.random.key(0))


def start(
    loop: Loop, state: TrainState, directory: Path, steps: int, resume: bool = True, **options: Any
) -> TrainState:
    """`train` with the settings that all runs here share."""
    run = RunConfig(steps, checkpoint_every=EVERY, keep=KEEP)
    config = options.pop("config", split_settings(loop.config)[0])
    return train(loop, state, run, directory, config=config, resume=resume, **options)


@dataclass(frozen=True)
class Left:
    """What a run left in its directory.

    Attributes:
      rows: metrics, but for times and memory. newest: state of the newest checkpoint, as bytes. steps: of all of them.
      unreadable: those that do not load.
    """

    rows: list[dict[str, Any]]
    newest: list[bytes]
    steps: list[int]
    unreadable: int


def left_by(directory: Path, like: TrainState, config: object) -> Left:
    """Reads everything that a run has left; each checkpoint must load by itself."""
    folder = directory / CHECKPOINTS
    steps = checkpoint.all_steps(folder)
    newest, unreadable = list[bytes](), 0
    for step in steps:
        try:
            state = checkpoint.restore(folder, without_base(like), config=config, step=step).state
            newest = [as_bytes(leaf) for leaf in jax.tree.leaves(state)]
        except checkpoint.DamagedCheckpointError:
            newest = []
            unreadable += 1
    metrics = directory / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.exists() else []
    return Left([{k: v for k, v in row.items() if k not in MACHINE_METRICS} for row in rows], newest, steps, unreadable)


def as_bytes(leaf: jax.Array) -> bytes:
    """Of an array, random keys included."""
    data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return np.asarray(data).tobytes()


class Saying(RealLoop):
    """Prints when a rollout begins: whoever breaks it listens."""

    def step(self, state: TrainState) -> tuple[TrainState, dict[str, float]]:
        print(f"rollout {int(state.step) // self.config.steps_per_rollout}", flush=True)
        return super().step(state)


class SayingWriter(checkpoint.Writer):
    """Prints when a save begins."""

    def save(self, step: int, state: Any, **what: Any) -> None:
        print(f"saving {step}", flush=True)
        super().save(step, state, **what)


def main(directory: str, steps: str) -> None:
    keep_programs()
    loop = real_loop()
    loop = Saying(loop.model, loop.task, loop.tokenizer, loop.optimizer, loop.config)
    checkpoint.Writer = SayingWriter
    try:
        start(loop, real_state(), Path(directory), int(steps))
    except RunStoppedError as stopped:
        print(stopped, flush=True)
        raise SystemExit(stopped.exit_code) from stopped
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
