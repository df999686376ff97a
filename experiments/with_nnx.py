"""Samples, replays and trains a flax.nnx transformer under a budget, in an ordinary nnx and optax loop.

    python experiments/with_nnx.py

The model uses only flax's modules and does not import this library. Its attention layers take a callable
(`attention_fn`); `hidden` passes ours.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import smd_jax as smd

VOCAB, WIDTH, HEADS, KV_HEADS, LAYERS = 64, 64, 4, 2, 2


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, num_kv_heads=KV_HEADS, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.tokens, self.places = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Embed(128, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def hidden(self, tokens, positions):
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return x


def hidden(module, tokens, positions, attention):
    for block in module.blocks:
        block.attention.attention_fn = lambda q, k, v, **_: attention(q, k, v)
    return module.hidden(tokens, positions)


def logits(module, states):
    return module.head(states)


module = Transformer(nnx.Rngs(0))
shape = smd.model.ModelShape(LAYERS, HEADS, KV_HEADS, WIDTH // HEADS, WIDTH, VOCAB, max_positions=128)
model, params = smd.model.from_nnx(module, shape, hidden, logits)
prompts = smd.PromptBatch(jnp.arange(1, 33).reshape(4, 8), valid=jnp.ones((4, 8), bool))
sizes = smd.RolloutConfig(max_new_tokens=24, budget=12, buffer=4)
optimizer = nnx.Optimizer(module, optax.adam(3e-3), wrt=nnx.Param)


@jax.jit
def gradient(params, trajectory, advantages):
    def loss(params):  # REINFORCE on the tokens of even ids, under the sampler's mask
        logprobs = smd.replay(model, params, trajectory).logprobs
        return -(advantages[:, None] * logprobs * trajectory.response_mask).mean(), logprobs

    return jax.grad(loss, has_aux=True)(params)


for step in range(5):
    params = nnx.state(module, nnx.Param)
    key = jax.random.fold_in(jax.random.key(1), step)
    trajectory = smd.rollout(model, params, prompts, key, policy=smd.eviction.H2O(), config=sizes, group_size=8)
    rewards = jnp.where(trajectory.response_mask, trajectory.response % 2 == 0, 0).mean(axis=1)
    gradients, logprobs = gradient(params, trajectory, smd.group_relative(rewards, 8))
    off = float(abs(logprobs - trajectory.logprobs).max())
    print(f"step {step}: reward {float(rewards.mean()):.3f}, sampler against learner {off:.1e} nats")
    optimizer.update(module, gradients)
