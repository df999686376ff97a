"""Sampling with smd_jax's engine. Started by `bench/rollout.py`.

The largest sampler–learner difference is measured after the timing, on four rows of the last turn.
"""

from __future__ import annotations

from types import SimpleNamespace

import common
import generation

common.one_thread()  # before jax is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from smd_common import max_difference, model_config  # noqa: E402

import smd_jax as smd  # noqa: E402
from smd_jax.testing import random_params  # noqa: E402

POLICIES = {"knorm": smd.eviction.Knorm(), "h2o": smd.eviction.H2O(), "dense": smd.eviction.Dense()}
CHECKED = 4  # rows whose log-probabilities the learner computes again


def main() -> None:
    args = common.settings()
    clock = common.Clock(args, warmup=1)
    marks = generation.Marks()
    model = smd.Decoder(model_config(args.prompt + args.new_tokens))
    params = random_params(model.config)
    policy = POLICIES[args.policy]
    # The longest possible group, a segment, needs the smallest table of key ranges.
    quant = None if args.bits is None else smd.QuantConfig(bits=args.bits, group=args.buffer)
    config = smd.RolloutConfig(max_new_tokens=args.new_tokens, budget=args.budget, buffer=args.buffer, quant=quant)
    tokens = jnp.asarray(generation.prompts(args.batch, args.prompt, common.VOCABULARY), jnp.int32)
    prompts = smd.PromptBatch(tokens=tokens, valid=jnp.ones(tokens.shape, bool))
    engine = smd.Engine(model, policy, config, decode_rows=args.batch)

    def mark_segment(progress: smd.sampler.Progress) -> None:
        marks.mark((len(marks.turns[-1]) + 1) * args.buffer)

    trajectory = None
    for number in range(clock.updates):
        clock.begin()
        marks.begin()
        done = engine.run(params, prompts, jax.random.key(number), report=mark_segment)
        trajectory = jax.block_until_ready(done.trajectory)
        clock.end()
        if not number:
            marks.forget()
    assert trajectory is not None
    row = generation.row(name(args), args, clock.seconds, marks)
    row |= {"budget": args.budget, "buffer": args.buffer} if policy.evicts else {}
    # Before the checks below, which would raise the peak memory.
    parameters = sum(x.size for x in jax.tree.leaves(params))
    measured = clock.measured(parameters, ["smd_jax", "jax", "jaxlib", "flax"])
    memory = smd.memory.segment_memory(engine, params, args.prompt)
    c = model.config
    slots = args.budget + args.buffer if policy.evicts else args.prompt + args.new_tokens
    expected = 2 * c.num_layers * c.num_kv_heads * slots * c.head_dim * jnp.dtype(c.dtype).itemsize * args.batch
    row |= {"cache_bytes": memory.state, "expected_cache_bytes": expected, "temp_bytes": memory.temporary}
    row["max_abs_dlogp"] = max_difference(model, params, trajectory, CHECKED)
    clock.say(row | measured)


def name(args: SimpleNamespace) -> str:
    """The engine's name in the rows of `bench/rollout.py`."""
    policy = "ours" if args.policy == "knorm" else f"ours-{args.policy}"
    return policy if args.bits is None else f"{policy}-{args.bits}bit"


if __name__ == "__main__":
    main()
