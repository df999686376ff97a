"""The learner's forward pass over a trajectory, under the sampler's mask or any other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from smd_jax.config import check_choice, check_instance
from smd_jax.learner.accumulation import count_parts, in_parts
from smd_jax.learner.blocks import columns_at_once, over_columns
from smd_jax.message.masks import Mask, ShadowMask
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params, check_model
from smd_jax.model.routing import check_expert_count
from smd_jax.model.shared_prompt import shared_prompt
from smd_jax.model.teacher_forced import hidden_and_router
from smd_jax.pytrees import PyTreeNode

Visibility = Literal["shadow", "dense"]  # the sampler's mask, or every key
ReplayFunction = Callable[[Params, Trajectory], Array]  # gives log-probabilities [batch, R]


class Replay(PyTreeNode):
    """The learner's log-probabilities and entropies of the response tokens, at the sampler's temperature and over its
    drawable tokens.

    Attributes:
      logprobs: `[batch, R]` log p of each response token; arbitrary where `response_mask` is false.
      entropy: `[batch, R]` entropy of each token's distribution, in nats.
    """

    logprobs: Float[Array, "batch R"]
    entropy: Float[Array, "batch R"]


def check_replayable(trajectory: Trajectory) -> None:
    """Raises ValueError for a greedily sampled trajectory, or one without log-probabilities."""
    if trajectory.logprobs is None:
        raise ValueError(
            "expected the sampler's log-probabilities in the trajectory: without them there is neither a ratio to the "
            "sampler nor a correction; got None"
        )
    if not trajectory.replayable:
        raise ValueError(
            "expected a trajectory sampled at a temperature > 0, because greedy decoding draws from no distribution "
            "that a learner could share; got one from a greedy sampler"
        )


def response_hidden(
    model: LanguageModel, params: Params, trajectory: Trajectory, mask: Mask
) -> Float[Array, "batch R hidden"]:
    """Hidden states that predict the response tokens: those of columns P-1 … T-2."""
    return response_hidden_and_router(model, params, trajectory, mask, read_router=False)[0]


def response_hidden_and_router(
    model: LanguageModel, params: Params, trajectory: Trajectory, mask: Mask, *, read_router: bool = True
) -> tuple[Float[Array, "batch R hidden"], Float[Array, "batch T mixtures count"] | None]:
    """`response_hidden`, and the router logits of all tokens, None without recorded routing or `read_router`."""
    packing = trajectory.packing
    longest = trajectory.longest if packing is None else packing.longest
    check_expert_count(model.shape, trajectory.expert_count)
    tokens, positions, routing = trajectory.tokens, trajectory.positions, trajectory.routing
    hidden, router = hidden_and_router(
        model, params, tokens, positions, mask, longest, routing, read_router=read_router
    )
    if packing is not None:
        return jnp.take_along_axis(hidden, packing.sources[..., None], axis=1), router
    # The state of column t predicts the token of column t + 1: the last prompt column predicts the first response
    # token, and the prediction of the last column was not sampled.
    return hidden[:, trajectory.prompt_width - 1 : -1], router


def response_logits(
    model: LanguageModel,
    params: Params,
    hidden: Float[Array, "batch columns hidden"],
    trajectory: Trajectory,
    columns: Int[Array, " columns"],
) -> Float[Array, "batch columns vocab"]:
    """Logits of response tokens with the sampler's temperature and filters, in float32 or wider. Logits of tokens that
    were not drawable are far below all others.

    Args:
      columns: response columns of `hidden`.
    """
    logits = model.logits(params, hidden) / trajectory.temperature
    if trajectory.drawable is None:
        return logits
    drawn = trajectory.response_mask[:, columns]
    # Padding keeps an arbitrary finite log-probability.
    return jnp.where(drawn[..., None], trajectory.drawable.apply(logits, columns), logits)


def replay(model: LanguageModel, params: Params, trajectory: Trajectory, mask: Mask | None = None) -> Replay:
    """One teacher-forced pass. `mask` None replays the sampler's mask and reproduces its log-probabilities.

    Not compiled; in a loop use `jax.jit(replay, static_argnums=0)`.

    Raises:
      TypeError: for a model that is no LanguageModel, or a trajectory of another class.
      ValueError: if the sampler was greedy.
    """
    check_model(model)
    check_instance("trajectory", trajectory, Trajectory)
    check_replayable(trajectory)
    trajectory = jax.tree.map(jnp.asarray, trajectory)  # NumPy arrays, as `device_get` gives, take no traced index
    mask = trajectory.mask if mask is None else mask
    return replay_hidden(model, params, response_hidden(model, params, trajectory, mask), trajectory)


def replay_hidden(
    model: LanguageModel,
    params: Params,
    hidden: Float[Array, "batch R hidden"],
    trajectory: Trajectory,
    entropy_gradient: bool = False,
) -> Replay:
    """The replay from hidden states of `response_hidden`, with logits in blocks of columns; see
    `smd_jax.learner.blocks`."""
    packing = trajectory.packing
    same = None if packing is None else packing.same
    if packing is not None and packing.distinct is not None and same is not None:
        hidden = jnp.take_along_axis(hidden, packing.distinct[..., None], axis=1)
        once = replay_hidden(model, params, hidden, trajectory.replace(packing=packing.once()), entropy_gradient)
        return jax.tree.map(lambda x: jnp.take_along_axis(x, same, axis=1), once)

    def of_block(
        params: Params, columns: Int[Array, " columns"], hidden: Array, tokens: Int[Array, "batch columns"]
    ) -> Replay:
        logits = response_logits(model, params, hidden, trajectory, columns)
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        # Logits of tokens that could not be drawn are very low but finite: they add 0 * finite, where -inf would add
        # NaN. Without entropy_gradient the entropy is a constant: otherwise the backward pass would compute the
        # logits' gradient twice.
        known = logprobs if entropy_gradient else jax.lax.stop_gradient(logprobs)
        entropy = -jnp.sum(jnp.exp(known) * known, axis=-1)
        return Replay(jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0], entropy)

    rows, length = trajectory.response.shape
    size = columns_at_once(model.shape, rows, length)
    return over_columns(of_block, params, size, jnp.arange(length), hidden, trajectory.response)


def learner_mask(trajectory: Trajectory, visibility: Visibility) -> Mask:
    """The learner's mask: the sampler's, or one without evictions."""
    return trajectory.mask if visibility == "shadow" else trajectory.dense_mask()


def learner_replay(
    model: LanguageModel,
    params: Params,
    trajectory: Trajectory,
    visibility: Visibility,
    microbatch_size: int | None,
    rows_per_prompt: int,
) -> Replay:
    """The learner's replay in microbatches with whole groups of `rows_per_prompt` rows."""

    def of_part(part: Trajectory) -> Replay:
        return replay(model, params, part, learner_mask(part, visibility))

    return in_parts(of_part, trajectory, count_parts(trajectory.tokens.shape[0], microbatch_size), rows_per_prompt)


