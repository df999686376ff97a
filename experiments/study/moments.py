"""What many noisy gradients say about their mean: inner products without the noise's own share.

A mean of n gradients is the true one plus noise / √n, so its squared norm is too large by the noise's variance / n, and
a cosine of two such means is too small, or, where both have their noise from the same rollouts, anything. Products of
*different* rollouts have no such share:

    <a, b>  ≈  1 / (n (n - 1))  Σ_{i ≠ j} a_i · b_j        unbiased, also where a_i and b_i come from one rollout

(a U-statistic). Vectors are kept as sums over blocks of rollouts: their products give the sum over all pairs, and of
every rollout only the products within it are needed beside them. Leaving out one block at a time (jackknife) gives the
standard errors of whatever follows from the products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.stats import t as student_t

F64 = np.float64


@dataclass
class Moments:
    """Sums over rollouts, in float64, where gradients are float32 and their sums cancel.

    Attributes:
      sums: `[blocks, names, size]` of the vectors of each block.
      within: `[blocks, names, names]` sums over the rollouts of a block of the products within each.
      counts: `[blocks]` rollouts.
    """

    sums: Float[np.ndarray, "blocks names size"]
    within: Float[np.ndarray, "blocks names names"]
    counts: Int[np.ndarray, " blocks"]

    @classmethod
    def empty(cls, blocks: int, names: int, size: int) -> Moments:
        return cls(np.zeros((blocks, names, size)), np.zeros((blocks, names, names)), np.zeros(blocks, int))

    def add(self, block: int, vectors: Float[np.ndarray, "names size"]) -> None:
        """The vectors of one rollout."""
        wide = np.asarray(vectors, F64)
        self.sums[block] += wide
        self.within[block] += wide @ wide.T
        self.counts[block] += 1

    def block_means(self, name: int) -> Float[np.ndarray, "blocks size"]:
        return self.sums[:, name] / self.counts[:, None]

    def products(self) -> Products:
        blocks, names, size = self.sums.shape
        flat = self.sums.reshape(blocks * names, size)
        between = (flat @ flat.T).reshape(blocks, names, blocks, names).transpose(0, 2, 1, 3)
        return Products(between, self.within, self.counts)


class Products(NamedTuple):
    """All that is left of the vectors.

    Attributes:
      between: `[blocks, blocks, names, names]` products of the blocks' sums.
      within: `[blocks, names, names]`, as in Moments. counts: `[blocks]` rollouts.
    """

    between: Float[np.ndarray, "blocks blocks names names"]
    within: Float[np.ndarray, "blocks names names"]
    counts: Int[np.ndarray, " blocks"]

    def mixed(self, weights: Float[np.ndarray, "new names"]) -> Products:
        """Of weighted sums of the vectors."""
        return Products(weights @ self.between @ weights.T, weights @ self.within @ weights.T, self.counts)

    def without(self, block: int) -> Products:
        stay = np.arange(len(self.counts)) != block
        return Products(self.between[stay][:, stay], self.within[stay], self.counts[stay])

    def of_means(self) -> Float[np.ndarray, "names names"]:
        """Unbiased inner products of the true means.

        Raises:
          ValueError: for fewer than two rollouts, which have no pair.
        """
        count = int(self.counts.sum())
        if count < 2:
            raise ValueError(f"expected two rollouts or more, whose noise is independent; got {count}")
        return (self.between.sum((0, 1)) - self.within.sum(0)) / (count * (count - 1))

    def of_rollouts(self) -> Float[np.ndarray, "names names"]:
        """Mean products within one rollout: those of the means, and the noise's."""
        return self.within.sum(0) / self.counts.sum()


class Compared(NamedTuple):
    """Vectors, and references from other rollouts: products of one with the other have no noise in common.

    Attributes:
      arms, references: products among themselves, in equally many blocks.
      across: `[blocks, blocks, names, references]` products of the blocks' sums.
    """

    arms: Products
    references: Products
    across: Float[np.ndarray, "blocks blocks names references"]

    @classmethod
    def of(cls, arms: Moments, references: Moments) -> Compared:
        across = np.einsum("ias,jbs->ijab", arms.sums, references.sums, optimize=True)
        return cls(arms.products(), references.products(), across)

    def mixed(self, weights: Float[np.ndarray, "new names"]) -> Compared:
        """With weighted sums of the vectors in place of these."""
        return self._replace(arms=self.arms.mixed(weights), across=weights @ self.across)

    def without(self, block: int) -> Compared:
        stay = np.arange(len(self.across)) != block
        return Compared(self.arms.without(block), self.references.without(block), self.across[stay][:, stay])

    def quality(self, name: int, reference: int) -> Quality:
        """Of a vector in view of the mean of a reference."""
        towards = self.across[..., name, reference].sum() / (self.arms.counts.sum() * self.references.counts.sum())
        return worth(
            self.arms.of_means()[name, name],
            self.arms.of_rollouts()[name, name],
            self.references.of_means()[reference, reference],
            towards,
        )


class Quality(NamedTuple):
    """What a gradient is worth.

    Attributes:
      signal: squared norm of its mean. Unbiased, so it may come out below 0.
      noise: trace of the covariance of one rollout.
      cosine: of its mean to that of another; NaN where a signal is not above 0.
      alignment: mean product of one rollout's gradient with the other's *mean*, over their lengths (a root mean square
        for the noisy one): how far a step of fixed length goes the right way. cosine · √(signal / (signal + noise)).
    """

    signal: float
    noise: float
    cosine: float
    alignment: float

    @property
    def snr(self) -> float:
        return self.signal / self.noise if self.noise > 0 else math.nan


def worth(signal: float, power: float, target: float, towards: float) -> Quality:
    """From squared norms of the mean, of one rollout and of the other's mean, and the product of the means."""
    cosine = towards / math.sqrt(signal * target) if signal > 0 and target > 0 else math.nan
    alignment = towards / math.sqrt(power * target) if power > 0 and target > 0 else math.nan
    return Quality(float(signal), float(power - signal), float(cosine), float(alignment))


def quality(products: Products, name: int, other: int) -> Quality:
    """Of vector `name` in view of the mean of vector `other`, from the same rollouts."""
    means = products.of_means()
    return worth(means[name, name], products.of_rollouts()[name, name], means[other, other], means[name, other])


def jackknife(blocks: int, statistic_without: Callable[[int], np.ndarray]) -> np.ndarray:
    """Half the width of the 95 % interval of a statistic, from leaving out a block at a time; NaN as the statistic's.

    t(0.975, k - 1) · √((k - 1) / k · Σ (f₋ᵢ - mean)²) for k blocks of about equal size.
    """
    left = np.stack([statistic_without(block) for block in range(blocks)])
    spread = ((left - left.mean(0)) ** 2).sum(0)
    return student_t.ppf(0.975, blocks - 1) * np.sqrt(spread * (blocks - 1) / blocks)
