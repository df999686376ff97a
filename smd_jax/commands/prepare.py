"""Builds and checks everything that a run needs, before any weights are read."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from smd_jax.commands.arguments import Common, Grpo, ModelArgs, OnlineDpo, Ppo, Rloo
from smd_jax.commands.choices import (
    decoder,
    decoding,
    eviction_policy,
    rollout_config,
    try_policy,
    update_config,
)
from smd_jax.commands.config_file import read_options
from smd_jax.commands.decode_names import split_decodes
from smd_jax.commands.environment_source import check_environment, environment_config
from smd_jax.commands.errors import UserError
from smd_jax.commands.fitting import fitted
from smd_jax.commands.limits import check_context, check_devices, check_reachable, evicts_keys
from smd_jax.commands.model_source import check_template_kwargs, open_model, tokenizer_to_export
from smd_jax.commands.places import is_file
from smd_jax.commands.task_source import Data, load_data, parameters_of, rewards_of
from smd_jax.config import ModelConfig
from smd_jax.devices.processes import is_first
from smd_jax.devices.sharding import make_mesh
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.learner.dpo_update import DPOUpdateConfig
from smd_jax.learner.state import TrainState, init_state
from smd_jax.losses.dpo import DPOConfig
from smd_jax.losses.value import ValueConfig
from smd_jax.memory.compiled import LoopMemory, param_shapes
from smd_jax.message.gate import add_gate
from smd_jax.message.sampling import SamplingConfig
from smd_jax.model.decoder import Decoder
from smd_jax.model.lora import LoraConfig, add_lora
from smd_jax.model.protocol import Params
from smd_jax.model.value_head import add_value_head
from smd_jax.model.weights import check_export_source
from smd_jax.monitor.tensorboard import check_tensorboard
from smd_jax.monitor.weights_and_biases import check_wandb
from smd_jax.sampler.config import RolloutConfig
from smd_jax.text.chat_template import DAY
from smd_jax.text.prompts import pad_token_id
from smd_jax.train.async_rollout import one_behind
from smd_jax.train.evaluation import EvaluationConfig, Evaluator
from smd_jax.train.grpo import GRPOConfig, GRPOLoop
from smd_jax.train.loop import Loop
from smd_jax.train.loop_config import LoopConfig
from smd_jax.train.online_dpo import OnlineDPOConfig, OnlineDPOLoop
from smd_jax.train.optimizers import OptimizerConfig, make_optimizer
from smd_jax.train.ppo import PolicyLoop, PPOConfig, PPOLoop


class Prepared(NamedTuple):
    """A run that is ready to start.

    Attributes:
      args: the arguments, with the date for the chat template.
      directory: directory of the model.
      tokenizer: turns rows into prompts.
      exported_tokenizer: saved with the trained model; None copies the model's own files.
      loop: its microbatch and decode rows fit into `--memory`.
      memory: memory per device; None without `--memory`.
      chosen: one line on the sizes that were reduced to fit; empty without `--memory`.
      evaluator: None disables evaluation.
    """

    args: Common
    directory: Path
    config: ModelConfig
    tokenizer: Any
    exported_tokenizer: Any
    data: Data
    loop: Loop
    memory: LoopMemory | None
    chosen: str
    evaluator: Evaluator | None


def prepare(args: Common) -> Prepared:
    """Builds everything but the weights.

    Raises:
      UserError, ValueError, OSError: a missing or unreadable input, or options that exclude each other.
    """
    check_platform(args.device.platform)
    check_environment(args.conversations, args.rewards, args.data.max_prompt_length)
    if is_first():  # only the first process has loggers
        check_loggers(args.run.report_to)
    opened = open_model(args.model, args.data.chat_template, args.sampler)
    directory, config, tokenizer, ends = opened.directory, opened.config, opened.tokenizer, opened.ends
    args = with_prompt_day(args, opened.own_tokenizer.chat_template)
    template_kwargs = parameters_of("--chat-template-kwargs", args.data.chat_template_kwargs)
    check_template_kwargs(tokenizer, [name for name, _ in template_kwargs])
    data = load_data(args, tokenizer)
    for task in (data.task, data.held_out):
        if task is not None:
            check_reachable(task, tokenizer, config.vocab_size)
    check_context(data.width, args.sampler.max_completion_length, config)
    model = decoder(config, args.device.attention, args.model.gradient_checkpointing, args.model.scan_layers)
    exported = tokenizer_to_export(opened.own_tokenizer, args.model.tokenizer is None, ends)
    check_export_source(config, directory, exported)
    loop = make_loop(args, model, data, tokenizer, ends)
    fit = fitted(args, loop, make_evaluator(args, loop, data), state_shapes(args, loop, model))
    return Prepared(
        args,
        directory,
        config,
        tokenizer,
        exported,
        data,
        fit.loop,
        fit.memory,
        fit.chosen,
        fit.evaluator,
    )


def with_prompt_day(args: Common, template: object) -> Common:
    """Adds `--chat-template-kwargs strftime_now=DAY` if the chat template reads the date and no flag sets it.

    DAY is today, or with --resume the day on which the run began.
    """
    given = args.data.chat_template_kwargs
    if args.data.chat_template == "none" or _days(given):
        return args
    settings = args.run.output_dir / "config.yaml"
    if args.run.resume and is_file(settings):
        saved = read_options(settings).get("chat_template_kwargs")
        days = _days(saved if isinstance(saved, list) else [])
    else:
        days = [f"{DAY}={datetime.date.today().isoformat()}"] if DAY in str(template) else []
    return replace(args, data=replace(args.data, chat_template_kwargs=(*given, *days[:1])))


def _days(given: Sequence[object]) -> list[str]:
    return [str(text) for text in given if str(text).partition("=")[0] == DAY]


def with_parts(args: Common, params: Params, config: ModelConfig, key: jax.Array) -> Params:
    """Adds the run's own trainable parts to a checkpoint's parameters: LoRA adapters, an eviction gate, a critic.

    Consumes the key.
    """
    lora = lora_config(args.model)
    if lora is not None:
        params = add_lora(params, lora, key)
    gate = eviction_policy(args.sampler).gate
    if gate is not None:
        params = add_gate(
            params,
            gate,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
    return add_value_head(params, config) if isinstance(args, Ppo) else params


def shapes(args: Common, model: Decoder) -> Params:
    """Shapes of the run's parameters."""
    key = jax.random.key(0)
    stored = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, args.model.param_dtype), param_shapes(model))
    return jax.eval_shape(lambda params: with_parts(args, params, model.config, key), stored)


