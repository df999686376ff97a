"""Compares a record with its replay, and names the cause of a mismatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from smd_jax.certify.causes import CAUSES, Conditions, PromptFacts
from smd_jax.certify.record import Record
from smd_jax.certify.replay import Replayed, replay
from smd_jax.learner.mismatch_guard import default_bound
from smd_jax.message.masks import NEVER
from smd_jax.model.protocol import LanguageModel, Params

# Mean |difference| in nats up to which a float32 sampler and learner are one policy.
TOLERANCE = 1e-4
# Largest mean |difference| of a bfloat16 sampler, as a multiple of bfloat16's effect in our own replay.
ROUNDING = 3.0
# A cause is named if its replay leaves at most this share of the mean |difference|.
EXPLAINED = 0.25
# Tokens, the likeliest first, among which a filter is fitted.
MOST_DRAWABLE = 2048
# Number of layers that are tested for a swap of two masks.
SUSPECTS = 6
# Nats at which the difference of one number is cut off: a token outside of a tested set has no probability.
MOST_DIFFERENT = 50.0
# Correlation of the difference with the other dtype's effect, below which the other dtype is its cause.
FOLLOWS = -0.5
# Largest mean |difference| of tokens before any eviction, as a share of later tokens', if evictions are the cause.
EARLY = 0.3
# Log-probability in nats from which a token can hardly tell two models apart: both give it nearly all probability.
CERTAIN = -0.1
# Fewest of such first tokens that must agree before a cause is looked for in the later ones.
FEWEST_FIRST = 4

FIXES = {cause.name: cause.fix for cause in CAUSES} | {
    "stale weights": "update the sampler's weights before it samples, and compare their checksums",
    "dtype": "compute in the same dtype on both sides, or accept its rounding: certify with --dtype",
    "sampling support": "record the tokens that filters left (support_ids), and replay over these",
    "temperature": "divide logits by the same temperature on both sides before the softmax",
    "tokens misaligned": "column t of logprobs belongs to token t",
    "evictions": "record what the engine evicted, after it evicted it",
    "evictions not recorded": "record evicted_at: which keys the engine evicted, and when",
    "undecided": "replay more rows (--rows); if these were all, record more",
}


class Models(NamedTuple):
    """The model that is about to be trained, and others to compare with.

    Attributes:
      model, params: to certify.
      other: the same weights in another compute dtype; None: not compared.
      other_dtype: its name.
      previous: older parameters that the sampler may have used; None: not compared.
    """

    model: LanguageModel
    params: Params
    other: tuple[LanguageModel, Params] | None = None
    other_dtype: str = ""
    previous: Params | None = None


class Finding(NamedTuple):
    """One tested explanation. `difference`: mean |difference| in nats that it leaves, over the sampled tokens and the
    recorded top log-probabilities."""

    cause: str
    detail: str
    difference: float

    @property
    def fix(self) -> str:
        """The fix for the cause."""
        return FIXES[self.cause]


@dataclass(frozen=True)
class Verdict:
    """The comparison of a record with its replay.

    Attributes:
      difference: `[rows, responses]` learner minus sampler in nats, NaN outside of responses.
      tolerance, largest: mean and largest |difference| up to which the two are one policy.
      cause: the named cause, "undecided" where too few rows tell; None for one policy, and where no tested explanation
        holds.
      findings: the tested explanations, the best first. One that leaves only rounding ends the search.
      sensitive_layers: `(layer, mean |difference| with this layer dense)`, best first, where a swap was searched.
    """

    difference: np.ndarray
    tolerance: float
    largest: float
    cause: Finding | None
    findings: tuple[Finding, ...]
    sensitive_layers: tuple[tuple[int, float], ...] = ()

    @property
    def mean_abs(self) -> float:
        return float(np.nanmean(np.abs(self.difference)))

    @property
    def max_abs(self) -> float:
        return float(np.nanmax(np.abs(self.difference)))

    @property
    def is_one_policy(self) -> bool:
        return self.mean_abs <= self.tolerance and self.max_abs <= self.largest

    @property
    def bias(self) -> tuple[float, float]:
        """Mean difference in nats, and its standard error over tokens."""
        values = self.difference[np.isfinite(self.difference)]
        return float(values.mean()), float(values.std() / np.sqrt(len(values)))

    @property
    def growth(self) -> tuple[float, float]:
        """Mean |difference| in the first and in the last third of the response columns."""
        thirds = np.array_split(self.difference, 3, axis=1)
        return _mean_abs(thirds[0]), _mean_abs(thirds[-1])

    @property
    def kind(self) -> str:
        """`rounding`; `single tokens`, if only the largest difference is too large; `bias`, whose mean is not zero or
        which grows with the length; or `noise`."""
        if self.mean_abs <= self.tolerance:
            return "rounding" if self.is_one_policy else "single tokens"
        mean, error = self.bias
        first, last = self.growth
        return "bias" if abs(mean) > 3 * error or last > 2 * first else "noise"


def _mean_abs(differences: np.ndarray) -> float:
    """Mean of the absolute values; NaN, which means that there is no token, is left out."""
    found = np.abs(differences[np.isfinite(differences)])
    return float(found.mean()) if found.size else 0.0


class _Replays:
    """Replays of one record under many conditions."""

    def __init__(self, models: Models, record: Record, facts: PromptFacts):
        self.models = models
        self.record = record
        self.facts = facts
        self.stated = Conditions.of(record, len(facts.system))
        columns, self.inside = record.response_columns
        self.responses = columns.shape[1]
        self.support: np.ndarray | None = None  # `[rows, responses, most]`, padded with -1
        if record.support is not None:
            self.support = np.full((*self.inside.shape, max(map(len, record.support))), -1, np.int32)
            for (row, column), ids in zip(np.argwhere(self.inside), record.support, strict=True):
                self.support[row, column, : len(ids)] = ids
        # Of the sampled token, then of the top log-probabilities: `[rows, responses, 1 + k]`.
        self.ids, self.sampled = (
            np.take_along_axis(x, columns, axis=1)[..., None]
            for x in (record.tokens, record.logprobs.astype(np.float64))
        )
        if record.top is not None:
            top_ids, top_logprobs = (np.take_along_axis(x, columns[..., None], axis=1) for x in record.top)
            self.ids = np.concatenate([self.ids, top_ids], axis=-1)
            self.sampled = np.concatenate([self.sampled, top_logprobs], axis=-1)
        self.there = self.inside[..., None] & (self.ids >= 0)

    def under(self, conditions: Conditions, params: Params | None = None) -> Replayed:
        """The replay of the model, or of other parameters of it."""
        params = self.models.params if params is None else params
        return replay(self.models.model, params, conditions, self.responses)

    def differences(self, replayed: Replayed, whose: str | None = None) -> np.ndarray:
        """Learner minus sampler over the recorded support, `[rows, responses, 1 + k]`; NaN only where no token is.

        Args:
          whose: name of the replayed model for the ValueError that NaN log-probabilities raise; None: they count as
            `MOST_DIFFERENT`.
        """
        return self._over(replayed, [self.record.temperature], self.support, whose)[0]

    def gaps(self, replayed: Replayed, temperatures: Sequence[float]) -> list[float]:
        """Mean |difference| at other temperatures."""
        return [_mean_abs(difference) for difference in self._over(replayed, temperatures, self.support)]

    def gap_over(self, replayed: Replayed, sets: np.ndarray | None) -> float:
        """Mean |difference| over other sets of ids, `[rows, responses, most]`; None: over the whole vocabulary."""
        return _mean_abs(self._over(replayed, [self.record.temperature], sets)[0])

    def left(self, conditions: Conditions) -> float:
        """Mean |difference| under the conditions."""
        return _mean_abs(self.differences(self.under(conditions)))

    def _over(
        self, replayed: Replayed, temperatures: Sequence[float], sets: np.ndarray | None, whose: str | None = None
    ) -> list[np.ndarray]:
        logprobs = np.asarray(replayed.logprobs(self.ids, temperatures, sets), np.float64)
        differences = logprobs - self.sampled[..., None]
        wrong = (np.isnan(differences[..., 0]) & self.there).any(axis=-1)
        if whose is not None and wrong.any():
            row, token = np.argwhere(wrong)[0]
            raise ValueError(
                f"expected finite log-probabilities from {whose}; got NaN for {wrong.sum()} of {self.inside.sum()} "
                f"response tokens, the first in row {row}, response token {token}"
            )
        # Left out, tokens without a number would let wrong conditions explain the others.
        differences = np.clip(np.nan_to_num(differences, nan=MOST_DIFFERENT), -MOST_DIFFERENT, MOST_DIFFERENT)
        return list(np.moveaxis(np.where(self.there[..., None], differences, np.nan), -1, 0))


def certify(models: Models, record: Record, facts: PromptFacts | None = None) -> Verdict:
    """Replays the record, and tests the known causes unless sampler and learner are one policy.

    Args:
      facts: of the tokenizer; None: causes that need one are not tested.

    Raises:
      ValueError: the record has expert routing, and the model has no experts; a row or a position is beyond the
        model's context; the model, the one in another dtype or the previous weights give NaN for a recorded token.
    """
    if record.routing is not None and models.model.shape.routing is None:
        raise ValueError(f"routing: expected a model with experts; got {type(models.model).__name__} without any")
    longest, most = int(record.lengths.max()), models.model.shape.max_positions
    if longest > most:
        raise ValueError(f"lengths: expected rows of at most {most} tokens (the model's context); got {longest}")
    inside = np.arange(record.tokens.shape[1]) < record.lengths[:, None]
    if (last := int(record.positions[inside].max())) >= most:
        raise ValueError(f"positions: expected numbers below {most} (the model's context); got {last}")
    replays = _Replays(models, record, facts or PromptFacts())
    replayed = replays.under(replays.stated)
    differences = replays.differences(replayed, "the learner")
    difference, base = differences[..., 0], _mean_abs(differences[..., 0])
    low, largest = models.model.shape.dtype == "bfloat16", default_bound(models.model.shape)
    if not low and base <= TOLERANCE:
        return Verdict(difference, TOLERANCE, largest, None, ())
    rounding = None
    if models.other is not None:
        replayed_by_other = replay(*models.other, replays.stated, replays.responses)
        rounding = replays.differences(replayed_by_other, f"the learner in {models.other_dtype}") - differences
    tolerance = TOLERANCE
    if low:
        # Measured by our own replay in the other dtype; without it, a typical value for bfloat16.
        tolerance = ROUNDING * (_mean_abs(rounding[..., 0]) if rounding is not None else 0.02)
        if base <= tolerance:
            return Verdict(difference, tolerance, largest, None, ())
    findings = []
    for finding in _explanations(replays, replayed, differences):
        findings.append(finding)
        # Only rounding is left: no other explanation can be better.
        if finding.difference <= tolerance:
            break
    findings.sort(key=lambda finding: finding.difference)
    allowed = max(EXPLAINED * _mean_abs(differences), tolerance)
    if findings and findings[0].difference <= allowed:
        return Verdict(difference, tolerance, largest, findings[0], tuple(findings))
    cause, layers = _by_elimination(replays, differences, rounding, allowed, tolerance)
    return Verdict(difference, tolerance, largest, cause, tuple(findings), layers)


def _explanations(replays: _Replays, replayed: Replayed, differences: np.ndarray) -> Iterator[Finding]:
    """All tested explanations; first those that need no extra forward pass.

    Args:
      replayed, differences: under the conditions that the record states.
    """
    yield from _of_softmax(replays, replayed, differences)
    yield from _of_alignment(replays, replayed, differences)
    previous = replays.models.previous
    if previous is not None:
        difference = replays.differences(replays.under(replays.stated, previous), "the previous weights")
        yield Finding("stale weights", "the sampler had the previous weights", _mean_abs(difference))
    for cause in CAUSES:
        for case in cause.cases(replays.record, replays.facts):
            yield Finding(cause.name, case.detail, replays.left(case.conditions))


def _of_softmax(replays: _Replays, replayed: Replayed, differences: np.ndarray) -> Iterator[Finding]:
    """Explanations by the softmax over the same logits."""
    record = replays.record
    temperatures = record.temperature * np.geomspace(0.25, 4, 25)
    for _ in range(6):  # the grid narrows around its best point
        left = replays.gaps(replayed, temperatures.tolist())
        best = int(np.argmin(left))
        low, high = temperatures[max(best - 1, 0)], temperatures[min(best + 1, len(temperatures) - 1)]
        fitted, least = float(temperatures[best]), left[best]
        temperatures = np.geomspace(low, high, 9)
    said = f"the sampler's temperature was {fitted:.3g}; the record says {record.temperature:.3g}"
    yield Finding("temperature", said, least)
    if replays.support is not None:
        left = replays.gap_over(replayed, None)
        yield Finding("sampling support", "log-probabilities were taken over the whole vocabulary", left)
        return
    yield from _of_filters(replays, replayed, differences)


def _of_filters(replays: _Replays, replayed: Replayed, differences: np.ndarray) -> Iterator[Finding]:
    """Top-k and top-p that the sampler may have used, fitted.

    A sampler that normalises over a set of tokens with probability m has log p / m where the learner has log p. So the
    difference of every token is log m.
    """
    mass = np.exp(differences[..., 0][replays.inside])
    if mass.mean() > 1.001:  # not of single tokens, which rounding in 16 bits moves by 1 %
        return  # the sampler cannot have lost probability by a filter
    most = min(MOST_DRAWABLE, replayed.model.shape.vocab_size)
    order, ordered = map(np.asarray, replayed.likeliest(most, replays.record.temperature))
    through = np.cumsum(ordered, axis=-1)
    count = int(np.median(np.argmin(np.abs(through[replays.inside] - mass[:, None]), axis=-1))) + 1
    sets = [(f"top_k {count}", order[..., :count])]
    for rank in (0.0, 0.02, 0.05, 0.1, 0.2):  # the smallest one is exact without rounding
        share = float(np.quantile(mass, rank)) - 1e-6
        sets.append((f"top_p {share:.3g}", np.where(through - ordered < share, order, -1)))
    for name, ids in sets:
        # With the recorded tokens, which rounding may put just outside of the fitted set.
        left = replays.gap_over(replayed, np.concatenate([ids, replays.ids], axis=-1).astype(np.int32))
        yield Finding("sampling support", f"log-probabilities were taken over the tokens of {name}", left)


def _of_alignment(replays: _Replays, replayed: Replayed, differences: np.ndarray) -> Iterator[Finding]:
    """Recorded log-probabilities that belong to the neighbouring token."""
    sampled = replays.sampled[..., 0]
    learner = differences[..., 0] + sampled
    for by, said in ((1, "next"), (-1, "previous")):
        moved = np.roll(learner, -by, axis=1)
        moved[:, -1 if by > 0 else 0] = np.nan
        both = np.isfinite(moved) & replays.inside
        # A shift of a few tokens may leave nothing to compare.
        if both.sum() > replays.inside.sum() / 2:
            moves = (moved - sampled)[both]
            # The top log-probabilities may be at their own token, or moved along with the sampled one's.
            both_ways = [differences[..., 1:]]
            if replays.record.top is not None:
                both_ways.append(replays.differences(replayed.rolled(-by))[..., 1:])
            tops = min(both_ways, key=_mean_abs)
            left = _mean_abs(np.concatenate([moves.ravel(), tops[both].ravel()]))
            yield Finding("tokens misaligned", f"log-probabilities belong to the {said} token", left)


def _by_elimination(
    replays: _Replays, differences: np.ndarray, rounding: np.ndarray | None, allowed: float, tolerance: float
) -> tuple[Finding | None, tuple[tuple[int, float], ...]]:
    """A cause that no single replay shows: rounding, other weights, or evictions other than recorded."""
    difference, base = differences[..., 0], _mean_abs(differences)
    if rounding is not None:
        # Both differences have the sampler subtracted once: if the sampler computed in the other dtype, the replay in
        # this one is too high where the replay in the other is too low.
        there = np.isfinite(differences)
        if float(np.corrcoef(rounding[there], differences[there])[0, 1]) < FOLLOWS:
            said = f"the sampler computed in {replays.models.other_dtype}"
            return Finding("dtype", said, base), ()
    record = replays.record
    if not record.has_evictions:
        return _without_evictions(difference, replays.sampled[:, 0, 0], tolerance), ()
    evicted = np.where(record.evicted_at > 0, record.evicted_at, NEVER).min(axis=(1, 2, 3))
    columns = record.prompt_lengths[:, None] + np.arange(replays.responses)
    # The token of column t is predicted by query t - 1.
    first = replays.inside & (columns - 1 < evicted[:, None])
    early = first & (replays.sampled[..., 0] < CERTAIN)
    before, after = _mean_abs(difference[early]), _mean_abs(difference[replays.inside & ~first])
    if early.sum() >= FEWEST_FIRST and before > EARLY * after:
        said = "no tested condition explains the difference, and tokens without evictions have it, too"
        return Finding("stale weights", said, base), ()
    swapped, layers = _swap(replays)
    if swapped is not None and swapped.difference <= allowed:
        return swapped, layers
    if early.sum() < FEWEST_FIRST:
        said = (
            "stale weights or other evictions than recorded; too few uncertain tokens before an eviction to tell which"
        )
        return Finding("undecided", said, base) if first.any() else None, layers
    said = "only tokens after the first eviction differ, and no tested condition explains how"
    return Finding("evictions", said, base), layers


def _without_evictions(difference: np.ndarray, sampled: np.ndarray, tolerance: float) -> Finding:
    """The cause for a record without evictions. Other weights change every token; unrecorded evictions leave the first
    ones, which are sampled from a full cache, unchanged.

    Args:
      sampled: `[rows]` log-probabilities of the first response tokens.
    """
    telling = np.isfinite(difference[:, 0]) & (sampled < CERTAIN)
    first, later = _mean_abs(difference[telling, 0]), _mean_abs(difference[:, 1:])
    agree = first <= min(tolerance, EARLY * later)
    if agree and telling.sum() >= FEWEST_FIRST:
        said = "first response tokens agree and later ones differ: keys may have been evicted that the record lacks"
        return Finding("evictions not recorded", said, _mean_abs(difference))
    if agree:
        said = "stale weights or evictions that the record lacks; too few uncertain first tokens to tell which"
        return Finding("undecided", said, _mean_abs(difference))
    said = "no tested condition explains the difference, and the first tokens have it, too"
    return Finding("stale weights", said, _mean_abs(difference))


def _swap(replays: _Replays) -> tuple[Finding | None, tuple[tuple[int, float], ...]]:
    """The best swap of the masks of two layers or two KV heads, and the mean |difference| with each layer dense.
    A record with one mask layer has swaps of heads only, and no layer to compare."""
    stated = replays.stated
    _, layers, heads, _ = stated.evicted_at.shape
    dense = np.where(stated.evicted_at > 0, NEVER, 0).astype(np.int32)

    def with_layers(changed: dict[int, np.ndarray]) -> float:
        evicted_at = stated.evicted_at.copy()
        for layer, mask in changed.items():
            evicted_at[:, layer] = mask
        return replays.left(replace(stated, evicted_at=evicted_at))

    left: list[tuple[float, int]] = []
    suspects = [0]
    if layers > 1:
        left = sorted((with_layers({layer: dense[:, layer]}), layer) for layer in range(layers))
        suspects = [layer for _, layer in left[:SUSPECTS]]
    masks = stated.evicted_at
    found = []
    for one, other in combinations(sorted(suspects), 2):
        difference = with_layers({one: masks[:, other], other: masks[:, one]})
        found.append((difference, f"the masks of the layers {one} and {other} were swapped"))
    for layer in suspects[:2]:
        where = f" of layer {layer}" if layers > 1 else ""
        for one, other in combinations(range(heads), 2):
            order = np.arange(heads)
            order[[one, other]] = other, one
            difference = with_layers({layer: masks[:, layer, order]})
            found.append((difference, f"the masks of the KV heads {one} and {other}{where} were swapped"))
    if not found:
        return None, ()
    difference, said = min(found)
    return Finding("layers or heads swapped", said, difference), tuple((layer, value) for value, layer in left)
