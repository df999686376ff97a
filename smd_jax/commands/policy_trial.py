"""Traces a user's eviction policy on shapes, so that its errors appear before the weights are read."""

from __future__ import annotations

import inspect
import traceback

import jax
import jax.numpy as jnp

from smd_jax.eviction.base import CacheView, EvictionPolicy
from smd_jax.eviction.statistics import CacheShape
from smd_jax.tasks.reward_calls import Caught


def check_score(policy: EvictionPolicy, shape: CacheShape, budget: int) -> None:
    """Raises ValueError unless the policy scores every key of such a cache. The error names the line that raised.

    A policy that reads the model's parameters is not traced: there are none yet.

    Args:
      budget: keys that are kept, of `shape.slots`.
    """
    kind = type(policy)
    if kind.parameters is not EvictionPolicy.parameters:
        return
    with Caught() as caught:
        scores = jax.eval_shape(lambda: policy.score(_view(policy, shape, budget)))
    if caught.error is not None:
        where = _line_of(caught.error, inspect.getfile(kind))
        raise ValueError(
            f"expected {kind.__name__}.score to score a cache; it raised {type(caught.error).__name__}{where}: "
            f"{caught.error}"
        ) from caught.error
    wanted = (shape.rows, shape.kv_heads, shape.slots)
    # The sampler asks their dtype for its smallest number.
    floating = isinstance(scores, jax.ShapeDtypeStruct) and jnp.issubdtype(scores.dtype, jnp.floating)
    if not floating or scores.shape != wanted:
        got = f"{scores.dtype} {list(scores.shape)}" if isinstance(scores, jax.ShapeDtypeStruct) else repr(scores)
        raise ValueError(
            f"expected {kind.__name__}.score to give floating-point [rows, kv_heads, slots], here {list(wanted)}; "
            f"got {got:.80}"
        )


def _view(policy: EvictionPolicy, shape: CacheShape, budget: int) -> CacheView:
    slots = (shape.rows, shape.kv_heads, shape.slots)
    keys = jnp.zeros((*slots, shape.head_dim), shape.dtype)
    return CacheView(
        keys=keys,
        values=keys,
        valid=jnp.ones(slots, bool),
        positions=jnp.zeros(slots, jnp.int32),
        newest=jnp.zeros(shape.rows, jnp.int32),
        number=jnp.zeros((), jnp.int32),
        states=tuple(statistic.init(shape) for statistic in policy.statistics),
        rng=jax.random.split(jax.random.key(0), shape.rows),
        budget=budget,
        declared=policy.statistics,
    )


def _line_of(error: BaseException, file: str) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" in line {lines[-1]} of {file}" if lines else ""
