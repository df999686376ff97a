"""Checks of numbers and sizes before a run begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from smd_jax.commands.errors import UserError
from smd_jax.config import MAX_SEED, ModelConfig
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.sampler.config import RolloutConfig, plan
from smd_jax.tasks.build import PROCEDURAL
from smd_jax.tasks.task import Task, prompt_text
from smd_jax.text.prompts import Tokenizer, unreachable_tokens
from smd_jax.train.loop import Loop

LARGEST = 2**24  # no size or count is larger; JAX's shapes and counters are int32
AT_LEAST_ONE = ("save_total_limit", "max_skipped_updates", "eval_rows", "decode_rows", "dataset_size")
AT_LEAST_ONE += ("max_prompt_length", "data_parallel", "fsdp", "tensor", "sequence")


def is_sparse(run: Any) -> bool:
    """Whether the policy that samples differs from that with the full cache."""
    return run.eviction != "dense" or run.quant_bits is not None


Rules = tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...]
NOT_PROCEDURAL = f"without --dataset {PROCEDURAL}NAME; --split train[:1000] takes the first rows of other data"
# Options, whether the run reads them, and when they have no effect.
_READ_BY_BOTH: Rules = (
    (("overlong_cache",), lambda run: "overlong" in run.reward, "without --reward overlong"),
    (
        ("max_turns", "max_turn_length", "environment_timeout", "turn_credit"),
        lambda run: run.environment is not None,
        "without --environment",
    ),
    (("context_length", "summary_request", "summary_heading"), lambda run: run.contexts > 1, "without --contexts"),
    # Eviction policies of evaluations have the same sinks.
    (
        ("sinks",),
        lambda run: not {run.eviction, *run.eval_decode} <= {"dense", "sampler"},
        "without an --eviction policy",
    ),
    (("budget", "pyramid"), lambda run: run.eviction != "dense", "without an --eviction policy"),
    # An environment replaces the rewards.
    (
        ("reward_weights", "reward_timeout"),
        lambda run: run.environment is None,
        "with --environment, which gives the rewards",
    ),
)
READ_IN_EVALUATION: Rules = (
    (("dataset_size",), lambda run: PROCEDURAL in run.dataset, NOT_PROCEDURAL),
    *_READ_BY_BOTH,
)
READ_IN_TRAINING: Rules = (
    (("dataset_size",), lambda run: PROCEDURAL in run.dataset + (run.eval_dataset or ""), NOT_PROCEDURAL),
    *_READ_BY_BOTH,
    (
        ("sync_ref_model",),
        lambda run: run.ref_model_sync_steps < run.max_steps * run.minibatches * run.num_iterations,
        "in a run of --max-steps rollouts, whose optimizer steps are no more than --ref-model-sync-steps",
    ),
    (
        ("distill",),
        lambda run: run.distill in ("anchor", "ema") or is_sparse(run),
        "with --eviction dense: teacher and student are one policy",
    ),
    (("dense_share",), is_sparse, "with --eviction dense: both learners are one policy, computed twice"),
    (("lora_alpha", "lora_target_modules", "use_rslora"), lambda run: run.lora_r is not None, "without --lora-r"),
    (("kl_estimator", "use_bias_correction_kl"), lambda run: run.beta > 0, "without --beta"),
    (("ref_model_mixup_alpha", "ref_model_sync_steps"), lambda run: run.sync_ref_model, "without --sync-ref-model"),
    # DPO replays the masks, too.
    (
        ("mismatch_bound",),
        lambda run: getattr(run, "correction", "shadow") == "shadow",
        "without --correction shadow: other learners differ from the sampler",
    ),
    # A file may hold a policy with a gate.
    (("gate_speed",), lambda run: "gate" in run.eviction or ".py" in run.eviction, "without --eviction gate"),
    (("distill_coef",), lambda run: run.distill != "none", "without --distill"),
    (("adam_beta1", "adam_beta2", "adam_epsilon"), lambda run: run.optim == "adamw", "without --optim adamw"),
    (("print_completions",), lambda run: run.completions_steps > 0, "without --completions-steps"),
    (
        ("eval_dataset", "eval_source", "eval_split", "eval_rows", "eval_seed", "eval_decode", "eval_temperature"),
        lambda run: run.eval_steps > 0,
        "without --eval-steps; only a later smd-eval --run reads it",
    ),
    (("greater_is_better",), lambda run: run.metric_for_best_model is not None, "without --metric-for-best-model"),
)


def check_numbers(args: Any) -> None:
    """Raises UserError for a number out of range in the groups of options of a command."""
    values = {name: value for group in vars(args).values() for name, value in vars(group).items()}
    for option, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        least, most = int(option in AT_LEAST_ONE), MAX_SEED if option.endswith("seed") else LARGEST
        if not least <= value <= most:
            raise UserError(f"expected --{option.replace('_', '-')} from {least} to {most}; got {str(value)[:40]}")
    if values.get("top_entropy_quantile") == 0:
        raise UserError("expected --top-entropy-quantile > 0, a share of the tokens; got 0")


def unread_options(args: Any, rules: Rules) -> list[str]:
    """Describes options that were changed and that the run does not read, because another option is off."""
    groups = vars(args).values()
    run = SimpleNamespace(**{name: value for group in groups for name, value in vars(group).items()})
    defaults = {field.name: field.default for group in groups for field in dataclasses.fields(group)}
    found = list[str]()
    for options, is_on, when in rules:
        changed = [name for name in options if name in defaults and getattr(run, name) != defaults[name]]
        if changed and not is_on(run):
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
            found.append(f"{flags}: no effect {when}")
    return found


def check_context(width: int, completion: int, config: ModelConfig) -> None:
    """Raises UserError if the longest prompt (`width`) and completion, in tokens, exceed the model's context."""
    if width + completion > config.max_positions:
        raise UserError(
            f"expected prompts and completions of at most {config.max_positions} tokens together, the model's context; "
            f"got {width} and {completion}. Lower --max-completion-length or --max-prompt-length"
        )


