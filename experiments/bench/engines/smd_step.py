"""A whole GRPO step of smd_jax: `smd_jax.GRPOLoop.step`, which `smd-train` runs. Started by `bench/step.py`.

Command    python experiments/bench/engines/smd_step.py --model runs/smollm2 --data train.jsonl --threads 2 \
                  --completions 16 --new-tokens 32                                   (dense)
           python experiments/bench/engines/smd_step.py --model runs/smollm2 --data train.jsonl --threads 2 \
                  --completions 16 --new-tokens 32 --budget 128 --buffer 32

With a budget: R-KV in the sampler (as in the preset gsm8k) and shadow masks in the learner. Without: a dense cache and
a dense learner. Activations are kept, not computed again. No second track.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import common
import whole_step

common.use_threads(common.asked_threads())  # before jax is imported

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

import smd_jax as smd  # noqa: E402
from smd_jax.tasks.task import Prompt, Row, longest_prompt  # noqa: E402
from smd_jax.text.prompts import eos_token_id, pad_token_id  # noqa: E402
from smd_jax.train.samples import Samples  # noqa: E402

POLICIES: dict[str, smd.eviction.EvictionPolicy] = {
    "rkv": smd.eviction.RKV(),
    "knorm": smd.eviction.Knorm(),
    "snapkv": smd.eviction.SnapKV(),
}


class Problems:
    """The rows of the benchmark as a task of ours."""

    def __init__(self, rows: list[dict[str, str]], grader: whole_step.Grader) -> None:
        self.rows = rows
        self.grader = grader

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return dict(self.rows[index])

    def reward(self, prompts: Sequence[Prompt], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        return self.grader(completions, columns["answer"])


@dataclass(frozen=True)
class Loop(smd.GRPOLoop):
    """GRPOLoop that remembers how long the prompts and completions of its last rollout were."""

    tokens: list[tuple[int, int]] = field(default_factory=list, kw_only=True)

    def collect(self, state: smd.TrainState, index: int) -> Samples:
        samples = super().collect(state, index)
        valid = np.asarray(samples.trajectory.valid)
        width = self.config.prompt_width
        lengths = zip(valid[:, :width].sum(axis=1).tolist(), valid[:, width:].sum(axis=1).tolist(), strict=True)
        self.tokens[:] = lengths
        return samples


def make_loop(args: argparse.Namespace, grader: whole_step.Grader) -> tuple[Loop, smd.model.Params]:
    config, params = smd.load_checkpoint(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    task = Problems(whole_step.problems(args), grader)
    sparse = args.budget is not None
    rollout = smd.RolloutConfig(
        args.new_tokens,
        args.budget or args.new_tokens,  # a policy that never evicts reads neither
        args.buffer or args.new_tokens,
        eos_token_id=None if args.full_length else eos_token_id(tokenizer),
        pad_token_id=pad_token_id(tokenizer),
    )
    update = smd.UpdateConfig(
        "shadow" if sparse else "dense",
        smd.losses.dapo(),
        correction=smd.corrections.Shadow() if sparse else smd.corrections.Naive(),
        microbatch_size=args.microbatch,
    )
    grpo = smd.GRPOConfig(
        prompts_per_step=len(task),
        group_size=args.group,
        prompt_width=longest_prompt(tokenizer, task),
        policy=POLICIES[args.policy] if sparse else smd.eviction.Dense(),
        rollout=rollout,
        update=update,
    )
    return Loop(smd.Decoder(config), task, tokenizer, optimizer(), grpo), params


def optimizer() -> optax.GradientTransformation:
    adamw = optax.adamw(common.LEARNING_RATE, *common.BETAS, eps=common.ADAM_EPS, weight_decay=common.WEIGHT_DECAY)
    return optax.chain(optax.clip_by_global_norm(whole_step.MAX_GRADIENT_NORM), adamw)


def main() -> None:
    parser = whole_step.parser(__doc__ or "")
    parser.add_argument("--budget", type=int, default=None, help="keys kept; none: a dense cache and a dense learner")
    parser.add_argument("--buffer", type=int, default=None, help="queries between two compressions")
    parser.add_argument("--policy", choices=tuple(POLICIES), default="rkv", help="which keys are kept")
    args = parser.parse_args()
    if (args.budget is None) != (args.buffer is None):
        raise SystemExit("expected --budget and --buffer, or neither")
    grader = whole_step.Grader()
    loop, params = make_loop(args, grader)
    clock = whole_step.StepClock(args, grader)
    state = smd.init_state(params, loop.optimizer, jax.random.key(0))
    del params  # the state's own are the ones that are donated
    differences = []
    for _ in range(clock.updates):
        clock.begin()
        state, metrics = loop.step(state)
        jax.block_until_ready(state)
        clock.end_step(loop.tokens)
        differences.append(metrics["sampling/sampling_logp_difference/max"])
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    more = {"budget": args.budget, "buffer": args.buffer, "max_abs_dlogp": max(differences)}
    name = "ours" if args.budget is not None else "ours-dense"
    clock.report_steps(name, parameters, ["smd_jax", "jax", "jaxlib", "flax"], more)


if __name__ == "__main__":
    main()
