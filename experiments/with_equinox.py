"""Samples, replays and trains a transformer of Equinox' layers under a budget, in a filtered optax loop."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import smd_jax as smd

VOCAB, WIDTH, HEADS, HEAD_DIM, LAYERS = 64, 64, 4, 16, 2


def per_token(layer):
    return jax.vmap(jax.vmap(layer))


class Block(eqx.Module):
    norms: list
    projections: list
    mlp: eqx.nn.MLP

    def __init__(self, key):
        keys, self.norms = jax.random.split(key, 3), [eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)]
        self.projections = [eqx.nn.Linear(WIDTH, n * WIDTH, key=k) for n, k in zip((3, 1), keys[:2], strict=True)]
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, depth=1, activation=jax.nn.gelu, key=keys[2])

    def __call__(self, x, attend):
        heads = per_token(self.projections[0])(per_token(self.norms[0])(x)).reshape(*x.shape[:2], 3, HEADS, HEAD_DIM)
        x = x + per_token(self.projections[1])(attend(*jnp.moveaxis(heads, 2, 0)).reshape(x.shape))
        return x + per_token(self.mlp)(per_token(self.norms[1])(x))


class Transformer(eqx.Module):
    embeddings: list
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, LAYERS + 3)
        self.embeddings = [eqx.nn.Embedding(n, WIDTH, key=k) for n, k in zip((VOCAB, 128), keys[:2], strict=True)]
        self.blocks = [Block(key) for key in keys[3:]]
        self.head = eqx.nn.Linear(WIDTH, VOCAB, key=keys[2])

    def hidden(self, tokens, positions, attend):
        x = per_token(self.embeddings[0])(tokens) + per_token(self.embeddings[1])(positions)
        for block in self.blocks:
            x = block(x, attend)
        return x

    def logits(self, states):
        return per_token(self.head)(states)


module = Transformer(jax.random.key(0))
shape = smd.model.ModelShape(LAYERS, HEADS, HEADS, HEAD_DIM, WIDTH, VOCAB, max_positions=128)
model, params = smd.model.from_equinox(module, shape, Transformer.hidden, Transformer.logits)
prompts = smd.PromptBatch(jnp.arange(1, 33).reshape(4, 8), jnp.ones((4, 8), bool))
sizes = smd.RolloutConfig(max_new_tokens=24, budget=12, buffer=4)
state = (optimizer := optax.adam(3e-3)).init(params)


@eqx.filter_jit
def step(params, state, trajectory, advantages):
    def loss(params):  # REINFORCE on the tokens of even ids, under the sampler's mask
        logprobs = smd.replay(model, params, trajectory).logprobs
        return -(advantages[:, None] * logprobs * trajectory.response_mask).mean(), logprobs

    gradients, logprobs = eqx.filter_grad(loss, has_aux=True)(params)
    updates, state = optimizer.update(gradients, state)
    return eqx.apply_updates(params, updates), state, logprobs


for index in range(5):
    key = jax.random.key(index + 1)
    trajectory = smd.rollout(model, params, prompts, key, policy=smd.eviction.H2O(), config=sizes, group_size=8)
    rewards = jnp.where(trajectory.response_mask, trajectory.response % 2 == 0, 0).mean(axis=1)
    params, state, logprobs = step(params, state, trajectory, smd.group_relative(rewards, 8))
    off = float(abs(logprobs - trajectory.logprobs).max())
    print(f"step {index}: reward {float(rewards.mean()):.3f}, sampler against learner {off:.1e} nats")
