"""The first training step of a fresh process. Started by `bench/startup.py`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

LOADED = time.time()  # the interpreter runs; nothing else is imported

os.environ |= {"JAX_PLATFORMS": "cpu", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}

from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[2]))  # of what the studies share

import smd_jax as smd  # noqa: E402
from smd_jax.commands.compilation_cache import keep_programs  # noqa: E402
from smd_jax.memory.plan import param_shapes  # noqa: E402
from smd_jax.tasks.reasoning_gym import ReasoningGymTask  # noqa: E402
from smd_jax.testing import byte_tokenizer  # noqa: E402
from smd_jax.text.prompts import eos_token_id, pad_token_id  # noqa: E402

IMPORTED = time.time()


def model_config(layers: int) -> smd.ModelConfig:
    """SmolLM2-135M's, but for the layers."""
    return smd.ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=layers,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_positions=2048,
        norm_eps=1e-5,
        tie_embeddings=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--cache", type=Path, required=True, help="folder of compiled programs")
    parser.add_argument("--began", type=float, default=LOADED, help="when the process was started, seconds since 1970")
    args = parser.parse_args()
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    keep_programs(args.cache)
    model = smd.Decoder(model_config(args.layers))
    # Numbers from numpy, which compiles nothing: a user's weights come from a file.
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: 0.02 * rng.standard_normal(x.shape, np.float32), param_shapes(model))
    tokenizer = byte_tokenizer(chat=False)
    # As many tokens as the model has embeddings, or the loop would refuse the pair.
    tokenizer.add_tokens([f"<unused {number}>" for number in range(model.config.vocab_size - len(tokenizer))])
    task = ReasoningGymTask("chain_sum", seed=0, size=100, parameters=())
    ends = (eos_token_id(tokenizer), pad_token_id(tokenizer))
    config = smd.GRPOConfig(
        prompts_per_step=2,
        group_size=4,
        prompt_width=96,
        policy=smd.eviction.H2O(),
        rollout=smd.RolloutConfig(32, 48, 16, *ends),
    )
    loop = smd.GRPOLoop(model, task, tokenizer, optax.adamw(1e-6), config)
    state = smd.init_state(jax.tree.map(jax.numpy.asarray, params), loop.optimizer, jax.random.key(0))
    built = time.time()
    state, _ = loop.step(state)
    jax.block_until_ready(state)
    first = time.time()
    state, _ = loop.step(state)
    jax.block_until_ready(state)
    row = {"engine": "ours", "what": "first training step", "device": "cpu", "layers": args.layers}
    row |= {"parameters": sum(x.size for x in jax.tree.leaves(params)), "seconds": first - args.began}
    row |= {"import_seconds": IMPORTED - args.began, "build_seconds": built - IMPORTED}
    row |= {"first_step_seconds": first - built, "second_step_seconds": time.time() - first}
    row |= {"versions": {"python": sys.version.split()[0], "jax": jax.__version__}}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
