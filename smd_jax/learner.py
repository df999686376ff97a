"""The learner's forward pass over a trajectory, under the mask that the sampler had or any other."""

from __future__ import annotations

from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from smd_jax.masks import Mask
from smd_jax.model import Decoder, Params, apply_model
from smd_jax.sampling import token_logprobs
from smd_jax.trajectory import Trajectory


@no_type_check  # JAX rebuilds pytrees with leaves that are not arrays
class ResponseScores(struct.PyTreeNode):
    """What the learner thinks of the response tokens, at the sampler's temperature.

    Attributes:
      logprobs: `[batch, R]` log p of each response token; defined, but meaningless, where `response_mask` is false.
      entropy: `[batch, R]` of the distribution that each token was drawn from, in nats.
    """

    logprobs: Float[Array, "batch R"]
    entropy: Float[Array, "batch R"]


def check_replayable(trajectory: Trajectory) -> None:
    """Raises ValueError for a trajectory whose probabilities a learner cannot reproduce, or that has none."""
    if trajectory.logprobs is None:
        raise ValueError(
            "expected the sampler's log-probabilities in the trajectory: without them there is neither a ratio to the "
            "sampler nor a correction; got None"
        )
    if not trajectory.replayable:
        raise ValueError(
            "expected a trajectory sampled at a temperature > 0 without top-k or top-p, because the learner does not "
            "replay token filters; got one from a filtered or greedy sampler"
        )


def response_hidden(
    model: Decoder, params: Params, trajectory: Trajectory, mask: Mask
) -> Float[Array, "batch R hidden"]:
    """Hidden states from which the response tokens are predicted: those of columns P-1 … T-2."""
    hidden = apply_model(model, params, trajectory.tokens, trajectory.positions, mask, method=Decoder.hidden)
    return hidden[:, trajectory.prompt_width - 1 : -1]


def response_logits(
    model: Decoder, params: Params, hidden: Float[Array, "batch R hidden"], temperature: float
) -> Float[Array, "batch R vocab"]:
    """Logits of the response tokens, divided by the temperature, in float32 or wider."""
    return apply_model(model, params, hidden, method=Decoder.logits) / temperature


def score_logits(logits: Float[Array, "batch R vocab"], trajectory: Trajectory) -> ResponseScores:
    """Log-probabilities and entropies from logits that the temperature has already divided."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    return ResponseScores(token_logprobs(logits, trajectory.response, 1.0), entropy)


def score(model: Decoder, params: Params, trajectory: Trajectory, mask: Mask | None = None) -> ResponseScores:
    """One teacher-forced pass. `mask` None replays what the sampler saw: then its log-probabilities come out again.

    Raises:
      ValueError: if the sampler filtered its tokens or was greedy, which is not replayed.
    """
    check_replayable(trajectory)
    mask = trajectory.mask if mask is None else mask
    hidden = response_hidden(model, params, trajectory, mask)
    return score_logits(response_logits(model, params, hidden, trajectory.temperature), trajectory)
