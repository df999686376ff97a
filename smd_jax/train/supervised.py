"""Supervised warm start: next-token cross-entropy on answers, with the dense mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from smd_jax.learner.blocks import columns_at_once, over_columns
from smd_jax.learner.state import TrainState, trained_params, with_trained
from smd_jax.learner.step import take_step
from smd_jax.message.masks import dense_mask, positions
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.model.teacher_forced import hidden_states
from smd_jax.pytrees import PyTreeNode
from smd_jax.text.prompts import (
    Tokenizer,
    encode_continuation,
    encode_prompt,
    eos_token_id,
    pad_left,
    pad_token_id,
    wants_special_tokens,
)


class Examples(PyTreeNode):
    """Prompts with their answers, left-padded.

    Attributes:
      tokens: `[batch, T]` ids.
      valid: `[batch, T]`, true for tokens of prompt and answer.
      targets: `[batch, T]`, true for tokens of the answer, end of sequence included.
    """

    tokens: Int[Array, "batch T"]
    valid: Bool[Array, "batch T"]
    targets: Bool[Array, "batch T"]


def encode_examples(tokenizer: Tokenizer, prompts: Sequence[str], answers: Sequence[str], *, width: int) -> Examples:
    """Encodes pairs of prompt and answer.

    Raises:
      ValueError: for an empty prompt, or a pair that with its end of sequence is longer than `width` (naming its row).
    """
    rows, answer_lengths = list[list[int]](), list[int]()
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        answer_ids = [*encode_continuation(tokenizer, answer), eos_token_id(tokenizer)]
        ids = [*encode_prompt(tokenizer, prompt, add_special_tokens=wants_special_tokens(tokenizer)), *answer_ids]
        # The first token of the answer is predicted from the last one of the prompt: there must be one.
        if len(ids) == len(answer_ids):
            raise ValueError(f"expected at least one token in every prompt; example {row} has none")
        if len(ids) > width:
            raise ValueError(f"expected prompt + answer within {width} tokens; example {row} has {len(ids)}")
        rows.append(ids)
        answer_lengths.append(len(answer_ids))
    # Left-padded like the prompts of a rollout: all rows end at the last column.
    padded = pad_left(rows, width, pad_token_id(tokenizer))
    targets = np.arange(width) >= width - np.array(answer_lengths)[:, None]
    return Examples(padded.tokens, padded.valid, jnp.asarray(targets))


def cross_entropy(model: LanguageModel, params: Params, examples: Examples) -> Float[Array, ""]:
    """Mean negative log-likelihood of the answers' tokens, in nats."""
    seen = dense_mask(examples.valid)
    hidden = hidden_states(model, params, examples.tokens, positions(examples.valid), seen)
    # Column t predicts the token of column t + 1: the last column predicts nothing, the first is not predicted.
    targets = examples.tokens[:, 1:]

    def of_block(params: Params, _: Array, hidden: Array, targets: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(model.logits(params, hidden), targets)

    rows, length = targets.shape
    size = columns_at_once(model.shape, rows, length)
    losses = over_columns(of_block, params, size, jnp.arange(length), hidden[:, :-1], targets)
    wanted = examples.targets[:, 1:]
    return jnp.sum(jnp.where(wanted, losses, 0.0)) / jnp.maximum(wanted.sum(), 1)


def make_supervised_update(
    model: LanguageModel, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Examples], tuple[TrainState, Float[Array, ""]]]:
    """The jitted step `(state, examples) -> (state, loss)`; it donates the old state's buffers."""

    def update(state: TrainState, examples: Examples) -> tuple[TrainState, Float[Array, ""]]:
        def objective(trained: Params) -> Float[Array, ""]:
            return cross_entropy(model, with_trained(state.params, trained), examples)

        loss, grads = jax.value_and_grad(objective)(trained_params(state.params))
        return take_step(state, optimizer, grads)[0], loss

    return jax.jit(update, donate_argnums=0)
