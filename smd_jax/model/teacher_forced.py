"""Teacher-forced forward passes of any model under an explicit mask."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Float, Int

from smd_jax.message.masks import LayerMask, Mask, check_mask, layer_mask, windowed
from smd_jax.model.lora import check_reads_lora
from smd_jax.model.protocol import LanguageModel, ModelShape, Params, check_attended, forward
from smd_jax.model.routing import routed_layers, router_logits


@dataclass(frozen=True)
class TeacherForced:
    """Attention of a teacher-forced pass. A layer's state is its mask; the new state is None."""

    shape: ModelShape

    def __call__(
        self,
        q: Float[Array, "batch heads tokens head_dim"],
        k: Float[Array, "batch kv_heads tokens head_dim"],
        v: Float[Array, "batch kv_heads tokens head_dim"],
        layer: LayerMask,
        /,
        sinks: Float[Array, " heads"] | None = None,
    ) -> tuple[Float[Array, "batch heads tokens head_dim"], None]:
        check_attended(self.shape, q, k, v)
        return self.shape.attention.attend(q, k, v, layer, sinks), None


def layer_masks(
    shape: ModelShape, tokens: Int[Array, "batch tokens"], mask: Mask, longest: int | None = None
) -> tuple[LayerMask, ...]:
    """The mask of each layer, restricted to the layer's sliding window.

    Args:
      longest: longest sequence in tokens, if rows hold several or padding; None: all columns are one sequence.

    Raises:
      TypeError: for a mask of numbers.
      ValueError: if the mask has a wrong shape, or a sequence may be longer than the model's context.
    """
    rows, columns = tokens.shape
    longest = columns if longest is None else longest
    if longest > shape.max_positions:
        raise ValueError(f"expected at most {shape.max_positions} tokens (the model's context); got {longest}")
    check_mask(mask, batch=rows, layers=shape.num_layers, kv_heads=shape.num_kv_heads, columns=columns)
    # Used for prompts and by the learner, so that both have the same windows.
    return tuple(windowed(layer_mask(mask, index), shape.window(index)) for index in range(shape.num_layers))


def hidden_states(
    model: LanguageModel,
    params: Params,
    tokens: Int[Array, "batch tokens"],
    positions: Int[Array, "batch tokens"],
    mask: Mask,
    longest: int | None = None,
    routing: Int[Array, "batch tokens mixtures per_token"] | None = None,
) -> Float[Array, "batch tokens hidden"]:
    """The hidden state that predicts each token's successor.

    Args:
      tokens: ids.
      positions: position of each token in its own sequence, see `smd_jax.message.masks.positions`.
      mask: a ShadowMask, or booleans of any pattern that broadcast to `[batch, layers, kv_heads, queries, keys]`.
      longest: as in `layer_masks`.
      routing: experts of each token, see `smd_jax.model.routing`; None: the model's router chooses.

    Raises:
      ValueError: as `layer_masks` and `routed_layers`.
      TypeError: as `check_reads_lora`.
    """
    return hidden_and_router(model, params, tokens, positions, mask, longest, routing, read_router=False)[0]


def hidden_and_router(
    model: LanguageModel,
    params: Params,
    tokens: Int[Array, "batch tokens"],
    positions: Int[Array, "batch tokens"],
    mask: Mask,
    longest: int | None = None,
    routing: Int[Array, "batch tokens mixtures per_token"] | None = None,
    *,
    read_router: bool = True,
) -> tuple[Float[Array, "batch tokens hidden"], Float[Array, "batch tokens mixtures count"] | None]:
    """`hidden_states`, and the router logits of every layer with experts, None without routing or `read_router`."""
    check_reads_lora(model, params)
    layers = routed_layers(model.shape, layer_masks(model.shape, tokens, mask, longest), routing)
    attention = TeacherForced(model.shape)
    hidden, layers = forward(model, params, tokens, model.encode_positions(positions), attention, layers)
    return hidden, router_logits(model.shape, layers) if read_router and routing is not None else None


def apply_model(
    model: LanguageModel,
    params: Params,
    tokens: Int[Array, "batch tokens"],
    positions: Int[Array, "batch tokens"],
    mask: Mask,
) -> Float[Array, "batch tokens vocab"]:
    """Logits of every token's successor, in float32 or wider; arguments and errors as `hidden_states`."""
    return model.logits(params, hidden_states(model, params, tokens, positions, mask))
