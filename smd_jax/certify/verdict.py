"""Compares a record with its replay, and names the cause of a mismatch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from smd_jax.certify.causes import CAUSES, SPARE, Conditions, PromptFacts
from smd_jax.message.drawable_tokens import OUTSIDE
from smd_jax.message.masks import NEVER, ShadowMask
from smd_jax.message.sampling import among
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.model.teacher_forced import hidden_states

# Mean |difference| in nats up to which a float32 sampler and learner are one policy.
TOLERANCE = 1e-4
# Mean |difference| of a bfloat16 sampler, as a multiple of what bfloat16 changes in our own replay.
ROUNDING = 3.0
# A cause is named if its replay leaves at most this share of the mean |difference|.
EXPLAINED = 0.25
# Tokens, the likeliest first, among which a filter is fitted.
MOST_DRAWABLE = 2048
# Layers that are tried for a swap of two masks.
SUSPECTS = 6
# Nats at which the difference of one number is cut off: a token outside of a tested set has no probability.
MOST_DIFFERENT = 50.0
# Correlation of the difference with what the other dtype changes, below which the other dtype is its cause.
FOLLOWS = -0.5

WEIGHTS = "stale weights"
WEIGHTS_MEND = "update the sampler's weights before it samples, and compare their checksums"
DTYPE = "dtype"
DTYPE_MEND = "compute in the same dtype on both sides, or accept its rounding: certify with --dtype"
SUPPORT = "sampling support"
SUPPORT_MEND = "record the tokens that filters left (support_ids), and replay over these"
TEMPERATURE = "temperature"
TEMPERATURE_MEND = "divide logits by the same temperature on both sides before the softmax"
ALIGNMENT = "tokens misaligned"
ALIGNMENT_MEND = "column t of logprobs belongs to token t"
VISIBILITY = "evictions"
VISIBILITY_MEND = "record what the engine evicted, after it evicted it"
SWAPPED = "layers or heads swapped"


class Models(NamedTuple):
    """The model that is about to be trained, and others to compare with.

    Attributes:
      model, params: to certify.
      other: the same weights computed in another dtype; None: not compared.
      other_dtype: its name.
      previous: older parameters that the sampler may have had; None: not compared.
    """

    model: LanguageModel
    params: Params
    other: tuple[LanguageModel, Params] | None = None
    other_dtype: str = ""
    previous: Params | None = None


class Finding(NamedTuple):
    """One tested explanation. `difference`: mean |difference| in nats that it leaves."""

    cause: str
    said: str
    mend: str
    difference: float


@dataclass(frozen=True)
class Verdict:
    """The comparison of a record with its replay.

    Attributes:
      difference: `[rows, responses]` learner less sampler in nats, NaN outside of responses.
      tolerance: mean |difference| up to which the two are one policy.
      cause: the named cause; None for one policy, and where no tested explanation holds.
      findings: the tested explanations, the best first. One that leaves nothing but rounding ends the search.
    """

    difference: np.ndarray
    tolerance: float
    cause: Finding | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def mean_abs(self) -> float:
        return _mean_abs(self.difference)

    @property
    def max_abs(self) -> float:
        return float(np.nanmax(np.abs(self.difference)))

    @property
    def is_one_policy(self) -> bool:
        return self.mean_abs <= self.tolerance


def _mean_abs(difference: np.ndarray) -> float:
    """The mean absolute value of all that are not NaN; 0 if none."""
    found = difference[np.isfinite(difference)]
    return float(np.abs(found).mean()) if found.size else 0.0


@partial(jax.jit, static_argnums=(0, 6))
def _response_logits(
    model: LanguageModel,
    params: Params,
    tokens: Int[Array, "rows T"],
    positions: Int[Array, "rows T"],
    evicted_at: Int[Array, "rows layers kv_heads T"],
    routing: Int[Array, "rows T mixtures per_token"] | None,
    first: int,
) -> Float[Array, "rows responses vocab"]:
    """Logits of the tokens from column `first` on, before the temperature."""
    longest = tokens.shape[1] - SPARE
    hidden = hidden_states(model, params, tokens, positions, ShadowMask(evicted_at), longest, routing)
    return model.logits(params, hidden[:, first - 1 : -1])


def replay_logits(model: LanguageModel, params: Params, at: Conditions) -> Float[Array, "rows responses vocab"]:
    """Logits of the response tokens under these conditions, before the temperature."""
    # Shared axes of the mask are written out: one program serves all conditions.
    shape = (len(at.tokens), model.shape.num_layers, model.shape.num_kv_heads, at.tokens.shape[1])
    evicted_at = np.broadcast_to(at.evicted_at, shape)
    return _response_logits(model, params, at.tokens, at.positions, evicted_at, at.routing, at.first)


@jax.jit
def logprobs_of(
    tokens: Int[Array, "rows responses"],
    logits: Float[Array, "rows responses vocab"],
    temperature: float | Float[Array, ""],
    drawable: Bool[Array, "#rows responses vocab"] | None = None,
) -> Float[Array, "rows responses"]:
    """log p of the tokens among the drawable ones; None: among all."""
    logits = logits / temperature
    if drawable is not None:
        logits = jnp.where(drawable, logits, OUTSIDE)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]


class _Replays:
    """Replays of one record under many conditions."""

    def __init__(self, models: Models, record: Trajectory):
        self.models = models
        self.stated = Conditions.of(record)
        self.temperature = record.temperature
        self.inside = np.asarray(record.response_mask)
        self.sampled = np.asarray(record.logprobs, np.float64)
        self.tokens = record.response
        self.drawable = None
        if record.drawable is not None:
            self.drawable = record.drawable.to_boolean(models.model.shape.vocab_size, jnp.arange(self.tokens.shape[1]))

    def logits(self, conditions: Conditions, params: Params | None = None) -> Array:
        return replay_logits(self.models.model, self.models.params if params is None else params, conditions)

    def difference(self, logits: Array, temperature: float | None = None) -> np.ndarray:
        """Learner less sampler over the recorded sampling support, NaN outside of responses."""
        return self.difference_over(logits, self.drawable, temperature)

    def difference_over(self, logits: Array, drawable: Array | None, temperature: float | None = None) -> np.ndarray:
        """The same over another sampling support; None: over the whole vocabulary."""
        temperature = self.temperature if temperature is None else temperature
        logprobs = logprobs_of(self.tokens, logits, temperature, drawable)
        difference = np.asarray(logprobs, np.float64) - self.sampled
        return np.where(self.inside, np.clip(difference, -MOST_DIFFERENT, MOST_DIFFERENT), np.nan)

    def left(self, conditions: Conditions) -> float:
        """Mean |difference| under the conditions."""
        return _mean_abs(self.difference(self.logits(conditions)))


def certify(models: Models, record: Trajectory, facts: PromptFacts | None = None) -> Verdict:
    """Replays the record, and tests the known causes unless sampler and learner are one policy.

    Args:
      facts: of the tokenizer; None: causes that need one are not tested.

    Raises:
      ValueError: the record has expert routing, and the model has no experts.
    """
    replays = _Replays(models, record)
    logits = replays.logits(replays.stated)
    difference = replays.difference(logits)
    base = _mean_abs(difference)
    low = models.model.shape.dtype == "bfloat16"
    if not low and base <= TOLERANCE:
        return Verdict(difference, TOLERANCE)
    rounding = None
    if models.other is not None:
        rounding = replays.difference(replay_logits(*models.other, replays.stated)) - difference
    tolerance = TOLERANCE
    if low:
        # Of another dtype's rounding our own is the measure; without it, what bfloat16 costs models of this size.
        tolerance = ROUNDING * (0.02 if rounding is None else _mean_abs(rounding))
        if base <= tolerance:
            return Verdict(difference, tolerance)
    findings = []
    for finding in _explanations(replays, logits, difference, facts or PromptFacts()):
        findings.append(finding)
        # As good as one policy: no other explanation can be better by more than rounding.
        if finding.difference <= tolerance:
            break
    findings.sort(key=lambda finding: finding.difference)
    allowed = max(EXPLAINED * base, tolerance)
    if findings[0].difference <= allowed:
        return Verdict(difference, tolerance, findings[0], tuple(findings))
    cause = _by_elimination(replays, difference, rounding, allowed)
    return Verdict(difference, tolerance, cause, tuple(findings))


def _explanations(replays: _Replays, logits: Array, difference: np.ndarray, facts: PromptFacts) -> Iterator[Finding]:
    """All tested explanations, those that need no forward pass of their own first."""
    yield _of_temperature(replays, logits)
    yield from _of_support(replays, logits, difference)
    yield from _of_alignment(replays, difference)
    previous = replays.models.previous
    if previous is not None:
        left = _mean_abs(replays.difference(replays.logits(replays.stated, previous)))
        yield Finding(WEIGHTS, "the sampler had the previous weights", WEIGHTS_MEND, left)
    for cause in CAUSES:
        for said, conditions in cause.cases(replays.stated, facts):
            yield Finding(cause.name, said, cause.mend, replays.left(conditions))


def _of_temperature(replays: _Replays, logits: Array) -> Finding:
    """The temperature that fits best."""
    temperatures = replays.temperature * np.geomspace(0.25, 4, 25)
    for _ in range(6):  # the grid narrows around its best point
        left = [_mean_abs(replays.difference(logits, float(t))) for t in temperatures]
        best = int(np.argmin(left))
        low, high = temperatures[max(best - 1, 0)], temperatures[min(best + 1, len(temperatures) - 1)]
        fitted, least = float(temperatures[best]), left[best]
        temperatures = np.geomspace(low, high, 9)
    said = f"the sampler's temperature was {fitted:.3g}; the record says {replays.temperature:.3g}"
    return Finding(TEMPERATURE, said, TEMPERATURE_MEND, least)


def _of_support(replays: _Replays, logits: Array, difference: np.ndarray) -> Iterator[Finding]:
    """The whole vocabulary instead of the recorded support; or else a top-k and a top-p, fitted.

    A sampler that normalises over a set of tokens with probability m has log p / m where the learner has log p. So the
    difference of every token is log m.
    """
    if replays.drawable is not None:
        left = _mean_abs(replays.difference_over(logits, None))
        yield Finding(SUPPORT, "log-probabilities were taken over the whole vocabulary", SUPPORT_MEND, left)
        return
    mass = np.exp(difference[replays.inside])
    if np.quantile(mass, 0.99) > 1.001:
        return  # the sampler cannot have lost probability by a filter
    vocab = logits.shape[-1]
    probabilities = jax.nn.softmax(logits / replays.temperature)
    ordered, ids = map(np.asarray, jax.lax.top_k(probabilities, min(MOST_DRAWABLE, vocab)))
    through = np.cumsum(ordered, axis=-1)
    count = int(np.median(np.argmin(np.abs(through[replays.inside] - mass[:, None]), axis=-1))) + 1
    share = float(mass.min()) - 1e-6
    for name, kept in (
        (f"top_k {count}", ids[..., :count]),
        (f"top_p {share:.3g}", np.where(through - ordered < share, ids, -1)),
    ):
        left = _mean_abs(replays.difference_over(logits, among(jnp.asarray(kept), vocab)))
        yield Finding(SUPPORT, f"log-probabilities were taken over the tokens of {name}", SUPPORT_MEND, left)


def _of_alignment(replays: _Replays, difference: np.ndarray) -> Iterator[Finding]:
    """Recorded log-probabilities that belong to the neighbouring token."""
    learner = np.pad(difference + replays.sampled, [(0, 0), (1, 1)], constant_values=np.nan)
    for moved, said in ((learner[:, 2:], "next"), (learner[:, :-2], "previous")):
        moves = (moved - replays.sampled)[replays.inside]
        # A shift of a few tokens may leave nothing to compare.
        if np.isfinite(moves).sum() > moves.size / 2:
            yield Finding(ALIGNMENT, f"log-probabilities belong to the {said} token", ALIGNMENT_MEND, _mean_abs(moves))


def _by_elimination(
    replays: _Replays, difference: np.ndarray, rounding: np.ndarray | None, allowed: float
) -> Finding | None:
    """A cause that no single replay shows: rounding, other weights, or evictions other than recorded."""
    base, inside = _mean_abs(difference), replays.inside
    # Both differences have the sampler subtracted once: if the sampler computed in the other dtype, the replay in this
    # one is too high where the replay in the other is too low.
    if rounding is not None and np.corrcoef(rounding[inside], difference[inside])[0, 1] < FOLLOWS:
        return Finding(DTYPE, f"the sampler computed in {replays.models.other_dtype}", DTYPE_MEND, base)
    at = replays.stated
    evicted = np.where(at.evicted, at.evicted_at, NEVER).min(axis=(1, 2, 3))
    # The token of column t is predicted by query t - 1.
    queries = at.first - 1 + np.arange(inside.shape[1])
    early = inside & (queries < evicted[:, None])
    before, after = _mean_abs(difference[early]), _mean_abs(difference[inside & ~early])
    if not at.evicted.any() or (early.sum() >= inside.sum() / 20 and before > 0.3 * after):
        said = "no tested condition explains the difference, and tokens without evictions have it, too"
        return Finding(WEIGHTS, said, WEIGHTS_MEND, base)
    swapped = _swap(replays)
    if swapped is not None and swapped.difference <= allowed:
        return swapped
    if not early.any():
        return None
    said = "only tokens after the first eviction differ, and no tested condition explains how"
    return Finding(VISIBILITY, said, VISIBILITY_MEND, base)


def _swap(replays: _Replays) -> Finding | None:
    """The best swap of two layers' or two KV heads' masks; None if the layers share one."""
    masks = replays.stated.evicted_at
    _, layers, heads, _ = masks.shape
    if layers < 2:
        return None

    def with_layers(changed: dict[int, np.ndarray]) -> float:
        evicted_at = masks.copy()
        for layer, mask in changed.items():
            evicted_at[:, layer] = mask
        return replays.left(replace(replays.stated, evicted_at=evicted_at))

    # A wrong mask costs more than none: layers that fit better when they are dense are suspected.
    dense = np.where(masks > 0, NEVER, 0)
    left = sorted((with_layers({layer: dense[:, layer]}), layer) for layer in range(layers))
    suspects = [layer for _, layer in left[:SUSPECTS]]
    found = []
    for one, other in combinations(sorted(suspects), 2):
        difference = with_layers({one: masks[:, other], other: masks[:, one]})
        found.append((difference, f"the masks of the layers {one} and {other} were swapped"))
    for layer in suspects[:2]:
        for one, other in combinations(range(heads), 2):
            order = np.arange(heads)
            order[[one, other]] = other, one
            difference = with_layers({layer: masks[:, layer, order]})
            found.append((difference, f"the masks of the KV heads {one} and {other} of layer {layer} were swapped"))
    difference, said = min(found)
    mend = next(cause.mend for cause in CAUSES if cause.name == SWAPPED)
    return Finding(SWAPPED, said, mend, difference)
