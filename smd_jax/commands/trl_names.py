"""TRL's option names and their equivalents here."""

from __future__ import annotations

from collections.abc import Mapping

NOTHING = "nothing: "  # prefix of the reason why there is no flag

TRL_NAMES: Mapping[str, str] = {
    "model_name_or_path": "--model",
    "dataset_name": "--dataset",
    "dataset_train_split": "--split",
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
    "vllm_importance_sampling_mode": "--correction tis for token_truncate, --correction mis for sequence_mask",
    "vllm_importance_sampling_cap": "nothing: --correction tis has 2, mis has 3; others are for Python",
    "vllm_importance_sampling_clip_max": "nothing: --correction tis has 2, mis has 3; others are for Python",
    "vllm_importance_sampling_clip_min": "nothing: a lower bound of the weights is for Python, smd.corrections",
    "off_policy_mask_threshold": "nothing: the mask is for Python, smd.corrections.OPSM",
    "delta": "nothing: the dual clip is for Python, smd.losses.grpo(delta=...)",
    "sapo_temperature_pos": "nothing: other temperatures than TRL's defaults are for Python, smd.losses.sapo",
    "sapo_temperature_neg": "nothing: other temperatures than TRL's defaults are for Python, smd.losses.sapo",
    "use_adaptive_entropy": "nothing: --entropy-coef is constant",
    "multi_objective_aggregation": "nothing: rewards are added, with --reward-weights",
    "repetition_penalty": "nothing: the learner would have to replay it, as it does --top-k, --top-p and --min-p",
    "generation_kwargs": "a flag for each: --temperature, --top-k, --top-p, --min-p, --min-completion-length, --stop",
    "cache_implementation": "--eviction, and --quant-bits",
    "torch_dtype": "--dtype",
    "bf16": "--dtype bfloat16",
    "fp16": "nothing: --dtype has bfloat16 and float32",
    "load_in_4bit": "nothing: weights are not quantised; the cache is, with --quant-bits",
    "load_in_8bit": "nothing: weights are not quantised; the cache is, with --quant-bits",
    "use_peft": "--lora-r",
    "lora_dropout": "nothing: with dropout sampler and learner would be two policies",
    "disable_dropout": "nothing: there is no dropout",
    "use_liger_kernel": "nothing: the loss never has the logits of all tokens at once",
    "deepspeed": "--fsdp",
    "trust_remote_code": "nothing: code that comes with a model or data is never run",
    "shuffle_dataset": "nothing: every epoch is shuffled",
    "remove_unused_columns": "nothing: all columns go to the rewards",
    "tools": "--environment path/to/file.py:Class, which may be a ToolEnvironment",
    "eval_strategy": "--eval-steps",
    "eval_on_start": "nothing: --eval-steps also evaluates before training",
    "save_strategy": "--save-steps",
    "load_best_model_at_end": "--metric-for-best-model",
    "resume_from_checkpoint": "--resume, from the newest checkpoint in --output-dir",
    "log_completions": "--completions-steps",
    "num_completions_to_print": "--print-completions",
    "run_name": "--output-dir, whose last part is the run's name",
    "push_to_hub": "nothing: the folder model in --output-dir can be uploaded, as with `hf upload`",
    "hub_model_id": "nothing: the folder model in --output-dir can be uploaded, as with `hf upload`",
    "callbacks": "nothing: in Python a loop has report and watch, and train has loggers",
    "logging_dir": "--output-dir",
    "logging_steps": "nothing: every rollout is logged",
    "use_vllm": "nothing: the sampler is part of this library",
    "vllm_mode": "nothing: the sampler is part of this library",
    "attn_implementation": "--attention",
}


def in_place_of(name: str) -> str | None:
    """The equivalent of an option of TRL, as a sentence; None for any other name.

    Args:
      name: with dashes or underscores, with or without `--`.
    """
    plain = name.removeprefix("--").replace("-", "_")
    if plain not in TRL_NAMES:
        return None
    ours = TRL_NAMES[plain]
    why = ours.removeprefix(NOTHING)
    return f"TRL's {name} is {ours} here" if why == ours else f"TRL's {name} has no flag here: {why}"
