"""Policies that wrap another policy: protected keys, budgets per layer, spans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from smd_jax.eviction.base import CacheView, EvictionPolicy, Scores, check_at_least, newest_slots, protect, scores_of
from smd_jax.eviction.policies import Dense
from smd_jax.eviction.statistics import Statistic
from smd_jax.message.gate import Gate
from smd_jax.message.spans import TokenSpans
from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class _Wrapper(EvictionPolicy):
    """A policy around another one."""

    inner: EvictionPolicy

    def __post_init__(self) -> None:
        check_types(self)
        if not self.inner.evicts:
            raise ValueError(f"expected {type(self).__name__}.inner to be a policy that evicts; got {self.inner}")

    @property
    def spans(self) -> TokenSpans | None:
        return self.inner.spans

    @property
    def statistics(self) -> tuple[Statistic[Any], ...]:
        return self.inner.statistics

    def parameters(self, params: Any, layer: int) -> Any:
        return self.inner.parameters(params, layer)

    def protected(self, budget: int) -> int:
        return self.inner.protected(budget)

    def layer_budgets(self, budget: int, num_layers: int) -> tuple[int, ...]:
        return self.inner.layer_budgets(budget, num_layers)

    def score(self, view: CacheView) -> Scores:
        return scores_of(self.inner, view)


@dataclass(frozen=True)
class Protect(_Wrapper):
    """Always keeps the first `sinks` and the newest `recent` keys; the inner policy chooses the rest.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: if the inner policy never evicts, or a number is negative.
    """

    sinks: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "sinks", "recent")

    def protected(self, budget: int) -> int:
        # A sum, because the inner policy may protect other keys.
        return self.inner.protected(budget) + self.sinks + self.recent

    def score(self, view: CacheView) -> Scores:
        return protect(scores_of(self.inner, view), (view.positions < self.sinks) | newest_slots(view, self.recent))


@dataclass(frozen=True)
class Pyramid(_Wrapper):
    """PyramidKV's budgets (arXiv:2406.02069) for any policy: they fall linearly from the first layer to the last.

    With the inner policy's window w: least = (budget - w) / beta, most = 2 (budget - w) - least, and layer l keeps
    w + most - l (most - least) / (L - 1). The mean over layers is `budget`, up to rounding.

    The first layer gets nearly twice the budget for any prompt. kvpress' PyramidKV compresses a prompt: it clamps the
    largest budget to the prompt's length and raises the smallest by as much, so its budgets differ for short prompts.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: if the inner policy never evicts, or `beta` is below 1.
    """

    beta: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        # Below 1 the last layer would get more than the first.
        check_at_least(self, 1, "beta")

    def layer_budgets(self, budget: int, num_layers: int) -> tuple[int, ...]:
        if num_layers == 1:  # L - 1 is 0
            return (budget,)
        window = self.inner.protected(budget)
        least = (budget - window) / self.beta
        most = 2 * (budget - window) - least
        step = (most - least) / (num_layers - 1)
        # The inner policy's protected keys must fit into every layer, so its window is added.
        return tuple(window + round(most - layer * step) for layer in range(num_layers))


@dataclass(frozen=True)
class OnTokens(_Wrapper):
    """Evicts spans of text when a token is written, in addition to the inner policy's evictions.

    Around `Dense` nothing else is evicted: Memento's cache (arXiv:2604.09852). It has a slot for every token, and hides
    the spans. Around a policy with a budget, the slots of a span are free after the next compression.

    Attributes:
      token_spans: which tokens, see `smd_jax.message.spans`.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: if the inner policy has spans of its own.
    """

    inner: EvictionPolicy = field(default_factory=Dense, kw_only=True)
    token_spans: TokenSpans

    def __post_init__(self) -> None:
        check_types(self)
        if self.inner.spans is not None:
            raise ValueError(f"expected an inner policy without spans, because a cache has one kind; got {self.inner}")

    @property
    def evicts(self) -> bool:
        return self.inner.evicts

    @property
    def spans(self) -> TokenSpans:
        return self.token_spans

    @property
    def gate(self) -> Gate | None:
        return self.inner.gate
