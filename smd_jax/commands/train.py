"""smd-train: trains a language model by reinforcement learning under a KV cache of fixed size.

    smd-train grpo --model runs/smollm2 --dataset reasoning_gym:chain_sum --max-steps 20
    smd-train --config runs/train/config.yaml --resume

1. Reads the arguments and checks everything that needs no weights. Wrong input ends here.
2. Prints the plan and reads the weights.
3. Trains, and writes metrics, evaluations and checkpoints under --output-dir.
4. Writes the trained model as a Hugging Face checkpoint, and prints the next command.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import yaml

from smd_jax.byte_sizes import show_bytes
from smd_jax.commands import config_file
from smd_jax.commands.arguments import Common, Grpo, LaunchArgs, OnlineDpo, Ppo, Rloo
from smd_jax.commands.command_line import parse
from smd_jax.commands.compilation_cache import cache_programs
from smd_jax.commands.console_scripts import smd_train
from smd_jax.commands.errors import UserError, as_user_errors, memory_errors, plain_warnings, print_box, report_errors
from smd_jax.commands.launch import check_same_command, check_same_plan, check_shared, join
from smd_jax.commands.limits import READ_IN_TRAINING, check_numbers, unread_options, without_evictions
from smd_jax.commands.model_source import save_model, shown_tokens
from smd_jax.commands.places import by_content, check_output_dir, with_absolute_paths
from smd_jax.commands.policy_texts import trained_gate
from smd_jax.commands.prepare import Prepared, learning_rate, prepare, state_of, state_shapes, with_parts
from smd_jax.devices.processes import OtherProcessError, all_or_none, is_first, on_first_host
from smd_jax.devices.sharding import shard_tree
from smd_jax.disk import disk_errors_named, replaced, stored_bytes
from smd_jax.learner.state import TrainState, trained_params
from smd_jax.memory.compiled import param_shapes
from smd_jax.model.decoder import Decoder
from smd_jax.model.gate_format import save_gate
from smd_jax.model.lora import has_lora
from smd_jax.model.peft_format import save_peft
from smd_jax.model.protocol import Params
from smd_jax.model.value_head import drop_value_head
from smd_jax.model.weights import check_export, load_checkpoint
from smd_jax.monitor.completions import CompletionsLog
from smd_jax.monitor.loggers import Logger, TensorBoardLogger, WandbLogger
from smd_jax.monitor.progress import rollout_report, summary_table
from smd_jax.monitor.run_plots import plot_runs
from smd_jax.runs.checkpoint.errors import DamagedCheckpointError, OtherConfigError, OtherFormatError, OtherStateError
from smd_jax.runs.checkpoint.reading import check_config
from smd_jax.runs.lock import DirectoryInUseError, reserve_directory
from smd_jax.runs.run import train
from smd_jax.runs.run_config import RunConfig
from smd_jax.runs.run_folder import CHECKPOINTS, check_directory, check_progress, check_room
from smd_jax.runs.run_log import NoSuchMetricError
from smd_jax.runs.settings import split_fields, split_settings
from smd_jax.runs.stop import RunStoppedError
from smd_jax.tasks.task import prompt_length, prompt_text
from smd_jax.text.visible_text import visible
from smd_jax.train.conversations import ConversationRollouts
from smd_jax.train.evaluation import every_evaluation
from smd_jax.train.loop import Loop
from smd_jax.train.samples import RefusedRolloutError

# Errors of checkpoints, processes and rollouts, whose messages are enough for the user.
EXPECTED = (
    *(OtherConfigError, OtherStateError, OtherFormatError, DamagedCheckpointError, NoSuchMetricError),
    *(RefusedRolloutError, OtherProcessError, DirectoryInUseError, OSError),
)


def main(words: Sequence[str] | None = None) -> None:
    """The console script. `words`: arguments after the command's name; None: those of the process."""
    with report_errors(words, *EXPECTED) as given, plain_warnings():
        algorithm, args = parse(given)
        join(args.launch)
        args = with_absolute_paths(args)
        try:
            advice = "--memory BYTES chooses sizes that fit; --microbatch, --decode-rows and --budget set them"
            with memory_errors(advice):
                run(algorithm, args)
        except RunStoppedError as stopped:
            print_box("stopped", str(stopped))
            # Outside the box, which would break a long line.
            again = shlex.join(["smd-train", "--config", str(args.run.output_dir / "config.yaml"), "--resume"])
            print(f"resume with: {again}", file=sys.stderr)
            raise SystemExit(stopped.exit_code) from None


