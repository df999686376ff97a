"""Sampling with smd_jax's engine. Started by `bench/rollout.py`.

The largest sampler–learner difference is measured after the timing, on four rows of the last turn.
"""

from __future__ import annotations

from types import SimpleNamespace

import common
import generation
import numpy as np

common.one_thread()  # before jax is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from smd_common import max_difference, model_config  # noqa: E402

import smd_jax as smd  # noqa: E402
from smd_jax.testing import random_params  # noqa: E402

POLICIES = {
    "knorm": smd.eviction.Knorm(),
    "h2o": smd.eviction.H2O(),
    "dense": smd.eviction.Dense(),
}
CHECKED = 4  # rows whose log-probabilities the learner computes again


class Sampling:
    """The sampler of the benchmark."""

    def __init__(self, args: SimpleNamespace) -> None:
        self.args = args
        self.marks = generation.Marks()
        self.model = smd.Decoder(model_config(args.prompt + args.new_tokens))
        self.params = random_params(self.model.config)
        self.policy = POLICIES[args.policy]
        # The longest possible group, a segment, needs the smallest table of key ranges.
        quant = None if args.bits is None else smd.QuantConfig(bits=args.bits, group=args.buffer)
        self.config = smd.RolloutConfig(args.new_tokens, args.budget, args.buffer, quant=quant)
        tokens = np.asarray(generation.prompts(args.batch, args.prompt, common.VOCABULARY), np.int32)
        self.prompts = smd.PromptBatch(tokens=jnp.asarray(tokens), valid=jnp.ones(tokens.shape, bool))
        self.engine = smd.Engine(self.model, self.policy, self.config, decode_rows=args.batch)

    def turn(self, number: int) -> smd.Trajectory:
        """Samples all rows."""
        segments = 0
        self.marks.begin()

        def report(progress: smd.sampler.Progress) -> None:
            nonlocal segments
            segments += 1
            self.marks.mark(segments * self.args.buffer)

        done = self.engine.run(self.params, self.prompts, jax.random.key(number), report=report)
        return jax.block_until_ready(done.trajectory)

    @property
    def parameters(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.params))

    def memory(self) -> dict[str, int]:
        """Bytes of the cache, measured and by the formula, and of the segment program's temporaries."""
        found = smd.memory.segment_memory(self.engine, self.params, self.args.prompt)
        c = self.model.config
        args = self.args
        slots = args.budget + args.buffer if self.policy.evicts else args.prompt + args.new_tokens
        expected = 2 * c.num_layers * c.num_kv_heads * slots * c.head_dim * jnp.dtype(c.dtype).itemsize * args.batch
        return {"cache_bytes": found.state, "expected_cache_bytes": expected, "temp_bytes": found.temporary}


def main() -> None:
    args = common.settings()
    clock = common.Clock(args, warmup=1)
    sampling = Sampling(args)
    trajectory = None
    for number in range(clock.updates):
        clock.begin()
        trajectory = sampling.turn(number)
        clock.end()
        if not number:
            sampling.marks.forget()
    assert trajectory is not None
    row = generation.row(name(args), args, clock.seconds, sampling.marks)
    row |= {"budget": args.budget, "buffer": args.buffer} if sampling.policy.evicts else {}
    # Before the checks below, which would raise the peak memory.
    measured = clock.measured(sampling.parameters, ["smd_jax", "jax", "jaxlib", "flax"])
    row |= sampling.memory()
    row["max_abs_dlogp"] = max_difference(sampling.model, sampling.params, trajectory, CHECKED)
    clock.say(row | measured)


def name(args: SimpleNamespace) -> str:
    """The engine's name in the rows of `bench/rollout.py`."""
    policy = "ours" if args.policy == "knorm" else f"ours-{args.policy}"
    return policy if args.bits is None else f"{policy}-{args.bits}bit"


if __name__ == "__main__":
    main()