def check_prompt_tokens(task: Task, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises UserError for a prompt with a token outside the embedding."""
    outside = unreachable_tokens(tokenizer, vocab_size)
    for index in range(len(task) if outside else 0):
        text = prompt_text(task[index], tokenizer)
        if found := [token for token in outside if token in text]:
            raise UserError(
                f"expected prompts of tokens that the model has; got {found[0]!r} in row {index}, outside its "
                f"embedding of {vocab_size} rows"
            )


def evicts_keys(policy: EvictionPolicy, rollout: RolloutConfig, num_layers: int, prompt_width: int) -> bool:
    """Whether the longest possible sequence may lose a key in any layer."""
    budgets, _ = plan(policy, rollout, num_layers, prompt_width)
    return policy.spans is not None or (policy.evicts and most_compressed(rollout, prompt_width) > min(budgets))


def most_compressed(rollout: RolloutConfig, prompt_width: int) -> int:
    """The largest number of keys at a compression that another token follows: after the prompt, and then every `buffer`
    tokens."""
    return prompt_width + (rollout.max_new_tokens - 1) // rollout.buffer * rollout.buffer


def without_evictions(loop: Loop) -> str | None:
    """A warning if the cache of an evicting policy holds all keys; otherwise None. Such a cache is larger than one
    without eviction."""
    config = loop.config
    if not config.policy.evicts:
        return None
    if evicts_keys(config.policy, config.rollout, loop.model.shape.num_layers, config.prompt_width):
        return None
    return (
        f"Nothing will be evicted: prompts of at most {config.prompt_width} tokens and completions of at most "
        f"{config.rollout.max_new_tokens} fit into the budget. Lower --budget below "
        f"{most_compressed(config.rollout, config.prompt_width)}, or take --eviction dense, which needs fewer slots"
    )


def check_devices(used: int, there: int) -> None:
    """Raises UserError for a mesh over a part of the devices. One device is the default and is allowed."""
    if 1 < used < there:
        raise UserError(
            f"expected --data-parallel * --fsdp * --tensor (* --sequence of smd-train) = {there}, the number of "
            f"devices; got {used}. To keep some of them out, hide them from JAX (CUDA_VISIBLE_DEVICES, "
            "TPU_VISIBLE_CHIPS)"
        )
