"""What a loop over layers saves in compilation, and what it costs in speed.

Question   How do compile time and size of the programs of rollout and update grow from 4 to 32 layers, with every layer
           compiled by itself and with one loop over all? How fast are the rollouts?
Sizes      SmolLM2-135M's (hidden 576, 9 query and 3 KV heads of 64, FFN 1,536, vocabulary 49,152), random parameters,
           float32. 8 rows, prompts of 64 tokens, 64 new ones, SnapKV with 64 + 16 keys. Update: forward and backward
           pass of the replay. For the loop, parameters are stacked.
Measure    CPU seconds to trace, lower and compile without a cache, of this process. Rollouts: CPU seconds, the two ways
           in turns; median of the ratios of a turn.
Command    python experiments/bench/depth.py --json
Cost       five minutes on two quiet cores
Result     experiments/results/depth_cpu.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the packages bench and lib

import smd_jax as smd
from bench.smollm2_shape import smollm2_shape
from lib.files import RESULTS, write_rows
from lib.provenance import command_line, provenance
from smd_jax.message.masks import positions
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.stacked_params import stack_params
from smd_jax.model.teacher_forced import hidden_states
from smd_jax.monitor.progress import summary_table
from smd_jax.sampler.fixed_batch import rollout_program
from smd_jax.testing import random_params
from smd_jax.text.prompts import PromptBatch

ROWS, PROMPT, RESPONSE = 8, 64, 64
POLICY = smd.eviction.SnapKV(window=8)
ROLLOUT = smd.RolloutConfig(max_new_tokens=RESPONSE, budget=64, buffer=16)


@dataclass(frozen=True)
class Args:
    """Measures compile time, program size and speed with and without a loop over layers."""

    layers: tuple[int, ...] = (4, 32)
    turns: int = 5  # of the rollouts
    json: bool = False  # write experiments/results/depth_cpu.json


def model_of(layers: int, loop: bool) -> smd.Decoder:
    return smd.Decoder(smollm2_shape(layers), scan_layers=loop)


def params_of(model: smd.Decoder) -> Any:
    return stack_params(random_params(model.config), model.shape.layer_runs)


def sample(model: smd.Decoder, params: Any) -> Trajectory:
    tokens = jax.random.randint(jax.random.key(3), (ROWS, PROMPT), 0, model.config.vocab_size)
    prompts = PromptBatch(tokens, jnp.ones(tokens.shape, bool))
    return rollout_program(model, params, prompts, jax.random.key(1), policy=POLICY, config=ROLLOUT)


def loss(params: Any, model: smd.Decoder, trajectory: Trajectory) -> jax.Array:
    places = positions(trajectory.valid)
    hidden = hidden_states(model, params, trajectory.tokens, places, trajectory.mask)
    return jnp.square(model.logits(params, hidden)).mean()


def programs(model: smd.Decoder) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Name -> function and the shapes of its arguments."""
    shapes = jax.eval_shape(lambda: params_of(model))
    trajectory = jax.eval_shape(lambda params: sample(model, params), shapes)
    return {
        "rollout": (lambda params: sample(model, params), (shapes,)),
        "update": (lambda params, found: jax.value_and_grad(loss)(params, model, found), (shapes, trajectory)),
    }


def compilations(args: Args) -> list[dict[str, Any]]:
    rows = []
    for layers in args.layers:
        for loop in (False, True):
            for name, (function, shapes) in programs(model_of(layers, loop)).items():
                jax.clear_caches()
                began = time.process_time()
                compiled = jax.jit(function).lower(*shapes).compile()
                seconds = time.process_time() - began
                memory, text = compiled.memory_analysis(), compiled.as_text()
                assert memory is not None and text is not None, "CPUs have both"
                row = {"program": name, "layers": layers, "loop": loop, "cpu_seconds": seconds}
                rows.append(row | {"characters": len(text), "scratch_bytes": memory.temp_size_in_bytes})
    return rows


def speeds(args: Args) -> list[dict[str, Any]]:
    """CPU seconds of a rollout of the deepest model."""
    layers = max(args.layers)
    ways = {loop: (model_of(layers, loop), params_of(model_of(layers, loop))) for loop in (False, True)}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(args.turns + 1):
        for loop, (model, params) in ways.items():
            began = time.process_time()
            jax.block_until_ready(sample(model, params))
            if turn:  # the first one compiles
                seconds[loop].append(time.process_time() - began)
    ratio = median(loop / each for loop, each in zip(seconds[True], seconds[False], strict=True))
    return [
        {"program": "rollout, second call", "layers": layers, "loop": loop, "cpu_seconds": median(seconds[loop])}
        | ({"ratio": ratio} if loop else {})
        for loop in (False, True)
    ]


def main(args: Args) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    rows = [row | provenance() | {"command": command_line()} for row in compilations(args) + speeds(args)]
    shown = ("program", "layers", "loop", "cpu_seconds", "characters", "scratch_bytes", "ratio")
    summary_table("A loop over layers", shown, [tuple(row.get(name, "") for name in shown) for row in rows])
    if args.json:
        write_rows(RESULTS / "depth_cpu.json", rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
