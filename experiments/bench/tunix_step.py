"""Time of a GRPO step of Tunix with our rollout and replay, compared with Tunix' own.

Question   The integration replaces Tunix' sampler, mask and model. Does a whole step (rollout, update) become slower?
Command    PYTHONPATH=.:kernels PYTHON experiments/bench/tunix_step.py --group 4 --new-tokens 128 --steps 7
           --out experiments/results/tunix_step_cpu.json, with the PYTHON of an environment as in docs/tunix.md
Cost       one minute on two idle cores
Result     experiments/results/tunix_step_cpu.json: ours takes 0.62 of the time per token (median of seven pairs, 0.58
           to 0.68). Both parts are faster; the models are two implementations.

Engines    tunix    Tunix' Llama3, its vanilla sampler with a dense cache, GRPOLearner with the loss "grpo"
           ours     our Decoder of the same sizes in an Actor, SmdRollout (H2O), SmdGRPOLearner with "smd_grpo"
Fairness   One process, the engines step in turns, and ratios are of neighbouring steps: other load on the machine hits
           both. The first step of each compiles and does not count. Weights are random, so some responses end early;
           `ms_per_token` therefore divides by the sampled tokens. The trivial reward function marks the end of the
           rollout.
Fields     seconds, rollout_seconds, update_seconds: medians of the steps. ms_per_token: of the whole step. ratios: ours
           / tunix of each pair of steps, from ms_per_token, and their median. load: the machine's load average
           before and after; above `cpus` the seconds are too high, but the ratios still hold.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the packages bench and lib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

import smd_jax as smd
from lib.files import write_rows
from lib.provenance import provenance
from smd_jax.integrations.tunix import Actor, SmdGRPOLearner, SmdRollout
from smd_jax.testing import random_params, tiny_model_config

PAD, END = 0, 1
ENGINES = ("tunix", "ours")


class Numbers:
    """A tokenizer whose texts are token ids."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return END

    def pad_id(self) -> int:
        return PAD


class Turns:
    """Lets threads run one at a time, in a fixed order."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.turns = {name: threading.Semaphore(0) for name in names}
        self.after = dict(zip(names, (*names[1:], names[0]), strict=True))
        self.turns[names[0]].release()

    def take(self, name: str) -> None:
        self.turns[name].acquire()

    def give(self, name: str) -> None:
        self.turns[self.after[name]].release()


class StepClock:
    """Times the steps of a learner: it yields batches, and is the reward function between rollout and update."""

    __name__ = "length"  # name of the reward in Tunix' log

    def __init__(self, engine: str, turns: Turns, batch: dict[str, np.ndarray], steps: int) -> None:
        self.engine = engine
        self.turns = turns
        self.batch = batch
        self.steps = steps
        self.rows: list[dict[str, float]] = []
        self.graded = 0.0
        self.tokens = 0

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        self.graded = time.perf_counter()
        self.tokens = sum(len(text.split()) for text in completions)
        return [float(text.count("7")) for text in completions]

    def batches(self, cluster: RLCluster) -> Iterator[dict[str, np.ndarray]]:
        """Yields a batch per step; the learner asks for the next one when a step has ended."""
        for step in range(self.steps + 1):
            self.turns.take(self.engine)
            began = time.perf_counter()
            yield self.batch
            jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
            ended = time.perf_counter()
            self.turns.give(self.engine)
            if step:
                row = {"seconds": ended - began, "rollout_seconds": self.graded - began}
                self.rows.append(row | {"update_seconds": ended - self.graded, "tokens": self.tokens})


def tunix_actor(config: smd.ModelConfig) -> Llama3:
    """Tunix' model of the same sizes; random, because its feed-forward part is initialised with zeros."""
    sizes = ModelConfig(
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        embed_dim=config.hidden_size,
        hidden_dim=config.intermediate_size,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        num_kv_heads=config.num_kv_heads,
        rope_theta=int(config.rope_theta),
        norm_eps=config.norm_eps,
        weight_tying=True,
    )
    model = Llama3(sizes, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)

    def drawn(x: jax.Array) -> jax.Array:
        return x if x.ndim == 1 else jnp.asarray(rng.normal(0, 0.02, x.shape), x.dtype)

    nnx.update(model, jax.tree.map(drawn, nnx.state(model, nnx.Param)))
    return model


