"""Cases and reference results for implementations of attention under interval masks."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from smd_jax.message.masks import NEVER
from smd_jax.model.attention import attend
from smd_jax.testing import random_evictions
from smd_kernels import reference
from smd_kernels.blocks import BlockKernel, Blocks
from smd_kernels.segments import Segments


class Case(NamedTuple):
    """A shadow mask, and random arrays to attend to."""

    heads: int
    head_dim: int
    segments: Segments
    evicted_at: np.ndarray  # [batch, kv_heads, tokens]
    seed: int

    def arrays(self, dtype: Any = np.float32) -> list[jax.Array]:
        """q, k, v and the gradient of the output."""
        batch, kv_heads, tokens = self.evicted_at.shape
        rng = np.random.default_rng(self.seed)
        heads = (self.heads, kv_heads, kv_heads, self.heads)
        return [jnp.asarray(rng.normal(size=(batch, n, tokens, self.head_dim)).astype(dtype)) for n in heads]


def evict_at_every_step(shape: tuple[int, int, int], padding: tuple[int, ...], budget: int, seed: int) -> np.ndarray:
    """`evicted_at` of a sampler that evicts a random key after every query, once it holds more than `budget`."""
    rng = np.random.default_rng(seed)
    evicted_at = np.full(shape, NEVER, np.int32)
    for row, head in np.ndindex(shape[:2]):
        evicted_at[row, head, : padding[row]] = 0
        held: list[int] = []
        for column in range(padding[row], shape[2]):
            held.append(column)
            if len(held) > budget:
                evicted_at[row, head, held.pop(rng.integers(len(held)))] = column + 1
    return evicted_at


class Drawn(NamedTuple):
    """The choices of hypothesis."""

    shape: tuple[int, int, int]  # batch, kv_heads, heads per kv_head
    tokens: int
    head_dim: int
    segments: Segments
    padding: tuple[int, ...]
    every_step: bool
    seed: int

    def case(self) -> Case:
        batch, kv_heads, group = self.shape
        if self.every_step:
            shape = (batch, kv_heads, self.tokens)
            evicted_at = evict_at_every_step(shape, self.padding, self.segments.budget, self.seed)
        else:
            sizes: Any = {"batch": batch, "kv_heads": kv_heads, "padding": self.padding, "seed": self.seed}
            evicted_at = np.asarray(random_evictions(self.tokens, self.segments, **sizes).evicted_at[:, 0])
        return Case(kv_heads * group, self.head_dim, self.segments, evicted_at, self.seed)


# One token; only a prompt, shorter than the budget; eviction at every step; no prompt; groups of query heads; padding.
# Few sizes, so that each program is compiled once for many masks.
FEW_SIZES: tuple[tuple[tuple[int, int, int], int, int, Segments], ...] = (
    ((1, 1, 1), 1, 64, Segments(first=1, length=1, budget=1)),
    ((1, 2, 3), 29, 64, Segments(first=29, length=3, budget=34)),
    ((1, 1, 1), 24, 128, Segments(first=3, length=1, budget=1)),
    ((1, 2, 3), 60, 128, Segments(first=0, length=20, budget=16)),
    ((2, 2, 1), 37, 64, Segments(first=9, length=5, budget=7)),
    ((2, 1, 4), 53, 64, Segments(first=12, length=7, budget=2)),
)


@st.composite
def masks_of_few_sizes(draw: Any) -> Drawn:
    """Any mask and padding of one of FEW_SIZES."""
    shape, tokens, head_dim, segments = draw(st.sampled_from(FEW_SIZES))
    padding = tuple(draw(st.integers(0, tokens)) for _ in range(shape[0]))
    return Drawn(shape, tokens, head_dim, segments, padding, draw(st.booleans()), draw(st.integers(0, 999)))


@partial(jax.jit, static_argnums=0)
def out_and_gradients(f: Any, q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, given: Any = ()) -> Any:
    out, pull = jax.vjp(lambda q, k, v: f(q, k, v, *given), q, k, v)
    return out, *pull(d_out)


@partial(jax.jit, static_argnums=4)
@partial(jax.value_and_grad, argnums=(0, 1, 2))
def sum_of_squares(q: Any, k: Any, v: Any, mask: Any, impl: Any) -> Any:
    return jnp.sum(attend(q, k, v, mask, impl) ** 2)


def with_gradients(
    f: Any, case: Case, dtype: Any = np.float32, given: Any = (), *, twice: bool = True
) -> list[np.ndarray]:
    """Returns out, dq, dk, dv. With `twice`, checks that a second run gives the same bits.

    Args:
      f: `f(q, k, v, *given)`, compiled once per function object.
    """
    arrays = case.arrays(dtype)
    first = [np.asarray(x) for x in out_and_gradients(f, *arrays, given)]
    for x, y in zip(first, out_and_gradients(f, *arrays, given) if twice else first, strict=True):
        np.testing.assert_array_equal(x, np.asarray(y))
    return [x.astype(np.float64) for x in first]


def _by_reference(q: jax.Array, k: jax.Array, v: jax.Array, evicted_at: jax.Array) -> jax.Array:
    return reference.attention(q, k, v, reference.interval_mask(evicted_at))


def expected(case: Case) -> list[np.ndarray]:
    return with_gradients(_by_reference, case, given=(jnp.asarray(case.evicted_at),))


class Result(NamedTuple):
    """Forward and backward results of a kernel over blocks."""

    out: Any
    lse: Any
    dq: Any
    dk: Any
    dv: Any


@partial(jax.jit, static_argnums=0)
def by_kernel(kernel: BlockKernel, blocks: Blocks, d_out: jax.Array) -> Result:
    out, lse = kernel.forward(blocks)
    return Result(out, lse, *kernel.backward(blocks, out, lse, d_out))


def seen_by_each(blocks: Blocks) -> jax.Array:
    """Whether each row sees each key of its block, `[blocks, rows, keys]`."""
    column = blocks.column[:, :, None]
    return (blocks.born[:, None] <= column) & (column < blocks.evicted_at[:, None])


@jax.jit
def blocks_by_reference(blocks: Blocks, d_out: jax.Array) -> Result:
    """Runs the reference in float32, with each block as a batch row with one head."""
    mask = seen_by_each(blocks)
    q, k, v = (x[:, None].astype(jnp.float32) for x in (blocks.q, blocks.k, blocks.v))
    out, pull = jax.vjp(lambda q, k, v: reference.attention(q, k, v, mask[:, None]), q, k, v)
    scores = jnp.where(mask, (q @ k.mT)[:, 0] * q.shape[-1] ** -0.5, -jnp.inf)
    lse = jnp.where(mask.any(-1), jax.nn.logsumexp(scores, axis=-1), jnp.inf)
    d_inputs = (x[:, 0] for x in pull(d_out[:, None].astype(jnp.float32)))
    return Result(out[:, 0], lse, *d_inputs)
