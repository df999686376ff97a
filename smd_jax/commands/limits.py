"""Checks of numbers and sizes before a run begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smd_jax.commands.errors import UserError
from smd_jax.config import MAX_SEED, ModelConfig
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.sampler.config import RolloutConfig, plan
from smd_jax.tasks.task import prompt_text
from smd_jax.text.prompts import unreachable_tokens
from smd_jax.train.loop import Loop

# Largest values. All other options are bounded by int32, the type of JAX's shapes and counters.
LARGEST: Mapping[str, int] = {
    "num_prompts": 2**20,
    "num_generations": 2**16,
    "max_completion_length": 2**24,
    "budget": 2**24,
    "buffer": 2**24,
    "dataset_size": 2**27,
    "lora_r": 2**16,
    "minibatches": 2**20,
    "num_iterations": 2**16,
    "seed": MAX_SEED,
    "eval_seed": MAX_SEED,
}
# Smallest values of the options that no configuration checks.
SMALLEST: Mapping[str, int] = {
    "seed": 0,
    "completions_steps": 0,
    "print_completions": 0,
    "save_total_limit": 1,
    "max_skipped_updates": 1,
    "eval_rows": 1,
    "decode_rows": 1,
    "dataset_size": 1,
    "max_prompt_length": 1,
    "data_parallel": 1,
    "fsdp": 1,
    "tensor": 1,
    "sequence": 1,
}

# The flags of smd-train whose product is the number of devices.
AXES = ("--data-parallel", "--fsdp", "--tensor", "--sequence")


def check_numbers(args: Any) -> None:
    """Raises UserError for a number out of range, and for an empty stop string.

    Args:
      args: the groups of options of a command.
    """
    values = {option: value for group in vars(args).values() for option, value in vars(group).items()}
    for option, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        flag, most = f"--{option.replace('_', '-')}", LARGEST.get(option, 2**31 - 1)
        if value > most:
            more = ", beyond which seeds repeat" if most == MAX_SEED else ""
            raise UserError(f"expected {flag} <= {most}{more}; got {str(value)[:40]}")
        if value < SMALLEST.get(option, value):
            raise UserError(f"expected {flag} >= {SMALLEST[option]}; got {value}")
    bound = values.get("mismatch_bound")
    if bound is not None and not bound > 0:
        raise UserError(f"expected --mismatch-bound > 0 nats; got {bound}")
    if values.get("top_entropy_quantile") == 0:
        raise UserError("expected --top-entropy-quantile > 0, a share of the tokens; got 0")
    if "" in values["stop"]:
        raise UserError(
            "expected non-empty strings for --stop; got an empty one, which would end every completion at once"
        )


def check_context(width: int, completion: int, config: ModelConfig) -> None:
    """Raises UserError for sequences that are longer than the model's context.

    Args:
      width, completion: largest number of tokens of a prompt, and of a completion.
    """
    if width + completion > config.max_positions:
        raise UserError(
            f"expected prompts and completions of at most {config.max_positions} tokens together, the model's context; "
            f"got {width} and {completion}. Lower --max-completion-length or --max-prompt-length"
        )


def check_reachable(task: Any, tokenizer: Any, vocab_size: int) -> None:
    """Raises UserError for a prompt with a token outside the embedding."""
    outside = unreachable_tokens(tokenizer, vocab_size)
    if not outside:
        return
    for index in range(len(task)):
        text = prompt_text(task[index], tokenizer)
        for token in outside:
            if token in text:
                raise UserError(
                    f"expected prompts of tokens that the model has; got {token!r} in row {index}, outside its "
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
    layers = loop.model.shape.num_layers
    if not config.policy.evicts or evicts_keys(config.policy, config.rollout, layers, config.prompt_width):
        return None
    budgets, _ = plan(config.policy, config.rollout, layers, config.prompt_width)
    most = most_compressed(config.rollout, config.prompt_width)
    return (
        f"Nothing will be evicted: prompts of at most {config.prompt_width} tokens and completions of at most "
        f"{config.rollout.max_new_tokens} fit into the {min(budgets)} keys that are kept, and {config.rollout.buffer} "
        f"of the buffer. Lower --budget below {most}, or take --eviction dense, which needs fewer slots"
    )


def check_devices(used: int, there: int, axes: Sequence[str] = AXES) -> None:
    """Raises UserError for a mesh over a part of the devices. One device is the default and is allowed.

    Args:
      axes: the flags of the command whose product is `used`.
    """
    if 1 < used < there:
        raise UserError(
            f"expected {' * '.join(axes)} = {there}, the number of devices; got {used}. To keep some of them out, "
            "hide them from JAX (CUDA_VISIBLE_DEVICES, TPU_VISIBLE_CHIPS)"
        )


def unused_devices(used: int, there: int) -> str | None:
    """A warning if some devices are not used; otherwise None."""
    if used == there:
        return None
    return f"{there - used} of {there} devices are not used: {' * '.join(AXES)} = {used}"
