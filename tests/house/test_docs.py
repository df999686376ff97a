"""README and docs: code blocks run, links and names exist, quoted numbers match the results."""

import importlib
import importlib.util
import itertools
import json
import re
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import smd_jax
from tests.paths import ROOT

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}

# A fenced code block: its language and its text.
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FENCE_LANGUAGES = {"python", "console", "text"}  # only Python is executed
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"(?<!/)\b(?:smd_jax|kernels|experiments|tests|docs|\.ci)/[\w./-]*\w")
NAME = re.compile(r"\bsmd(?:_jax)?((?:\.[A-Za-z_]\w*)+)")

# `mkdocs build` generates these pages from docstrings, without files.
GENERATED_PAGES = ROOT / "docs" / "reference"


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """Number of lines before each block, and its text."""
    text = page.read_text(encoding="utf-8")
    return [(text[: match.start(2)].count("\n"), match[2]) for match in FENCE.finditer(text) if match[1] == "python"]


# Pages, run by tests/integrations, and modules that need a package missing from this environment.
INTEGRATION_PAGES = {"tunix.md"}
REQUIRED_PACKAGES = {"smd_jax.integrations.tunix": "tunix"}


def run_page(page: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Executes all Python blocks of the page in one new module; returns the module's variables."""
    module = types.ModuleType(f"page_{page.stem.lower()}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    for line, block in python_blocks(page):
        exec(compile("\n" * line + block, str(page), "exec"), vars(module))
    return vars(module)


TESTED_PAGES = [page for page in PAGES if python_blocks(page) and page.name not in INTEGRATION_PAGES]


@pytest.mark.slow
@pytest.mark.parametrize("page", TESTED_PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_runs(page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    names = run_page(page, monkeypatch)
    if page == README:
        assert float(capsys.readouterr().out) <= 2e-5, "the output of README's example"
        visible = names["trajectory"].mask.to_boolean()
        assert visible.shape == (4, 3, 2, 320, 320) and visible.dtype == jnp.bool_


def test_every_fence_names_its_language():
    wrong = [
        (page.name, match[1])
        for page, text in TEXTS.items()
        for match in FENCE.finditer(text)
        if match[1] not in FENCE_LANGUAGES
    ]
    assert not wrong, f"expected fences of {sorted(FENCE_LANGUAGES)}; got {wrong}"


def test_linked_files_exist():
    links = {(page, link.partition("#")[0]) for page, text in TEXTS.items() for link in LINK.findall(text)}
    targets = {(page.name, (page.parent / link).resolve()) for page, link in links if link and "://" not in link}
    missing = [(page, str(path)) for page, path in targets if not path.exists() and path.parent != GENERATED_PAGES]
    assert not missing, f"expected links to files; got {sorted(missing)}"


def test_named_paths_exist():
    named = {(page.name, path) for page, text in TEXTS.items() for path in PATH.findall(text)}
    missing = sorted((page, path) for page, path in named if not (ROOT / path).exists())
    assert not missing, f"expected paths in the repository; got {missing}"


def has_name(names: list[str]) -> bool:
    """Whether smd_jax has this dotted attribute or module."""
    value: object = smd_jax
    for name in names:
        if not hasattr(value, name) and isinstance(value, types.ModuleType):
            if importlib.util.find_spec(f"{value.__name__}.{name}") is None:
                return False
            needed = REQUIRED_PACKAGES.get(f"{value.__name__}.{name}")
            if needed is not None and importlib.util.find_spec(needed) is None:
                return True
            importlib.import_module(f"{value.__name__}.{name}")
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def test_named_objects_of_the_library_exist():
    """Such as `smd.eviction.H2O` and `smd_jax.eviction.H2O`."""
    named = {(page.name, dotted) for page, text in TEXTS.items() for dotted in NAME.findall(text)}
    missing = sorted((page, dotted) for page, dotted in named if not has_name(dotted.strip(".").split(".")))
    assert not missing, f"expected names that smd_jax has; got {missing}"


def test_readme_and_the_first_blocks_of_recipes_are_short():
    assert len(TEXTS[README].splitlines()) <= 110, "the rest belongs in docs/"
    for page in ("loss", "correction"):
        block = python_blocks(ROOT / "docs" / "recipes" / f"{page}.md")[0][1]
        assert "@dataclass" in block and "smd.UpdateConfig(" in block and len(block.splitlines()) <= 30


@pytest.mark.parametrize(
    ("table", "page"), [(smd_jax.corrections.CORRECTIONS, "corrections"), (smd_jax.losses.LOSSES, "algorithms")]
)
def test_the_docs_have_every_name(table: dict[str, Any], page: str):
    text = TEXTS[ROOT / "docs" / f"{page}.md"]
    assert [name for name in table if f"`{name}`" not in text and f"{name}()`" not in text] == []


def test_notebooks_have_no_outputs():
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    cells = [cell for path in notebooks for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    assert len(notebooks) >= 4
    assert not [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count") is not None]


def test_citation_has_the_version_of_the_project():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["cff-version"] == "1.2.0"
    assert (citation["title"], citation["version"]) == (project["name"], project["version"])
    assert citation["license"] == project["license"]


def load_docs_tool(name: str) -> types.ModuleType:
    """Imports a module of `mkdocs build` by its path, because docs/ is no package."""
    pytest.importorskip("mkdocs", reason="expected mkdocs; got none: it is among the packages of `docs`")
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_grouped_names_of_a_docstring_are_split():
    docstring = """A cache.

Attributes:
  keys, values: what it
    holds. valid: which of them; note: this is no name.
  budget: their number.

Text: with, a colon.
"""
    split = load_docs_tool("grouped_names").split_entries(docstring, {"keys", "values", "valid", "budget"})
    assert (
        split
        == """A cache.

Attributes:
  keys: what it
    holds.
  values: what it
    holds.
  valid: which of them; note: this is no name.
  budget: their number.

Text: with, a colon."""
    )


def test_reference_has_every_package():
    pages = load_docs_tool("hooks").reference_pages()
    packages = {path.parent.name for path in (ROOT / "smd_jax").glob("*/__init__.py")}
    assert packages <= pages.keys()
    assert "::: smd_jax.eviction" in pages["eviction"] and "H2O" in pages["eviction"]
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [name for name in pages if f"reference/{name}.md" not in nav], "mkdocs.yml lists every page"


# --- quoted numbers, recomputed from the committed rows

RESULTS = ROOT / "experiments" / "results"
QUOTED = re.compile(r"([+−]\d\.\d{3}) ± (\d\.\d{3})")
T_975 = {
    1: 12.706205,
    2: 4.302653,
    4: 2.776445,
    5: 2.570582,
    7: 2.364624,
}  # 97.5 % quantiles of Student's t, by degrees of freedom
REWARDS = ("sparse", "dense", "sparse_greedy", "dense_greedy")


def rows_of(*names: str) -> list[dict[str, Any]]:
    """Rows of results files, without pilots and unfinished runs."""
    rows = [row for name in names for row in json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))]
    return [row for row in rows if not row["pilot"] and row.get("finished", True)]


def paired_difference(after: np.ndarray, before: np.ndarray) -> str:
    """Mean and half-width of the 95 % interval of paired differences, in the format of the pages."""
    paired = after - before
    half = T_975[len(paired) - 1] * paired.std(ddof=1) / len(paired) ** 0.5
    return f"{paired.mean():+.3f} ± {half:.3f}".replace("-", "−")


def arm_differences(
    rows: list[dict[str, Any]], cell_of: tuple[str, ...], arm_of: tuple[str, ...], kinds: tuple[str, ...] = REWARDS
) -> set[str]:
    """All differences between two arms of a cell, and between an arm and its start, in these columns."""
    cells: dict[tuple[Any, ...], dict[tuple[Any, ...], list[dict[str, Any]]]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        cell, arm = (tuple(row[name] for name in names) for names in (cell_of, arm_of))
        cells.setdefault(cell, {}).setdefault(arm, []).append(row)
    differences = set()
    for arms in cells.values():
        runs = [runs for runs in arms.values() if len(runs) - 1 in T_975]
        for ours, theirs in itertools.permutations(runs, 2):
            if [row["seed"] for row in ours] == [row["seed"] for row in theirs]:
                differences |= {paired_difference(column(ours, kind), column(theirs, kind)) for kind in kinds}
                # A gate is compared with the start that decodes with the full cache.
                differences.add(paired_difference(column(ours, "sparse"), column(theirs, "dense")))
        for kind in kinds:
            before = f"{kind}_before"
            differences |= {paired_difference(column(x, kind), column(x, before)) for x in runs if before in x[0]}
    return differences


def column(rows: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([row[name] for row in rows])


def test_quoted_logits_come_from_the_rows():
    rows = json.loads((RESULTS / "parity.json").read_text(encoding="utf-8"))["rows"]
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for row in rows:
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {row['family']} |")]
        shown = f"{row['max_abs_dlogit']:.1e}" if row["dtype"] == "float32" else f"{row['max_abs_dlogit']:.2f}"
        assert f"| {shown} |" in line and row["round_trip"] == ("| exact |" in line)


@pytest.mark.parametrize("name", ["README.md", "docs/results.md", "docs/older_studies.md"])
def test_quoted_intervals_come_from_the_rows(name: str):
    cell = ("task", "policy", "budget")
    known = arm_differences(rows_of("eviction_action"), ("task",), ("arm", "policy"))
    for names in (("map", "choices"), ("horizon",), ("real_model",)):
        known |= arm_differences(rows_of(*names), cell, ("arm",))
    known |= arm_differences(rows_of("wall_first"), ("length",), ("way",), ("own",))
    for names in (("map_rates",), ("horizon", "horizon_rates"), ("room/copy-8", "room/sorting-12")):
        known |= arm_differences(rows_of(*names), cell, ("arm", "learning_rate"))
    quoted = {match[0] for match in QUOTED.finditer((ROOT / name).read_text(encoding="utf-8"))}
    assert len(quoted) >= 6
    assert quoted <= known, f"{name} quotes {sorted(quoted - known)}, which no rows give"
