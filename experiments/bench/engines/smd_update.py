"""A GRPO update of smd_jax, as `smd_jax.make_update` compiles it. Started by `bench/update.py`.

With a budget the learner has the shadow mask of a random eviction policy, else a dense mask.
"""

from __future__ import annotations

from types import SimpleNamespace

import common

common.one_thread()  # before jax is imported

import jax  # noqa: E402
import numpy as np  # noqa: E402
from smd_common import adamw, model_config, random_batch  # noqa: E402

import smd_jax as smd  # noqa: E402
from smd_jax.learner.config import UpdateConfig  # noqa: E402
from smd_jax.learner.state import init_state  # noqa: E402
from smd_jax.learner.update import make_update  # noqa: E402
from smd_jax.testing import random_params  # noqa: E402
from smd_jax.train.compile_ahead import return_freed_memory  # noqa: E402


def random_tokens(args: SimpleNamespace) -> np.ndarray:
    """Random tokens; rows whose prompt is read once share it."""
    tokens = np.random.default_rng(0).integers(1, common.VOCABULARY, (args.sequences, args.tokens), dtype=np.int32)
    groups = tokens.reshape(-1, args.rows_per_prompt, args.tokens)
    groups[:, :, : args.prompt] = groups[:, :1, : args.prompt]
    return tokens


def main() -> None:
    args = common.settings()
    model = smd.Decoder(model_config(args.tokens))
    shadow = args.budget is not None
    config = UpdateConfig(
        visibility="shadow" if shadow else "dense",
        correction=smd.corrections.Shadow() if shadow else smd.corrections.Naive(),
        microbatch_size=args.microbatch,
        rows_per_prompt=args.rows_per_prompt,
    )
    state = init_state(random_params(model.config), adamw(), jax.random.key(0))
    clock = common.Clock(args)
    update = make_update(model, adamw(), config)
    batch = random_batch(model.config, random_tokens(args), args.prompt, args.budget, args.buffer)
    # A training loop also returns the memory that the compiler freed.
    planned_bytes = smd.memory.program_bytes(update.lower(state, batch))
    return_freed_memory()
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    for _ in range(clock.updates):
        clock.begin()
        state, metrics = update(state, batch)
        jax.block_until_ready((state.params, metrics))
        clock.end()
    more = {"visibility": config.learner_visibility, "budget": args.budget, "buffer": args.buffer}
    more |= {"rows_per_prompt": config.rows_per_prompt, "planned_bytes": planned_bytes}
    clock.report("ours", parameters, ["smd_jax", "jax", "jaxlib", "flax"], more)


if __name__ == "__main__":
    main()
