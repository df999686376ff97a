"""Builds the library's objects from command-line options: model, policy, rollout, update and loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from smd_jax.commands.arguments import (
    AttentionName,
    DeviceArgs,
    LossArgs,
    ReferenceArgs,
    SamplerArgs,
    SamplingArgs,
)
from smd_jax.commands.decode_names import parse_decode, policy_text
from smd_jax.commands.described_policies import check_centers
from smd_jax.commands.policy_names import own_place, parse_policy
from smd_jax.commands.policy_trial import check_score
from smd_jax.config import ModelConfig
from smd_jax.corrections.named import CORRECTIONS
from smd_jax.eviction import policies, wrappers
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.learned import LearnedGate
from smd_jax.eviction.statistics import CacheShape
from smd_jax.eviction.triattention import TriAttention
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.dense_learner import DenseLearner
from smd_jax.learner.reference import ReferenceSync
from smd_jax.losses.distillation import Direction, DistillConfig
from smd_jax.losses.named import LOSSES
from smd_jax.losses.policy import LossConfig
from smd_jax.message.gate import LinearGate
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.sampling import SamplingConfig
from smd_jax.model.decoder import Decoder, Remat
from smd_jax.model.protocol import ModelShape
from smd_jax.sampler.config import RolloutConfig
from smd_jax.train.decoding import Decode, as_trained

BOTH = frozenset({"epsilon", "epsilon_high"})
BOUNDS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(LOSSES, BOTH),
    "cispo": frozenset({"epsilon_high"}),
    "sapo": frozenset(),
}


def decoder(config: ModelConfig, attention: AttentionName, remat: Remat = "none", scan_layers: bool = False) -> Decoder:
    """The model with the platform's fastest attention, or with plain JAX."""
    if attention == "portable":
        return Decoder(config, remat, impl="portable", decode_impl="xla", scan_layers=scan_layers)
    return Decoder(config, remat, scan_layers=scan_layers)


def eviction_policy(args: SamplerArgs) -> EvictionPolicy:
    """The policy of --eviction, --sinks and --pyramid.

    Raises:
      ValueError: as `named_policy`; a greedy gate, which cannot be trained.
    """
    policy = named_policy(args.eviction, args.sinks, args.pyramid)
    if isinstance(policy, LearnedGate) and policy.greedy:
        raise ValueError(
            f"expected a gate that samples its evictions, so that it can be trained; got {args.eviction!r}"
        )
    return policy


def named_policy(text: str, sinks: int, pyramid: bool) -> EvictionPolicy:
    """Parses a policy that always keeps the first `sinks` keys; a pyramid gives deeper layers smaller budgets.

    Raises:
      ValueError: as `parse_policy`; sinks that are given twice; a pyramid for a gate.
    """
    named = parse_policy(text)
    if isinstance(named.policy, policies.StreamingLLM) and "sinks" in named.given:
        raise ValueError(f"expected the sinks of streaming_llm only in --sinks; got {text!r}")
    policy = with_sinks(named.policy, sinks)
    if pyramid and isinstance(policy, LearnedGate):
        raise ValueError(
            "expected no --pyramid with the policy 'gate', because its draws would not be recorded; got it"
        )
    return wrappers.Pyramid(policy) if pyramid and policy.evicts else policy


def way_of_decoding(text: str, sinks: int) -> Decode:
    """`parse_decode`, with a policy that keeps the first `sinks` keys. Raises as it and `named_policy`."""
    return replace(parse_decode(text), policy=named_policy(policy_text(text), sinks, pyramid=False))


def decoding(
    text: str, sampler: SamplingArgs, policy: EvictionPolicy, rollout: RolloutConfig, shape: ModelShape
) -> Decode:
    """One entry of --eval-decode: "sampler", which decodes as in training, or a text for `way_of_decoding`.

    Args:
      policy: the policy of "sampler".
      rollout: the rollout of "sampler", and the defaults of all other ways of decoding.

    Raises:
      ValueError: as `way_of_decoding` and `try_policy`.
    """
    if text.strip() == "sampler":
        return as_trained(policy, rollout)
    decode = way_of_decoding(text, sampler.sinks)
    sizes = decode.rollout(rollout)
    try_policy(policy_text(text), shape, sizes.budget, sizes.buffer)
    return decode


def try_policy(text: str, shape: ModelShape, budget: int, buffer: int) -> None:
    """Raises ValueError if a user's eviction policy returns scores that the sampler cannot use, and for query centers
    of another model."""
    policy = parse_policy(text).policy
    check_centers(policy, shape)
    if own_place(text) is not None:
        sizes = CacheShape(1, shape.num_heads, shape.num_kv_heads, budget + buffer, shape.head_dim, shape.dtype)
        check_score(policy, sizes, budget)


