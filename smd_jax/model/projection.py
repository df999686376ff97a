"""Dense layer with an optional LoRA adapter."""

from __future__ import annotations

from typing import no_type_check

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from smd_jax.model.lora import LORA


@no_type_check  # the annotations of nn.Dense cannot be checked
class Projection(nn.Dense):
    """`nn.Dense`; and with `lora_A`, `lora_B` and `scale` in Flax's collection "lora" (`variables_of`), plus
    scale * (x A) B.

    The variables determine whether there is an adapter: the same module is the base and the policy.
    """

    def __call__(self, inputs: Float[Array, "*tokens in"]) -> Float[Array, "*tokens out"]:
        out = super().__call__(inputs)
        if not self.has_variable(LORA, "lora_A"):
            return out
        a, b = (self.get_variable(LORA, name).astype(out.dtype) for name in ("lora_A", "lora_B"))
        # Scales the narrow product in float32, so that the scale equals that of a merged matrix.
        wide = jnp.promote_types(out.dtype, jnp.float32)
        thin = jnp.matmul(inputs.astype(out.dtype), a, precision=self.precision, preferred_element_type=wide)
        thin = (self.get_variable(LORA, "scale") * thin).astype(out.dtype)
        return out + jnp.matmul(thin, b, precision=self.precision)
