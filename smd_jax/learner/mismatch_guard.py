"""Checks at every rollout that sampler and learner are one policy, and locates differences.

    |log p_learner - log p_sampler|     float32   6e-5 over 30 layers, 5e-6 over 3        bound   1.1e-3, 5.6e-4
                                        16 bits   0.3 over 30 layers                              2
                                        float64   1e-10 over 3                                    1e-8

A mask that is wrong for one relevant key causes a difference of a tenth of a nat or more.

To find the layer and head, each head is replayed with the masks of common bugs. The message names the one closest to
the sampler.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smd_jax.devices.processes import on_host
from smd_jax.learner.forward import replay
from smd_jax.message.masks import NEVER, ShadowMask
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, ModelShape, Params
from smd_jax.typed_fields import check_types

DIFFERENCE = "sampling/sampling_logp_difference/max"

# Nats, and nats per layer, by compute dtype. Ten times the measured values, see docs/determinism.md.
BOUNDS: dict[str, tuple[float, float]] = {
    "float64": (1e-8, 1e-9),
    "float32": (5e-4, 2e-5),
    "float16": (0.5, 0.05),
    "bfloat16": (0.5, 0.05),
}

# Masks that are replayed at the same time.
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


def default_bound(shape: ModelShape) -> float:
    """Ten times the largest difference caused by rounding, in nats."""
    dtype = shape.dtype
    # GPUs and TPUs multiply float32 in 10 or 8 bits by default.
    if dtype == "float32" and jax.default_backend() != "cpu":
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        precise = precision in ("highest", "float32")
        dtype = "float32" if precise else "bfloat16"
    base, per_layer = BOUNDS[dtype]
    return base + per_layer * shape.num_layers


class Parting(NamedTuple):
    """The first difference between sampler and learner.

    Attributes:
      row: row of the batch.
      position: position of the token in its own sequence, including the prompt.
      difference: log p_learner - log p_sampler of that token, nats.
      layer, head: the KV head whose mask is most likely wrong; None if no single head explains it.
      left: remaining |difference| with the mask of `explanation`.
    """

    row: int
    position: int
    difference: float
    layer: int | None
    head: int | None
    left: float
    explanation: str

    def __str__(self) -> str:
        where = f"first at row {self.row}, position {self.position} ({self.difference:+.3g} nats)"
        if self.layer is None:
            return f"{where}; no mask of a single head explains it: other parameters, or another attention"
        return (
            f"{where}; likeliest layer {self.layer}, KV head {self.head}: {self.left:.3g} nats are left where it "
            f"{self.explanation}"
        )


def find_parting(
    model: LanguageModel, params: Params, trajectory: Trajectory, logprobs: Float[Array, "batch R"], bound: float
) -> Parting | None:
    """The first position where learner and sampler differ by more than `bound`; None without one.

    All processes must call it and get the same result: every host receives the log-probabilities of all rows and the
    mask of the reported row.

    Args:
      params: the parameters that sampled the trajectory.
      logprobs: the learner's, under the recorded mask.
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
    difference = float(delta[row, column])
    one = jax.tree.map(lambda x: on_host(x[row : row + 1]), trajectory)
    found = _likeliest_head(model, params, one, column)
    # It must explain more than half: another bug may be compensated by chance.
    if found is None or found[3] > abs(difference) / 2:
        return Parting(row, position, difference, None, None, abs(difference), "")
    layer, head, explanation, left = found
    return Parting(row, position, difference, layer, head, left, explanation)


def _likeliest_head(
    model: LanguageModel, params: Params, one: Trajectory, column: int
) -> tuple[int, int, str, float] | None:
    """Layer, KV head, the explaining mask's name, and the remaining difference, for one row on the host."""
    if not isinstance(one.mask, ShadowMask):
        return None  # a custom pattern, whose common bugs are unknown
    shape = model.shape
    sides = (1, shape.num_layers, shape.num_kv_heads, one.tokens.shape[1])
    recorded = np.broadcast_to(np.asarray(one.mask.evicted_at), sides)[0]
    candidates = _other_masks(recorded)
    names, logprobs = list[tuple[int, int, str]](), list[float]()
    # A few at a time: for a large model and a long sequence all of them take gigabytes.
    while part := list(itertools.islice(candidates, AT_ONCE)):
        masks = [mask for *_, mask in part]
        # The last batch is padded, so that one program is compiled.
        filled = np.stack(masks + masks[-1:] * (AT_ONCE - len(masks)))
        # Parameters may be on devices of several processes; host arrays go to all of them.
        found = on_host(_logprobs_under(model, params, one, filled, column))
        names += [(layer, head, explanation) for layer, head, explanation, _ in part]
        logprobs += found[: len(part)].tolist()
    left = np.abs(np.array(logprobs) - float(one.logprobs[0, column]))
    best = int(np.nanargmin(left))
    return (*names[best], float(left[best]))


def _other_masks(recorded: np.ndarray) -> Iterator[tuple[int, int, str, np.ndarray]]:
    """Layer, KV head, name of the change, and `evicted_at [layers, kv_heads, T]` with only that head changed."""
    layers, heads, _ = recorded.shape
    for layer, head in np.ndindex(layers, heads):
        own = recorded[layer, head]
        evicted = (own > 0) & (own < NEVER)
        changed = {
            "sees every key": np.where(own > 0, NEVER, 0),
            "evicts a query later": own + evicted,
            "evicts a query earlier": own - evicted,
        }
        if heads > 1:
            changed["sees what the next head does"] = recorded[layer, (head + 1) % heads]
        if layers > 1:
            changed["sees what its head of the next layer does"] = recorded[(layer + 1) % layers, head]
        for explanation, mask in changed.items():
            whole = recorded.copy()
            whole[layer, head] = mask
            yield layer, head, explanation, whole


@partial(jax.jit, static_argnums=0)
def _logprobs_under(
    model: LanguageModel,
    params: Params,
    one: Trajectory,
    evicted_at: Int[Array, "masks layers kv_heads T"],
    column: Int[Array, ""] | int,
) -> Float[Array, " masks"]:
    """log p of one row's token at a response column, under each of the masks."""
    assert isinstance(one.mask, ShadowMask)
    rows = jax.tree.map(lambda x: jnp.repeat(x, len(evicted_at), axis=0), one)
    # Changed masks do not respect the segments.
    return replay(model, params, rows, rows.mask.replace(evicted_at=evicted_at, segments=())).logprobs[:, column]
