"""The learner's log-probabilities for a record: one forward pass, and logits in blocks of columns.

    hidden states   [rows, responses, hidden]     ████|████|████|██    of one forward pass
    logits          [rows, block, vocab]          ████                 of one block, recomputed for every question
    answers         [rows, responses, …]          ▁▁▁▁|▁▁▁▁|▁▁▁▁|▁▁

The logits of 8 responses of 1,024 tokens with a vocabulary of 151,936 have 4.6 GiB in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from smd_jax.certify.causes import Conditions
from smd_jax.learner.blocks import columns_at_once, over_columns
from smd_jax.message.drawable_tokens import OUTSIDE
from smd_jax.message.masks import ShadowMask
from smd_jax.message.sampling import among
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.model.teacher_forced import hidden_states
from smd_jax.pytrees import PyTreeNode


class Replayed(PyTreeNode):
    """The hidden states that predict the response tokens of a record, and the model that turns them into logits.

    Attributes:
      model, params: of the forward pass. The model is static.
      hidden: `[rows, responses, hidden]`; after a row's end arbitrary.
    """

    model: LanguageModel = struct.field(pytree_node=False)
    params: Params
    hidden: Float[Array, "rows responses hidden"]

    @jax.jit
    def logprobs(
        self,
        ids: Int[Array, "rows responses k"],
        temperatures: Sequence[float | Float[Array, ""]] = (1.0,),
        support: Int[Array, "rows responses most"] | None = None,
    ) -> Float[Array, "rows responses k temperatures"]:
        """log p of any ids instead of the response tokens, at every temperature.

        Args:
          ids: int32 `[rows, responses, k]`; -1 has an arbitrary result.
          support: int32 `[rows, responses, most]` ids that could be drawn, padded with -1; None: all.
        """

        def of_block(params: Params, _: Array, hidden: Array, ids: Array, support: Array | None) -> Array:
            logits = self.model.logits(params, hidden)
            if support is not None:
                drawable = among(support, logits.shape[-1])

            def at(temperature: Array) -> Array:
                scaled = logits / temperature
                if support is not None:
                    scaled = jnp.where(drawable, scaled, OUTSIDE)
                chosen = jnp.take_along_axis(scaled, jnp.maximum(ids, 0), axis=-1)
                return chosen - jax.nn.logsumexp(scaled, axis=-1, keepdims=True)

            # One after the other: together they would need logits for every temperature.
            return jnp.moveaxis(jax.lax.map(at, jnp.asarray(temperatures, jnp.float32)), 0, -1)

        return self._by_blocks(of_block, ids, support)

    @partial(jax.jit, static_argnums=1)
    def likeliest(
        self, count: int, temperature: float | Float[Array, ""] = 1.0
    ) -> tuple[Int[Array, "rows responses count"], Float[Array, "rows responses count"]]:
        """The ids of the likeliest tokens, the likeliest first, and their probabilities."""

        def of_block(params: Params, _: Array, hidden: Array) -> tuple[Array, Array]:
            scaled = self.model.logits(params, hidden) / jnp.float32(temperature)
            largest, ids = jax.lax.top_k(jax.nn.softmax(scaled, axis=-1), count)
            return ids, largest

        return self._by_blocks(of_block)

    def _by_blocks(self, of_block: Callable[..., Any], *arrays: Array | None) -> Any:
        rows, responses, _ = self.hidden.shape
        size = columns_at_once(self.model.shape, rows, responses)
        return over_columns(of_block, self.params, size, jnp.arange(responses), self.hidden, *arrays)

    def rolled(self, by: int) -> Replayed:
        """The states moved by `by` response tokens."""
        return self.replace(hidden=jnp.roll(self.hidden, by, axis=1))


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