def state_of(args: Common, loop: Loop, params: Params, key: jax.Array) -> TrainState:
    """Initial train state of a run with these parameters."""
    state = init_state(params, loop.optimizer, key, params if keeps_reference(args, loop) else None)
    return one_behind(state) if loop.config.samples_ahead else state


def state_shapes(args: Common, loop: Loop, model: Decoder) -> TrainState:
    """Shapes of the initial train state. Reads no weights."""
    key = jax.random.key(0)
    return jax.eval_shape(lambda params: state_of(args, loop, params, key), shapes(args, model))


def keeps_reference(args: Common, loop: Loop) -> bool:
    """Whether the train state holds a copy of the parameters as reference.

    With LoRA the frozen base is the reference, unless the reference is synced with the policy.
    """
    if isinstance(loop, PolicyLoop):
        update = loop.config.update
        return update.needs_reference and (args.model.lora_r is None or update.reference_sync is not None)
    return args.model.lora_r is None  # online DPO always compares


def lora_config(args: ModelArgs) -> LoraConfig | None:
    """Configuration of the LoRA adapters; None without --lora-r."""
    if args.lora_r is None:
        return None
    return LoraConfig(
        rank=args.lora_r, alpha=args.lora_alpha, targets=args.lora_target_modules, rank_stabilised=args.use_rslora
    )


