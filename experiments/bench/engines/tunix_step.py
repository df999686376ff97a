"""A whole GRPO step of Tunix: GRPOLearner.train() with its vanilla sampler. Started by `bench/step.py`.

Its Llama reads the checkpoint. Settings other than the defaults: beta 0 (no reference model), temperature 1, sizes and
optimizer of the benchmark, and padding with "<|endoftext|>": Tunix takes every token that equals the padding for
padding, and SmolLM2's own is also the end of every message. Sampler and trainer share one model. With --full-length
no token is the one that ends a response.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import common
import whole_step

common.use_threads(common.asked_threads())  # before jax is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from transformers import AutoTokenizer, PreTrainedTokenizerBase  # noqa: E402
from tunix.models.llama3.model import Llama3, ModelConfig  # noqa: E402
from tunix.models.llama3.params import create_model_from_safe_tensors  # noqa: E402
from tunix.rl import rl_cluster  # noqa: E402
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner  # noqa: E402
from tunix.rl.rollout.base_rollout import RolloutConfig  # noqa: E402

NEVER = -1  # an end of sequence that no token is
PAD = "<|endoftext|>"


class Reward:
    """The grader with Tunix' signature."""

    __name__ = "reward"  # under which Tunix logs it

    def __init__(self, grader: whole_step.Grader) -> None:
        self.grader = grader

    def __call__(self, prompts, completions, answer, **columns) -> list[float]:
        return self.grader(completions, [str(one) for one in answer])


class Cluster(rl_cluster.RLCluster):
    """RLCluster that remembers how long the prompts and completions of its last generation were."""

    tokens: list[tuple[int, int]]

    def generate(self, *args, **kwargs):
        out = super().generate(*args, **kwargs)
        prompts = (np.asarray(out.left_padded_prompt_tokens) != self.tokenizer.pad_id()).sum(axis=1).tolist()
        self.tokens = [(before, len(ids)) for before, ids in zip(prompts, out.tokens, strict=True)]
        return out


def llama_config(directory: str) -> ModelConfig:
    """The checkpoint's sizes in Tunix' words."""
    sizes = common.read_sizes(directory)
    found = json.loads((Path(directory) / "config.json").read_text())
    return ModelConfig(
        num_layers=sizes.layers,
        vocab_size=sizes.vocabulary,
        embed_dim=sizes.hidden,
        hidden_dim=sizes.ffn,
        num_heads=sizes.heads,
        head_dim=sizes.head_dim,
        num_kv_heads=sizes.kv_heads,
        rope_theta=found["rope_theta"],
        norm_eps=found["rms_norm_eps"],
        weight_tying=sizes.tied,
    )


def cluster_config(args: argparse.Namespace, mesh: jax.sharding.Mesh, width: int, steps: int):
    """One mesh for all roles; Tunix counts batches in prompts, each of which becomes a group."""
    prompts = args.completions // args.group
    adamw = optax.adamw(common.LEARNING_RATE, *common.BETAS, eps=common.ADAM_EPS, weight_decay=common.WEIGHT_DECAY)
    return rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys((rl_cluster.Role.ACTOR, rl_cluster.Role.ROLLOUT), mesh),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.chain(optax.clip_by_global_norm(whole_step.MAX_GRADIENT_NORM), adamw),
            eval_every_n_steps=steps + 1,
            max_steps=steps + 1,
            mini_batch_size=prompts,
            train_micro_batch_size=args.microbatch // args.group,
            rollout_micro_batch_size=prompts,
            compute_logps_micro_batch_size=prompts,
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=args.new_tokens,
            max_prompt_length=width,
            kv_cache_size=width + args.new_tokens,
            temperature=1.0,
            eos_tokens=[NEVER] if args.full_length else None,
        ),
    )


def batches(
    clock: whole_step.StepClock, cluster: Cluster, prompts: list[str], answers: list[str]
) -> Iterator[dict[str, list[str]]]:
    """The same prompts in every step. The learner asks for the next ones when a step is over."""
    for _ in range(clock.updates):
        clock.begin()
        yield {"prompts": prompts, "answer": answers}
        jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
        clock.end_step(cluster.tokens)


def main() -> None:
    args = whole_step.parser(__doc__).parse_args()
    if args.microbatch % args.group:
        raise SystemExit(f"expected a microbatch of whole groups of {args.group}, as Tunix has; got {args.microbatch}")
    grader = whole_step.Grader()
    clock = whole_step.StepClock(args, grader)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = PAD
    rows = whole_step.problems(args)
    messages = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    prompts = [tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in messages]
    width = max(len(tokenizer.encode(text)) for text in prompts)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    model: Llama3 = create_model_from_safe_tensors(args.model, llama_config(args.model), mesh, jnp.float32)
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    cluster = Cluster(actor=model, tokenizer=tokenizer, cluster_config=cluster_config(args, mesh, width, clock.updates))
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=args.group, beta=0.0), Reward(grader))
    answers = [row["answer"] for row in rows]
    learner.train(batches(clock, cluster, prompts, answers))
    clock.report_steps("tunix", parameters, ["google-tunix", "jax", "flax"])


if __name__ == "__main__":
    main()
