"""smd-eval: how good a checkpoint is, decoded with its whole cache and under budgets, side by side.

    smd-eval --model runs/train/model --task gsm8k --decode dense,snapkv:512,rkv:512

Prints the mean reward with its 95 % interval over prompts, lengths, the share of completions that were cut off, bytes
of the cache per sequence, and tokens per second. Of a task that holds rows back it takes the first --rows of them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro

from smd_jax.byte_sizes import show_bytes
from smd_jax.commands.arguments import AttentionName, RewardArgs, TemplateName
from smd_jax.commands.choices import decoder, way_of_decoding
from smd_jax.commands.compilation_cache import keep_programs
from smd_jax.commands.errors import EVALUATION_FLAGS, UserError, plain_warnings, reported, users_mistakes
from smd_jax.commands.limits import check_context, check_devices, check_reachable
from smd_jax.commands.model_source import (
    check_template_kwargs,
    end_token_ids,
    load_tokenizer,
    model_directory,
    shown_tokens,
    with_reachable_padding,
    with_template,
)
from smd_jax.commands.near_names import is_file
from smd_jax.commands.prepare import check_platform, compute_dtype
from smd_jax.commands.task_source import holds_back, parameters_of, rewards_of
from smd_jax.devices.sharding import make_mesh
from smd_jax.eviction.learned import LearnedGate
from smd_jax.message.gate import EVICTION_GATE
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.sampling import SamplingConfig
from smd_jax.message.trajectory import NonFiniteLogitsError
from smd_jax.model.decoder import Decoder
from smd_jax.model.gate_format import load_gate
from smd_jax.model.protocol import Params
from smd_jax.model.weights import load_checkpoint, read_config
from smd_jax.monitor.progress import summary_table
from smd_jax.sampler.config import RolloutConfig
from smd_jax.tasks.build import TaskChoice, build_task
from smd_jax.tasks.dataset_task import first_rows
from smd_jax.tasks.functions import import_function
from smd_jax.tasks.lengths import select_prompts, usable_lengths
from smd_jax.tasks.reward_callers import UnloadableRewardError
from smd_jax.tasks.rewards import TooManyFailures
from smd_jax.text.prompts import pad_token_id
from smd_jax.text.stop_strings import stop_table
from smd_jax.train.decoding import Decode, check_names, split_decodes
from smd_jax.train.evaluation import Evaluated, EvaluationConfig, Evaluator


@dataclass(frozen=True)
class Args:
    """Evaluates a checkpoint on a task, dense and under cache budgets."""

    model: str  # Hugging Face checkpoint directory, or an id on the Hub
    task: str  # as --dataset of smd-train: gsm8k, reasoning_gym:NAME, …
    model_revision: str | None = None  # branch, tag or commit of a model on the Hub; None: its main branch
    tokenizer: str | None = None  # a directory, or an id on the Hub; by default the model's own
    tokenizer_revision: str | None = None  # the same of --tokenizer
    source: str | None = None  # with a ready task: rows from elsewhere in its layout, a Hub id, file or folder
    config: str | None = None  # which of several configurations (subsets)
    split: str | None = None  # by default the rows that the task holds back
    task_parameters: tuple[str, ...] = ()  # of a procedural task, as min_terms=2
    task_size: int = 10_000  # rows of a procedural task, as --dataset-size of smd-train
    task_seed: int = 0  # of a procedural task's rows, as --eval-seed of smd-train, or its --seed
    prompt_column: str | None = None  # text or chat messages; None: "prompt"
    # In front of every prompt, for models with a chat template. It makes chat messages of text prompts, and so of the
    # completions that rewards get: smd.tasks.completion_text takes either
    system_prompt: str | None = None
    chat_template: TemplateName = "auto"  # none: prompts are text, taken as it is; auto: a template is used if there
    chat_template_kwargs: tuple[str, ...] = ()  # what the chat template is told, as enable_thinking=false
    map_function: str | None = None  # path/to/file.py:function or package.module:function, row -> row
    rows: int = 256  # prompts, at most
    reward: tuple[str, ...] = ()  # in place of the task's own: names of docs/rewards.md, or path/to/file.py:function
    reward_weights: tuple[float, ...] = ()  # one for each; 1 by default
    reward_timeout: float | None = 60.0  # seconds of one call of a reward; None: in this process, without a limit
    max_failed_rewards: float = 0.25  # share of a batch's completions without a reward that stops the evaluation
    overlong_cache: int | None = None  # tokens before the limit over which `overlong` rises; None: a fifth of it
    decode: str = "dense"  # ways of decoding: dense, or policy:budget or policy:budget+buffer, with commas between
    gate: Path | None = None  # directory of a trained gate, as smd-train leaves it; for gate:512 in --decode
    sinks: int = 4  # first keys of a sequence that every policy keeps, as in smd-train; a trained gate has its own
    pyramid: bool = False  # larger budgets in the lower layers, the same on average, as in smd-train
    prefill_chunk: int | None = None  # tokens of a prompt read at once, as in smd-train; None: all
    num_generations: int = 1  # completions per prompt
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # draw from so many tokens; 0: from all
    top_p: float = 1.0  # draw from the likeliest tokens that have this probability together
    min_p: float = 0.0  # draw from tokens at least this many times as likely as the likeliest
    quant_bits: Literal[8, 4, 2] | None = None  # of the cache's codes; full precision by default
    max_prompt_length: int | None = None  # tokens; longer prompts are dropped. By default those of the longest
    max_completion_length: int = 256  # tokens
    min_completion_length: int = 0  # tokens
    stop: tuple[str, ...] = ()  # texts that end a completion
    eos_token: tuple[str, ...] = ()  # tokens that end one; by default those of tokenizer and generation_config.json
    batch: int = 64  # completions decoded at once
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: float32 on a CPU, else bfloat16
    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"  # refuse to start on another one
    attention: AttentionName = "auto"  # auto: kernels on Hopper GPUs and TPUs; portable: plain JAX everywhere
    data_parallel: int = 1  # devices among which rows are split; times fsdp and tensor: all that are used
    fsdp: int = 1  # devices among which rows and weights are split
    tensor: int = 1  # devices among which heads and the width of the MLP are split
    seed: int = 0
    json: bool = False  # one JSON object a way of decoding, in place of a table
    debug: bool = False  # show the traceback of every error


def main(words: Sequence[str] | None = None) -> None:
    """The console script."""
    given = list(sys.argv[1:] if words is None else words)
    args = tyro.cli(Args, prog="smd-eval", description=__doc__, args=given)
    with reported(args.debug, EVALUATION_FLAGS), plain_warnings():
        run(args)


def run(args: Args) -> list[Evaluated]:
    """Evaluates, and prints what came of it."""
    keep_programs()
    with users_mistakes():
        check_platform(args.platform)
        directory = model_directory(args.model, args.model_revision)
        model = decoder(read_config(directory, compute_dtype(args.dtype)), args.attention)
        own_tokenizer = load_tokenizer(directory, args.tokenizer, args.tokenizer_revision)
        tokenizer = with_template(with_reachable_padding(own_tokenizer, model.config.vocab_size), args.chat_template)
        parts, gate = ({}, None) if args.gate is None else with_gate(args.gate, model)
        ends = end_token_ids(directory, tokenizer, args.eos_token, model.config.vocab_size)
        stop_table(tokenizer, args.stop, model.config.vocab_size)  # for its errors, before weights are read
        evaluator, dropped = make_evaluator(args, model, tokenizer, gate, ends)
        _, params = load_checkpoint(directory, mesh=evaluator.mesh)
        params = params | parts
    print(dropped, file=sys.stderr)
    print(f"a completion ends with: {shown_tokens(tokenizer, ends)}", file=sys.stderr)
    found = list[Evaluated]()
    try:
        for result in evaluator.each(params, say_progress):
            found.append(result)
            if args.json:
                # As they come: what is done is not lost when the rest is stopped.
                print(json.dumps({"model": args.model, "task": args.task} | result.row), flush=True)
    except (TooManyFailures, UnloadableRewardError, NonFiniteLogitsError) as error:
        raise UserError(str(error)) from error
    if not args.json:
        print_results(f"{args.task}, {args.model}", found)
    return found


def print_results(title: str, results: Sequence[Evaluated]) -> None:
    """A table that fits 80 columns: one line for each way of decoding."""
    prompts, completions = results[0].rewards.shape
    heads = ("decode", "reward", "95 %", "tokens", "cut off", "cache", "tok/s")
    each = "1 completion each" if completions == 1 else f"{completions} completions each"
    summary_table(f"{title}: {prompts} prompts, {each}", heads, [table_row(result) for result in results])
    for result in results:
        failed = int(np.isnan(result.rewards).sum())
        if failed:
            print(f"{result.name}: mean and interval leave out completions without a reward, {failed}")


def table_row(result: Evaluated) -> tuple[str, ...]:
    """The numbers of one way of decoding, as text."""
    low, high = result.interval
    return (
        result.name,
        "-" if math.isnan(result.reward) else f"{result.reward:.4f}",
        "-" if math.isnan(low) else f"{low:.3f}..{high:.3f}",
        f"{result.lengths.mean():.1f}",
        f"{result.clipped.mean():.0%}",
        show_bytes(result.cache_bytes),
        f"{result.tokens_per_second:,.0f}",
    )


def say_progress(decode: str, done: int, count: int) -> None:
    """After every batch, where results do not go."""
    print(f"{decode}: {done} of {count} prompts", file=sys.stderr, flush=True)


def with_gate(directory: Path, model: Decoder) -> tuple[Params, LearnedGate]:
    """What a trained gate adds to the parameters, and the policy that goes by it."""
    parameters, gate = load_gate(directory, model.shape)
    return {EVICTION_GATE: parameters}, LearnedGate(gate)


def decode_of(text: str, args: Args, gate: LearnedGate | None) -> Decode:
    """One way of decoding, by the flags: with the trained gate, or with the policy that was named and its sinks.

    Raises:
      ValueError: as `way_of_decoding`.
      UserError: a gate that nobody has trained.
    """
    decode = way_of_decoding(text, args.sinks, args.pyramid)
    if isinstance(decode.policy, LearnedGate):
        if gate is None:
            raise UserError(f"expected --gate, a directory with a trained gate, for --decode {decode.name}; got none")
        decode = replace(decode, policy=gate)
    bits = args.quant_bits if decode.policy.evicts else None
    return replace(decode, quant=None if bits is None else QuantConfig(bits))


def make_evaluator(
    args: Args, model: Decoder, tokenizer: Any, gate: LearnedGate | None, ends: tuple[int, ...]
) -> tuple[Evaluator, str]:
    """The evaluator, and a line on the prompts that were dropped."""
    told = parameters_of("--chat-template-kwargs", args.chat_template_kwargs)
    check_template_kwargs(tokenizer, [name for name, _ in told])
    # A file has one split, which is taken without asking.
    split = "train" if args.split is None and is_file(Path(args.task)) else args.split
    if split is None and not holds_back(args.task):
        raise UserError(
            f"expected --split with --task {args.task}, which does not say which rows it holds back; got none"
        )
    choice = TaskChoice(
        args.task,
        args.source,
        args.config,
        split,
        held_out=split is None,
        prompt_column=args.prompt_column,
        system_prompt=args.system_prompt,
        map_row=None if args.map_function is None else import_function(args.map_function),
        chat_template_kwargs=told,
        seed=args.task_seed,
        size=args.task_size,
        parameters=parameters_of("--task-parameters", args.task_parameters),
    )
    whole: Any = build_task(choice)
    grading = RewardArgs(
        args.reward, args.reward_weights, args.reward_timeout, args.max_failed_rewards, args.overlong_cache
    )
    rewards = rewards_of(grading, args.max_completion_length, whole, args.task)
    task = first_rows(whole, args.rows)
    check_reachable(task, tokenizer, model.config.vocab_size)
    lengths = usable_lengths(task, tokenizer)
    width = args.max_prompt_length or int(lengths.max())
    check_context(width, args.max_completion_length, model.config)
    task, counts = select_prompts(task, lengths, width)
    sampling = SamplingConfig(args.temperature, args.top_k, args.top_p, args.min_p)
    decodes = tuple(decode_of(text, args, gate) for text in split_decodes(args.decode))
    check_names(decodes)
    rollout = RolloutConfig(
        args.max_completion_length,
        budget=args.max_completion_length,  # and buffer: where a way of decoding names none
        buffer=128,
        eos_token_id=ends,
        pad_token_id=pad_token_id(tokenizer),
        min_new_tokens=args.min_completion_length,
        prefill_chunk=args.prefill_chunk,
        sampling=sampling,
    )
    config = EvaluationConfig(decodes, rollout, width, args.num_generations, args.batch, args.stop, args.seed)
    mesh = make_mesh(args.data_parallel, args.fsdp, args.tensor)
    check_devices(mesh.size, jax.device_count(), ("--data-parallel", "--fsdp", "--tensor"))
    return Evaluator(model, task, tokenizer, config, mesh, rewards=rewards), str(counts)


if __name__ == "__main__":
    main()
