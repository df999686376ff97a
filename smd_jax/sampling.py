"""From logits to a token and the log-probability under which it was drawn."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: keep this many tokens of highest probability; 0 keeps all.
      top_p: keep the smallest set of most likely tokens whose probability reaches this; 1.0 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"expected a temperature >= 0; got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"expected top_k >= 0 (0: no filter); got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"expected 0 < top_p <= 1 (1: no filter); got {self.top_p}")

    @property
    def trainable(self) -> bool:
        """Whether a learner can reproduce the probabilities: a temperature can be replayed, a token filter cannot."""
        return self.temperature > 0 and self.top_k == 0 and self.top_p == 1.0


def token_logprobs(logits: Float[Array, "... vocab"], tokens: Int[Array, ...], temperature: float) -> Float[Array, ...]:
    """log p(token) at a temperature above 0; sampler and learner both compute it here."""
    logprobs = jax.nn.log_softmax(logits / temperature, axis=-1)
    return jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]


def sample(
    logits: Float[Array, "batch vocab"], keys: Key[Array, " batch"], config: SamplingConfig
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    """Draws one token a row.

    Args:
      keys: one key per row, consumed: a row's token depends on its own key alone, not on the batch.

    Returns:
      Tokens, and their log-probabilities under the distribution that they were drawn from (temperature and filters
      applied; greedy decoding reports those at temperature 1).
    """
    if config.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1)
        return tokens.astype(jnp.int32), token_logprobs(logits, tokens, 1.0)
    scaled = filter_logits(logits / config.temperature, config)
    tokens = jax.vmap(jax.random.categorical)(keys, scaled)
    return tokens.astype(jnp.int32), token_logprobs(scaled, tokens, 1.0)


def filter_logits(logits: Float[Array, "batch vocab"], config: SamplingConfig) -> Float[Array, "batch vocab"]:
    """-inf outside the top-k and top-p sets; top-p counts the probabilities that remain after top-k."""
    if config.top_k:
        least = jax.lax.top_k(logits, min(config.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if config.top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probability = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        least = jnp.min(jnp.where(before < config.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits
