"""Inputs of corrections: ratios by hand, and the arrays of golden/corrections.json."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np

from smd_jax.corrections import CorrectionInputs
from tests import paths

GOLDEN = json.loads((paths.GOLDEN / "corrections.json").read_text(encoding="utf-8"))


def inputs_of(xi: Any, r: Any = 1.0, *, sampler=0.2, advantages=None, mask: Any = None) -> CorrectionInputs:
    """Tokens with mismatch ratios `xi`, staleness ratios `r` and the sampler's probability `sampler`."""
    xi = np.atleast_2d(np.asarray(xi, np.float64))
    before = np.log(np.broadcast_to(sampler, xi.shape))
    old = before + np.log(xi)
    return CorrectionInputs(
        sampler_logprobs=jnp.asarray(before, jnp.float32),
        old_logprobs=jnp.asarray(old, jnp.float32),
        logprobs=jnp.asarray(old + np.log(np.broadcast_to(r, xi.shape)), jnp.float32),
        advantages=jnp.ones(len(xi)) if advantages is None else jnp.asarray(advantages, jnp.float32),
        mask=jnp.ones(xi.shape, bool) if mask is None else jnp.asarray(mask, bool),
    )


def golden_inputs() -> CorrectionInputs:
    arrays = {name: jnp.asarray(x, bool if name == "mask" else jnp.float32) for name, x in GOLDEN["inputs"].items()}
    return CorrectionInputs(**arrays)
