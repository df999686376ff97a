"""Optimizers of a run, from optax, with the names and schedules of TRL.

    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-6, lr_scheduler_type="cosine", warmup_steps=0.1), 500)

                       bytes of state per parameter (plus 4 for the parameter and 4 for its gradient in float32)
    adamw              8      two moments in float32
    adamw, bfloat16    6      the momentum in bfloat16
    adafactor          < 0.1  row and column means of the second moment, of matrices from 128 on; no momentum

    clip by global norm ─► adamw or adafactor ─► + weight decay * parameter ─► * -learning rate

AdamW is torch's. Adafactor (arXiv:1804.04235) saves memory and behaves like AdamW at AdamW's learning rates: the same
second moment, stored by rows and columns, scales its steps. Lion is not offered: it steps by the gradient's sign, so a
batch without signal moves every weight as far as any other, and it needs other learning rates.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from smd_jax.learner.storage import is_vector
from smd_jax.message.gate import EVICTION_GATE
from smd_jax.model.layer_runs import layers_in_name
from smd_jax.model.protocol import Params
from smd_jax.typed_fields import check_types

Optim = Literal["adamw", "adafactor"]
Scheduler = Literal["constant", "linear", "cosine"]
MomentumName = Literal["float32", "bfloat16"]

# Adafactor, as in the paper and in transformers.
BLOCK_RMS = 1.0  # largest root mean square of a matrix update
LEAST_FACTORED = 128  # smallest sides of a matrix whose second moment is factored


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and the learning rate.

    Names and defaults are those of transformers' TrainingArguments, except the learning rate, which is that of TRL's
    GRPOConfig, and the scheduler, which is "linear" there.

    Attributes:
      optim: the optimizer.
      learning_rate: maximum learning rate.
      lr_scheduler_type: after the warm-up: "constant", or "linear" or "cosine" (half a wave) until the end of the run.
      warmup_steps: optimizer steps in which the learning rate rises from 0; below 1 their share of the run, rounded up.
      min_lr_rate: end of "linear" and "cosine" as a share of `learning_rate` (cosine_with_min_lr in transformers).
      weight_decay: decoupled, times the learning rate. As in transformers, vectors and everything called bias or scale
        do not decay.
      adam_beta1, adam_beta2, adam_epsilon: of AdamW.
      momentum_dtype: dtype of AdamW's momentum.
      max_grad_norm: gradients with a larger global norm are scaled down to it; None: never.
      gate_speed: learning rate of an eviction gate (`smd_jax.message.gate`) relative to that of the model: the gate
        starts at zero and needs logits of about one.
    """

    optim: Optim = "adamw"
    learning_rate: float = 1e-6
    lr_scheduler_type: Scheduler = "constant"
    warmup_steps: int | float = 0
    min_lr_rate: float = 0.0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    momentum_dtype: MomentumName = "float32"
    max_grad_norm: float | None = 1.0
    gate_speed: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        for name, value in (("learning_rate", self.learning_rate), ("adam_epsilon", self.adam_epsilon)):
            if not 0 < value < math.inf:
                raise ValueError(f"expected a finite {name} > 0; got {value}")
        for name, value in (("adam_beta1", self.adam_beta1), ("adam_beta2", self.adam_beta2)):
            if not 0 <= value < 1:
                raise ValueError(f"expected 0 <= {name} < 1; got {value}")
        if not 0 <= self.min_lr_rate <= 1:
            raise ValueError(f"expected 0 <= min_lr_rate <= 1, a share of the learning rate; got {self.min_lr_rate}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"expected a finite weight_decay >= 0; got {self.weight_decay}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"expected max_grad_norm > 0, or None; got {self.max_grad_norm}")
        if self.gate_speed is not None and not 0 < self.gate_speed < math.inf:
            raise ValueError(f"expected a finite gate_speed > 0, or None; got {self.gate_speed}")
        if not 0 <= self.warmup_steps < math.inf or (self.warmup_steps > 1 and self.warmup_steps % 1):
            raise ValueError(
                f"expected warmup_steps to be whole steps, or a share of the run below 1; got {self.warmup_steps}"
            )
        # Refused, because nothing would read it.
        if self.lr_scheduler_type == "constant" and self.min_lr_rate > 0:
            raise ValueError(
                f"expected min_lr_rate 0 with the scheduler 'constant', which never falls; got {self.min_lr_rate}"
            )
        if self.optim == "adafactor" and self.momentum_dtype != "float32":
            raise ValueError(
                f"expected momentum_dtype 'float32', the default, with 'adafactor', which keeps no momentum; "
                f"got {self.momentum_dtype!r}"
            )


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate of each of `steps` optimizer steps, as transformers' schedulers; a warm-up begins at 0.

    A warm-up that a run with a constant rate does not finish gives a warning, because more steps can follow.

    Raises:
      ValueError: without steps, or if the warm-up leaves no steps for a falling rate.
    """
    if steps < 1:
        raise ValueError(f"expected at least one optimizer step; got {steps}")
    share = config.warmup_steps < 1
    warmup = min(math.ceil(config.warmup_steps * steps), steps - 1) if share else int(config.warmup_steps)
    peak = config.learning_rate
    if warmup >= steps:
        problem = f"expected fewer warmup_steps than the {steps} optimizer steps of the run; got {warmup}"
        if config.lr_scheduler_type != "constant":
            raise ValueError(f"{problem}, so that the learning rate never falls")
        last = peak * (steps - 1) / warmup
        warnings.warn(f"{problem}, so that the last learning rate is {last:.3g}, not {peak:g}", stacklevel=2)
    if config.lr_scheduler_type == "linear":
        after = optax.linear_schedule(peak, config.min_lr_rate * peak, steps - warmup)
    elif config.lr_scheduler_type == "cosine":
        after = optax.cosine_decay_schedule(peak, steps - warmup, config.min_lr_rate)
    else:
        after = optax.constant_schedule(peak)
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def _faster_gate(speed: float) -> optax.GradientTransformation:
    """Multiplies the update of the eviction gate. Its state is empty, as in the checkpoints of earlier runs."""

    def scaled(updates: Any, params: Any) -> Any:
        if EVICTION_GATE not in updates:
            return updates
        return {**updates, EVICTION_GATE: jax.tree.map(lambda x: speed * x, updates[EVICTION_GATE])}

    return optax.stateless(scaled)


def _clip_by_layer_rms(threshold: float) -> optax.GradientTransformation:
    """`optax.clip_by_block_rms`, with each of stacked layers (`smd_jax.model.stacked_params`) as its own block."""

    def clipped(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        names = (jax.tree_util.keystr((key,), simple=True) for key in path)
        is_stacked = any(layers_in_name(name) is not None for name in names)
        rms = jnp.sqrt(jnp.mean(x**2, axis=tuple(range(int(is_stacked), x.ndim)), keepdims=True))
        return x / jnp.maximum(1.0, rms / threshold)

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(clipped, updates))


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimizer of a run of `steps` optimizer steps: rollouts times `LoopConfig.steps_per_rollout`.

    Its state holds the rate of the last step as `learning_rate`, which updates log.

    Raises:
      ValueError: as `learning_rate_schedule`.
    """

    def scaled(learning_rate: Any) -> optax.GradientTransformation:
        # Both turn the gradient into a direction of about unit size in every weight.
        if config.optim == "adafactor":
            # Without Adafactor's scaling by parameters, as in transformers' Trainer, so that AdamW's rates apply.
            factored = optax.scale_by_factored_rms(min_dim_size_to_factor=LEAST_FACTORED)
            parts = [factored, _clip_by_layer_rms(BLOCK_RMS)]
        else:
            dtype = jnp.dtype(config.momentum_dtype)
            parts = [optax.scale_by_adam(config.adam_beta1, config.adam_beta2, config.adam_epsilon, mu_dtype=dtype)]
        if config.weight_decay:
            parts.append(optax.add_decayed_weights(config.weight_decay, decayed))
        if config.gate_speed is not None:
            parts.append(_faster_gate(config.gate_speed))
        return optax.chain(*parts, optax.scale_by_learning_rate(learning_rate))

    # Explicitly float32: a rate like 1e-6 has few digits in the dtype of the parameters.
    rated = optax.inject_hyperparams(scaled, hyperparam_dtype=jnp.float32)
    optimizer = rated(learning_rate=learning_rate_schedule(config, steps))
    if config.max_grad_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optimizer)


def decayed(params: Params) -> Any:
    """The leaves that decay: matrices, and no norms, biases or sinks."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: not is_vector(path, leaf), params)