def make_replay(
    model: LanguageModel, visibility: Visibility, microbatch_size: int | None = None, rows_per_prompt: int = 1
) -> ReplayFunction:
    """The jitted `(params, trajectory) -> logprobs [batch, R]`, an extra forward pass for a learner that differs from
    the sampler and takes several steps per rollout. `microbatch_size` and `rows_per_prompt` as in UpdateConfig.

    The returned function raises ValueError for rows of `rows_per_prompt` without a common prompt.

    Raises:
      ValueError: for an unknown visibility.
    """
    check_choice("visibility", visibility, get_args(Visibility))

    def logprobs(params: Params, trajectory: Trajectory) -> Array:
        once = shared_prompt(model, rows_per_prompt, trajectory.prompt_width)
        return learner_replay(once, params, trajectory, visibility, microbatch_size, rows_per_prompt).logprobs

    def check(params: Params, trajectory: Trajectory) -> tuple[()]:
        check_shared_prompts(rows_per_prompt, trajectory)
        return ()

    return checked_before(jax.jit(logprobs), check)


def checked_before(program: Any, check: Callable[..., tuple[Any, ...]]) -> Any:
    """The jitted program with a check of its arguments before each call, outside of jit. The check returns further
    arguments."""
    of_program = ("lower", "trace", "eval_shape", "clear_cache")

    @functools.wraps(program, (*functools.WRAPPER_ASSIGNMENTS, *of_program), ())
    def checked(*args: Any) -> Any:
        return program(*args, *check(*args))

    return checked


def is_traced(tree: Any) -> bool:
    """Whether a pytree holds tracers, whose values no check can read."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def check_shared_prompts(rows: int, trajectory: Trajectory) -> None:
    """Raises ValueError for `rows` consecutive rows whose prompts differ, or were read under different masks. Call it
    outside of jit; under a trace it checks nothing."""
    # A batch that does not divide raises its own error.
    if rows == 1 or is_traced(trajectory) or len(trajectory.tokens) % rows:
        return
    with jax.ensure_compile_time_eval():  # of a constant batch, also in a jit of the caller's
        found = jax.device_get(_unlike_prompts(trajectory, rows))
    for name in ("tokens", "valid", "mask", "routing"):
        if found.get(name, -1) >= 0:
            row, column = divmod(int(found[name]), trajectory.prompt_width)
            raise ValueError(
                f"expected rows_per_prompt={rows} consecutive rows to have one prompt, read under one mask; got other "
                f"{name} in row {row}, column {column}, than in row {row - row % rows}. With pack_columns as well, "
                "rows share what is equal"
            )


@functools.partial(jax.jit, static_argnames="rows")
def _unlike_prompts(trajectory: Trajectory, rows: int) -> dict[str, Array]:
    """By name, the first `row * P + column` that differs from the group's first row; -1 without one."""
    columns = trajectory.prompt_width
    # No query sees padding, whose tokens may differ.
    read = {"tokens": jnp.where(trajectory.valid, trajectory.tokens, 0), "valid": trajectory.valid}
    if isinstance(trajectory.mask, ShadowMask):
        # A prompt's queries see only whether a key was evicted before the prompt's end.
        at = jnp.minimum(trajectory.mask.evicted_at[..., :columns], columns)
        read["mask"] = jnp.moveaxis(at, -1, 1)
    elif len(trajectory.mask) > 1:  # booleans
        read["mask"] = jnp.moveaxis(trajectory.mask[..., :columns, :columns], -1, 1)
    if trajectory.routing is not None:
        read["routing"] = trajectory.routing
    found = {}
    for name, values in read.items():
        groups = values[:, :columns].reshape(-1, rows, columns, *values.shape[2:])
        unlike = (groups != groups[:, :1]).reshape(len(values), columns, -1).any(axis=-1).ravel()
        found[name] = jnp.where(unlike.any(), jnp.argmax(unlike), -1)
    return found
