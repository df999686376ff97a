"""NNX modules that Tunix calls like its own models: a language model with its parameters, and its replay."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from smd_jax.learner.forward import response_hidden, response_logits
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.lora import LORA
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.model.teacher_forced import apply_model


class Actor(nnx.Module):
    """A LanguageModel and its parameters as one module, whose state Tunix trains, shards and saves.

    LoRA adapters are `nnx.LoRAParam`, and Tunix then trains only these.

    Attributes:
      model: the LanguageModel. Static.
      weights: one variable for each leaf of the parameters, by its path: "layers_0.attention.q_proj.kernel".
    """

    def __init__(self, model: LanguageModel, params: Params) -> None:
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(params)
        named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
        self.model = model
        self._names = tuple(named)
        kinds = {name: nnx.LoRAParam if name.split(".")[0] == LORA else nnx.Param for name in named}
        self.weights = nnx.Dict({name: kinds[name](jnp.asarray(leaf)) for name, leaf in named.items()})

    @property
    def params(self) -> Params:
        """The current parameters, in the structure in which they were given."""
        return jax.tree.unflatten(self._structure, [self.weights[name][...] for name in self._names])

    def __call__(
        self,
        input_tokens: Int[Array, "batch tokens"],
        positions: Int[Array, "batch tokens"],
        cache: Any,
        attention_mask: Bool[Array, "batch tokens tokens"] | None,
    ) -> tuple[Float[Array, "batch tokens vocab"], None]:
        """Logits under Tunix' mask, which all layers and heads share, and no cache."""
        if cache is not None:
            raise ValueError(f"cache: expected None, because SmdRollout samples; got {type(cache).__name__}")
        if attention_mask is None:
            raise ValueError("attention_mask: expected booleans [batch, tokens, tokens]; got None (packed sequences)")
        return apply_model(self.model, self.params, input_tokens, positions, attention_mask[:, None, None]), None


class Replay(nnx.Module):
    """An actor under the mask and positions of a trajectory; ignores the mask and positions that Tunix passes."""

    def __init__(self, actor: Actor, trajectory: Trajectory, temperature: float) -> None:
        """`temperature` is the training's, by which Tunix divides the logits of evaluations, too."""
        self.actor = actor
        sampled_at = trajectory.temperature or 1.0  # a greedy sampler reports log-probabilities at temperature 1
        self.trajectory = nnx.data(trajectory.replace(temperature=sampled_at / temperature))

    def __call__(
        self, input_tokens: Any, positions: Any, cache: Any, attention_mask: Any
    ) -> tuple[Float[Array, "batch columns vocab"], None]:
        """Logits that predict the response, and zeros for the last column, which Tunix drops."""
        model, params, trajectory = self.actor.model, self.actor.params, self.trajectory
        hidden = response_hidden(model, params, trajectory, trajectory.mask)
        logits = response_logits(model, params, hidden, trajectory, jnp.arange(hidden.shape[1]))
        return jnp.pad(logits, ((0, 0), (0, 1), (0, 0))), None
