"""The train step of a model that ignores its attention, for tests of everything after the log-probabilities.

It compiles in half the time of tests/tiny_update.py, which has the same functions and tests what a query sees.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.state import TrainBatch
from smd_jax.message.masks import NEVER, ShadowMask
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import Attend, LayerState, ModelShape
from tests import tiny_update
from tests.tiny_update import ADVANTAGES, LENGTH, ROWS, TEMPERATURE, WIDTH

VOCAB, HIDDEN = 32, 8
PROMPTS, RESPONSES = np.array([8, 5, 3, 8, 2, 6, 7, 1]), np.array([10, 4, 7, 10, 1, 9, 3, 6])


@dataclass(frozen=True)
class Bigram:
    """A language model whose next token depends only on the last one."""

    @property
    def shape(self) -> ModelShape:
        return ModelShape(1, 2, 1, 4, HIDDEN, VOCAB, max_positions=64)

    def encode_positions(self, positions: jax.Array) -> jax.Array:
        return positions

    def hidden(
        self, params: Any, tokens: jax.Array, positions: Any, attend: Attend, layers: tuple[LayerState, ...]
    ) -> tuple[jax.Array, tuple[LayerState, ...]]:
        query, key = (jnp.zeros((tokens.shape[0], heads, tokens.shape[1], 4)) for heads in (2, 1))
        _, state = attend(query, key, key, layers[0])
        return params["table"][tokens], (state,)

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        return hidden @ params["head"]

    def compute_params(self, params: Any) -> Any:
        return params


def params_of(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = {"table": (VOCAB, HIDDEN), "head": (HIDDEN, VOCAB)}
    return {name: jnp.asarray(0.6 * rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


MODEL, PARAMS, REFERENCE = Bigram(), params_of(0), params_of(1)


def explicit_logprobs(params: Any) -> jax.Array:
    """Log-probabilities `[ROWS, LENGTH, VOCAB]` of the response's distributions."""
    states = params["table"][tokens()[:, WIDTH - 1 : -1]]
    return jax.nn.log_softmax(states @ params["head"] / TEMPERATURE)


def explicit_token_logprobs(params: Any) -> jax.Array:
    return jnp.take_along_axis(explicit_logprobs(params), tokens()[:, WIDTH:, None], -1)[..., 0]


@functools.cache
def tokens() -> np.ndarray:
    return np.random.default_rng(2).integers(0, VOCAB, (ROWS, WIDTH + LENGTH), np.int32)


@functools.cache
def trajectory() -> Trajectory:
    """Eight rows of unequal prompts and responses; the sampler's log-probabilities are 0.3 nats off those of PARAMS."""
    columns = np.arange(WIDTH + LENGTH)[None]
    valid = (columns >= WIDTH - PROMPTS[:, None]) & (columns < WIDTH + RESPONSES[:, None])
    noise = 0.3 * np.random.default_rng(3).normal(size=(ROWS, LENGTH))
    logprobs = np.where(valid[:, WIDTH:], np.asarray(jax.jit(explicit_token_logprobs)(PARAMS)) + noise, 0.0)
    return Trajectory(
        tokens=jnp.asarray(tokens()),
        valid=jnp.asarray(valid),
        logprobs=jnp.asarray(logprobs, jnp.float32),
        terminated=jnp.asarray(RESPONSES < LENGTH),
        mask=ShadowMask(jnp.asarray(np.where(valid, NEVER, 0)[:, None, None], jnp.int32)),
        temperature=TEMPERATURE,
    )


def batch() -> TrainBatch:
    """The ratio is taken to the sampler."""
    return TrainBatch(trajectory(), ADVANTAGES, trajectory().logprobs)


def metrics_and_gradients(config: UpdateConfig, data: TrainBatch | None = None, reference: Any = None):
    """As in tests/tiny_update.py."""
    return tiny_update.metrics_and_gradients(
        config, batch() if data is None else data, reference=reference, model=MODEL, params=PARAMS
    )
