"""Importing the library prints nothing and sets no environment variable."""

import json
import os
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from tests.paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Every module except those that run a command or need another RL library. JAX and its dependencies set variables, so
# they are imported first.
IMPORT_ALL = """
import importlib, json, os, pkgutil, sys
import flax, jax, optax, orbax.checkpoint
before = dict(os.environ)
import smd_jax
names = [module.name for module in pkgutil.walk_packages(smd_jax.__path__, "smd_jax.")]
for name in names:
    if not name.endswith("__main__") and not name.startswith("smd_jax.integrations."):
        importlib.import_module(name)
changed = {name for name in os.environ.keys() | before.keys() if os.environ.get(name) != before.get(name)}
print(json.dumps([len(names), sorted(changed)]))
"""


def environment() -> dict[str, str]:
    """This process's variables, without the one that silences transformers. Python prints syntax warnings when it
    compiles a package of others for the first time."""
    own = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_NO_ADVISORY_WARNINGS"}
    return own | {"PYTHONWARNINGS": "ignore::SyntaxWarning"}


@pytest.mark.slow
def test_importing_every_module_prints_nothing():
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    count, changed = json.loads(done.stdout)
    assert count > 100 and changed == []


@pytest.mark.slow
def test_imports_of_notebooks_print_nothing(monkeypatch):
    """In a notebook kernel, where tqdm warns when ipywidgets is missing."""
    monkeypatch.delenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", raising=False)
    lines = [
        line
        for path in NOTEBOOKS
        for cell in nbformat.read(path, 4).cells
        for line in cell.source.splitlines()
        if cell.cell_type == "code" and line.startswith(("import ", "from "))
    ]
    assert any("smd_jax.testing" in line for line in lines)
    cell = nbformat.v4.new_code_cell("\n".join(lines))
    NotebookClient(nbformat.v4.new_notebook(cells=[cell]), timeout=120, kernel_name="python3").execute()
    assert cell.outputs == []
