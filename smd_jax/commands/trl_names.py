"""Flags that TRL's users type, and that are called otherwise here, or not needed: what to write in their place."""

from __future__ import annotations

from collections.abc import Mapping

TRL_NAMES: Mapping[str, str] = {
    "model_name_or_path": "--model",
    "dataset_name": "--dataset",
    "dataset_train_split": "--dataset-split",
    "dataset_test_split": "--eval-split",
    "reward_funcs": "--reward path/to/file.py:function",
    "reward_model_name_or_path": "--reward with a function of your own, which may ask a model",
    "per_device_train_batch_size": "--num-prompts, prompts of a rollout, and --microbatch, rows of one pass",
    "per_device_eval_batch_size": "--decode-rows",
    "gradient_accumulation_steps": "--microbatch, rows of one pass",
    "generation_batch_size": "--num-prompts times --num-generations",
    "steps_per_generation": "--minibatches, optimizer steps per pass over a rollout",
    "num_train_epochs": "--max-steps, in rollouts",
    "warmup_ratio": "--warmup-steps below 1",
    "importance_sampling_level": "--loss-type gspo",
    "vllm_importance_sampling_correction": "--correction",
    "torch_dtype": "--dtype",
    "bf16": "--dtype bfloat16",
    "use_peft": "--lora-r",
    "eval_strategy": "--eval-steps",
    "save_strategy": "--save-steps",
    "load_best_model_at_end": "--metric-for-best-model",
    "resume_from_checkpoint": "--resume, from the newest checkpoint in --output-dir",
    "log_completions": "--completions-steps",
    "num_completions_to_print": "--print-completions",
    "run_name": "--output-dir, whose last part is the run's name",
    "logging_steps": "nothing: every rollout is logged",
    "use_vllm": "nothing: the sampler is part of this library",
    "vllm_mode": "nothing: the sampler is part of this library",
    "attn_implementation": "--attention",
}


def in_place_of(name: str) -> str | None:
    """What to write in place of an option of TRL's; None if it is none of them.

    Args:
      name: with dashes or underscores, also as a flag.
    """
    plain = name.removeprefix("--").replace("-", "_")
    return f"TRL's {name} is {TRL_NAMES[plain]} here" if plain in TRL_NAMES else None
