"""Checks at every rollout that sampler and learner are one policy, and locates the first difference and its cause.

    |log p_learner - log p_sampler|     float32   6e-5 over 30 layers, 5e-6 over 3        bound   1.1e-3, 5.6e-4
                                        16 bits   0.3 over 30 layers                              2
                                        float64   1e-10 over 3                                    1e-8

A mask that is wrong for one relevant key causes a difference of a tenth of a nat or more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smd_jax.devices.processes import on_host
from smd_jax.learner.forward import replay
from smd_jax.message.masks import NEVER
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, ModelShape, Params
from smd_jax.typed_fields import check_types

DIFFERENCE = "sampling/sampling_logp_difference/max"

# Nats, and nats per layer, by compute dtype. Ten times the measured values, see docs/runs.md.
BOUNDS: dict[str, tuple[float, float]] = {
    "float64": (1e-8, 1e-9),
    "float32": (5e-4, 2e-5),
    "float16": (0.5, 0.05),
    "bfloat16": (0.5, 0.05),
}

# Masks that `find_wrong_head` replays together. All would take gigabytes with a large model and a long sequence.
AT_ONCE = 16


@dataclass(frozen=True)
class MismatchGuard:
    """Stops a run whose learner and sampler differ.

    Attributes:
      bound: largest allowed difference of a token's log-probabilities, in nats; None: see `default_bound`.
    """

    bound: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.bound is not None and not self.bound > 0:
            raise ValueError(f"expected a bound > 0 nats, or None; got {self.bound}")

    def bound_for(self, shape: ModelShape) -> float:
        """The bound of a model, in nats."""
        return default_bound(shape) if self.bound is None else self.bound


def is_beyond(difference: float, bound: float | None) -> bool:
    """Whether a difference exceeds the bound; NaN always does. None: no bound."""
    return bound is not None and not difference <= bound


def default_bound(shape: ModelShape) -> float:
    """The bound in nats: 7 to 18 times the largest rounding that was measured, see docs/runs.md."""
    dtype = shape.dtype
    # GPUs and TPUs multiply float32 in 10 or 8 bits unless the model or the process asks for more.
    if dtype == "float32" and not shape.full_float32 and jax.default_backend() != "cpu":
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        dtype = "float32" if precision in ("highest", "float32") else "bfloat16"
    base, per_layer = BOUNDS[dtype]
    return base + per_layer * shape.num_layers


class Difference(NamedTuple):
    """Where sampler and learner first differ.

    Attributes:
      row: row of the batch.
      column: column of the response.
      position: position of the token in its own sequence, including the prompt.
      nats: log p_learner - log p_sampler of that token.
    """

    row: int
    column: int
    position: int
    nats: float

    def __str__(self) -> str:
        return f"first at row {self.row}, position {self.position} ({self.nats:+.3g} nats)"


def first_difference(trajectory: Trajectory, logprobs: Float[Array, "batch R"], bound: float) -> Difference | None:
    """The first token at which learner and sampler differ by more than `bound` nats; None without one.

    All processes must call it and get the same result.

    Args:
      logprobs: the learner's, under the recorded mask and at the parameters that sampled the trajectory.
    """
    counted, sampled, learned = map(on_host, (trajectory.response_mask, trajectory.logprobs, logprobs))
    delta = np.where(counted, learned - sampled, 0.0)
    apart = ~(np.abs(delta) <= bound)
    if not apart.any():
        return None
    # The earliest column of any row, and there the row with the largest difference.
    column = int(np.argmax(apart.any(axis=0)))
    row = int(np.argmax(np.where(apart[:, column], np.abs(delta[:, column]), -1.0)))
    position = int(on_host(trajectory.positions)[row, trajectory.prompt_width + column])
    return Difference(row, column, position, float(delta[row, column]))


def find_wrong_head(model: LanguageModel, params: Params, trajectory: Trajectory, difference: Difference) -> str:
    """`likeliest layer 1, KV head 0: 2e-07 nats are left where it evicts a query earlier`, or why no head is named.

    Replays one row with the masks of common bugs, each in one head, and takes the one closest to the sampler.
    All processes must call it and get the same result: every host receives the row of `difference`.

    Args:
      params: the parameters that sampled the trajectory.
    """
    if not math.isfinite(difference.nats):
        return "no mask explains a NaN"
    one = jax.tree.map(lambda x: on_host(x[difference.row : difference.row + 1]), trajectory)
    shape = model.shape
    sides = (1, shape.num_layers, shape.num_kv_heads, one.tokens.shape[1])
    candidates = _masks_of_common_bugs(np.broadcast_to(one.mask.evicted_at, sides)[0])
    tried, logprobs = list[tuple[str, str]](), list[float]()
    while part := list(islice(candidates, AT_ONCE)):
        masks = [mask for _, _, mask in part]
        # The last ones are padded, so that one program is compiled.
        filled = np.stack(masks + masks[-1:] * (AT_ONCE - len(masks)))
        # Parameters may be on devices of several processes; host arrays go to all of them.
        logprobs += on_host(_logprobs_under(model, params, one, filled, difference.column))[: len(masks)].tolist()
        tried += [(head, change) for head, change, _ in part]
    left = np.abs(np.array(logprobs) - float(one.logprobs[0, difference.column]))
    best = int(np.nanargmin(left))
    # It must explain more than half: another bug may be compensated by chance.
    if left[best] > abs(difference.nats) / 2:
        return "no mask of a single head explains it: other parameters, or another attention"
    head, change = tried[best]
    return f"likeliest {head}: {left[best]:.3g} nats are left where it {change}"


def _masks_of_common_bugs(recorded: Int[np.ndarray, "layers kv_heads T"]) -> Iterator[tuple[str, str, np.ndarray]]:
    """The changed head, its change, and the recorded masks with it."""
    layers, heads, _ = recorded.shape
    for layer, head in np.ndindex(layers, heads):
        own = recorded[layer, head]
        evicted = (own > 0) & (own < NEVER)
        changes = {
            "sees every key": np.where(own > 0, NEVER, 0),
            "evicts a query later": own + evicted,
            "evicts a query earlier": own - evicted,
        }
        if heads > 1:
            changes["sees what the next head does"] = recorded[layer, (head + 1) % heads]
        if layers > 1:
            changes["sees what its head of the next layer does"] = recorded[(layer + 1) % layers, head]
        for change, mask in changes.items():
            whole = recorded.copy()
            whole[layer, head] = mask
            yield f"layer {layer}, KV head {head}", change, whole


@partial(jax.jit, static_argnums=0)
def _logprobs_under(
    model: LanguageModel,
    params: Params,
    one: Trajectory,
    evicted_at: Int[Array, "masks layers kv_heads T"],
    column: Int[Array, ""] | int,
) -> Float[Array, " masks"]:
    """log p of one row's token at a response column, under each of the masks."""
    rows = jax.tree.map(lambda x: jnp.repeat(x, len(evicted_at), axis=0), one)
    # Without segments, which changed masks do not respect.
    return replay(model, params, rows, rows.mask.replace(evicted_at=evicted_at)).logprobs[:, column]
