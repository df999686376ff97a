"""Chains of corrections, and their split into parts before and after the learner's forward pass."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

from smd_jax.corrections.base import (
    Correction,
    CorrectionInputs,
    CorrectionTerms,
    CorrectionTraits,
    Naive,
    Shadow,
    combine_terms,
    terms_of,
)
from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class Chain(Correction):
    """Combines independent corrections: weights multiply, and a token counts if it counts in all.

    `Chain((TIS(), GeometricRejection()))` is verl's decoupled_geo_rs_token_tis.
    """

    parts: tuple[Correction, ...]

    def __post_init__(self) -> None:
        check_types(self)
        names = [type(part).__name__ for part in self.parts]
        if not self.parts:
            raise ValueError("expected Chain.parts with at least one correction; got ()")
        if sum(part.traits.weighs for part in self.parts) > 1:
            raise ValueError(f"expected at most one correction that weights by xi in a Chain; got {names}")
        # The ratio to the sampler is r xi: a weight xi would count the mismatch twice.
        if self.traits.weighs and self.traits.ratio_to == "sampler":
            raise ValueError(
                f"expected no weights by xi with a ratio to the sampler, which contains xi already; got {names}"
            )

    @property
    def traits(self) -> CorrectionTraits:
        return functools.reduce(operator.or_, [part.traits for part in self.parts])

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        return functools.reduce(combine_terms, [terms_of(part, inputs) for part in self.parts])


def split_by_time(correction: Correction) -> tuple[Correction, Correction | None]:
    """Splits a correction into parts before the learner's forward pass and parts that use the current learner.

    `combine_terms` of both gives the correction's terms. Late parts reject no tokens, so the early parts determine the
    denominators. `ratio_to` and `clips` are those of the whole correction.

    Returns:
      (early, late): nested chains are flattened. Early is `Naive` if no part is early. If no part uses the current
      learner, early is the correction itself and late is None.

    Raises:
      ValueError: if a late part needs the whole minibatch; it only sees a microbatch.
    """
    if not correction.traits.uses_present:
        return correction, None
    # Flattened: one late part in a nested chain would make the whole chain late.
    parts = flat_parts(correction)
    early = tuple(part for part in parts if not part.traits.uses_present)
    late = tuple(part for part in parts if part.traits.uses_present)
    for part in late:
        if part.traits.whole_batch:
            raise ValueError(f"expected no part that needs the current learner and the whole minibatch; got {part}")
    return _joined(early), _joined(late)


def flat_parts(correction: Correction) -> tuple[Correction, ...]:
    """The parts of a chain, with nested chains flattened; any other correction is its only part."""
    if not isinstance(correction, Chain):
        return (correction,)
    return tuple(single for part in correction.parts for single in flat_parts(part))


def _joined(parts: tuple[Correction, ...]) -> Correction:
    """The parts as one correction."""
    parts = parts or (Naive(),)  # the identity of `combine_terms`: weights of 1, and every token counts
    return parts[0] if len(parts) == 1 else Chain(parts)


def claims_no_mismatch(correction: Correction) -> bool:
    """Whether it is `Shadow`, or a chain with one."""
    return any(isinstance(part, Shadow) for part in flat_parts(correction))
