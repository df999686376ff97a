"""Builds the library's objects from command-line options: model, policy, rollout, update and loss."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

from smd_jax.commands.arguments import AttentionName, LossArgs, ReferenceArgs, SamplerArgs, SamplingArgs
from smd_jax.commands.policy_texts import named_policy, parse_decode
from smd_jax.config import ModelConfig
from smd_jax.corrections.named import CORRECTIONS
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import LearnedGate
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.policy_term import DenseLearner
from smd_jax.learner.step import ReferenceSync
from smd_jax.losses.distillation import DistillConfig
from smd_jax.losses.named import LOSSES
from smd_jax.losses.policy import LossConfig
from smd_jax.message.gate import LinearGate
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.sampling import SamplingConfig
from smd_jax.model.decoder import Decoder, Remat
from smd_jax.sampler.config import RolloutConfig
from smd_jax.train.evaluation import Decode, as_trained


def decoder(config: ModelConfig, attention: AttentionName, remat: Remat = "none", scan_layers: bool = False) -> Decoder:
    """The model with the platform's fastest attention, or with plain JAX."""
    if attention == "portable":
        return Decoder(config, remat, impl="portable", decode_impl="xla", scan_layers=scan_layers)
    return Decoder(config, remat, scan_layers=scan_layers)


def eviction_policy(args: SamplerArgs) -> EvictionPolicy:
    """The policy of --eviction, --sinks and --pyramid. Raises ValueError as `named_policy`, for a greedy gate, which
    cannot be trained, and for a gate that cannot be saved."""
    policy = named_policy(args.eviction, args.sinks, args.pyramid)
    if isinstance(policy, LearnedGate) and policy.greedy:
        raise ValueError(
            f"expected a gate that samples its evictions, so that it can be trained; got {args.eviction!r}"
        )
    gate = policy.gate
    if gate is not None and gate.has_parameters and type(gate) is not LinearGate:
        raise ValueError(
            f"expected a LinearGate or a gate without parameters, because no file holds others; got {gate}. "
            "smd.GRPOLoop trains it"
        )
    return policy


def decoding(text: str, sampler: SamplingArgs, policy: EvictionPolicy, rollout: RolloutConfig) -> Decode:
    """One entry of --eval-decode: "sampler", which is `policy` and `rollout`, or a text for `parse_decode`."""
    return as_trained(policy, rollout) if text.strip() == "sampler" else parse_decode(text, sampler.sinks)


def rollout_config(args: SamplingArgs, eos: tuple[int, ...], pad: int) -> RolloutConfig:
    """The rollout of the options; `eos` and `pad` are token ids."""
    return RolloutConfig(
        max_new_tokens=args.max_completion_length,
        budget=args.budget,
        buffer=args.buffer,
        eos_token_id=eos,
        pad_token_id=pad,
        min_new_tokens=args.min_completion_length,
        prefill_chunk=args.prefill_chunk,
        sampling=SamplingConfig(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p),
        quant=None if args.quant_bits is None else QuantConfig(bits=args.quant_bits),
    )


def update_config(
    loss: LossArgs, reference: ReferenceArgs, policy: EvictionPolicy, microbatch: int | None, completions: int
) -> UpdateConfig:
    """The update of GRPO, RLOO and PPO, without a critic, for this number of completions per prompt. A gate of the
    sampler's policy is trained."""
    distill = None if loss.distill == "none" else DistillConfig(direction=loss.distill, coef=loss.distill_coef)
    # A microbatch may hold fewer rows than a prompt has: as many of a prompt's rows as are always in one microbatch.
    # With pack_columns it counts packed rows, which share a prompt wherever they can.
    together = completions if loss.pack_columns is not None else math.gcd(completions, microbatch or completions)
    rows_per_prompt = together if loss.share_prompts else 1
    if loss.share_prompts and rows_per_prompt == 1:
        raise ValueError(
            f"expected, with share_prompts, num_generations and a microbatch with a common divisor above 1; got "
            f"{completions} and {microbatch}"
        )
    sync = ReferenceSync(reference.ref_model_mixup_alpha, reference.ref_model_sync_steps)
    return UpdateConfig(
        loss=loss_config(loss, reference),
        correction=CORRECTIONS[loss.correction](),
        distill=distill,
        dense_learner=DenseLearner(loss.dense_share) if loss.dense_share else None,
        entropy_coef=loss.entropy_coef,
        top_entropy_quantile=loss.top_entropy_quantile,
        kl_in_reward=reference.kl_in_reward,
        reference_sync=sync if reference.sync_ref_model else None,
        mask_truncated_completions=loss.mask_truncated_completions,
        microbatch_size=microbatch,
        pack_columns=loss.pack_columns,
        rows_per_prompt=rows_per_prompt,
        eviction_coef=0.0 if policy.gate is None else 1.0,
    )


def loss_config(args: LossArgs, reference: ReferenceArgs) -> LossConfig:
    """The named loss with its paper's clipping bounds, or the given ones. Raises ValueError for a bound it lacks."""
    bounds = {"epsilon": args.epsilon, "epsilon_high": args.epsilon_high}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    make = LOSSES[args.loss_type]
    bounds_of_loss = [name for name in bounds if name in inspect.signature(make).parameters]
    if given and not CORRECTIONS[args.correction]().traits.clips:
        raise ValueError(
            f"expected no bounds of the loss with the correction {args.correction!r}, whose trust region replaces "
            f"them; got {given}"
        )
    others = [name for name in given if name not in bounds_of_loss]
    if others:
        raise ValueError(f"expected bounds of the loss {args.loss_type!r}, among {bounds_of_loss}; got {others}")
    return replace(
        make(**given),
        beta=reference.beta,
        kl_estimator=reference.kl_estimator,
        use_bias_correction_kl=reference.use_bias_correction_kl,
    )
