"""GRPO with shadow masks on GSM8K, from a Hugging Face checkpoint directory.

Input      --model DIR   config.json, safetensors and tokenizer of a Llama, Qwen2/2.5 or Qwen3 model
           --data FILE   GSM8K rows, one {"question", "answer"} object a line; --eval FILE likewise (optional)
Command    python experiments/gsm8k.py --model Qwen2.5-1.5B-Instruct --data train.jsonl --eval test.jsonl --fsdp 8
           With no model at hand, a small random one shows the loop at work, on CPU in half a minute:
             python -m smd_jax.testing runs/tiny-qwen2
             python experiments/gsm8k.py --model runs/tiny-qwen2 --data train.jsonl --steps 3 --prompts 2 --group 4 \
               --response-tokens 64 --budget 64 --buffer 16
Differs    from Sparse-RL's set-up (arXiv:2601.10079): the learner replays the sampler's visibility, so that there is no
           importance weight and nothing to reject; R-KV decides per layer and KV head.
Cost       not measured on a real model
Result     runs/gsm8k: metrics.jsonl, training.png, checkpoints, and the trained model as a Hugging Face checkpoint
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
import optax
import tyro
from transformers import AutoTokenizer

import smd_jax as smd
from flags import explained, stopped_in_order
from smd_jax.commands.compilation_cache import keep_programs
from smd_jax.losses.distillation import Direction
from smd_jax.memory.compiled import loop_memory
from smd_jax.memory.plan import fit_evaluation, fit_loop, parse_bytes
from smd_jax.model.weights import check_replaceable
from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.monitor.plots import plot_training
from smd_jax.monitor.progress import rollout_report, summary_table
from smd_jax.sampler.fixed_batch import cache_bytes
from smd_jax.sharding import make_mesh, shard_tree
from smd_jax.tasks.gsm8k import Gsm8kTask, load_gsm8k
from smd_jax.tasks.task import longest_prompt
from smd_jax.text.prompts import eos_token_id, pad_token_id
from smd_jax.train.journal import EVALUATIONS_FILE, METRICS_FILE
from smd_jax.train.run import RunConfig, check_directory, train
from smd_jax.train.settings import split_settings
from smd_jax.train.verdict import verdict

POLICIES: dict[str, smd.eviction.EvictionPolicy] = {
    "rkv": smd.eviction.RKV(),
    "snapkv": smd.eviction.SnapKV(),
    "h2o": smd.eviction.H2O(),
    "streaming_llm": smd.eviction.StreamingLLM(),
    "dense": smd.eviction.Dense(),
}

LOSSES: dict[str, smd.LossConfig] = {
    "grpo": smd.losses.grpo(),
    "bnpo": smd.losses.bnpo(),
    "dr_grpo": smd.losses.dr_grpo(),
    "dapo": smd.losses.dapo(),
    "cispo": smd.losses.cispo(),
}

# Only with shadow masks does the learner see what the sampler saw; the others correct a dense learner, or do not.
CORRECTIONS: dict[str, smd.corrections.Correction] = {
    "shadow": smd.corrections.Shadow(),
    "naive": smd.corrections.Naive(),
    "bypass": smd.corrections.Bypass(),
    "tis": smd.corrections.TIS(),
    "icepop": smd.corrections.IcePop(),
    "sparse_rl": smd.corrections.SparseRL(),
}


@dataclass(frozen=True)
class Args:
    """Trains a checkpoint on GSM8K with rollouts under a fixed KV budget."""

    model: Path  # Hugging Face checkpoint directory
    data: Path  # JSONL file with the training rows
    eval: Path | None = None  # JSONL file with rows to evaluate on, before and after
    eval_rows: int = 256  # how many of them
    correction: Literal["shadow", "naive", "bypass", "tis", "icepop", "sparse_rl"] = "shadow"  # of the mismatch
    distill: Direction | Literal["none", "auto"] = "auto"  # second track; auto: forward with shadow masks, else none
    distill_coef: float = 0.1  # its weight in the loss
    distill_fraction: float = 0.25  # share of the rows that get the dense teacher's forward pass
    policy: Literal["rkv", "snapkv", "h2o", "streaming_llm", "dense"] = "rkv"  # eviction policy of the sampler
    budget: int = 512  # keys kept per layer and KV head
    buffer: int = 128  # queries between two compressions
    prefill_chunk: int | None = None  # columns of a prompt read at once; all by default
    quant_bits: Literal[8, 4, 2] | None = None  # of the cache's codes, in groups of 32; full precision by default
    prompt_tokens: int | None = None  # columns of the prompt; by default those of the longest in the data
    response_tokens: int = 1024  # longest response
    min_tokens: int = 0  # shortest response
    temperature: float = 1.0  # of the sampler
    top_k: int = 0  # keep so many tokens; 0 keeps all. The learner replays this filter, and the two below
    top_p: float = 1.0  # keep the likeliest tokens that have this probability together
    min_p: float = 0.0  # keep tokens at least this many times as likely as the likeliest
    stop: tuple[str, ...] = ()  # texts that end a response, and stay in it
    prompts: int = 16  # per rollout
    group: int = 8  # completions per prompt
    minibatches: int = 1  # optimizer steps per rollout
    microbatch: int | None = None  # rows of one forward and backward pass; all by default
    decode_rows: int | None = None  # completions decoded at once, through which the others go; all by default
    memory: str | None = None  # of a device, such as 80GiB: chooses microbatch and completions decoded at once
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"] = "grpo"  # with the bounds of its paper
    beta: float = 0.0  # coefficient of the k3 KL to the initial policy
    learning_rate: float = 1e-6
    steps: int = 100  # rollouts
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # compute dtype; parameters are float32
    export_dtype: Literal["bfloat16", "float32"] = "float32"  # small steps are lost in bfloat16
    data_parallel: int = 1  # mesh axis "data"
    fsdp: int = 1  # mesh axis "fsdp"
    tensor: int = 1  # mesh axis "tensor"
    seed: int = 0
    checkpoint_every: int = 20  # rollouts
    runs: Path = Path("runs/gsm8k")
    resume: bool = False  # continue from the newest checkpoint under runs


def main(args: Args) -> None:
    keep_programs()
    export = args.runs / "model"
    with explained(Args):
        check_directory(args.runs, args.resume)
        check_replaceable(export)
    with jax.default_device(jax.devices("cpu")[0]):  # no single accelerator need hold the whole model
        config, params = smd.load_checkpoint(args.model)
    with explained(Args):
        loop = make_loop(args, smd.Decoder(replace(config, dtype=args.dtype), remat=True))
        loop, plan = fit_loop(loop, params, memory_of(args))
    summary_table(plan.title, ("", "rollout", "update"), plan.rows())
    loop = replace(loop, report=rollout_report())
    params = shard_tree(params, loop.mesh)
    reference = params if loop.config.update.needs_reference else None
    state = smd.init_state(params, loop.optimizer, jax.random.key(args.seed), reference)
    if args.memory is not None:
        compiled = loop_memory(loop, state)
        summary_table(compiled.title, ("", "rollout", "update"), compiled.rows())
    compared, noted = split_settings(loop.config)
    state = train(
        loop,
        state,
        # Before the first rollout and after the last.
        RunConfig(args.steps, args.checkpoint_every, evaluate_every=args.steps if args.eval else 0),
        args.runs,
        config={
            "model": replace(config, dtype=args.dtype),
            "loop": compared,
            "data": args.data.resolve(),
            "learning_rate": args.learning_rate,
        },
        noted={"loop": noted, "model": args.model.resolve(), "memory": args.memory, "eval_rows": args.eval_rows},
        resume=args.resume,
        evaluate=lambda now: {f"eval/{name}": x for name, x in evaluate(args, loop, now.params).items()},
        label="gsm8k",
    )
    trained = jax.device_get(state.params)
    smd.save_checkpoint(export, trained, config, dtype=args.export_dtype, tokenizer_from=args.model)
    report(args, loop)
    print(f"trained model: {export}")


def make_loop(args: Args, model: smd.Decoder) -> smd.GRPOLoop:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    shadow = args.correction == "shadow"
    distills = args.distill != "none" if args.distill != "auto" else shadow and args.policy != "dense"
    direction: Direction = "forward" if args.distill in ("none", "auto") else args.distill
    tasks = [load_gsm8k(path) for path in (args.data, args.eval) if path is not None]
    config = smd.GRPOConfig(
        prompts_per_step=args.prompts,
        group_size=args.group,
        prompt_width=args.prompt_tokens or max(longest_prompt(tokenizer, task) for task in tasks),
        policy=POLICIES[args.policy],
        decode_rows=args.decode_rows,
        stop_strings=args.stop,
        rollout=smd.RolloutConfig(
            args.response_tokens,
            args.budget,
            args.buffer,
            eos_token_id(tokenizer),
            pad_token_id(tokenizer),
            args.min_tokens,
            args.prefill_chunk,
            smd.SamplingConfig(args.temperature, args.top_k, args.top_p, args.min_p),
            quant=None if args.quant_bits is None else smd.QuantConfig(args.quant_bits),
        ),
        update=smd.UpdateConfig(
            "shadow" if shadow else "dense",
            replace(LOSSES[args.loss_type], beta=args.beta),
            correction=CORRECTIONS[args.correction],
            distill=smd.DistillConfig(direction, args.distill_coef, args.distill_fraction) if distills else None,
            microbatch_size=args.microbatch,
        ),
        minibatches=args.minibatches,
        seed=args.seed,
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(args.learning_rate, weight_decay=0.0))
    mesh = make_mesh(args.data_parallel, args.fsdp, args.tensor)
    return smd.GRPOLoop(model, tasks[0], tokenizer, optimizer, config, mesh)


def memory_of(args: Args) -> int | None:
    return None if args.memory is None else parse_bytes(args.memory)


def evaluate(args: Args, loop: smd.GRPOLoop, params: smd.model.Params) -> Mapping[str, float]:
    """Mean reward on the evaluation rows, decoded under the budget and with the full cache."""
    assert args.eval is not None
    task = load_gsm8k(args.eval)
    held_out = Gsm8kTask(task.rows[: args.eval_rows])
    full = replace(loop.config.rollout, quant=None, prefill_chunk=None)
    with explained(Args):  # a dense cache needs more than the budgeted one that fits
        dense = fit_evaluation(loop, params, memory_of(args), policy=smd.eviction.Dense(), config=full)
    key = jax.random.key(args.seed + 1)
    return {
        name: arm.evaluate(params, held_out, key, policy=arm.config.policy, config=arm.config.rollout)
        for name, arm in {"sparse": loop, "dense": dense}.items()
    }


def report(args: Args, loop: smd.GRPOLoop) -> None:
    history = read_metrics(args.runs / METRICS_FILE)
    plot_training({args.correction: history}, args.runs / "training.png")
    sizes = loop.config.rollout
    rows = (loop.config.prompt_width, loop.config.decode_rows or loop.config.completions_per_step)
    kept = cache_bytes(loop.model.shape, loop.config.policy, sizes, *rows)
    full = cache_bytes(loop.model.shape, smd.eviction.Dense(), replace(sizes, quant=None), *rows)
    rewards = list[tuple[str, float, float]]()
    if args.eval is not None:
        evaluations = read_metrics(args.runs / EVALUATIONS_FILE)
        before, after = evaluations[0], evaluations[-1]
        rewards = [(f"reward, {x} decoding", before[f"eval/{x}"], after[f"eval/{x}"]) for x in ("sparse", "dense")]
    rewards.append(("reward, training", history[0]["reward"], history[-1]["reward"]))
    summary_table(f"GSM8K, {len(history)} rollouts", ("", "before", "after"), rewards)
    largest = max(row["sampling/sampling_logp_difference/max"] for row in history)
    summary_table(
        "sampler against learner",
        ("", "value"),
        [("max |Δ log p|, nats", largest), ("KV cache while decoding, bytes", kept), ("the same, dense", full)],
    )
    for line in verdict(history):
        print(line)


if __name__ == "__main__":
    with stopped_in_order():
        main(tyro.cli(Args))
