"""How long a user waits for the first training step, with every layer compiled by itself and with a loop over layers.

Question   Seconds from the start of a process to the end of its first GRPO step, with an empty compilation cache, and
           again with the cache that this start filled.
Sizes      SmolLM2-135M's shape (hidden 576, 9 query and 3 KV heads of 64, FFN 1,536, vocabulary 49,152, tied), random
           weights, float32, with 4 layers and with all 30. 2 prompts of 96 columns, 4 completions each of at most 32
           tokens, H2O with 48 + 16 keys, AdamW: compile time does not depend on the number of rows. For the loop,
           parameters are stacked.
Measure    Wall seconds; processes start one after another and use all cores, as compilers do. `second_step_seconds` is
           the time of a step without compilation.
Command    python experiments/bench/startup.py --out experiments/results/startup_cpu.json
Cost       six minutes on two quiet cores
Result     experiments/results/startup_cpu.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the packages bench and lib

from bench.turns import Row, keep


@dataclass(frozen=True)
class Args:
    """Times first training steps, with and without compiled programs on disk."""

    layers: tuple[int, ...] = (4, 30)
    turns: int = 1  # starts of each kind
    out: Path | None = None  # write the rows, with date and command, to this file
    child: tuple[int, bool, float] | None = None  # internal: layers, loop over layers, when the process was started


def first_step(layers: int, loop: bool, began: float) -> Row:
    """Trains two steps in this process."""
    import jax
    import numpy as np
    import optax

    import smd_jax as smd
    from smd_jax.memory.compiled import param_shapes
    from smd_jax.tasks.reasoning_gym import ReasoningGymTask
    from smd_jax.testing import byte_tokenizer
    from smd_jax.text.prompts import eos_token_id, pad_token_id

    imported = time.time()
    shape = smd.ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=layers,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_positions=8192,
        rope_theta=1e5,
        norm_eps=1e-5,
        tie_embeddings=True,
    )
    model = smd.Decoder(shape, scan_layers=loop)
    # NumPy compiles nothing, like loading weights from a file.
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: 0.02 * rng.standard_normal(x.shape, np.float32), param_shapes(model))
    if loop:
        params = smd.model.stack_params(params, model.shape.layer_runs)
    tokenizer = byte_tokenizer(chat=False)
    # The loop refuses an embedding that is much larger than the tokenizer.
    tokenizer.add_tokens([f"<unused {number}>" for number in range(shape.vocab_size - len(tokenizer))])
    config = smd.GRPOConfig(
        prompts_per_step=2,
        group_size=4,
        prompt_width=96,
        policy=smd.eviction.H2O(),
        rollout=smd.RolloutConfig(
            max_new_tokens=32,
            budget=48,
            buffer=16,
            eos_token_id=eos_token_id(tokenizer),
            pad_token_id=pad_token_id(tokenizer),
        ),
    )
    task = ReasoningGymTask("chain_sum", seed=0, size=100, parameters=())
    training = smd.GRPOLoop(model, task, tokenizer, optax.adamw(1e-6), config)
    state = smd.init_state(jax.tree.map(jax.numpy.asarray, params), training.optimizer, jax.random.key(0))
    marks = [time.time()]
    for _ in range(2):
        state, _ = training.step(state)
        jax.block_until_ready(state)
        marks.append(time.time())
    return {
        "layers": layers,
        "loop": loop,
        "seconds": marks[1] - began,
        "import_seconds": imported - began,
        "first_step_seconds": marks[1] - marks[0],
        "second_step_seconds": marks[2] - marks[1],
    }


def starts(layers: int, loop: bool) -> list[Row]:
    """Two rows: a start with an empty cache, and one with the cache that the first start filled."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        more = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        for state in ("cold", "warm"):
            command = [sys.executable, __file__, "--child", str(layers), str(loop), str(time.time())]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | more)
            rows.append(json.loads(done.stdout.splitlines()[-1]) | {"cache": state})
    return rows


def main(args: Args) -> None:
    if args.child is not None:
        print(json.dumps(first_step(*args.child)))
        return
    kinds = [(layers, loop) for layers in args.layers for loop in (False, True)]
    keep([row for _ in range(args.turns) for kind in kinds for row in starts(*kind)], args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
