"""Bytes of the learner's forward and backward pass over a microbatch, on one device.

Counted from the equations of the model, and calibrated against the buffers of the compiled update (jax 0.10.2, CPU,
float32; `tests/memory`), under XLA's default scheduler and the one that spares memory, like those of accelerators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax.numpy as jnp

from smd_jax.config import ModelConfig
from smd_jax.learner.blocks import block_columns
from smd_jax.losses.distillation import DistillConfig
from smd_jax.memory.sampler import SCORE_COPIES, WIDE, Platform, compute_itemsize
from smd_jax.message.draws import boundary_count
from smd_jax.message.masks import Segments
from smd_jax.model.attention import pays
from smd_jax.model.decoder import Decoder, Remat
from smd_kernels.hardware import Hardware, why_not_blocks
from smd_kernels.xla import ACCELERATOR_SIZES, CPU_SIZES

LOGIT_COPIES = 4  # of a block alive together: logits, softmax forward and recomputed, cotangent
GATE_COPIES = 3  # of every layer's gate logits: one by one, stacked, their cotangent
DRAW_COPIES = 8  # of one layer's gate logits: sorted, and the sums before and after each draw
SUMMED_HEADS = 2  # of the output head, where its gradient is summed over blocks: the sum and a block's summand


@dataclass(frozen=True)
class LearnerPass:
    """One forward and backward pass over a microbatch, on one device.

    Attributes:
      model: how it attends, and whether it recomputes its layers.
      shape: the device's part of the model.
      rows: rows of the microbatch on this device.
      prompt, response: their columns.
      segments: where the sampler compressed; None if it never did.
      boolean: whether the mask is T x T booleans.
      sequence: devices that share the columns, and in attention the heads.
    """

    model: Decoder
    shape: ModelConfig
    platform: Platform
    rows: int
    prompt: int
    response: int
    segments: Segments | None
    boolean: bool = False
    sequence: int = 1

    @property
    def columns(self) -> int:
        return self.prompt + self.response

    @property
    def tokens(self) -> int:
        """Tokens of all rows on this device."""
        return -(-self.rows * self.columns // self.sequence)

    @property
    def remat(self) -> Remat:
        """XLA's CPU scheduler recomputes too early to save memory (measured)."""
        return "none" if self.platform == "cpu" else self.model.recomputed

    @property
    def itemsize(self) -> int:
        return compute_itemsize(self.shape, self.platform)

    @property
    def squares(self) -> bool:
        """Whether scores of T x T are kept."""
        return self.boolean or self.model.impl in ("reference", "xla")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Windows of every layer."""
        return self.shape.sliding_windows or (None,) * self.shape.num_layers

    def segments_within(self, window: int | None) -> Segments | None:
        """Segments of a layer with this window, as `smd_jax.message.masks.windowed` makes them."""
        if window is None:
            return self.segments
        if self.segments is None:
            return Segments(first=window, length=window, budget=window)
        return replace(self.segments, budget=min(self.segments.budget, window))

    def saved(self, window: int | None = None) -> int:
        """Bytes of one layer that its backward pass reads.

        MLP: gate, up, sigmoid and two products; GeGLU two more. Two norms and two residual sums; as much for post-norms
        and for norms of q and k. Attention: q, k, v and its output, twice; with segments a copy of q, k, v from the
        first one on; or T x T scores.
        """
        s = self.shape
        heads = s.num_heads * s.head_dim
        kv_heads = s.num_kv_heads * s.head_dim
        wide = (5 if s.activation == "silu" else 7) * s.intermediate_size
        wide += (8 if s.post_norms else 4) * s.hidden_size
        wide += (2 * (heads + kv_heads) if s.qk_norm else 0) + 3 * heads + 2 * kv_heads
        floats = self.columns * wide
        segments = self.segments_within(window)
        if segments is not None and self.gathers(segments):
            floats += max(self.columns - segments.first, 0) * (heads + 2 * kv_heads)
        scores = SCORE_COPIES * s.num_heads * self.columns**2 * WIDE if self.squares else 0
        # The log of the softmax's denominator, a float32 for each query and head.
        denominators = self.columns * s.num_heads * WIDE
        return self.rows * (floats * self.itemsize + denominators + scores) // self.sequence

    def gathers(self, segments: Segments | None) -> bool:
        """Whether attention uses these segments, decided as in `smd_jax.model.attention`."""
        if self.squares or segments is None or self.model.impl == "interval":
            return False
        return self.model.impl == "segments" or pays(segments, self.columns)

    def products(self) -> int:
        """Bytes of one layer's products with weights."""
        s = self.shape
        floats = 2 * s.intermediate_size + 2 * s.hidden_size + (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
        return self.tokens * floats * self.itemsize

    def between_layers(self) -> int:
        """Bytes kept of one layer: its input, or cotangents that wait for the gradients of its matrices."""
        s = self.shape
        floats = s.hidden_size + (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
        return self.tokens * floats * self.itemsize

    def outside_layers(self) -> int:
        """Bytes of embeddings, the last norm, the response's hidden states and their cotangent."""
        return 4 * self.tokens * self.shape.hidden_size * self.itemsize

    def tiles(self) -> int:
        """Bytes of attention scores in plain JAX, beyond what the MLP frees."""
        s = self.shape
        kernels: dict[str, Hardware] = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}
        kernel = kernels.get(self.platform)
        in_kernel = kernel is not None and why_not_blocks(kernel, jnp.dtype(s.dtype), s.head_dim) is None
        if self.squares or (in_kernel and self.model.impl in (None, "mosaic_gpu", "mosaic_tpu")):
            return 0
        sizes = self.model.sizes or (CPU_SIZES if self.platform == "cpu" else ACCELERATOR_SIZES)
        layers = [self.segments_within(window) for window in set(self.windows)]
        # The layer whose queries meet most keys decides.
        keys = max(x.budget + x.length if x and self.gathers(x) else self.columns for x in layers)
        scores = min(sizes.scores, self.tokens * s.num_heads * keys)
        freed = 5 * self.tokens * s.intermediate_size * self.itemsize
        return max(SCORE_COPIES * WIDE * scores - freed, 0)

    def activations(self) -> int:
        """Bytes at the end of the forward pass."""
        layers = self.shape.num_layers
        always = layers * self.between_layers() + self.outside_layers() + self.tiles()
        if self.remat == "none":
            return sum(self.saved(window) for window in self.windows) + always
        # Recomputed layers exist one at a time.
        kept = self.products() if self.remat == "dots" else 0
        return layers * kept + self.largest_layer() - kept + always

    def largest_layer(self) -> int:
        """Bytes of the largest layer."""
        return max(self.saved(window) for window in set(self.windows))

    def last_layer(self) -> int:
        """Bytes at the end of the backward pass, when all gradients exist."""
        return self.shape.num_layers * self.between_layers() + self.largest_layer() + self.outside_layers()

    def logits(self, positions: float = 1.0, policies: int = 1) -> int:
        """Bytes of a block's logits; with several blocks also the head in float32 and its summed gradient.

        Args:
          positions: share of the columns that are projected. policies: by how many policies.
        """
        token = self.shape.vocab_size * WIDE
        columns = max(-(-round(self.response * positions) // self.sequence), 1)
        block = block_columns(policies * self.rows, columns, token)
        summed = SUMMED_HEADS * token * self.shape.hidden_size if block < columns else 0
        return LOGIT_COPIES * self.rows * block * token + summed

    def draws(self, buffer: int) -> int:
        """Bytes of gate logits of all layers at every compression, and of one layer's sort; `buffer` columns apart."""
        compressions = boundary_count(self.prompt, buffer, self.columns)
        layer = self.rows * self.shape.num_kv_heads * compressions * self.columns * WIDE
        return (GATE_COPIES * self.shape.num_layers + DRAW_COPIES) * layer

    def teacher(self, distill: DistillConfig) -> tuple[int, int]:
        """Activations and logits of distillation: logits of two policies, half more for "reverse", "published" and a
        share of the rows (measured). Only "published" keeps the layers of the dense policy, for its gradient."""
        # Less a little, because a rounding error in the product must not add a row.
        dense = replace(self, rows=math.ceil(self.rows * distill.fraction - 1e-6))
        more = distill.direction in ("reverse", "published") or distill.fraction < 1
        kept = dense.activations() if distill.direction == "published" else dense.outside_layers()
        return kept, round(dense.logits(distill.position_fraction, policies=2) * (1.5 if more else 1.0))