def run(algorithm: str, args: Common) -> None:
    """Runs the command."""
    cache_programs()
    # config.yaml has the number, so that a later default does not change a run.
    args = replace(args, optimizer=replace(args.optimizer, learning_rate=learning_rate(args)))
    directory = args.run.output_dir
    if args.run.resume_if_there:
        # Before the processes meet: afterwards one of them may already have written there.
        args = replace(args, run=replace(args.run, resume=run_exists(directory)))
    # First: a process without --resume should be refused for that, not for the files that it finds.
    check_same_command(algorithm, args)
    with all_or_none(), as_user_errors():
        check_numbers(args)
        settings = run_config(args)
        check_directory(directory, args.run.resume)
        if args.run.resume and not run_exists(directory):
            raise UserError(
                f"expected a run to resume in {directory}; got none. To begin one, leave --resume out; a run that was "
                "moved needs its new --output-dir"
            )
        check_output_dir(args)
        check_export(directory / "model", 0)
        ready = prepare(args)
        # Of an environment in any case: it may refuse all rows.
        shows = args.run.dry_run or args.conversations.environment is not None
        prompts = first_prompts(ready) if shows else []
        size = check_disk(ready, settings)
        compared, metadata = run_settings(ready.args, ready.loop)
        if args.run.resume:
            # Before config.yaml is written: a refused resume must not change the run.
            check_progress(directory, args.run.resume, settings)
            check_config(directory / CHECKPOINTS, compared)
    check_same_plan(ready.loop.config, ready.evaluator)
    with all_or_none():
        if is_first():
            print_plan(algorithm, ready)
            print(
                f"checkpoints: {settings.keep} at most, {show_bytes(size)} each, to resume and for smd-export; "
                "--save-total-limit 1 keeps one"
            )
            if args.run.dry_run:
                for index, (text, length) in enumerate(prompts):
                    print(f"--- prompt {index}, {length} of {ready.data.width} tokens:\n{visible(text)}")
    if args.run.dry_run:
        return
    with ExitStack() as held:
        with all_or_none():
            held.enter_context(reserve_directory(directory))
        run_prepared(algorithm, ready, settings, compared, metadata)


def check_disk(ready: Prepared, settings: RunConfig) -> int:
    """Bytes of a checkpoint. Raises OSError if the disk has no room for the checkpoints or for the trained model."""
    args, model = ready.args, Decoder(ready.model.config)
    state = state_shapes(args, ready.loop, model)
    # A checkpoint of adapters does not hold the base model.
    size = stored_bytes(state.replace(params=trained_params(state.params)))
    check_room(args.run.output_dir, size, settings)
    exported = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, args.run.export_dtype), param_shapes(model))
    check_export(args.run.output_dir / "model", stored_bytes(exported))
    return size


def run_prepared(algorithm: str, ready: Prepared, settings: RunConfig, compared: Any, metadata: Any) -> None:
    """Reads the weights, trains, and exports the model."""
    args, directory = ready.args, ready.args.run.output_dir
    with all_or_none(), as_user_errors():
        state = initial_state(ready)
        with disk_errors_named(directory / "config.yaml"):
            directory.mkdir(parents=True, exist_ok=True)
            if is_first():
                with replaced(directory / "config.yaml") as new:
                    new.write_text(config_text(algorithm, args), encoding="utf-8")
    check_shared(directory / "config.yaml")
    loop = with_reporting(ready)
    with all_or_none(), as_user_errors():
        copies = loggers(algorithm, args) if is_first() else []
    state = train(
        loop,
        state,
        settings,
        directory,
        config=compared,
        metadata=metadata,
        resume=args.run.resume,
        evaluate=None if ready.evaluator is None else every_evaluation(loop, ready.evaluator),
        loggers=copies,
        label=algorithm,
    )
    params = on_first_host(drop_value_head(state.params)) if jax.process_count() > 1 else drop_value_head(state.params)
    # The other processes wait for the first one, and fail if it fails.
    with all_or_none():
        if is_first():
            try:
                with disk_errors_named(directory / "training.png"):
                    plot_runs([directory], directory / "training.png")
            except (OSError, ValueError) as error:  # smd-plot can draw the curves later
                print_box("notice", str(error))
            export_or_explain(ready, params)


