"""The GRPO loop on a toy-sized task, for tests that run its steps."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax

from smd_jax.devices.sharding import make_mesh, shard_tree
from smd_jax.eviction.policies import H2O
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.forward import make_replay
from smd_jax.learner.state import TrainState, init_state
from smd_jax.learner.update import make_update
from smd_jax.losses.distillation import DistillConfig
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.fixed_batch import RolloutConfig
from smd_jax.tasks.reasoning_gym import ReasoningGymTask
from smd_jax.tasks.task import Prompt, Row, Task
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config
from smd_jax.text.prompts import Tokenizer
from smd_jax.train import loop as loop_module
from smd_jax.train.grpo import GRPOConfig, GRPOLoop
from smd_jax.train.loop import Loop
from smd_jax.train.supervised import encode_examples, make_supervised_update
from tests.documented_metrics import MACHINE_METRICS

TOKENIZER = byte_tokenizer(chat=False)
EOS, PAD = 258, 256
# One layer, as in tests/tiny_update.py: every loop compiles a rollout and a train step.
MODEL = Decoder(tiny_model_config(max_positions=32, num_layers=1))
SORT = (("num_digits", 3), ("num_distractors", 4), ("partial_credit", True))
TASK = ReasoningGymTask("distractor_sort", seed=0, size=50, parameters=SORT)


class Sevens:
    """The prompts of TASK; the reward is the share of "7" in the completion, which is easy to learn."""

    def __len__(self) -> int:
        return len(TASK)

    def __getitem__(self, index: int) -> Row:
        return TASK[index]

    def reward(self, prompts: Sequence[Prompt], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        return [text.count("7") / max(len(text), 1) for text in completions]


SEVENS = Sevens()
ROLLOUT = RolloutConfig(max_new_tokens=5, budget=5, buffer=2, eos_token_id=EOS, pad_token_id=PAD)
SIZES: Any = {"prompts_per_step": 2, "group_size": 4, "prompt_width": 9, "policy": H2O(), "rollout": ROLLOUT}
CONFIG = GRPOConfig(**SIZES)
DISTILLED = dataclasses.replace(CONFIG, update=UpdateConfig(distill=DistillConfig(), microbatch_size=4))


@functools.cache
def optimizer():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


@functools.cache
def warm_params():
    """A model trained to answer in about three digits, so that rewards differ."""
    state = init_state(random_params(MODEL.config), optax.adam(1e-2), jax.random.key(0))
    update = make_supervised_update(MODEL, optax.adam(1e-2))
    for step in range(40):
        rows = [TASK[(8 * step + i) % 50] for i in range(8)]
        prompts, answers = [row["prompt"] for row in rows], [row["answer"] for row in rows]
        state, _ = update(state, encode_examples(TOKENIZER, prompts, answers, width=12))
    return state.params


shared_update, shared_replay = functools.cache(make_update), functools.cache(make_replay)


def share_programs(loop: Loop) -> None:
    """Gives loops with equal train steps and replays the same jitted functions, so that they compile once."""
    with mock.patch.multiple(loop_module, make_update=shared_update, make_replay=shared_replay):
        assert loop.update is not None and loop.replay is not None  # builds both


def own_loop(
    config: GRPOConfig = CONFIG, task: Task = TASK, sizes=(1, 1, 1), tokenizer: Tokenizer = TOKENIZER
) -> GRPOLoop:
    """A loop with its own train step, for tests that count compilations."""
    return GRPOLoop(MODEL, task, tokenizer, optimizer(), config, make_mesh(*sizes))


@functools.cache
def new_loop(
    config: GRPOConfig = CONFIG, task: Task = TASK, sizes=(1, 1, 1), tokenizer: Tokenizer = TOKENIZER
) -> GRPOLoop:
    """A cached loop, whose programs are compiled once for all tests."""
    loop = own_loop(config, task, sizes, tokenizer)
    share_programs(loop)
    return loop


def new_state(seed: int = 1) -> TrainState:
    """Fresh buffers, because a step donates them; sharded as a step returns them, so that `learn` reuses the program of
    `step`."""
    state = init_state(jax.tree.map(jnp.copy, warm_params()), optimizer(), jax.random.key(seed))
    return shard_tree(state, make_mesh())


def run(loop: Loop, state: TrainState, steps: int) -> tuple[TrainState, list[dict[str, float]]]:
    """Runs steps; the metrics are without times and memory."""
    rows = []
    for _ in range(steps):
        state, metrics = loop.step(state)
        rows.append({name: float(value) for name, value in metrics.items() if name not in MACHINE_METRICS})
    return state, rows
