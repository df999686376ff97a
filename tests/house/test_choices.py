"""Choices by name: what is none of them is refused where it is made, also for users, who have no type checker."""

from __future__ import annotations

from typing import Any

import pytest

from smd_jax.corrections import MIS, TIS, Naive, Rejection
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.dpo_update import DPOUpdateConfig
from smd_jax.losses.distillation import DistillConfig
from smd_jax.losses.dpo import DPOConfig
from smd_jax.losses.policy import LossConfig
from smd_jax.train.optimizers import OptimizerConfig
from tests.toy_loop import CONFIG


@pytest.mark.parametrize(
    ("config", "field", "name", "choices"),
    [
        (TIS(), "level", "sequence_truncate", "token, sequence"),
        (MIS(), "level", "geometric", "token, sequence"),
        (Rejection(), "level", "seq_mean_k1", "token, sequence, geometric"),
        (LossConfig(), "ratio_level", "sequence", "token, geometric"),
        (CONFIG, "advantages", "rloo", "group_relative, leave_one_out"),
        (CONFIG, "scale_rewards", True, "group, batch, none"),
        (UpdateConfig(correction=Naive()), "visibility", "masked", "shadow, dense"),
        (DPOUpdateConfig(), "visibility", "masked", "shadow, dense"),
        (DPOConfig(), "loss_type", "hinge", "sigmoid, ipo"),
        (LossConfig(beta=0.1), "kl_estimator", "k4", "k1, k2, k3"),
        (OptimizerConfig(), "optim", "lion", "adamw, adafactor"),
        (OptimizerConfig(), "lr_scheduler_type", "step", "constant, linear, cosine"),
        (OptimizerConfig(), "momentum_dtype", "int8", "float32, bfloat16"),
        (DistillConfig(), "direction", "backward", "forward, reverse, published, anchor, ema"),
    ],
)
def test_a_name_that_is_no_choice(config: Any, field: str, name: Any, choices: str):
    broken = object.__new__(type(config))
    for key, value in vars(config).items():
        object.__setattr__(broken, key, value)
    object.__setattr__(broken, field, name)  # behind the type checker of these tests
    with pytest.raises(ValueError, match=f"expected {field} to be one of {choices}; got {name!r}"):
        broken.__post_init__()
