"""A whole GRPO step of smd_jax, `smd_jax.GRPOLoop.step`. Started by `bench/step.py`.

With a budget: R-KV in the sampler and shadow masks in the learner. Without: a full cache and a dense learner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import common
import whole_step

common.one_thread()  # before jax is imported

import jax  # noqa: E402
import optax  # noqa: E402
from smd_common import adamw  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

import smd_jax as smd  # noqa: E402
from smd_jax.tasks.dataset_task import usable_lengths  # noqa: E402
from smd_jax.tasks.task import Prompt, Row  # noqa: E402
from smd_jax.text.prompts import pad_token_id  # noqa: E402


@dataclass(frozen=True)
class Questions:
    """The prompts of the benchmark as a task."""

    texts: list[str]
    graded: whole_step.Reward

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Row:
        return {"prompt": [{"role": "user", "content": self.texts[index]}]}

    def reward(self, prompts: Sequence[Prompt], completions: Sequence[Any], **columns: Sequence[Any]) -> list[float]:
        texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
        return self.graded(texts)


def main() -> None:
    args = common.settings()
    config, params = smd.load_checkpoint(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    task = Questions(whole_step.questions(args), whole_step.Reward())
    sparse = args.budget is not None
    grpo = smd.GRPOConfig(
        prompts_per_step=len(task),
        group_size=args.group,
        prompt_width=int(usable_lengths(task, tokenizer).max()),
        policy=smd.eviction.RKV() if sparse else smd.eviction.Dense(),
        # A policy that never evicts reads neither budget nor buffer. Without an end token no completion ends early.
        rollout=smd.RolloutConfig(
            max_new_tokens=args.new_tokens,
            budget=args.budget or 1,
            buffer=args.buffer,
            pad_token_id=pad_token_id(tokenizer),
        ),
        update=smd.UpdateConfig(
            visibility="shadow" if sparse else "dense",
            loss=smd.losses.dapo(),
            correction=smd.corrections.Shadow() if sparse else smd.corrections.Naive(),
            microbatch_size=args.microbatch,
            rows_per_prompt=args.rows_per_prompt,
        ),
    )
    optimizer = optax.chain(optax.clip_by_global_norm(common.MAX_GRADIENT_NORM), adamw())
    loop = smd.GRPOLoop(smd.Decoder(config), task, tokenizer, optimizer, grpo)
    state = smd.init_state(params, optimizer, jax.random.key(0))
    parameters = sum(x.size for x in jax.tree.leaves(params))
    del params  # the first update donates it
    clock = whole_step.StepClock(args, task.graded)
    differences = []
    for _ in range(clock.updates):
        clock.begin()
        state, metrics = loop.step(state)
        jax.block_until_ready(state)
        clock.end()
        differences.append(float(metrics["sampling/sampling_logp_difference/max"]))
    more = {"budget": args.budget, "buffer": args.buffer if sparse else None, "rows_per_prompt": args.rows_per_prompt}
    more |= {"max_abs_dlogp": max(differences)}
    clock.report_steps("ours" if sparse else "ours-dense", parameters, ["smd_jax", "jax", "jaxlib", "flax"], more)


if __name__ == "__main__":
    main()
