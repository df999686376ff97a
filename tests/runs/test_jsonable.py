"""Settings as JSON, and the lines in which two of them differ."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from smd_jax.config import YarnRope
from smd_jax.runs.jsonable import config_differences, to_jsonable
from smd_jax.testing import tiny_model_config


def test_to_jsonable_by_hand():
    @dataclass(frozen=True)
    class Inner:
        scale: float
        path: Path

    @dataclass(frozen=True)
    class Outer:
        inner: Inner | None
        sizes: tuple[int, ...]
        flag: bool

    value = Outer(Inner(float("inf"), Path("a/b")), (1, 2), True)
    expected = {
        "_class": "Outer",
        "inner": {"_class": "Inner", "scale": "inf", "path": "a/b"},
        "sizes": [1, 2],
        "flag": True,
    }
    assert to_jsonable(value) == expected
    assert json.loads(json.dumps(expected, allow_nan=False)) == expected


def test_to_jsonable_names_the_field_that_does_not_fit():
    @dataclass(frozen=True)
    class Bad:
        rewards: dict[str, object]

    with pytest.raises(TypeError, match=r"config.rewards.exact: expected None, bool.*; got builtin_function_or_method"):
        to_jsonable(Bad({"exact": len}))
    with pytest.raises(TypeError, match="config.rewards: expected string keys; got int 1"):
        to_jsonable({"rewards": {1: 2.0}})


def test_two_classes_with_equal_fields_differ():
    @dataclass(frozen=True)
    class Recent:
        window: int = 4

    @dataclass(frozen=True)
    class Random:
        window: int = 4

    lines = config_differences(to_jsonable(Recent()), to_jsonable(Random()))
    assert lines == ['_class: expected "Recent", got "Random"']
    assert config_differences([], {}) == [": expected [], got {}"]
    assert config_differences({"a": []}, {"a": []}) == []


def test_fields_that_were_added_later_are_left_out_at_their_default():
    """Settings that were saved before a field existed equal those of today, and a value of its own shows."""
    config = tiny_model_config()
    shown: Any
    for shown in (repr(config), to_jsonable(config)):
        assert "pre_norms" not in shown and "tie_embeddings" in shown
    other = replace(config, pre_norms=False)
    saved: Any = to_jsonable(other)
    assert repr(other).endswith("pre_norms=False)") and saved["pre_norms"] is False
    assert config_differences(to_jsonable(config), saved) == ["pre_norms: expected (absent), got false"]
    assert repr(YarnRope(4.0, 16)).endswith("attention_factor=None)")
