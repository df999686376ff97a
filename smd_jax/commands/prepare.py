"""Builds and checks everything that a run needs, before any weights are read."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from smd_jax.byte_sizes import parse_bytes
from smd_jax.commands.arguments import Common, Grpo, ModelArgs, OnlineDpo, Ppo, Rloo
from smd_jax.commands.choices import decoder, decoding, eviction_policy, rollout_config, update_config
from smd_jax.commands.config_file import read_options
from smd_jax.commands.errors import UserError
from smd_jax.commands.limits import check_context, check_devices, check_prompt_tokens
from smd_jax.commands.model_source import OpenedModel, open_model
from smd_jax.commands.policy_texts import trained_gate
from smd_jax.commands.task_source import Data, check_environment, environment_config, load_data, rewards_of
from smd_jax.config import ModelConfig
from smd_jax.devices.processes import is_first
from smd_jax.devices.sharding import make_mesh
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.learner.accumulation import count_parts
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.mismatch_guard import MismatchGuard
from smd_jax.learner.state import TrainState, init_state
from smd_jax.losses.dpo import DPOConfig
from smd_jax.losses.value import ValueConfig
from smd_jax.memory.compiled import LoopMemory, param_shapes
from smd_jax.memory.fit import fit_evaluator, fit_loop
from smd_jax.message.gate import add_gate
from smd_jax.model.decoder import Decoder
from smd_jax.model.lora import LORA, LoraConfig, add_lora, has_lora
from smd_jax.model.peft_format import check_peft
from smd_jax.model.protocol import Params
from smd_jax.model.value_head import add_value_head
from smd_jax.model.weights import check_export_source
from smd_jax.monitor.loggers import check_tensorboard, check_wandb
from smd_jax.sampler.config import RolloutConfig
from smd_jax.text.chat_template import DAY
from smd_jax.text.prompts import pad_token_id
from smd_jax.train.async_rollout import with_sampler_params
from smd_jax.train.evaluation import EvaluationConfig, Evaluator
from smd_jax.train.grpo import GRPOConfig, GRPOLoop
from smd_jax.train.loop import Loop
from smd_jax.train.loop_config import LoopConfig
from smd_jax.train.online_dpo import OnlineDPOConfig, OnlineDPOLoop
from smd_jax.train.optimizers import OptimizerConfig, make_optimizer
from smd_jax.train.ppo import PPOConfig, PPOLoop


class Prepared(NamedTuple):
    """A run that is ready to start.

    Attributes:
      args: the arguments, with the date for the chat template.
      loop: its microbatch and decode rows fit into `--memory`.
      evaluator: None disables evaluation; its rows fit, too.
      memory: memory per device; None without `--memory`.
    """

    args: Common
    model: OpenedModel
    data: Data
    loop: Loop
    evaluator: Evaluator | None
    memory: LoopMemory | None


def prepare(args: Common) -> Prepared:
    """Builds everything but the weights. Raises UserError, ValueError or OSError for a missing or unreadable input, or
    options that exclude each other."""
    check_platform(args.device.platform)
    check_environment(args.conversations, args.rewards, args.data.max_prompt_length)
    # Only the first process has loggers; they are created after the weights are read.
    if is_first() and "tensorboard" in args.run.report_to:
        check_tensorboard()
    if is_first() and "wandb" in args.run.report_to:
        check_wandb()
    opened = open_model(args.model, args.data, args.sampler)
    args = with_prompt_day(args, opened.tokenizer.chat_template)
    data = load_data(args, opened.tokenizer)
    if args.conversations.environment is None:
        for task in [data.task] if data.held_out is None else [data.task, data.held_out]:
            check_prompt_tokens(task, opened.tokenizer, opened.config.vocab_size)
    check_context(data.held_out_width, args.sampler.max_completion_length, opened.config)
    model = decoder(opened.config, args.device.attention, args.model.gradient_checkpointing, args.model.scan_layers)
    check_export_source(opened.config, opened.directory, opened.exported_tokenizer)
    loop = make_loop(args, model, data, opened)
    state = state_shapes(args, loop, model)
    if has_lora(state.params):
        check_peft(opened.config, state.params[LORA].config, opened.directory)
    loop.check(state)
    evaluator, memory = make_evaluator(args, loop, data), None
    if args.device.memory is not None:
        if loop.environment is not None:
            raise UserError("expected no --memory with --environment; set --microbatch and --decode-rows yourself")
        if loop.config.update.pack_columns is not None:
            raise UserError("expected no --memory with --pack-columns; set --microbatch and --decode-rows yourself")
        memory_bytes = parse_bytes(args.device.memory)
        loop, memory = fit_loop(loop, state, memory_bytes)
        evaluator = None if evaluator is None else fit_evaluator(evaluator, state, memory_bytes)
    return Prepared(args, opened, data, loop, evaluator, memory)


def with_prompt_day(args: Common, template: object) -> Common:
    """Adds `--chat-template-kwargs strftime_now=DAY` if the chat template reads the date and no flag sets it.

    DAY is today, or with --resume the day on which the run began.
    """
    given = args.data.chat_template_kwargs
    settings = args.run.output_dir / "config.yaml"
    if args.data.chat_template == "none" or _days(given):
        return args
    if args.run.resume and os.path.isfile(settings):
        days = _days(read_options(settings).get("chat_template_kwargs") or ())
    else:
        days = [f"{DAY}={datetime.date.today().isoformat()}"] if DAY in str(template) else []
    return replace(args, data=replace(args.data, chat_template_kwargs=(*given, *days)))


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
            params, gate, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
        )
    return add_value_head(params, config) if isinstance(args, Ppo) else params


def shapes(args: Common, model: Decoder) -> Params:
    """Shapes of the run's parameters."""
    stored = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, args.model.param_dtype), param_shapes(model))
    return jax.eval_shape(lambda params: with_parts(args, params, model.config, jax.random.key(0)), stored)


