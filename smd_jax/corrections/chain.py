"""Several corrections at once, and which of them can be evaluated before the learner's forward pass."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

from smd_jax.corrections.base import Correction, CorrectionInputs, CorrectionTerms, CorrectionTraits, combine_terms
from smd_jax.corrections.uncorrected import Naive
from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class Chain(Correction):
    """Several corrections at once, each on its own: weights multiply, and a token counts if it counts for all.

    `Chain((TIS(), GeometricRejection()))` is verl's decoupled_geo_rs_token_tis.
    """

    parts: tuple[Correction, ...]

    def __post_init__(self) -> None:
        check_types(self)
        names = [type(part).__name__ for part in self.parts]
        if not self.parts:
            raise ValueError("expected Chain.parts with at least one correction; got ()")
        if sum(part.traits.weighs for part in self.parts) > 1:
            raise ValueError(f"expected at most one correction that weighs by xi in a Chain; got {names}")
        # The ratio to the sampler is r xi: a weight xi would count the mismatch twice.
        if self.traits.weighs and self.traits.ratio_to == "sampler":
            raise ValueError(
                f"expected no weights by xi with a ratio to the sampler, which contains xi already; got {names}"
            )

    @property
    def traits(self) -> CorrectionTraits:
        return functools.reduce(operator.or_, [part.traits for part in self.parts])

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        return functools.reduce(combine_terms, [part.terms(inputs) for part in self.parts])


def split_by_time(correction: Correction) -> tuple[Correction, Correction | None]:
    """The parts that can be evaluated before the learner's forward pass, and those that look at the learner now.

    The terms of the two, by `combine_terms`, are the correction's own. The late ones reject no token: the early
    ones alone say what is in the denominators. What the ratio is taken to, and whether it is clipped, is the whole
    correction's.

    Returns:
      (early, late): chains in chains are flattened. Early is `Naive` where nothing can be evaluated before. Where
      nothing looks at the learner now, late is None and early the correction itself.

    Raises:
      ValueError: if a late part must see the whole minibatch: its forward pass has a microbatch.
    """
    if not correction.traits.uses_present:
        return correction, None
    # Flat, because one late part in a chain would otherwise hold back the whole chain.
    parts = flat_parts(correction)
    early = tuple(part for part in parts if not part.traits.uses_present)
    late = tuple(part for part in parts if part.traits.uses_present)
    for part in late:
        if part.traits.whole_batch:
            raise ValueError(f"expected no part that needs both the learner now and the whole minibatch; got {part}")
    return _joined(early), _joined(late)


def flat_parts(correction: Correction) -> tuple[Correction, ...]:
    """The corrections that a chain, or a chain in it, is made of; another correction is its own only part."""
    if not isinstance(correction, Chain):
        return (correction,)
    return tuple(single for part in correction.parts for single in flat_parts(part))


def _joined(parts: tuple[Correction, ...]) -> Correction:
    """The parts as one correction."""
    if not parts:
        # The neutral element of `combine_terms`: weights of 1, and every token counts.
        return Naive()
    return parts[0] if len(parts) == 1 else Chain(parts)
