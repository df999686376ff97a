"""A realistic run: GRPO with the engine, adapters, two passes of two minibatches, shuffled rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import jax
import numpy as np
import optax

from breaking.run_result import RunResult, result_in
from smd_jax.devices.sharding import make_mesh
from smd_jax.eviction.policies import H2O
from smd_jax.learner.state import TrainState, init_state
from smd_jax.model.decoder import Decoder
from smd_jax.model.lora import LoraConfig, add_lora
from smd_jax.runs import checkpoint
from smd_jax.runs.frozen_base import without_base
from smd_jax.runs.run_folder import CHECKPOINTS
from smd_jax.runs.settings import split_settings
from smd_jax.sampler.config import RolloutConfig
from smd_jax.tasks.reasoning_gym import ReasoningGymTask
from smd_jax.tasks.rewards import Rewards
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config
from smd_jax.train.async_rollout import with_sampler_params
from smd_jax.train.grpo import GRPOConfig, GRPOLoop
from smd_jax.train.samples import Samples

EOS, PAD = 258, 256

MODEL = Decoder(tiny_model_config(max_positions=32, num_layers=2))
SORT = (("num_digits", 3), ("num_distractors", 4))
CONFIG = GRPOConfig(
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
AHEAD = replace(CONFIG, rollouts_ahead=1)


@dataclass(frozen=True)
class RealLoop(GRPOLoop):
    """GRPO; `tamper` may change the samples of a rollout before the update."""

    tamper: Callable[[int, Samples], Samples] = field(default=lambda index, samples: samples, kw_only=True)

    def collect(self, state: TrainState, index: int) -> Samples:
        return self.tamper(index, super().collect(state, index))


@functools.cache
def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def by_checksum(completions: Sequence[str], **columns: Any) -> list[float]:
    """Rewards that differ between completions: an untrained model would rarely earn the task's."""
    return [crc32(completion.encode()) % 7 / 6 for completion in completions]


def real_loop(config: GRPOConfig = CONFIG, sizes: Sequence[int] | None = None) -> RealLoop:
    """The loop on a mesh of `sizes` (data, fsdp, tensor); None: on one device of each process."""
    task = ReasoningGymTask("distractor_sort", seed=0, size=50, parameters=SORT)
    mesh = make_mesh(fsdp=jax.process_count()) if sizes is None else make_mesh(*sizes)
    rewards = Rewards((by_checksum,), seconds=None)
    return RealLoop(MODEL, task, byte_tokenizer(chat=False), optimizer(), config, mesh, rewards=rewards)


def real_state(config: GRPOConfig = CONFIG) -> TrainState:
    """A state with adapters; for rollouts ahead, which do not support them, with whole parameters."""
    params = random_params(MODEL.config)
    if config.rollouts_ahead:
        return with_sampler_params(init_state(params, optimizer(), jax.random.key(0)))
    return init_state(add_lora(params, LoraConfig(rank=2), jax.random.key(0)), optimizer(), jax.random.key(0))


def real_result(directory: Path, config: GRPOConfig = CONFIG) -> RunResult:
    return result_in(directory, real_state(config), split_settings(config)[0])


def real_params(directory: Path) -> list[np.ndarray]:
    """Trained parameters of the newest checkpoint, for a comparison up to rounding."""
    like = without_base(real_state())
    newest = checkpoint.restore(directory / CHECKPOINTS, like, config=split_settings(CONFIG)[0])
    return [np.asarray(leaf) for leaf in jax.tree.leaves(newest.state.params)]