def run_config(args: Common) -> RunConfig:
    """Number of rollouts, checkpoints and evaluations, and the metric of the best checkpoint. Raises ValueError for
    numbers out of range."""
    evaluation = args.evaluation
    name = evaluation.metric_for_best_model
    if name is not None and name.startswith("eval/") and not evaluation.eval_steps:
        raise UserError(f"expected --eval-steps with --metric-for-best-model {name}, a metric of evaluations; got 0")
    run = args.run
    return RunConfig(
        steps=run.max_steps,
        checkpoint_every=run.save_steps,
        evaluate_every=evaluation.eval_steps,
        keep=run.save_total_limit,
        objective=evaluation.objective,
    )


def config_text(algorithm: str, args: Common) -> str:
    """The text of config.yaml, which repeats the run, or resumes it with --resume."""
    run = replace(args.run, resume=False, resume_if_there=False)
    # Without the processes, which may differ each time.
    return config_file.dump(algorithm, replace(args, run=run, launch=LaunchArgs()))


def run_exists(directory: Path) -> bool:
    """Whether a run has begun in this directory."""
    return (directory / "config.yaml").is_file()


def print_plan(algorithm: str, ready: Prepared) -> None:
    """The plan of the run: algorithm, loss, memory, policy, teacher, devices and data."""
    args, config, mesh, rewards = ready.args, ready.loop.config, ready.loop.mesh, ready.loop.rewards
    sampler, model, update = args.sampler, args.model, config.update
    size = f"{args.run.max_steps} rollouts of {sampler.num_prompts} x {sampler.num_generations} completions"
    print(f"{algorithm}: {size}, learning rate {args.optimizer.learning_rate:g}")
    if isinstance(args, Grpo | Rloo | Ppo):
        share = f", dense share {args.loss.dense_share:g}" if args.loss.dense_share else ""
        print(f"loss: {args.loss.loss_type}, correction {args.loss.correction}{share}")
    elif isinstance(args, OnlineDpo):
        print(f"loss: {args.pairs.dpo_loss}, beta {args.pairs.dpo_beta:g}")
    print(f"reward: {args.conversations.environment if rewards is None else ', '.join(rewards.logged_names)}")
    trained = "all parameters" if model.lora_r is None else f"LoRA adapters of rank {model.lora_r}"
    print(f"trained: {trained}, stored in {model.param_dtype}, computed in {ready.model.config.dtype}")
    if ready.memory is not None:
        summary_table(ready.memory.title, ("", "rollout", "update"), ready.memory.rows())
        rows = "all" if config.decode_rows is None else f"{config.decode_rows}, prefill rows {config.prefill_rows}"
        microbatch = "all" if update.microbatch_size is None else update.microbatch_size
        if update.pairs is not None and update.microbatch_size is not None:  # --microbatch counts pairs
            microbatch = f"{update.microbatch_size // update.rows_together} pairs"
        print(f"sizes that fit: microbatch {microbatch}, decode rows {rows}")
    kept = f" --sinks {sampler.sinks}{' --pyramid' if sampler.pyramid else ''}"
    kept += f", {sampler.budget} + {sampler.buffer} keys per layer and KV head"
    print(f"eviction: {sampler.eviction}{kept if config.policy.evicts else ''}")
    if update.distill is not None:
        print(f"teacher: {update.distill.direction}, with a weight of {update.distill.coef} in the loss")
    print(f"a completion ends with: {shown_tokens(ready.model.tokenizer, ready.model.ends)}")
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    print(f"devices: {mesh.size} of {jax.device_count()} x {jax.devices()[0].device_kind}; mesh: {axes}")
    for line in filter(None, [without_evictions(ready.loop), *unread_options(ready.args, READ_IN_TRAINING)]):
        print_box("notice", line)
    for line in ready.data.counts:
        print(line)
    prompts, rows = config.prompts_per_step, len(ready.data.task)
    if prompts > rows:
        print(f"{prompts} prompts a rollout from {rows} rows: each rollout has rows more than once")


def first_prompts(ready: Prepared) -> list[tuple[str, int]]:
    """The first three prompts as the model reads them, each with its length in tokens. An environment writes its own.

    Raises:
      UserError: an environment begins none of these conversations.
    """
    task, tokenizer, rollouts = ready.data.task, ready.model.tokenizer, ready.loop.rollouts
    rows = [task[index] for index in range(min(len(task), 3))]
    if not isinstance(rollouts, ConversationRollouts):
        return [(prompt_text(row, tokenizer), prompt_length(row, tokenizer)) for row in rows]
    begun = rollouts.respondent(rows, group_size=1).conversations
    prompts = [each.prompt for each in begun if each.failure is None]
    if not prompts:
        raise UserError(
            f"expected an environment that begins a conversation about each row; got, for the first {len(rows)}: "
            f"{begun[0].failure}"
        )
    return [(prompt, len(rollouts.dialogue.prompt_tokens(prompt))) for prompt in prompts]


