"""The study of another sampler, without torch."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest

from smd_jax.testing import byte_tokenizer, tiny_model_config
from tests.paths import ROOT

pytestmark = pytest.mark.study

EXPERIMENTS = ROOT / "experiments"


def module(name: str) -> ModuleType:
    with mock.patch.object(sys, "path", [str(EXPERIMENTS), *sys.path]):
        return importlib.import_module(name)


def test_an_engines_answer_becomes_a_row():
    """Two rows as the engine says them; a learner that is off by known numbers."""
    script = module("foreign_sampler")
    args = script.Args("python", response_tokens=4, temperature=0.8)
    kept = [[[0, 2], [1, 2]], [[0, 1], [2, 0]]]
    rows = [
        {"tokens": [5, 6, 7, 8], "logprobs": [-1.0, -1.0, -1.0, -1.0], "compressions": [[2, kept]]},
        {"tokens": [5, 2], "logprobs": [-2.0, -2.0], "compressions": []},
    ]
    shape = tiny_model_config(vocab_size=16)
    trajectory = script.to_trajectory([[1, 3], [4]], rows, shape, 2, args)
    assert trajectory.terminated.tolist() == [False, True] and trajectory.temperature == 0.8
    # The queries of the response, 2 to 5, see 3 + 3 + 4 + 5 of 3 + 4 + 5 + 6 keys in row 0. Row 1 has queries 1 and 2,
    # which see all of their 2 + 3 keys.
    assert script.evicted_share(trajectory) == pytest.approx(1 - (15 + 5) / (18 + 5))

    def learner(trajectory: Any, mask: Any) -> np.ndarray:
        shift = 0.5 if mask is trajectory.mask else 2.0
        return np.asarray(trajectory.logprobs) - shift * np.array([[1, 0, 0, 0], [0, 1, 99, 99]])

    row = script.compare({"press": "knorm", "budget": 2}, trajectory, 1, learner, args)
    assert (row.press, row.budget, row.response_tokens, row.prompts) == ("knorm", 2, 6, 2)
    assert (row.max_abs_dlogp, row.mean_abs_dlogp) == pytest.approx((0.5, 1 / 6))
    assert (row.dense_max_abs_dlogp, row.dense_mean_abs_dlogp) == pytest.approx((2.0, 4 / 6))


def test_every_press_runs_at_every_budget():
    script = module("foreign_sampler")
    runs = script.runs(script.Args("python", press=("none", "snapkv"), budget=(8, 16)))
    assert [(run["press"], run["budget"]) for run in runs] == [("none", 0), ("snapkv", 8), ("snapkv", 16)]


def test_passages_are_cut():
    passages = module("lib.passages")
    rows = passages.encoded(byte_tokenizer(), [3, 4, 5, 6])
    assert [len(row) for row in rows] == [3, 4, 5, 6] and bytes(rows[0]) == b"The"
    with pytest.raises(ValueError, match="tokens of passage 1; got a length of 99999"):
        passages.encoded(byte_tokenizer(), [1, 99999, 1, 1])


def test_a_failing_engine_ends_the_study(tmp_path: Path):
    engine = module("foreign_sampler")
    with mock.patch.object(engine, "ENGINES", tmp_path):
        (tmp_path / "good.py").write_text("import json, sys\nprint(json.dumps([json.load(sys.stdin)]))")
        (tmp_path / "bad.py").write_text("raise SystemExit(3)")
        assert engine.ask(sys.executable, "good", {"a": 1}) == [{"a": 1}]
        with pytest.raises(SystemExit, match=r"bad\.py to end well; got exit status 3"):
            engine.ask(sys.executable, "bad", {})
