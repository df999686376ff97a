"""Policy losses by the names of their papers, with their papers' bounds.

    name      weighting      surrogate    ratio of
    grpo      SequenceMean   Clip         a token
    bnpo      TokenMean      Clip         a token
    dapo      TokenMean      Clip         a token
    dr_grpo   FixedLength    Clip         a token
    gspo      SequenceMean   Clip         a response (geometric mean)
    cispo     TokenMean      ClipWeight   a token
    sapo      SequenceMean   SoftGate     a token
    luspo     FixedLength    Clip         a response (geometric mean)

`beta` is the coefficient of the k3 KL to the reference policy; the other arguments are those of the surrogate. For
other combinations, or your own parts, build a `LossConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from smd_jax.losses.policy import LossConfig
from smd_jax.losses.surrogates import Clip, ClipWeight, SoftGate
from smd_jax.losses.weighting import FixedLength, SequenceMean, TokenMean


def grpo(
    epsilon: float = 0.2, epsilon_high: float | None = None, beta: float = 0.0, delta: float | None = None
) -> LossConfig:
    """GRPO (arXiv:2402.03300 eq. 3): every response has the same weight."""
    return LossConfig(weighting=SequenceMean(), surrogate=Clip(epsilon, epsilon_high, delta), beta=beta)


def bnpo(
    epsilon: float = 0.2, epsilon_high: float | None = None, beta: float = 0.0, delta: float | None = None
) -> LossConfig:
    """TRL's bnpo: every token of the minibatch has the same weight. The default, `LossConfig()`."""
    return LossConfig(weighting=TokenMean(), surrogate=Clip(epsilon, epsilon_high, delta), beta=beta)


def dapo(
    epsilon: float = 0.2, epsilon_high: float | None = 0.28, beta: float = 0.0, delta: float | None = None
) -> LossConfig:
    """DAPO (arXiv:2503.14476 eq. 8): every token has the same weight, and the upper clipping bound is higher."""
    return LossConfig(weighting=TokenMean(), surrogate=Clip(epsilon, epsilon_high, delta), beta=beta)


def dr_grpo(
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    delta: float | None = None,
    max_length: int | None = None,
) -> LossConfig:
    """Dr. GRPO (arXiv:2503.20783): the denominator is constant. Use it with `scale_rewards="none"`."""
    return LossConfig(weighting=FixedLength(max_length), surrogate=Clip(epsilon, epsilon_high, delta), beta=beta)


def gspo(epsilon: float = 3e-4, epsilon_high: float | None = 4e-4, beta: float = 0.0) -> LossConfig:
    """GSPO (arXiv:2507.18071 eq. 7): all tokens of a response have the geometric mean of their ratios."""
    return LossConfig(
        weighting=SequenceMean(), surrogate=Clip(epsilon, epsilon_high), ratio_level="geometric", beta=beta
    )


def cispo(epsilon_high: float = 0.2, beta: float = 0.0) -> LossConfig:
    """CISPO (arXiv:2506.13585): the clipped ratio is a weight, so that no token loses its gradient."""
    return LossConfig(weighting=TokenMean(), surrogate=ClipWeight(epsilon_high), beta=beta)


def sapo(temperature_pos: float = 1.0, temperature_neg: float = 1.05, beta: float = 0.0) -> LossConfig:
    """SAPO (arXiv:2511.20347): a sigmoid of the ratio instead of clipping."""
    return LossConfig(weighting=SequenceMean(), surrogate=SoftGate(temperature_pos, temperature_neg), beta=beta)


def luspo(epsilon: float = 3e-4, epsilon_high: float | None = 4e-4, beta: float = 0.0) -> LossConfig:
    """LUSPO (arXiv:2602.05261): GSPO with every response multiplied by its length, so that short responses are not
    preferred, and with GSPO's bounds."""
    # The sum over all tokens divided by the number of sequences.
    return LossConfig(
        weighting=FixedLength(1), surrogate=Clip(epsilon, epsilon_high), ratio_level="geometric", beta=beta
    )


LOSSES: Mapping[str, Callable[..., LossConfig]] = {
    loss.__name__: loss for loss in (grpo, bnpo, dapo, dr_grpo, gspo, cispo, sapo, luspo)
}
"""Constructors by name, for `--loss-type`."""
