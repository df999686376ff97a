"""Settings as JSON, and the settings that a resume compares."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from smd_jax.devices.processes import differences
from smd_jax.runs.settings import split_fields, split_settings, to_jsonable
from smd_jax.train.grpo import GRPOConfig
from tests.plain_loop import CONFIG

GRPO = GRPOConfig(prompts_per_step=2, group_size=4, prompt_width=9, policy=CONFIG.policy, rollout=CONFIG.rollout)


@dataclass(frozen=True)
class Inner:
    scale: float
    path: Path


@dataclass(frozen=True)
class Outer:
    inner: Inner | None
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Other:
    inner: Inner | None
    sizes: tuple[int, ...]


def test_to_jsonable_by_hand():
    value = Outer(Inner(float("inf"), Path("a/b")), (1, 2))
    inner = {"_class": "Inner", "scale": "inf", "path": "a/b"}
    assert to_jsonable(value) == {"_class": "Outer", "inner": inner, "sizes": [1, 2]}
    lines = differences(to_jsonable(value), to_jsonable(Other(None, (1, 3))))
    assert lines[0] == '_class: expected "Outer", got "Other"' and lines[2] == "sizes.1: expected 2, got 3"
    assert not differences({"x": float("nan")}, {"x": float("nan")})
    for wrong, message in (({"exact": len}, "config.rewards.exact: .*builtin"), ({1: 2.0}, "config.rewards: .*dict")):
        with pytest.raises(TypeError, match=message):
            to_jsonable({"rewards": wrong})


def test_memory_settings_are_noted_and_not_compared():
    compared, metadata = split_settings(GRPO)
    cache_rows = {"decode_rows": None, "prefill_rows": 8}
    update_fields = {"update.microbatch_size": None, "update.pack_columns": None, "update.rows_per_prompt": 1}
    assert metadata == {**cache_rows, **update_fields, "update_widths": 4}
    assert not {"decode_rows", "prefill_rows", "update_widths"} & compared.keys()
    assert "microbatch_size" not in cast(dict[str, Any], compared["update"]) and compared["prompts_per_step"] == 2
    planned = replace(GRPO, decode_rows=4, update_widths=1, update=replace(GRPO.update, microbatch_size=2))
    assert split_settings(planned)[0] == compared
    assert split_settings(replace(GRPO, update=replace(GRPO.update, visibility="shadow")))[0] == compared
    assert cast(dict[str, Any], compared["update"])["visibility"] is None
    for other in (replace(GRPO, seed=1), replace(GRPO, rollout=replace(GRPO.rollout, budget=5))):
        assert split_settings(other)[0] != compared
    assert split_fields({"a": {"b": 1, "c": 2}}, ["a.b"]) == ({"a": {"c": 2}}, {"a.b": 1})
