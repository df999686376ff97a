"""Shared prompts: the model reads the common prompt of several rows once.

    rows of a batch                            one row of the model
    [prompt | response a]
    [prompt | response b]        ─►            [prompt | response a | response b | response c]
    [prompt | response c]

Projections, norms and MLP, most of a model's work, then process `P + rows * R` tokens instead of `rows * (P + R)`. For
attention, queries, keys and values are rearranged into the batch's rows, so every row attends under its own mask with
any implementation, and gradients of the shared keys add up.

It requires that a prompt's tokens have the same mask in all of its rows, as in a rollout, which reads every prompt
once. The prompt's states are those of the first row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from smd_jax.model.protocol import (
    Attend,
    EncodedPositions,
    LanguageModel,
    LayerState,
    ModelShape,
    Params,
    Routed,
    forward,
)


@dataclass(frozen=True)
class SharedPrompt:
    """A LanguageModel for batches in which `rows` consecutive rows have the same prompt. Its hidden states equal those
    of `model` up to rounding.

    Attributes:
      rows: rows per prompt.
      columns: P, columns of the prompt, including padding.

    Raises:
      ValueError: in `hidden`, for a batch that is not a multiple of `rows`.
    """

    model: LanguageModel
    rows: int
    columns: int

    @property
    def shape(self) -> ModelShape:
        return self.model.shape

    def encode_positions(self, positions: Int[Array, "batch tokens"]) -> EncodedPositions:
        return self.model.encode_positions(positions)

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "batch tokens"],
        positions: EncodedPositions,
        attend: Attend,
        layers: tuple[LayerState, ...],
    ) -> tuple[Float[Array, "batch tokens hidden_size"], tuple[LayerState, ...]]:
        if tokens.shape[0] % self.rows:
            raise ValueError(
                f"expected a batch of whole groups of {self.rows} rows with one prompt; got {tokens.shape[0]} rows"
            )
        once = SharedAttend(attend, self.rows, self.columns)
        positions = jax.tree.map(once.together, positions)
        layers = tuple(_routed(once.together, layer) for layer in layers)
        hidden, layers = forward(self.model, params, once.together(tokens), positions, once, layers)
        return once.apart(hidden), tuple(_routed(once.apart, layer) for layer in layers)

    def logits(
        self, params: Params, hidden: Float[Array, "batch tokens hidden_size"]
    ) -> Float[Array, "batch tokens vocab_size"]:
        return self.model.logits(params, hidden)

    def compute_params(self, params: Params) -> Params:
        return self.model.compute_params(params)


@dataclass(frozen=True)
class SharedAttend:
    """`attend` over separate rows, for a model that reads them in one row."""

    attend: Attend
    rows: int
    columns: int

    def __call__(
        self,
        q: Float[Array, "prompts heads together head_dim"],
        k: Float[Array, "prompts kv_heads together head_dim"],
        v: Float[Array, "prompts kv_heads together head_dim"],
        layer: LayerState,
        /,
        sinks: Float[Array, " heads"] | None = None,
    ) -> tuple[Float[Array, "prompts heads together head_dim"], LayerState]:
        q, k, v = (_over_tokens(self.apart, x) for x in (q, k, v))
        out, layer = self.attend(q, k, v, layer) if sinks is None else self.attend(q, k, v, layer, sinks)
        return _over_tokens(self.together, out), layer

    def together(self, x: Array) -> Array:
        """`[batch, P + R, ...]` -> `[prompts, P + rows * R, ...]`."""
        groups = x.reshape(-1, self.rows, *x.shape[1:])
        prompts, responses = groups[:, 0, : self.columns], groups[:, :, self.columns :]
        return jnp.concatenate([prompts, responses.reshape(len(groups), -1, *x.shape[2:])], axis=1)

    def apart(self, x: Array) -> Array:
        """The inverse of `together`."""
        responses = x[:, self.columns :].reshape(len(x), self.rows, -1, *x.shape[2:])
        prompts = jnp.broadcast_to(x[:, None, : self.columns], (*responses.shape[:2], self.columns, *x.shape[2:]))
        return jnp.concatenate([prompts, responses], axis=2).reshape(
            -1, self.columns + responses.shape[2], *x.shape[2:]
        )


def _routed(f: Callable[[Array], Array], layer: LayerState) -> LayerState:
    """The layer's state with `f` of its routing, if it has one."""
    return Routed(layer.state, *jax.tree.map(f, layer[1:])) if isinstance(layer, Routed) else layer


def _over_tokens(f: Callable[[Array], Array], x: Float[Array, "rows heads tokens head_dim"]) -> Array:
    return f(x.swapaxes(1, 2)).swapaxes(1, 2)


def shared_prompt(model: LanguageModel, rows: int, columns: int) -> LanguageModel:
    """The model for `rows` consecutive rows per prompt of `columns` columns; for one row, the model itself."""
    return model if rows == 1 else SharedPrompt(model, rows, columns)
