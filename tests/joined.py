"""Runs that one process takes on four devices, or several processes on the same mesh; what they give is compared.

python -m tests.joined FILE COORDINATOR COUNT INDEX       the process with index 0 writes FILE
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from smd_jax import processes
from smd_jax.eviction.policies import H2O
from smd_jax.learner.state import init_state
from smd_jax.model.decoder import Decoder
from smd_jax.monitor.metrics_log import MACHINE_METRICS
from smd_jax.processes import on_host
from smd_jax.sampler.fixed_batch import RolloutConfig
from smd_jax.sharding import make_mesh, shard_tree
from smd_jax.tasks.rewards import Rewards
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config
from smd_jax.train.grpo import GRPOConfig, GRPOLoop
from smd_jax.train.loop import Loop
from smd_jax.train.samples import Samples

EOS, PAD = 258, 256
TOKENIZER = byte_tokenizer(chat=False)
MODEL = Decoder(tiny_model_config(max_positions=32, num_layers=1))
ROLLOUT = RolloutConfig(max_new_tokens=6, budget=5, buffer=2, eos_token_id=EOS, pad_token_id=PAD)
CONFIG = GRPOConfig(prompts_per_step=4, group_size=2, prompt_width=8, policy=H2O(), rollout=ROLLOUT)
STEPS = 2


class Words:
    """Prompts of several lengths."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": "abcdefgh"[: 1 + index % 8], "number": index}

    def reward(self, prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        """Follows from the tokens: what a random model says has some spread."""
        return [(sum(ids) % 11) / 10 for ids in completion_ids]


@functools.cache
def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def steps_of(loop: Loop, params: Any, steps: int = STEPS) -> dict[str, np.ndarray]:
    """What the steps gave, by names: tokens, rewards, metrics, parameters."""
    found = dict[str, np.ndarray]()

    def watch(index: int, samples: Samples) -> None:
        trajectory = samples.trajectory
        for name, x in (("tokens", trajectory.tokens), ("logprobs", trajectory.logprobs), ("rewards", samples.rewards)):
            found[f"{name} {index}"] = np.asarray(x)
        for place, x in enumerate(jax.tree.leaves(trajectory.mask)):
            found[f"mask {index} {place}"] = np.asarray(x)
        found[f"completions {index}"] = np.array(samples.completions)
        found[f"numbers {index}"] = np.array([row["number"] for row in samples.task_rows])

    loop = dataclasses.replace(loop, watch=watch)
    state = init_state(shard_tree(params, loop.mesh), loop.optimizer, jax.random.key(3))
    for step in range(steps):
        state, metrics = loop.step(state)
        found |= {f"metric {step} {name}": np.float64(x) for name, x in metrics.items() if name not in MACHINE_METRICS}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        found[f"params {jax.tree_util.keystr(path)}"] = on_host(leaf)
    return found


def grpo(sizes: tuple[int, int, int], config: GRPOConfig = CONFIG) -> dict[str, np.ndarray]:
    task = Words()
    loop = GRPOLoop(
        MODEL, task, TOKENIZER, optimizer(), config, make_mesh(*sizes), rewards=Rewards((task.reward,), seconds=None)
    )
    return steps_of(loop, random_params(MODEL.config))


RUNS = {"grpo": functools.partial(grpo, (2, 2, 1))}


def all_runs() -> dict[str, np.ndarray]:
    return {f"{run}: {name}": value for run, take in RUNS.items() for name, value in take().items()}


def main(file: str, coordinator: str, count: str, index: str) -> None:
    processes.join(coordinator, int(count), int(index))
    found = all_runs()
    if processes.is_first():
        temporary = Path(f"{file}.npz.tmp.npz")
        np.savez(temporary, **found)  # pyright: ignore[reportArgumentType]
        os.replace(temporary, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