def state_of(args: Common, loop: Loop, params: Params, key: jax.Array) -> TrainState:
    """Initial train state of a run with these parameters."""
    update = loop.config.update
    # With LoRA the frozen base is the reference. A synced reference moves, unlike the base.
    keeps_reference = update.needs_reference and (args.model.lora_r is None or update.reference_sync is not None)
    state = init_state(params, loop.optimizer, key, params if keeps_reference else None)
    return with_sampler_params(state) if loop.config.samples_ahead else state


def state_shapes(args: Common, loop: Loop, model: Decoder) -> TrainState:
    """Shapes of the initial train state. Reads no weights."""
    return jax.eval_shape(lambda params: state_of(args, loop, params, jax.random.key(0)), shapes(args, model))


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


def make_loop(args: Common, model: Decoder, data: Data, opened: OpenedModel) -> Loop:
    """Builds the loop of the algorithm, with its guards."""
    device = args.device
    mesh = make_mesh(device.data_parallel, device.fsdp, device.tensor, device.sequence)
    check_devices(mesh.size, jax.device_count())
    policy = eviction_policy(args.sampler)
    if policy.gate is not None and not isinstance(args, Grpo | Rloo):
        raise UserError(
            "expected grpo or rloo with --eviction gate, which is trained by one advantage per response; "
            f"got {type(args).__name__}"
        )
    rollout = rollout_config(args.sampler, opened.ends, pad_token_id(opened.tokenizer))
    kind, config = loop_config(args, policy, rollout, data.width)
    gate_speed = None if policy.gate is None else args.optimizer.gate_speed
    options = vars(args.optimizer) | {"learning_rate": learning_rate(args), "gate_speed": gate_speed}
    environment = environment_config(args.conversations, args.rewards.max_failed_rewards, data.task, args.data)
    rewards = None if environment is not None else rewards_of(args, data.task, args.data.dataset)
    return kind(
        model,
        data.task,
        opened.tokenizer,
        make_optimizer(OptimizerConfig(**options), args.run.max_steps * config.steps_per_rollout),
        config,
        mesh,
        rewards=rewards,
        environment=environment,
        guard=MismatchGuard(args.run.mismatch_bound),
        max_skipped=args.run.max_skipped_updates,
    )


def loop_config(args: Common, policy: EvictionPolicy, rollout: RolloutConfig, width: int) -> tuple[Any, LoopConfig]:
    """Returns the class of the loop and its configuration, for prompts of at most `width` tokens."""
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
        loss = DPOConfig(beta=args.pairs.dpo_beta, loss_type=args.pairs.dpo_loss)
        count_parts(sampler.num_prompts, device.microbatch, "pairs")  # an error in the unit of --microbatch
        update = UpdateConfig(pairs=loss, microbatch_size=None if device.microbatch is None else 2 * device.microbatch)
        penalty = args.pairs.missing_eos_penalty
        return OnlineDPOLoop, OnlineDPOConfig(**options, update=update, missing_eos_penalty=penalty)
    if not isinstance(args, Grpo | Rloo | Ppo):
        raise TypeError(f"expected the arguments of an algorithm; got {type(args).__name__}")
    update = update_config(args.loss, args.reference, policy, device.microbatch, sampler.num_generations)
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


def learning_rate(args: Common) -> float:
    """--learning-rate, or the default: 1e-5 for LoRA adapters, which start at zero, and 1e-6 for all weights."""
    if args.optimizer.learning_rate is not None:
        return args.optimizer.learning_rate
    return 1e-6 if args.model.lora_r is None else 1e-5


def make_evaluator(args: Common, loop: Loop, data: Data) -> Evaluator | None:
    """Builds the evaluator of the run; None without held-out rows."""
    if data.held_out is None:
        return None
    config, evaluation = loop.config, args.evaluation
    decodes = [decoding(text, args.sampler, config.policy, config.rollout) for text in evaluation.eval_decode]
    for decode in decodes:
        if trained_gate(decode.policy) is not None and trained_gate(config.policy) is None:
            raise ValueError(f"expected --eviction gate with --eval-decode {decode.name}, whose gate must be trained")
    if evaluation.eval_temperature is not None:
        sampling = replace(config.rollout.sampling, temperature=evaluation.eval_temperature)
        decodes = [replace(decode, sampling=sampling) for decode in decodes]
    settings = EvaluationConfig(
        decodes=tuple(decodes),
        rollout=config.rollout,
        prompt_width=data.held_out_width,
        rows=config.decode_rows or config.completions_per_step,
        stop_strings=config.stop_strings,
        seed=config.seed,
    )
    environment = environment_config(args.conversations, args.rewards.max_failed_rewards, data.held_out, args.data)
    name = evaluation.eval_dataset or args.data.dataset
    # The held-out rows may have a reward of their own; functions of --reward need no second process.
    rewards = loop.rewards if args.rewards.reward else None
    if environment is None and rewards is None:
        rewards = rewards_of(args, data.held_out, name)
    return Evaluator(
        loop.model, data.held_out, loop.tokenizer, settings, loop.mesh, rewards=rewards, environment=environment
    )
