"""Sampling with smd_jax, as `smd_jax.sampler.fixed_batch` and its engine do it. Started by `bench/rollout.py`.

Command    python experiments/bench/engines/smd_rollout.py --policy knorm --new-tokens 512
           python experiments/bench/engines/smd_rollout.py --policy knorm --new-tokens 2048 --rows 256 --spread log \
                  --fixed

The difference of sampler and learner is measured after the timing, on four rows of the last turn.
"""

from __future__ import annotations

import argparse

import common
import generation
import numpy as np

common.one_thread()  # before jax is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from smd_common import max_difference, model_config  # noqa: E402

import smd_jax as smd  # noqa: E402
from smd_jax.sampler.keys import row_keys  # noqa: E402
from smd_jax.testing import random_params  # noqa: E402

POLICIES = {
    "knorm": smd.eviction.Knorm(),
    "snapkv": smd.eviction.SnapKV(),
    "h2o": smd.eviction.H2O(),
    "dense": smd.eviction.Dense(),
}
CHECKED = 4  # rows whose log-probabilities the learner computes again


def response_lengths(rows: int, longest: int, spread: str) -> np.ndarray:
    """From a 32nd of the longest on, in even steps or in even ratios, in random order."""
    shortest = max(longest // 32, 1)
    step = np.linspace(0, 1, rows)
    exact = shortest + step * (longest - shortest) if spread == "even" else shortest * (longest / shortest) ** step
    return np.random.default_rng(0).permutation(np.rint(exact).astype(np.int32))


class Sampling:
    """Samples one turn, by the engine or as fixed batches."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.marks = generation.Marks()
        self.model = smd.Decoder(model_config(True, args.prompt + args.new_tokens))
        self.params = random_params(self.model.config)
        self.policy = POLICIES[args.policy]
        # Groups as long as a segment: the longest that there can be, and the smallest table of key ranges.
        quant = None if args.bits is None else smd.QuantConfig(args.bits, group=args.buffer)
        self.config = smd.RolloutConfig(args.new_tokens, args.budget, args.buffer, quant=quant)
        rows = args.rows or args.batch
        tokens = np.asarray(generation.prompts(rows, args.prompt, common.VOCABULARY), np.int32)
        self.prompts = smd.PromptBatch(tokens=jnp.asarray(tokens), valid=jnp.ones(tokens.shape, bool))
        self.limits = np.full(rows, args.new_tokens, np.int32)
        if args.rows is not None:
            self.limits = response_lengths(rows, args.new_tokens, args.spread)
        self.engine = smd.Engine(self.model, self.policy, self.config, decode_rows=args.batch)

    def turn(self, number: int) -> tuple[smd.Trajectory, float]:
        """All rows, and the share of live rows among those decoded."""
        key = jax.random.key(number)
        return self.fixed(key) if self.args.fixed else self.continuous(key)

    def continuous(self, key: jax.Array) -> tuple[smd.Trajectory, float]:
        segments = 0
        self.marks.begin()

        def report(progress: smd.sampler.Progress) -> None:
            nonlocal segments
            segments += 1
            self.marks.mark(segments * self.args.buffer)

        done = self.engine.run(self.params, self.prompts, key, limits=self.limits, report=report)
        return jax.block_until_ready(done.trajectory), float(done.stats.utilisation)

    def fixed(self, key: jax.Array) -> tuple[smd.Trajectory, float]:
        """Batches in the order of arrival, each until its longest row is done; the last of them."""
        batch = self.args.batch
        steps = 0
        trajectory = None
        keys = row_keys(key, len(self.limits))
        for start in range(0, len(self.limits), batch):
            rows = slice(start, start + batch)
            prompts = smd.PromptBatch(tokens=self.prompts.tokens[rows], valid=self.prompts.valid[rows])
            limits = self.limits[rows]
            trajectory = smd.rollout(
                self.model, self.params, prompts, keys[rows], policy=self.policy, config=self.config, limits=limits
            )
            jax.block_until_ready(trajectory)
            steps += int(limits.max())
        assert trajectory is not None
        return trajectory, float(self.limits.sum() / (steps * batch))

    @property
    def parameters(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.params))

    def memory(self) -> dict[str, int]:
        """Bytes of the program of a segment, and of its keys and values by the formula."""
        found = smd.memory.segment_memory(self.engine, self.params, self.args.prompt)
        c = self.model.config
        args = self.args
        slots = args.budget + args.buffer if self.policy.evicts else args.prompt + args.new_tokens
        expected = 2 * c.num_layers * c.num_kv_heads * slots * c.head_dim * jnp.dtype(c.dtype).itemsize * args.batch
        return {"cache_bytes": found.state, "expected_cache_bytes": expected, "temp_bytes": found.temporary}


def main() -> None:
    parser = generation.parser(__doc__ or "")
    parser.add_argument("--policy", choices=tuple(POLICIES), default="knorm")
    parser.add_argument("--bits", type=int, choices=(8, 4, 2), default=None, help="of a quantised cache")
    parser.add_argument("--rows", type=int, default=None, help="responses of different lengths; none: one full batch")
    parser.add_argument("--spread", choices=("log", "even"), default="log", help="of the lengths of --rows")
    parser.add_argument("--fixed", action="store_true", help="fixed batches in place of the engine")
    args = parser.parse_args()
    clock = common.Clock(args, warmup=1)
    sampling = Sampling(args)
    trajectory = None
    utilisation = None
    for number in range(clock.updates):
        clock.begin()
        trajectory, utilisation = sampling.turn(number)
        clock.end()
        if not number:
            sampling.marks.forget()
    assert trajectory is not None
    marks = sampling.marks if args.rows is None else None  # a step has rows at different places
    row = generation.row(name(args), args, clock.seconds, marks, int(sampling.limits.sum()))
    row |= {"budget": args.budget, "buffer": args.buffer} if sampling.policy.evicts else {}
    row |= {"rows": len(sampling.limits), "spread": args.spread if args.rows else None, "utilisation": utilisation}
    # Peak memory first: what follows is not in it.
    measured = clock.measured(sampling.parameters, ["smd_jax", "jax", "jaxlib", "flax"])
    row |= sampling.memory()
    row["max_abs_dlogp"] = max_difference(sampling.model, sampling.params, trajectory, CHECKED)
    clock.say(row | measured)


def name(args: argparse.Namespace) -> str:
    """As in the rows of `bench/rollout.py`."""
    if args.rows is not None:
        return f"ours-{'fixed' if args.fixed else 'continuous'}-{args.spread}"
    policy = "ours" if args.policy == "knorm" else f"ours-{args.policy}"
    return policy if args.bits is None else f"{policy}-{args.bits}bit"


if __name__ == "__main__":
    main()
