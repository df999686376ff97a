"""Conditions under which a sampler may have sampled a record's tokens, and the replay under them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smd_jax.certify.record import Record
from smd_jax.message.drawable_tokens import OUTSIDE
from smd_jax.message.masks import NEVER, ShadowMask
from smd_jax.message.sampling import among
from smd_jax.model.protocol import LanguageModel, Params, Routed
from smd_jax.model.teacher_forced import TeacherForced, layer_masks

# Fewest columns that are added at the right, for tokens that a cause puts before the prompt.
SPARE = 48


@dataclass(frozen=True)
class Conditions:
    """Inputs of a forward pass that predicts the response tokens of a record.

    Attributes:
      tokens, positions: int32 `[rows, T]`.
      evicted_at: int32 `[rows, layers or 1, kv_heads or 1, T]`.
      first: int32 `[rows]` column of the first response token.
      routing: int32 `[rows, T, layers with experts, experts of a token]`, -1 for tokens that choose themselves; None:
        all do.
    """

    tokens: np.ndarray
    positions: np.ndarray
    evicted_at: np.ndarray
    first: np.ndarray
    routing: np.ndarray | None = None

    @classmethod
    def of(cls, record: Record, system: int = 0) -> Conditions:
        """The conditions that the record states.

        Args:
          system: tokens of the chat template's system message, which a cause may put before the prompts.
        """
        # A cause may also put padding before the prompts, up to the longest of them.
        spare = max(SPARE, int(np.ptp(record.prompt_lengths)), system)
        routing = record.routing
        if routing is not None:
            routing = np.pad(routing, [(0, 0), (0, spare), (0, 0), (0, 0)], constant_values=-1)
        return cls(
            _widened(record.tokens, spare),
            _widened(record.positions, spare),
            _widened(record.evicted_at, spare),
            record.prompt_lengths,
            routing,
        )

    def with_prefix(self, prefixes: list[np.ndarray], positions: list[np.ndarray]) -> Conditions:
        """The conditions of rows that begin with these tokens, which are never evicted.

        Args:
          prefixes: tokens of each row, at most as many as there are spare columns. positions: of the row's own tokens,
            given its old ones.
        """
        counts = np.array([len(prefix) for prefix in prefixes])
        found = self._moved(np.zeros_like(counts), counts, np.stack(positions))
        for row, (prefix, count) in enumerate(zip(prefixes, counts, strict=True)):
            found.tokens[row, :count], found.positions[row, :count] = prefix, np.arange(count)
            found.evicted_at[row, :, :, :count] = NEVER
        return found

    def without_columns(self, starts: np.ndarray, ends: np.ndarray) -> Conditions:
        """The conditions of rows without the columns `starts` to `ends` of the prompt."""
        cuts, columns = ends - starts, np.arange(self.tokens.shape[1])
        return self._moved(starts, -cuts, columns - np.where(columns < starts[:, None], 0, cuts[:, None]))

    def _moved(self, starts: np.ndarray, by: np.ndarray, positions: np.ndarray) -> Conditions:
        """Moves the columns from `starts` on to the right, or with negative numbers over the columns at their left."""
        width = self.tokens.shape[1]
        columns = np.arange(width) - np.where(np.arange(width) < starts[:, None], 0, by[:, None])
        inside = (columns >= 0) & (columns < width)
        at = np.where(inside, columns, 0)
        tokens, positions = (np.where(inside, np.take_along_axis(x, at, 1), 0) for x in (self.tokens, positions))
        later = (self.evicted_at >= np.maximum(starts - by, 1)[:, None, None, None]) & (self.evicted_at < NEVER)
        evicted_at = np.take_along_axis(self.evicted_at + later * by[:, None, None, None], at[:, None, None], 3)
        arrays = (tokens, positions, np.where(inside[:, None, None], evicted_at, 0), self.first + by)
        routing = self.routing
        if routing is not None:
            routing = np.where(inside[..., None, None], np.take_along_axis(routing, at[..., None, None], 1), -1)
        return Conditions(*(array.astype(np.int32) for array in arrays), routing)


def _widened(array: np.ndarray, spare: int) -> np.ndarray:
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, spare)]).astype(np.int32)


@partial(jax.jit, static_argnums=(0, 7))
def response_logits(
    model: LanguageModel,
    params: Params,
    tokens: Int[Array, "rows T"],
    positions: Int[Array, "rows T"],
    evicted_at: Int[Array, "rows layers kv_heads T"],
    first: Int[Array, " rows"],
    routing: Int[Array, "rows T mixtures per_token"] | None,
    responses: int,
) -> Float[Array, "rows responses vocab"]:
    """Logits of the response tokens, before the temperature. `responses`: tokens of the longest response."""
    # `certify` compares the record's own rows with the context, which spare columns may exceed.
    longest = min(tokens.shape[1], model.shape.max_positions)
    states = layer_masks(model.shape, tokens, ShadowMask(evicted_at), longest)
    if routing is not None and model.shape.routing is not None:
        of_layer = {layer: routing[:, :, place] for place, layer in enumerate(model.shape.routing.layers)}
        states = tuple(Routed(mask, of_layer.get(layer)) for layer, mask in enumerate(states))
    attention = TeacherForced(model.shape.attention)
    hidden, _ = model.hidden(params, tokens, model.encode_positions(positions), attention, states)
    columns = jnp.clip(first[:, None] - 1 + jnp.arange(responses)[None], 0, tokens.shape[1] - 1)
    return model.logits(params, jnp.take_along_axis(hidden, columns[..., None], axis=1))


@jax.jit
def logprobs_of(
    ids: Int[Array, "rows responses k"],
    logits: Float[Array, "rows responses vocab"],
    temperature: Float[Array, ""],
    support: Int[Array, "rows responses most"] | None = None,
) -> Float[Array, "rows responses k"]:
    """log p of any ids instead of the response tokens. `support`: ids that could be drawn, padded with -1."""
    logits = logits / temperature
    if support is not None:
        logits = jnp.where(among(support, logits.shape[-1]), logits, OUTSIDE)
    chosen = jnp.take_along_axis(logits, jnp.maximum(ids, 0), axis=-1)
    return chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def replay_logits(model: LanguageModel, params: Params, conditions: Conditions, responses: int) -> Array:
    """`response_logits` under the conditions. Shared axes of the mask are expanded, so that one program is compiled."""
    rows, columns = conditions.tokens.shape
    shape = (rows, model.shape.num_layers, model.shape.num_kv_heads, columns)
    evicted_at = np.broadcast_to(conditions.evicted_at, shape)
    arrays = (conditions.tokens, conditions.positions, evicted_at, conditions.first, conditions.routing)
    return response_logits(model, params, *arrays, responses)