def check_platform(wanted: str) -> None:
    """Raises UserError if JAX does not run on the platform of --platform."""
    backend = jax.default_backend()
    if wanted not in ("auto", backend):
        raise UserError(
            f"expected JAX to run on {wanted!r}, as --platform says; got {backend!r} with {jax.devices()}. Is "
            f"smd_jax[{'cuda' if wanted == 'gpu' else wanted}] installed, and JAX_PLATFORMS unset?"
        )


def check_loggers(report_to: Sequence[str]) -> None:
    """Raises MissingExtraError for a logger whose package is not installed.

    The loggers themselves are created after the weights are read.
    """
    if "tensorboard" in report_to:
        check_tensorboard()
    if "wandb" in report_to:
        check_wandb()


def make_loop(args: Common, model: Decoder, data: Data, tokenizer: Any, ends: tuple[int, ...]) -> Loop:
    """Builds the loop of the algorithm. `ends` are the tokens that end a response."""
    policy = eviction_policy(args.sampler)
    try_policy(args.sampler.eviction, model.shape, args.sampler.budget, args.sampler.buffer)
    if policy.gate is not None and not isinstance(args, Grpo | Rloo):
        raise UserError(
            "expected grpo or rloo with --eviction gate, which is trained by one advantage per response; "
            f"got {type(args).__name__}"
        )
    if isinstance(args, Grpo | Rloo) and args.ahead.rollouts_ahead:
        check_ahead(args.model)
    device = args.device
    mesh = make_mesh(device.data_parallel, device.fsdp, device.tensor, device.sequence)
    check_devices(mesh.size, jax.device_count())
    variables = dict(parameters_of("--chat-template-kwargs", args.data.chat_template_kwargs))
    environment = environment_config(args.conversations, args.rewards.max_failed_rewards, data.task, variables)
    rollout = rollout_config(args.sampler, ends, pad_token_id(tokenizer))
    evicts = evicts_keys(policy, rollout, model.shape.num_layers, data.width)
    kind, config = loop_config(args, policy, rollout, data.width, evicts)
    optimizer = optimizer_of(args, config.steps_per_rollout)
    if environment is not None:
        return kind(model, data.task, tokenizer, optimizer, config, mesh, environment=environment)
    rewards = rewards_of(args.rewards, args.sampler.max_completion_length, data.task, args.data.dataset)
    return kind(model, data.task, tokenizer, optimizer, config, mesh, rewards=rewards)


def loop_config(
    args: Common, policy: EvictionPolicy, rollout: RolloutConfig, width: int, evicts: bool
) -> tuple[Any, LoopConfig]:
    """Returns the class of the loop and its configuration.

    Args:
      width: tokens of the longest prompt.
      evicts: whether this run evicts any key.
    """
    sampler, device = args.sampler, args.device
    options: dict[str, Any] = {
        "prompts_per_step": sampler.num_prompts,
        "group_size": sampler.num_generations,
        "prompt_width": width,
        "policy": policy,
        "rollout": rollout,
        "decode_rows": sampler.decode_rows,
        "stop_strings": sampler.stop,
        "seed": args.run.seed,
    }
    if isinstance(args, OnlineDpo):
        if device.pack_columns is not None:
            raise UserError("expected no --pack-columns with online-dpo, which does not pack its pairs")
        if device.share_prompts:
            raise UserError("expected no --share-prompts with online-dpo, which has two rows per prompt")
        loss = DPOConfig(beta=args.pairs.dpo_beta, loss_type=args.pairs.dpo_loss)
        update = DPOUpdateConfig(loss=loss, microbatch_size=device.microbatch)
        penalty = args.pairs.missing_eos_penalty
        return OnlineDPOLoop, OnlineDPOConfig(**options, update=update, missing_eos_penalty=penalty)
    if not isinstance(args, Grpo | Rloo | Ppo):
        raise TypeError(f"expected the arguments of an algorithm; got {type(args).__name__}")
    update = update_config(args.loss, args.reference, policy, device, sampler.num_generations, evicts)
    options |= {"minibatches": args.loss.minibatches, "num_iterations": args.loss.num_iterations, "update": update}
    match args:
        case Grpo(group=group):
            options |= {"scale_rewards": group.scale_rewards, "dynamic_sampling": group.dynamic_sampling}
            return GRPOLoop, GRPOConfig(**options, rollouts_ahead=args.ahead.rollouts_ahead)
        case Rloo():
            options |= {"advantages": "leave_one_out", "scale_rewards": "none"}
            return GRPOLoop, GRPOConfig(**options, rollouts_ahead=args.ahead.rollouts_ahead)
        case Ppo(critic=critic):
            options |= {"update": replace(update, value=ValueConfig())}
            return PPOLoop, PPOConfig(**options | vars(critic))