def make_learner(engine: str, args: argparse.Namespace, config: smd.ModelConfig, clock: StepClock) -> GRPOLearner:
    ours = engine == "ours"
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    rollout = functools.partial(SmdRollout, policy=smd.eviction.H2O(), budget=args.budget, buffer=args.buffer)
    cluster = RLCluster(
        actor=Actor(smd.Decoder(config), random_params(config)) if ours else tunix_actor(config),
        tokenizer=Numbers(),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.ROLLOUT), mesh),
            rollout_engine=rollout if ours else "vanilla",
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-5),
                eval_every_n_steps=args.steps + 2,
                max_steps=args.steps + 2,  # the clock ends the run
                mini_batch_size=args.prompts,
                train_micro_batch_size=1,
                rollout_micro_batch_size=args.prompts,
            ),
            rollout_config=RolloutConfig(
                max_prompt_length=args.prompt,
                max_tokens_to_generate=args.new_tokens,
                kv_cache_size=args.prompt + args.new_tokens,
                temperature=1.0,
            ),
        ),
    )
    learner = SmdGRPOLearner if ours else GRPOLearner
    algorithm = GRPOConfig(num_generations=args.group, beta=0.0, policy_loss_fn="smd_grpo" if ours else "grpo")
    return learner(cluster, algorithm, clock)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each engine, and one for their ratio."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_layers": 4}
    config = tiny_model_config(
        vocab_size=4096, num_heads=8, num_kv_heads=2, head_dim=32, qkv_bias=False, norm_eps=1e-5, **sizes
    )
    tokens = np.random.default_rng(0).integers(2, config.vocab_size, (args.prompts, args.prompt))
    batch = {"prompts": np.array([" ".join(map(str, row)) for row in tokens])}
    turns = Turns(ENGINES)
    clocks = {engine: StepClock(engine, turns, batch, args.steps) for engine in ENGINES}
    load = os.getloadavg()[0]

    def train(engine: str) -> None:
        learner = make_learner(engine, args, config, clocks[engine])
        learner.train(clocks[engine].batches(learner.rl_cluster))

    with ThreadPoolExecutor(len(ENGINES)) as threads:
        for done in [threads.submit(train, engine) for engine in ENGINES]:
            done.result()
    machine = {"cpus": os.cpu_count(), "load": [load, os.getloadavg()[0]]}
    machine |= {name: value for name, value in vars(args).items() if name != "out"}
    rows = []
    per_token = {}
    for engine in ENGINES:
        steps = clocks[engine].rows
        per_token[engine] = [1e3 * step["seconds"] / step["tokens"] for step in steps]
        row: dict[str, Any] = {"engine": engine, "ms_per_token": statistics.median(per_token[engine])}
        for name in ("seconds", "rollout_seconds", "update_seconds", "tokens"):
            row[name] = statistics.median(step[name] for step in steps)
        rows.append(row | machine)
    ratios = [ours / theirs for theirs, ours in zip(*(per_token[engine] for engine in ENGINES), strict=True)]
    return [*rows, {"engine": "ours / tunix", "median_ratio": statistics.median(ratios), "ratios": ratios} | machine]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a step")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=256, help="longest completion")
    parser.add_argument("--budget", type=int, default=48, help="keys that ours keeps at a compression")
    parser.add_argument("--buffer", type=int, default=16, help="tokens between two compressions of ours")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each engine")
    parser.add_argument("--out", type=Path, help="rows go there")
    args = parser.parse_args()
    rows = measure(args)
    for row in rows:
        print(json.dumps(row))
    if args.out is not None:
        facts = provenance(("jax", "jaxlib", "flax", "google-tunix"))
        write_rows(args.out, [row | facts for row in rows])


if __name__ == "__main__":
    main()