def with_sinks(policy: EvictionPolicy, sinks: int) -> EvictionPolicy:
    """Protects the first `sinks` keys of a sequence from the policy."""
    if not policy.evicts:
        return policy
    if isinstance(policy, policies.StreamingLLM):
        return policies.StreamingLLM(sinks)  # has sinks itself
    if isinstance(policy, TriAttention):
        return replace(policy, sinks=sinks)  # which are left out of its normalisation
    if isinstance(policy, LearnedGate):
        return replace(policy, weights=LinearGate(sinks))  # the learner must know which keys no draw evicts
    return wrappers.Protect(policy, sinks=sinks) if sinks else policy


def rollout_config(args: SamplingArgs, eos: tuple[int, ...], pad: int) -> RolloutConfig:
    """The rollout of the options; `eos` and `pad` are token ids."""
    return RolloutConfig(
        max_new_tokens=args.max_completion_length,
        budget=args.budget,
        buffer=args.buffer,
        # One token is an int: runs recorded it this way, and resume compares it.
        eos_token_id=eos[0] if len(eos) == 1 else eos,
        pad_token_id=pad,
        min_new_tokens=args.min_completion_length,
        prefill_chunk=args.prefill_chunk,
        sampling=SamplingConfig(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p),
        quant=None if args.quant_bits is None else QuantConfig(bits=args.quant_bits),
    )


def update_config(
    loss: LossArgs, reference: ReferenceArgs, policy: EvictionPolicy, device: DeviceArgs, completions: int, evicts: bool
) -> UpdateConfig:
    """The update of GRPO, RLOO and PPO, without a critic.

    Args:
      policy: the sampler's policy; a gate is trained.
      completions: completions per prompt.
      evicts: whether this run evicts any key.
    """
    direction = distillation(loss, reference, evicts)
    distill = None if direction is None else DistillConfig(direction=direction, coef=loss.distill_coef)
    # A microbatch may hold fewer rows than a prompt has: as many of a prompt's rows as are always in one microbatch.
    together = math.gcd(completions, device.microbatch or completions) if device.share_prompts else 1
    if device.share_prompts and together == 1:
        raise ValueError(
            f"expected, with share_prompts, num_generations and a microbatch with a common divisor above 1; got "
            f"{completions} and {device.microbatch}"
        )
    sync = None
    if reference.sync_ref_model:
        sync = ReferenceSync(reference.ref_model_mixup_alpha, reference.ref_model_sync_steps)
    return UpdateConfig(
        visibility="shadow" if loss.correction == "shadow" else "dense",
        loss=loss_config(loss, reference),
        correction=CORRECTIONS[loss.correction](),
        distill=distill,
        dense_learner=DenseLearner(loss.dense_share) if loss.dense_share else None,
        entropy_coef=loss.entropy_coef,
        top_entropy_quantile=loss.top_entropy_quantile,
        kl_in_reward=reference.kl_in_reward,
        reference_sync=sync,
        mask_truncated_completions=loss.mask_truncated_completions,
        microbatch_size=device.microbatch,
        pack_columns=device.pack_columns,
        rows_per_prompt=together,
        eviction_coef=0.0 if policy.gate is None else 1.0,
    )


def distillation(loss: LossArgs, reference: ReferenceArgs, evicts: bool) -> Direction | None:
    """The direction of distillation.

    The default is the frozen dense teacher, which won in our study. Without evictions it sees the same keys as the
    policy and would only hold the policy to its start, so the default is then none.
    """
    if loss.distill == "none":
        return None
    if loss.distill == "auto":
        # A reference that is synced with the policy is no anchor.
        return "anchor" if loss.correction == "shadow" and evicts and not reference.sync_ref_model else None
    return loss.distill


def loss_config(args: LossArgs, reference: ReferenceArgs) -> LossConfig:
    """The named loss with the clipping bounds of its paper, or the given ones.

    Raises:
      ValueError: a bound that the loss does not have.
    """
    bounds = {"epsilon": args.epsilon, "epsilon_high": args.epsilon_high}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    allowed = BOUNDS[args.loss_type]
    if unread := given.keys() - allowed:
        raise ValueError(
            f"expected for the loss {args.loss_type!r} only the bounds {sorted(allowed)}; got {sorted(unread)}"
        )
    return replace(
        LOSSES[args.loss_type](**given),
        beta=reference.beta,
        kl_estimator=reference.kl_estimator,
        use_bias_correction_kl=reference.use_bias_correction_kl,
    )
