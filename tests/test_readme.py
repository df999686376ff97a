"""The README's code runs as it stands, one block after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import smd_jax as smd

README = Path(__file__).resolve().parents[1] / "README.md"


def test_code_blocks(capsys: Any):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {"smd": smd}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)

    assert float(capsys.readouterr().out) <= 2e-5, "what the first block prints"
    assert names["visible"].shape == (4, 3, 2, 320, 320) and names["visible"].dtype == jnp.bool_

    correction = names["HalfOfTheUnlikely"]()
    smd.UpdateConfig("dense", correction=smd.corrections.Chain((correction, smd.corrections.Veto())))
    old = jnp.log(jnp.array([[0.1, 0.3, 0.5]]))
    inputs = smd.corrections.CorrectionInputs(
        jnp.log(jnp.full((1, 3), 0.2)), old, None, jnp.ones(1), jnp.array([[True, True, False]])
    )
    np.testing.assert_array_equal(correction.terms(inputs).weights, [[0.5, 1.0, 0.0]])

    policy = names["KeepLoudValues"]()
    sizes = smd.RolloutConfig(max_new_tokens=9, budget=16, buffer=4)
    trajectory = smd.rollout(
        names["model"], names["params"], names["prompts"], names["jax"].random.key(2), policy=policy, config=sizes
    )
    scores = smd.replay(names["model"], names["params"], trajectory)
    np.testing.assert_allclose(scores.logprobs, trajectory.logprobs, atol=2e-5)