def check_ahead(model: ModelArgs) -> None:
    """Raises UserError if --rollouts-ahead is not supported for this run."""
    if model.lora_r is not None:
        raise UserError(f"expected no --rollouts-ahead with --lora-r; got --lora-r {model.lora_r}")
    if jax.process_count() > 1:
        raise UserError(f"expected no --rollouts-ahead with several processes; got {jax.process_count()} of them")


def optimizer_of(args: Common, steps_per_rollout: int) -> Any:
    """Builds the optimizer for the whole run."""
    has_gate = eviction_policy(args.sampler).gate is not None
    options: dict[str, Any] = {**vars(args.optimizer), "learning_rate": learning_rate(args)}
    options["gate_speed"] = args.optimizer.gate_speed if has_gate else None
    return make_optimizer(OptimizerConfig(**options), args.run.max_steps * steps_per_rollout)


def learning_rate(args: Common) -> float:
    """--learning-rate, or the default: 1e-5 for LoRA adapters, which start at zero, and 1e-6 for all weights."""
    if args.optimizer.learning_rate is not None:
        return args.optimizer.learning_rate
    return 1e-6 if args.model.lora_r is None else 1e-5


def make_evaluator(args: Common, loop: Loop, data: Data) -> Evaluator | None:
    """Builds the evaluator of the run; None without held-out rows."""
    if data.held_out is None:
        return None
    config = loop.config
    rows = config.decode_rows or config.completions_per_step
    texts = split_decodes(",".join(args.evaluation.eval_decode))
    decodes = [decoding(text, args.sampler, config.policy, config.rollout, loop.model.shape) for text in texts]
    temperature = args.evaluation.eval_temperature
    if temperature is not None:
        decodes = [replace(decode, sampling=SamplingConfig(temperature=temperature)) for decode in decodes]
    length = args.sampler.max_completion_length
    name = args.evaluation.eval_dataset or args.data.dataset
    settings = EvaluationConfig(
        decodes=tuple(decodes),
        rollout=config.rollout,
        prompt_width=config.prompt_width,
        rows=rows,
        stop_strings=config.stop_strings,
        seed=config.seed,
    )
    if loop.environment is not None:
        # Of its own: an environment may take the rewards of the held-out rows.
        failed, variables = args.rewards.max_failed_rewards, dict(loop.environment.template_variables)
        environment = environment_config(args.conversations, failed, data.held_out, variables)
        return Evaluator(loop.model, data.held_out, loop.tokenizer, settings, loop.mesh, environment=environment)
    # The held-out rows may come from another dataset with another reward.
    rewards = loop.rewards if args.rewards.reward else rewards_of(args.rewards, length, data.held_out, name)
    return Evaluator(loop.model, data.held_out, loop.tokenizer, settings, loop.mesh, rewards=rewards)
