"""Notebooks are kept without what they printed; `make notebooks` runs them."""

from __future__ import annotations

import json

from tests.paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_outputs_are_stripped():
    assert len(NOTEBOOKS) >= 4
    kept = [
        (path.name, cell["id"])
        for path in NOTEBOOKS
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code" and (cell["outputs"] or cell["execution_count"] is not None)
    ]
    assert not kept, f"expected cells without outputs; got {kept}"
