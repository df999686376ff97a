"""One training step in which every part comes from outside: term, correction, eviction policy and task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import smd_jax as smd
from smd_jax.learner import Term, TermInputs, TermOutputs
from tests import toy_loop


@dataclass(frozen=True)
class Imitation(Term):
    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        loss = -jnp.sum(jnp.where(inputs.advantages > 0, inputs.prepared, 0.0) * inputs.logprobs)
        return TermOutputs(loss, {"loss/imitation": loss})


@dataclass(frozen=True)
class Halved(smd.corrections.Correction):
    """Weighs every token by one half."""

    def terms(self, inputs: smd.corrections.CorrectionInputs) -> smd.corrections.CorrectionTerms:
        return smd.corrections.CorrectionTerms(inputs.mask / 2.0, inputs.mask)


@dataclass(frozen=True)
class Oldest(smd.eviction.EvictionPolicy):
    """Keeps the first keys."""

    def score(self, view: smd.eviction.CacheView) -> Array:
        return -view.positions.astype(jnp.float32)


@dataclass(frozen=True)
class Digits:
    """Digits to sort; the reward is the share that is right."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        digits = [str(digit) for digit in np.random.default_rng(index).integers(0, 10, 5)]
        return {"prompt": "".join(digits) + "=", "answer": "".join(sorted(digits))}

    def reward(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        pairs = zip(completions, columns["answer"], strict=True)
        return [sum(a == b for a, b in zip(text, answer, strict=False)) / 5 for text, answer in pairs]


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


@pytest.mark.slow
def test_every_part_may_come_from_outside():
    update = smd.UpdateConfig(visibility="dense", correction=Halved(), terms=(Imitation(),))
    config = smd.GRPOConfig(
        prompts_per_step=2, group_size=4, prompt_width=9, policy=Oldest(), rollout=toy_loop.ROLLOUT, update=update
    )
    _, metrics = toy_loop.own_loop(config, Digits()).step(toy_loop.new_state())
    assert 0 <= metrics["reward"] <= 1 and metrics["grad_norm"] > 0
    assert metrics["loss/imitation"] > 0 and metrics["rollout_corr/rollout_is_mean"] == 0.5
    assert metrics["sampling/sampling_logp_difference/max"] > 1e-3, "keys were evicted, and the learner is dense"
