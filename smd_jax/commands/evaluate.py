"""smd-eval: evaluates a checkpoint with the full cache and under budgets.

    smd-eval --run runs/train                                      the trained model, with the settings of its run
    smd-eval --model DIR --dataset gsm8k --eval-decode dense snapkv:512 rkv:512
    smd-eval --config FILE                                         options from a YAML file; flags override them

Prints the mean reward with its 95 % interval over prompts, lengths, the share of completions that were cut off, cache
bytes per sequence, and tokens per second. The default of --split: the held-out rows of a built-in task; `train` of your
own data or the Hub's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from smd_jax.byte_sizes import show_bytes
from smd_jax.commands import config_file
from smd_jax.commands.arguments import (
    Basic,
    Common,
    ComputeArgs,
    ConversationArgs,
    DataArgs,
    EvaluationRows,
    ModelSource,
    RewardArgs,
    SamplingArgs,
)
from smd_jax.commands.choices import decoder, decoding, rollout_config
from smd_jax.commands.command_line import arguments_of_run, asks_for_help, parse_options
from smd_jax.commands.compilation_cache import cache_programs
from smd_jax.commands.console_scripts import smd_eval
from smd_jax.commands.errors import UserError, as_user_errors, memory_errors, plain_warnings, print_box, report_errors
from smd_jax.commands.limits import (
    READ_IN_EVALUATION,
    check_context,
    check_devices,
    check_numbers,
    check_prompt_tokens,
    unread_options,
)
from smd_jax.commands.model_source import OpenedModel, open_model, shown_tokens
from smd_jax.commands.places import full_path
from smd_jax.commands.policy_texts import named_policy
from smd_jax.commands.prepare import check_platform
from smd_jax.commands.task_source import (
    check_environment,
    check_eval_seed,
    drop_long_prompts,
    environment_config,
    evaluation_choice,
    has_held_out_rows,
    held_out_data,
    names_held_out_rows,
    of_dataset,
    rewards_of,
    task_of,
)
from smd_jax.devices.sharding import make_mesh
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import LearnedGate
from smd_jax.message.gate import EVICTION_GATE, LinearGate
from smd_jax.model.decoder import Decoder
from smd_jax.model.gate_format import load_gate
from smd_jax.model.weights import load_checkpoint
from smd_jax.monitor.progress import summary_table
from smd_jax.tasks.dataset_task import first_rows
from smd_jax.text.prompts import pad_token_id
from smd_jax.train.evaluation import Evaluated, EvaluationConfig, Evaluator

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CommandArgs:
    """Options of the command itself."""

    run: Basic[Path | None] = None  # evaluate the trained model of this run; all options default to the run's
    gate: Basic[Path | None] = None  # directory of a trained gate, for --eviction gate; None: that of --run
    num_generations: Basic[int] = 1  # completions per prompt
    decode_rows: int = 64  # completions decoded at once
    seed: Basic[int] = 0  # for sampling, and for the rows of a procedural dataset
    json: Basic[bool] = False  # one JSON object per way of decoding instead of a table


@dataclass(frozen=True, kw_only=True)
class Args:
    """Evaluates a checkpoint on a dataset, with the whole cache and under budgets."""

    command: CommandArgs = CommandArgs()
    model: ModelSource
    data: DataArgs
    rewards: RewardArgs = RewardArgs()
    evaluation: EvaluationRows = EvaluationRows()
    conversations: ConversationArgs = ConversationArgs()
    sampler: SamplingArgs = SamplingArgs()
    device: ComputeArgs = ComputeArgs()


def main(words: Sequence[str] | None = None) -> None:
    """The console script."""
    with (
        report_errors(words) as given,
        plain_warnings(),
        memory_errors("--decode-rows and --eval-decode set the sizes; --param-dtype bfloat16 halves the weights"),
    ):
        run(read(given))


def read(words: Sequence[str]) -> Args:
    """Reads the arguments: flags, then the YAML file of `--config`, then the settings of the run of `--run`. Raises
    UserError for a missing file or run, or one with unreadable options. Exits as `parse_options`."""
    words = config_file.with_file(words, Args)
    rest, directory = config_file.take_option(words, "--run")
    description = __doc__ or ""
    if directory is None or asks_for_help(words):
        return parse_options(Args, "smd-eval", description, words)
    of_run = args_of_run(full_path(directory))
    _, dataset = config_file.take_option(rest, "--dataset")
    if dataset not in (None, of_run.data.dataset):
        of_run = replace(of_run, data=of_dataset(of_run.data, dataset))
    return parse_options(Args, "smd-eval", description, rest, of_run)


def args_of_run(directory: Path) -> Args:
    """The arguments that evaluate a run's trained model like the run's own evaluations. Raises UserError as
    `arguments_of_run`."""
    trained = arguments_of_run(directory)
    evaluation, sampler = trained.evaluation, part_of(SamplingArgs, trained.sampler)
    if evaluation.eval_temperature is not None:
        sampler = replace(sampler, temperature=evaluation.eval_temperature)
    gate = directory / "gate"
    return Args(
        command=CommandArgs(run=directory, gate=gate if gate.is_dir() else None, seed=trained.run.seed),
        model=ModelSource(
            model=str(directory / "model"), dtype=trained.model.dtype, param_dtype=trained.model.param_dtype
        ),
        data=evaluation_rows(trained),
        rewards=trained.rewards,
        evaluation=part_of(EvaluationRows, evaluation),
        conversations=part_of(ConversationArgs, trained.conversations),
        sampler=sampler,
        # Not the mesh: this machine may have other devices.
        device=ComputeArgs(attention=trained.device.attention),
    )


def part_of(kind: type[T], whole: Any) -> T:
    """Copies the fields of a base class from an object of a derived class."""
    return kind(**{field.name: getattr(whole, field.name) for field in dataclasses.fields(kind)})  # pyright: ignore[reportArgumentType]


def evaluation_rows(trained: Common) -> DataArgs:
    """The evaluation rows of a run; its training rows if there are no held-out rows."""
    data, evaluation = trained.data, trained.evaluation
    named = evaluation.eval_dataset or evaluation.eval_source or evaluation.eval_split or evaluation.eval_steps
    if not named:
        return data if data.dataset_source or not has_held_out_rows(data.dataset) else replace(data, split=None)
    return held_out_data(evaluation, data)


def reads_training_rows(args: Args) -> bool:
    """Whether the run of --run was trained on the rows to evaluate on."""
    if args.command.run is None:
        return False
    trained = arguments_of_run(args.command.run).data
    same = _rows(args.data) == _rows(trained)
    if trained.dataset_source is not None or not names_held_out_rows(trained.dataset, trained.split):
        return same
    # Trained on the rows that other runs hold out, which are also those that --split names by default.
    return trained.split is not None and (same or _rows(args.data) == _rows(replace(trained, split=None)))


def _rows(data: DataArgs) -> tuple[object, ...]:
    """The options that choose rows, without those that write their prompts."""
    size = data.dataset_size, data.dataset_parameters
    return data.dataset, data.dataset_source, data.dataset_config, data.split, *size


def run(args: Args) -> list[Evaluated]:
    """Evaluates and prints the results."""
    cache_programs()
    with as_user_errors():
        check_numbers(args)
        check_platform(args.device.platform)
        check_environment(args.conversations, args.rewards, args.data.max_prompt_length)
        if args.command.run is None:  # the seed of a run may belong to another dataset than the one named here
            check_eval_seed(args.evaluation.eval_seed, args.data.dataset)
        directory, exported = args.command.run, Path(args.model.model)
        if directory is not None and exported == directory / "model" and not exported.is_dir():
            raise UserError(
                f"expected a trained model in {exported}, which a run writes when it ends; got none. Export the newest "
                f"checkpoint with: {shlex.join(['smd-export', str(directory), '--out', str(exported)])}"
            )
        opened = open_model(args.model, args.data, args.sampler)
        model = decoder(opened.config, args.device.attention)
        parts, gate = ({}, None) if args.command.gate is None else load_gate(args.command.gate, model.shape)
        evaluator, dropped = make_evaluator(args, model, opened, gate)
        _, params = load_checkpoint(opened.directory, dtype=args.model.param_dtype, mesh=evaluator.mesh)
    if gate is not None:
        params |= {EVICTION_GATE: parts}
    print(dropped, file=sys.stderr)
    if reads_training_rows(args):
        print_box("notice", "The run was trained on these rows and names no others. --split or --dataset names some.")
    for line in unread_options(args, READ_IN_EVALUATION):
        print_box("notice", line)
    print(f"a completion ends with: {shown_tokens(opened.tokenizer, opened.ends)}", file=sys.stderr)
    results, output = list[Evaluated](), sys.stdout
    # A reward in this process may print.
    with contextlib.redirect_stdout(sys.stderr) if args.command.json else contextlib.nullcontext():
        for result in evaluator.each(params, print_progress):
            results.append(result)
            if args.command.json:
                # Printed as it finishes, so that an interrupt loses no finished row.
                row = {"model": args.model.model, "dataset": args.data.dataset} | result.row
                print(json.dumps(row), file=output, flush=True)
    if not args.command.json:
        rows = args.data.dataset if args.data.split is None else f"{args.data.dataset} {args.data.split}"
        print_results(f"{rows}, {args.model.model}", results)
    return results


def print_results(title: str, results: Sequence[Evaluated]) -> None:
    """Prints a table, one line per way of decoding."""
    prompts, completions = results[0].rewards.shape
    heads = ("decode", "reward", "95 %", "tokens", "cut off", "cache", "tok/s")
    each = "1 completion each" if completions == 1 else f"{completions} completions each"
    rows = [
        (
            result.name,
            "-" if math.isnan(result.reward) else f"{result.reward:.4f}",
            "-" if math.isnan(result.interval[0]) else "{:.3f}..{:.3f}".format(*result.interval),
            f"{result.lengths.mean():.1f}",
            f"{result.clipped.mean():.0%}",
            show_bytes(result.cache_bytes),
            f"{result.tokens_per_second:,.0f}",
        )
        for result in results
    ]
    summary_table(f"{title}: {prompts} prompts, {each}", heads, rows)
    for result in results:
        failed = int(np.isnan(result.rewards).sum())
        if failed:
            print(f"{result.name}: mean and interval leave out completions without a reward, {failed}")


def print_progress(decode: str, done: int, count: int) -> None:
    """Prints the progress to standard error after every batch."""
    print(f"{decode}: {done} of {count} prompts", file=sys.stderr, flush=True)


def make_evaluator(args: Args, model: Decoder, opened: OpenedModel, gate: LinearGate | None) -> tuple[Evaluator, str]:
    """Builds the evaluator, and a line on dropped prompts."""
    data, sampler, command, tokenizer = args.data, args.sampler, args.command, opened.tokenizer
    seed = command.seed if args.evaluation.eval_seed is None else args.evaluation.eval_seed
    whole: Any = task_of(evaluation_choice(data, seed))
    task = first_rows(whole, args.evaluation.eval_rows)
    environment = environment_config(args.conversations, args.rewards.max_failed_rewards, whole, data)
    if environment is not None and data.max_prompt_length is not None:  # it writes its own prompts
        width, counts, rewards = data.max_prompt_length, f"{len(task)} rows", None
    else:
        task, width, counts = drop_long_prompts(task, tokenizer, data)
        check_prompt_tokens(task, tokenizer, model.config.vocab_size)
        rewards = rewards_of(args, whole, data.dataset)
    check_context(width, sampler.max_completion_length, model.config)
    rollout = rollout_config(sampler, opened.ends, pad_token_id(tokenizer))
    policy = named_policy(sampler.eviction, sampler.sinks, sampler.pyramid)
    decodes = [decoding(text, sampler, policy, rollout) for text in args.evaluation.eval_decode]
    config = EvaluationConfig(
        decodes=tuple(replace(decode, policy=with_trained(decode.policy, gate)) for decode in decodes),
        rollout=rollout,
        prompt_width=width,
        group_size=command.num_generations,
        rows=command.decode_rows,
        stop_strings=sampler.stop,
        seed=command.seed,
    )
    mesh = make_mesh(args.device.data_parallel, args.device.fsdp, args.device.tensor)
    check_devices(mesh.size, jax.device_count())
    return Evaluator(model, task, tokenizer, config, mesh, rewards=rewards, environment=environment), counts


def with_trained(policy: EvictionPolicy, gate: LinearGate | None) -> EvictionPolicy:
    """Replaces an untrained gate by the trained one. Raises UserError without a trained one."""
    if not (isinstance(policy, LearnedGate) and policy.weights.has_parameters):
        return policy
    if gate is None:
        raise UserError("expected --gate, a directory with a trained gate, with --eviction gate; got none")
    return replace(policy, weights=gate)


if __name__ == "__main__":
    smd_eval()
