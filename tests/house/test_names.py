"""One table of names and constructors a kind: the command, the docs and the tests have the same names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import pytest

import smd_jax as smd
from smd_jax.commands.arguments import CorrectionName, LossName
from tests import loss_cases
from tests.corrections.test_corrections import CORRECTIONS
from tests.paths import ROOT


@pytest.mark.parametrize(
    ("table", "names", "page"),
    [(smd.corrections.CORRECTIONS, CorrectionName, "corrections"), (smd.losses.LOSSES, LossName, "algorithms")],
)
def test_the_command_and_the_docs_have_every_name(table: Mapping[str, Any], names: Any, page: str):
    assert set(table) == set(get_args(names))
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert [name for name in table if f"`{name}`" not in text and f"{name}()`" not in text] == []


def test_every_name_is_under_test():
    tried = {type(correction) for correction in CORRECTIONS.values()}
    assert [name for name, kind in smd.corrections.CORRECTIONS.items() if kind not in tried] == []
    assert set(smd.losses.LOSSES) - set(loss_cases.LOSSES) == {"gspo"}, "the level of another loss's ratio"


@pytest.mark.parametrize("page", ["loss", "correction"])
def test_a_recipe_begins_with_a_part_of_at_most_30_lines(page: str):
    text = (ROOT / "docs" / "recipes" / f"{page}.md").read_text(encoding="utf-8")
    block = text.split("```python\n")[1].split("```")[0]
    assert "@dataclass" in block and "smd.UpdateConfig(" in block
    assert len(block.splitlines()) <= 30
