"""A GRPO update of smd_jax, as `smd_jax.make_update` does it, and what its pieces cost. Started by `bench/update.py`.

Command    python experiments/bench/engines/smd_update.py --tokens 576 --visibility shadow --budget 128 --buffer 32
           python experiments/bench/engines/smd_update.py --tokens 576 --parts        (one JSON object a line and piece)
           python experiments/bench/engines/smd_update.py --tokens 4096 --sequences 2 --microbatch 1 \
                  --visibility shadow --budget 256 --buffer 128 --check      (against the mask as booleans)
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import common

common.one_thread()  # before jax is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from smd_common import model_config  # noqa: E402

import smd_jax as smd  # noqa: E402
from smd_jax.learner.config import UpdateConfig  # noqa: E402
from smd_jax.learner.forward import (  # noqa: E402
    learner_mask,
    replay_hidden,
    response_hidden,
)
from smd_jax.learner.state import TrainBatch, TrainState, init_state  # noqa: E402
from smd_jax.learner.update import make_update  # noqa: E402
from smd_jax.message.masks import Segments, dense_mask, layer_mask  # noqa: E402
from smd_jax.message.trajectory import Trajectory  # noqa: E402
from smd_jax.model.attention import attend  # noqa: E402
from smd_jax.model.decoder import MLP, RMSNorm  # noqa: E402
from smd_jax.model.rope import rope_tables, rotate  # noqa: E402
from smd_jax.testing import random_evictions, random_params  # noqa: E402
from smd_jax.train.compile_ahead import return_freed_memory  # noqa: E402


def random_batch(args: argparse.Namespace) -> TrainBatch:
    """Random tokens, none of them padding, as a budgeted sampler could have handed them over."""
    tokens = np.random.default_rng(0).integers(1, common.VOCABULARY, (args.sequences, args.tokens), dtype=np.int32)
    valid = jnp.ones(tokens.shape, bool)
    mask = dense_mask(valid)
    if args.rows_per_prompt > 1:
        groups = tokens.reshape(-1, args.rows_per_prompt, args.tokens)
        groups[:, :, : args.prompt] = groups[:, :1, : args.prompt]
    if args.budget is not None:
        segments = Segments(args.prompt, args.buffer, args.budget)
        sizes = (common.LAYERS, common.KV_HEADS)
        mask = random_evictions(args.tokens, segments, batch=args.sequences, layers=sizes[0], kv_heads=sizes[1])
    trajectory = Trajectory(
        tokens=jnp.asarray(tokens),
        valid=valid,
        logprobs=jnp.full((args.sequences, args.tokens - args.prompt), -np.log(common.VOCABULARY), jnp.float32),
        terminated=jnp.zeros(args.sequences, bool),
        mask=mask.to_boolean() if args.boolean else mask,
    )
    return TrainBatch(trajectory, jnp.asarray(common.advantages(args.sequences), jnp.float32), None)


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(common.LEARNING_RATE, *common.BETAS, eps=common.ADAM_EPS, weight_decay=common.WEIGHT_DECAY)


def run_update(args: argparse.Namespace, model: smd.Decoder, config: UpdateConfig, state: TrainState) -> None:
    clock = common.Clock(args)
    update = make_update(model, optimizer(), config)
    batch = random_batch(args)
    # As a loop does it: what the compiler freed goes back to the system before anything runs.
    update.lower(state, batch).compile()
    return_freed_memory()
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    for _ in range(clock.updates):
        clock.begin()
        state, metrics = update(state, batch)
        jax.block_until_ready((state.params, metrics))
        clock.end()
    sizes = {"visibility": config.visibility, "budget": args.budget, "buffer": args.buffer}
    sizes["mask"] = "boolean" if args.boolean else "compact"
    sizes["rows_per_prompt"] = config.rows_per_prompt
    clock.report("ours", parameters, ["smd_jax", "jax", "jaxlib", "flax"], sizes)


# ---------------------------------------------------------------- where the time goes


def parts(
    args: argparse.Namespace, model: smd.Decoder, config: UpdateConfig, state: TrainState
) -> Iterator[tuple[str, int, float, Callable[..., Any], tuple]]:
    """(name, how often in one update, matrix products of one run in flops, function, arguments) of each piece.

    Those marked "both" are forward and backward. They are jitted one by one: XLA may fuse them with their neighbours
    in the whole update, so that the sum of the pieces is not its time.
    """
    c = model.config
    rows = args.microbatch
    count = args.sequences // args.microbatch
    batch = jax.tree.map(lambda x: x[:rows], random_batch(args))
    trajectory = batch.trajectory
    weights = jnp.full((rows, args.tokens - args.prompt), 1.0 / args.tokens)
    mask = learner_mask(trajectory, config.visibility)
    tokens = rows * args.tokens
    response = rows * (args.tokens - args.prompt)
    square = 2.0 * tokens * c.hidden_size  # flops a column of a projection costs
    mlp = 3 * square * c.intermediate_size
    heads = c.num_heads * c.head_dim
    projections = square * (2 * heads + 2 * c.num_kv_heads * c.head_dim)
    attention = 4.0 * rows * args.tokens**2 * heads  # dense and not causal: what a budget or causality saves shows
    logits = 2.0 * response * c.hidden_size * c.vocab_size
    layers = c.num_layers * (mlp + projections + attention)

    def loss(params: Any) -> jax.Array:
        hidden = response_hidden(model, params, trajectory, mask)
        return jnp.sum(weights * replay_hidden(model, params, hidden, trajectory).logprobs)

    yield "forward", count, layers + logits, loss, (state.params,)
    yield "both: all", count, 3 * (layers + logits), jax.grad(loss), (state.params,)

    x = jax.random.normal(jax.random.key(0), (rows, args.tokens, c.hidden_size))
    layer = state.params["layers_0"]
    each = count * c.num_layers
    swiglu = MLP(c)
    norm = RMSNorm(c.norm_eps)
    yield "both: mlp", each, 3 * mlp, _both(lambda p, x: swiglu.apply({"params": p}, x)), (layer["mlp"], x)
    yield "both: norm", 2 * each, 0.0, _both(lambda p, x: norm.apply({"params": p}, x)), (layer["mlp_norm"], x)

    kernels = {name: layer["attention"][name]["kernel"] for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    yield "both: projections", each, 3 * projections, _both(_projections), (kernels, x)

    q = jax.random.normal(jax.random.key(1), (rows, c.num_heads, args.tokens, c.head_dim))
    k, v = jax.random.normal(jax.random.key(2), (2, rows, c.num_kv_heads, args.tokens, c.head_dim))
    seen, one_layer = layer_mask(mask, 0), _both(lambda qkv, seen: attend(qkv[0], qkv[1], qkv[2], seen))
    yield "both: attention", each, 3 * attention, one_layer, ((q, k, v), seen)
    rope = rope_tables(c, trajectory.positions)
    yield "both: rope", each, 0.0, _both(lambda qk, rope: (rotate(qk[0], rope), rotate(qk[1], rope))), ((q, k), rope)

    def head(params: Any, hidden: jax.Array) -> jax.Array:
        return replay_hidden(model, params, hidden, trajectory).logprobs

    hidden = x[:, args.prompt :]
    yield "both: logits", count, 3 * logits, _both(head), (state.params, hidden)
    adamw = optimizer()
    yield "optimizer", 1, 0.0, lambda s: adamw.update(s.params, s.opt_state, s.params), (replace(state, key=None),)

    # What XLA makes of a bare product: the rate that no piece can beat.
    a = x.reshape(tokens, -1)
    b = layer["mlp"]["gate_proj"]["kernel"]
    yield "matmul [n,256]x[256,768]", each, square * c.intermediate_size, jnp.matmul, (a, b)
    yield "matmul [768,n]x[n,256]", each, square * c.intermediate_size, lambda a, b: b.T @ a, (a, a @ b)


def _both(f: Callable[..., Any]) -> Callable[..., Any]:
    """Forward and backward with a cotangent of ones, to the first two arguments where they are floats."""

    def run(first: Any, second: Any) -> Any:
        if all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(second)):
            out, pull = jax.vjp(f, first, second)
        else:
            out, pull = jax.vjp(lambda first: f(first, second), first)
        return pull(jax.tree.map(jnp.ones_like, out))

    return run


def _projections(kernels: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, ...]:
    q = x @ kernels["q_proj"]
    return q @ kernels["o_proj"], x @ kernels["k_proj"], x @ kernels["v_proj"]


def time_part(function: Callable[..., Any], arguments: tuple, repeats: int) -> float:
    """Median seconds of a run, in CPU time: other programs do not count."""
    jitted = jax.jit(function)
    jax.block_until_ready(jitted(*arguments))
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        jax.block_until_ready(jitted(*arguments))
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def run_parts(args: argparse.Namespace, model: smd.Decoder, config: UpdateConfig, state: TrainState) -> None:
    for name, times, flops, function, arguments in parts(args, model, config, state):
        once = time_part(function, arguments, args.repeats)
        row = {"engine": "ours", "device": "cpu", "part": name, "tokens": args.tokens, "microbatch": args.microbatch}
        row |= {"visibility": config.visibility, "budget": args.budget, "buffer": args.buffer, "times": times}
        row |= {"cpu_seconds": once * times, "gflops_per_second": flops / once / 1e9}
        print(json.dumps(row), flush=True)


# ---------------------------------------------------------------- is it the same update?

# An optimizer that moves nothing and keeps the gradients as its state.
RECORD = optax.GradientTransformation(
    init=lambda params: jax.tree.map(jnp.zeros_like, params),
    update=lambda updates, state, params=None: (jax.tree.map(jnp.zeros_like, updates), updates),
)


def run_check(args: argparse.Namespace, model: smd.Decoder, config: UpdateConfig) -> None:
    """Loss and gradients under the compact mask against those under the same mask as T × T booleans."""
    found = []
    for boolean in (False, True):
        batch = random_batch(argparse.Namespace(**{**vars(args), "boolean": boolean}))
        state = init_state(random_params(model.config), RECORD, jax.random.key(0))
        state, metrics = make_update(model, RECORD, config)(state, batch)
        found.append((float(metrics["loss"]), state.opt_state))
    (loss, gradients), (expected_loss, expected) = found
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True)
    off = optax.tree.norm([x - y for x, y in pairs]) / optax.tree.norm(expected)
    row = {"check": "compact mask against booleans", "tokens": args.tokens, "budget": args.budget}
    row |= {"loss_difference": abs(loss - expected_loss), "relative_gradient_difference": float(off)}
    print(json.dumps(row), flush=True)
    if not (row["loss_difference"] <= 1e-5 and row["relative_gradient_difference"] <= 1e-4):
        raise SystemExit("expected the same loss (1e-5) and gradients (1e-4) under both forms of the mask; see above")


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--visibility", choices=("dense", "shadow"), default="dense")
    parser.add_argument("--budget", type=int, default=None, help="keys kept; none: a sampler that never evicts")
    parser.add_argument("--buffer", type=int, default=None, help="queries between two compressions")
    parser.add_argument("--boolean", action="store_true", help="store the mask as T × T booleans")
    parser.add_argument("--rows-per-prompt", type=int, default=1, help="rows whose prompt is read once")
    parser.add_argument("--check", action="store_true", help="compare loss and gradients of both forms of the mask")
    parser.add_argument("--parts", action="store_true", help="time the pieces of the update")
    args = parser.parse_args()
    if (args.budget is None) != (args.buffer is None) or (args.visibility == "shadow") != (args.budget is not None):
        raise SystemExit("expected --budget and --buffer with --visibility shadow, and neither with dense")
    model = smd.Decoder(model_config(not args.untied, args.tokens))
    correction = smd.corrections.Shadow() if args.visibility == "shadow" else smd.corrections.Naive()
    config = UpdateConfig(
        args.visibility, correction=correction, microbatch_size=args.microbatch, rows_per_prompt=args.rows_per_prompt
    )
    if args.check:
        run_check(args, model, config)
        return
    state = init_state(random_params(model.config), optimizer(), jax.random.key(0))
    (run_parts if args.parts else run_update)(args, model, config, state)


if __name__ == "__main__":
    main()
