"""The learner's log-probabilities for a record: one forward pass, and logits in blocks of columns.

    hidden states   [rows, responses, hidden]     ████|████|████|██    of one forward pass
    logits          [rows, block, vocab]          ████                 of one block, recomputed for every question
    answers         [rows, responses, …]          ▁▁▁▁|▁▁▁▁|▁▁▁▁|▁▁

The logits of 8 responses of 1,024 tokens with a vocabulary of 151,936 have 4.6 GiB in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smd_jax.certify.causes import Conditions
from smd_jax.learner.blocks import columns_at_once, over_columns
from smd_jax.message.drawable_tokens import OUTSIDE
from smd_jax.message.masks import ShadowMask
from smd_jax.message.sampling import among
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.model.teacher_forced import hidden_states


class Replayed(NamedTuple):
    """The hidden states that predict the response tokens of a record, and the model that turns them into logits.

    Attributes:
      model, params: of the forward pass.
      hidden: `[rows, responses, hidden]`; after a row's end arbitrary.
    """

    model: LanguageModel
    params: Params
    hidden: Float[Array, "rows responses hidden"]

    def logprobs(
        self, ids: np.ndarray | Array, temperatures: Sequence[float] = (1.0,), support: np.ndarray | None = None
    ) -> Float[Array, "rows responses k temperatures"]:
        """log p of any ids instead of the response tokens, at every temperature.

        Args:
          ids: int32 `[rows, responses, k]`; -1 has an arbitrary result.
          support: int32 `[rows, responses, most]` ids that could be drawn, padded with -1; None: all.
        """
        at = jnp.asarray(temperatures, jnp.float32)
        return _logprobs(self.model, self.params, self.hidden, ids, at, support)

    def likeliest(
        self, count: int, temperature: float = 1.0
    ) -> tuple[Int[Array, "rows responses count"], Float[Array, "rows responses count"]]:
        """The ids of the likeliest tokens, the likeliest first, and their probabilities."""
        return _likeliest(self.model, self.params, self.hidden, jnp.float32(temperature), count)

    def rolled(self, by: int) -> Replayed:
        """The states moved by so many response tokens."""
        return self._replace(hidden=jnp.roll(self.hidden, by, axis=1))


def replay(model: LanguageModel, params: Params, conditions: Conditions, responses: int) -> Replayed:
    """One forward pass under the conditions. `responses`: tokens of the longest response."""
    return Replayed(model, params, _hidden(model, params, conditions, responses))


@partial(jax.jit, static_argnums=(0, 3))
def _hidden(
    model: LanguageModel, params: Params, conditions: Conditions, responses: int
) -> Float[Array, "rows responses hidden"]:
    tokens, positions, evicted_at, first = map(
        jnp.asarray, (conditions.tokens, conditions.positions, conditions.evicted_at, conditions.first)
    )
    # `certify` compares the record's own rows with the context, which spare columns may exceed.
    longest = min(tokens.shape[1], model.shape.max_positions)
    # A model without experts chooses none.
    routing = None if conditions.routing is None or model.shape.routing is None else jnp.asarray(conditions.routing)
    hidden = hidden_states(model, params, tokens, positions, ShadowMask(evicted_at), longest, routing)
    columns = jnp.clip(first[:, None] - 1 + jnp.arange(responses)[None], 0, tokens.shape[1] - 1)
    return jnp.take_along_axis(hidden, columns[..., None], axis=1)


@partial(jax.jit, static_argnums=0)
def _logprobs(
    model: LanguageModel,
    params: Params,
    hidden: Float[Array, "rows responses hidden"],
    ids: Int[Array, "rows responses k"],
    temperatures: Float[Array, " temperatures"],
    support: Int[Array, "rows responses most"] | None,
) -> Float[Array, "rows responses k temperatures"]:
    def of_block(params: Params, _: Array, hidden: Array, ids: Array, support: Array | None) -> Array:
        logits = model.logits(params, hidden)
        if support is not None:
            drawable = among(support, logits.shape[-1])

        def at(temperature: Array) -> Array:
            scaled = logits / temperature
            if support is not None:
                scaled = jnp.where(drawable, scaled, OUTSIDE)
            chosen = jnp.take_along_axis(scaled, jnp.maximum(ids, 0), axis=-1)
            return chosen - jax.nn.logsumexp(scaled, axis=-1, keepdims=True)

        # One after the other: together they would need logits for every temperature.
        return jnp.moveaxis(jax.lax.map(at, temperatures), 0, -1)

    rows, responses, _ = hidden.shape
    size = columns_at_once(model.shape, rows, responses)
    return over_columns(of_block, params, size, jnp.arange(responses), hidden, jnp.asarray(ids), support)


@partial(jax.jit, static_argnums=(0, 4))
def _likeliest(
    model: LanguageModel,
    params: Params,
    hidden: Float[Array, "rows responses hidden"],
    temperature: Float[Array, ""],
    count: int,
) -> tuple[Int[Array, "rows responses count"], Float[Array, "rows responses count"]]:
    def of_block(params: Params, _: Array, hidden: Array) -> tuple[Array, Array]:
        probabilities = jax.nn.softmax(model.logits(params, hidden) / temperature, axis=-1)
        largest, ids = jax.lax.top_k(probabilities, count)
        return ids, largest

    rows, responses, _ = hidden.shape
    size = columns_at_once(model.shape, rows, responses)
    return over_columns(of_block, params, size, jnp.arange(responses), hidden)
