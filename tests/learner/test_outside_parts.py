"""Parts from outside of the library whose objects are equal although they differ: refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import smd_jax as smd
from smd_jax.learner import Term


class Policy(smd.eviction.EvictionPolicy):
    """This and the next classes have a setting and no decorator, so all their objects are equal."""

    def __init__(self) -> None:
        self.setting = 1


class Correction(smd.corrections.Correction):
    def __init__(self) -> None:
        self.setting = 1


class OwnTerm(Term):
    def __init__(self) -> None:
        self.setting = 1


class Surrogate(smd.losses.Surrogate):
    def __init__(self) -> None:
        self.setting = 1


class Weighting(smd.losses.TokenWeighting):
    def __init__(self) -> None:
        self.setting = 1


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: smd.eviction.Protect(Policy(), sinks=1), "Policy"),
        (lambda: smd.eviction.Pyramid(Policy()), "Policy"),
        (lambda: smd.UpdateConfig(correction=Correction()), "Correction"),
        (lambda: smd.corrections.Chain((Correction(),)), "Correction"),
        (lambda: smd.UpdateConfig(terms=(OwnTerm(),)), "OwnTerm"),
        (lambda: smd.LossConfig(surrogate=Surrogate()), "Surrogate"),
        (lambda: smd.LossConfig(weighting=Weighting()), "Weighting"),
    ],
)
def test_parts_that_are_equal_and_differ_are_refused(make: Callable[[], object], name: str):
    message = f"expected {name} to be a frozen dataclass.*; got attributes that are no fields: setting"
    with pytest.raises(TypeError, match=message):
        make()
