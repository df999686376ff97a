"""Shared by the engines of TRL: settings (no gradient checkpointing, float32, nothing logged or saved), and a timer."""

from __future__ import annotations

from typing import Any

import common
from transformers import TrainerCallback
from trl import GRPOConfig


class Timer(TrainerCallback):
    """Times each optimizer step from its start to the end of its update, generation included."""

    def __init__(self, clock: common.Clock) -> None:
        self.clock = clock

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.clock.begin()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.clock.end()


def grpo_config(
    folder: str,
    *,
    rows: int,
    microbatch: int,
    group: int,
    new_tokens: int,
    steps: int,
    generation_kwargs: dict[str, Any] | None = None,
) -> GRPOConfig:
    """One optimizer step on `rows` completions, accumulated over microbatches.

    Args:
      new_tokens: maximum length of a completion. steps: optimizer steps.
    """
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=rows // microbatch,
        num_generations=group,
        max_completion_length=new_tokens,
        generation_kwargs=generation_kwargs,
        max_steps=steps,
        learning_rate=common.LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=common.BETAS[0],
        adam_beta2=common.BETAS[1],
        adam_epsilon=common.ADAM_EPS,
        weight_decay=common.WEIGHT_DECAY,
        max_grad_norm=common.MAX_GRADIENT_NORM,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
