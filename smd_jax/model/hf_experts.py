"""Mixtures of experts in Hugging Face's config.json, for every family that has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smd_jax.config import Experts, ModelConfig
from smd_jax.model.families import ExpertKeys, Family
from smd_jax.model.hf_fields import flag, number, shown, whole

EXPERT_KEYS = ("num_experts", "num_local_experts")
_CLAMP = 7.0  # gpt-oss' swiglu_limit, where config.json gives none
_BALANCE_COEF = 0.001  # of every family


def read_experts(config: Mapping[str, Any], keys: ExpertKeys, layers: int) -> Experts:
    """The experts of a model of `layers` layers.

    Raises:
      ValueError: a value of the wrong type or out of range; names the key.
    """
    count = _count(config, keys)
    per_token = whole(config, "num_experts_per_tok", keys.per_token)
    if per_token > count:
        raise ValueError(f"expected num_experts_per_tok <= {keys.count[0]} {count}; got {per_token}")
    return Experts(
        count=count,
        per_token=per_token,
        intermediate_size=whole(config, *keys.size),
        layers=_layers(config, layers) if keys.some_layers else (),
        normalised=keys.normalised is None or flag(config, "norm_topk_prob", keys.normalised),
        bias=keys.clamped,
        clamp=number(config, "swiglu_limit", _CLAMP) if keys.clamped else None,
        balance_coef=number(config, "router_aux_loss_coef", _BALANCE_COEF, zero=True),
    )


def _count(config: Mapping[str, Any], keys: ExpertKeys) -> int:
    """The key has another name in each family of transformers 4; transformers 5 reads both."""
    given = {key: whole(config, key) for key in EXPERT_KEYS if key in config}
    if len(set(given.values())) > 1:
        raise ValueError(f"expected one number of experts; got {given}")
    return next(iter(given.values())) if given else keys.count[1]


def _layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers have experts; empty if all have."""
    step = whole(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ValueError(f"expected mlp_only_layers as a list of integers, or null; got {shown(dense)}")
    found = tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))
    if not any(found):
        raise ValueError(
            f"expected a layer with experts; got decoder_sparse_step={step} and mlp_only_layers={shown(dense)}"
        )
    return () if all(found) else found


def experts_to_hf(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys of config.json; empty for a family without experts."""
    experts, keys = config.experts, family.experts
    if experts is None or keys is None:
        return {}
    found: dict[str, Any] = {
        keys.count[0]: experts.count,
        "num_experts_per_tok": experts.per_token,
        keys.size[0]: experts.intermediate_size,
        "router_aux_loss_coef": experts.balance_coef,
        "output_router_logits": False,
    }
    if keys.normalised is not None:
        found["norm_topk_prob"] = experts.normalised
    if keys.some_layers:
        found["decoder_sparse_step"] = 1
        found["mlp_only_layers"] = [n for n in range(config.num_layers) if not config.is_mixture(n)]
    if keys.clamped:
        found["swiglu_limit"] = experts.clamp
    return found