def initial_state(ready: Prepared) -> TrainState:
    """The train state: weights of the checkpoint, sharded over the mesh, and a new optimizer state."""
    args, loop = ready.args, ready.loop
    key = jax.random.key(args.run.seed)
    _, params = load_checkpoint(ready.model.directory, dtype=args.model.param_dtype, mesh=loop.mesh)
    params = shard_tree(with_parts(args, params, ready.model.config, jax.random.fold_in(key, 1)), loop.mesh)
    return state_of(args, loop, params, key)


def with_reporting(ready: Prepared) -> Loop:
    """The loop with its progress report and log of completions."""
    run, loop = ready.args.run, ready.loop
    if is_first():
        loop = replace(loop, report=rollout_report())
    if not run.completions_steps:
        return loop
    log = CompletionsLog(run.output_dir, ready.model.tokenizer, table_rows=run.print_completions)
    return replace(loop, watch=log, watch_every=run.completions_steps)


def loggers(algorithm: str, args: Common) -> list[Logger]:
    """The loggers of --report-to."""
    run, found = args.run, list[Logger]()
    if "tensorboard" in run.report_to:
        found.append(TensorBoardLogger(run.output_dir))
    if "wandb" in run.report_to:
        config = yaml.safe_load(config_file.dump(algorithm, args))
        found.append(WandbLogger(run.output_dir, name=run.output_dir.name, config=config, resume=run.resume))
    return found


def run_settings(args: Common, loop: Loop) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings that must not change at a resume, and those that may: number of steps, paths, reports, and sizes
    chosen by memory. Raises OSError if a file that they name cannot be read."""
    groups, places = by_content(args)
    compared, metadata = split_settings(loop.config)
    optimizer = args.optimizer
    # Such a learning rate depends on the number of steps.
    to_the_end = optimizer.lr_scheduler_type != "constant" or 0 < optimizer.warmup_steps < 1
    # These limits decide when a run stops, and do not change its result.
    rewards, limits = split_fields(groups["rewards"], ("reward_timeout", "max_failed_rewards"))
    conversations, _ = split_fields(groups["conversations"], ("environment_timeout",))
    model, remat = split_fields(groups["model"], ("gradient_checkpointing",))
    same = groups | {"model": model, "rewards": rewards, "conversations": conversations}
    same |= {"optimizer": optimizer, "loop": compared}
    run = replace(args.run, resume=False, resume_if_there=False, dry_run=False)
    # Another attention changes only rounding.
    free = {"loop": metadata, "run": run, "attention": args.device.attention, "eval": args.evaluation}
    free |= {"model": remat, "rewards": limits, "files": places}
    return same | {"steps": run.max_steps if to_the_end else None}, free


def export_or_explain(ready: Prepared, params: Params) -> None:
    """Exports the trained model. Raises UserError with the command that repeats it if that fails."""
    directory = ready.args.run.output_dir
    try:
        export(ready, params, directory)
    except (OSError, ValueError) as error:
        again = shlex.join(
            ["smd-export", str(directory), "--out", "MODEL", "--export-dtype", ready.args.run.export_dtype]
        )
        raise UserError(
            f"The run is complete, and its checkpoints are saved. Its export failed: {error}\nTo repeat it: {again}"
        ) from error


def export(ready: Prepared, params: Params, directory: Path) -> None:
    """Writes the trained model in Hugging Face's format with merged adapters, the adapters in PEFT's, and the gate."""
    gate, opened, dtype = trained_gate(ready.loop.config.policy), ready.model, ready.args.run.export_dtype
    if gate is not None:
        save_gate(directory / "gate", params, gate)
        print(f"gate of evictions: {directory / 'gate'}")
    save_model(directory / "model", params, opened, dtype)
    print(f"trained model: {directory / 'model'}")
    if has_lora(params):
        base = ready.args.model.model
        save_peft(
            directory / "adapter", params, opened.config, base_model=base, base_directory=opened.directory, dtype=dtype
        )
        print(f"adapters: {directory / 'adapter'}")
    print(f"evaluate it with: {shlex.join(['smd-eval', '--run', str(directory)])}")


if __name__ == "__main__":
    smd_train()
