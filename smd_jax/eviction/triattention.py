"""TriAttention: scores keys by their expected attention from future queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from smd_jax.eviction.base import CacheView, EvictionPolicy, Scores, at_least_float32, check_at_least, protect
from smd_jax.message.query_centers import QueryCenters
from smd_jax.typed_fields import check_types

LEAST_DEVIATION = 1e-6  # smallest standard deviation by which a head's scores are divided


@dataclass(frozen=True)
class TriAttention(EvictionPolicy):
    """TriAttention (arXiv:2604.04921; WeianMao/triattention `pruning_utils.py`), in the mode that TensorRT-LLM calls
    `per_layer_perhead`: every KV head of every layer chooses its keys.

    With E the mean query before RoPE and k a key before RoPE, as complex numbers of each frequency w:

        s_j = mean over d of sum over w of  Re(E conj(k_j) exp(i w (t + d - p_j)))  +  (mean |q| - |E|) |k_j|

    t is the position of the next query, d = 1, 2, 4, … up to `longest`. Scores of a query head are normalised over the
    keys (mean 0, variance 1), and a KV head takes the maximum over its query heads.

    There is no window of newest keys: `Protect(..., recent=n)` adds one. TensorRT-LLM never evicts the prompt, and its
    budget is for the response. To do the same, set `sinks` to the prompt length and increase the budget by as much.

    Attributes:
      centers: query centers of the model, see `smd_jax.model.query_centers`.
      sinks: number of first keys, which are kept and left out of the normalisation.
      longest: the largest d.

    Raises:
      TypeError, ValueError: a value that its field does not allow.
    """

    centers: QueryCenters
    sinks: int = 0
    longest: int = 65536

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, "sinks", self.sinks, 0)
        check_at_least(self, "longest", self.longest, 1)

    def protected(self, budget: int) -> int:
        del budget
        return self.sinks

    def parameters(self, params: Any, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Real and imaginary part of the mean query, rotated and averaged over d; the weight of |k|; the frequencies.

        Raises:
          ValueError: the centers have fewer layers.
        """
        del params
        if layer >= len(self.centers.mean):
            raise ValueError(f"expected query centers of at least {layer + 1} layers; got {len(self.centers.mean)}")
        mean, frequencies = self.centers.mean[layer].astype(np.complex128), self.centers.frequencies[layer]
        ahead = 2.0 ** np.arange(int(np.log2(self.longest)) + 1)
        turned = mean * np.exp(1j * ahead[:, None] * frequencies).mean(axis=0)
        return turned.real, turned.imag, self.centers.length[layer] - np.abs(mean), frequencies

    def score(self, view: CacheView) -> Scores:
        keys = at_least_float32(view.keys)
        of_heads = self._of_heads(view, keys)
        batch, kv_heads, slots, _ = keys.shape
        candidates = view.valid & (view.positions >= self.sinks)
        counted = candidates[:, :, None]
        count = jnp.maximum(counted.sum(-1, keepdims=True), 1)
        mean = jnp.where(counted, of_heads, 0).sum(-1, keepdims=True) / count
        centered = jnp.where(counted, of_heads - mean, 0)
        deviation = jnp.sqrt((centered**2).sum(-1, keepdims=True) / count)
        scores = (centered / jnp.maximum(deviation, LEAST_DEVIATION)).max(axis=2)
        return protect(scores, view.positions < self.sinks) if self.sinks else scores

    def _of_heads(
        self, view: CacheView, keys: Float[Array, "batch kv_heads slots head_dim"]
    ) -> Float[Array, "batch kv_heads group slots"]:
        """Scores of every query head."""
        kv_heads, half = keys.shape[1], keys.shape[3] // 2
        real, imaginary, weight, frequencies = (jnp.asarray(x, keys.dtype) for x in view.parameters)
        heads, frequency_count = real.shape
        if heads % kv_heads or frequency_count != half:
            raise ValueError(
                f"expected query centers of a multiple of {kv_heads} heads and {half} frequencies; got {heads} and "
                f"{frequency_count}"
            )
        # A cached key is already rotated to its position, so only the query's position is needed.
        angles = (view.newest[:, None] + 1).astype(keys.dtype) * frequencies[None]
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        real, imaginary = real[None], imaginary[None]
        turned = jnp.concatenate([real * cos - imaginary * sin, real * sin + imaginary * cos], axis=-1)
        grouped = turned.reshape(len(turned), kv_heads, -1, 2 * half)
        lengths = jnp.sqrt(keys[..., :half] ** 2 + keys[..., half:] ** 2)
        weights = weight.reshape(kv_heads, -1, half)
        # Accelerators multiply float32 in fewer bits by default.
        expected = jnp.einsum("bhgd,bhsd->bhgs", grouped, keys, precision="highest")
        return expected + jnp.einsum("hgf,bhsf->bhgs", weights, lengths, precision="highest")
