"""The rules of the house, read from the sources without importing them: who imports whom, lengths, habits, pins."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "smd_jax"
KERNELS = ROOT / "kernels" / "smd_kernels"
MAX_LINES = 600

# A module may import its own level and those below it, never one above. `smd_jax/__init__.py` stands above all.
LEVELS = {
    "config": 0,
    "hf_config": 1,
    "masks": 1,
    "quantization": 1,
    "quantized_cache": 1,
    "rollout_config": 1,
    "cache": 1,
    "eviction": 1,
    "sampling": 1,
    "kept_tokens": 1,
    "advantages": 1,
    "correction": 1,
    "corrections": 1,
    "importance": 1,
    "rejection": 1,
    "trust_region": 1,
    "gae": 1,
    "value": 1,
    "losses": 1,
    "mismatch": 1,
    "distillation": 1,
    "dpo": 1,
    "pairs": 1,
    "schedules": 1,
    "sharding": 1,
    "metrics": 1,
    "plots": 1,
    "progress": 1,
    "prompts": 1,
    "token_bytes": 1,
    "stop_strings": 1,
    "tasks": 1,
    "sorting": 1,
    "rewards": 1,
    "trajectory": 1,
    "attention": 1,
    "model": 2,
    "sampler_params": 2,
    "learner": 3,
    "compression": 1,
    "random_keys": 1,
    "sampler": 3,
    "prefill": 3,
    "rows": 3,
    "segment": 3,
    "records": 3,
    "rollout": 3,
    "engine": 3,
    "accumulation": 3,
    "footprint": 3,
    "learner_footprint": 3,
    "second_track": 4,
    "update": 4,
    "dpo_update": 4,
    "loop": 5,
    "grpo": 5,
    "online_dpo": 5,
    "ppo": 5,
    "memory": 5,
    "supervised": 5,
    "checkpoint": 5,
    "weights": 5,
    "testing": 5,
    "training": 5,
    "__init__": 6,
}

# The seams, beyond the levels: the trajectory is the whole message from the sampler to the learner.
SAMPLER = {"rollout", "engine", "sampler", "prefill", "rows", "segment", "records", "compression", "eviction", "cache"}
NEVER = {
    "losses": {"model"},
    "distillation": {"model"},
    "dpo": {"model"},
    "value": {"model"},
    "sampler": {"losses"},
    "rollout": {"losses"},
    "engine": {"losses"},
    "learner": SAMPLER,
    "second_track": SAMPLER,
    "update": SAMPLER,
    "dpo_update": SAMPLER,
}

# Catch-all arguments that somebody else's signature asks for: a task's `reward(prompts, completions, **columns)`, which
# users know from TRL, and the listeners of jax.monitoring.
GIVEN_SIGNATURES = {"**columns", "**tags"}

# `smd_kernels` depends on JAX alone; jaxtyping carries the shapes in its annotations, numpy comes with JAX.
KERNELS_MAY_IMPORT = {"jax", "jaxlib", "jaxtyping", "numpy", "smd_kernels"} | sys.stdlib_module_names


def sources(*folders: Path) -> list[Path]:
    """Every Python file under the folders, in a stable order."""
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_names(path: Path) -> Iterator[str]:
    """Absolute dotted names of everything that the file imports, also inside functions.

    `from a.b import c` gives both `a.b` and `a.b.c`, because `c` may be a module.
    """
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *(node.module.split(".") if node.module else ())))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def library_imports(path: Path) -> set[str]:
    """Modules of smd_jax that the file imports, by their short names; `__init__` for the package itself."""
    names = {name for name in imported_names(path) if name.split(".")[0] == LIBRARY.name}
    modules = {name.split(".")[1] for name in names if "." in name} & {p.stem for p in LIBRARY.glob("*.py")}
    from_package = any(
        isinstance(node, ast.ImportFrom)
        and node.module == LIBRARY.name
        and any(alias.name not in modules for alias in node.names)
        for node in ast.walk(parse(path))
    )
    return modules | ({"__init__"} if from_package else set())


def level_of(module: str) -> int:
    """Level of a module of smd_jax, by its short name; fails the test if LEVELS does not have it."""
    if module not in LEVELS:
        pytest.fail(
            f"smd_jax/{module}.py has no level: expected one of {sorted(LEVELS)}; add it to LEVELS in {__file__}"
        )
    return LEVELS[module]


LIBRARY_FILES = pytest.mark.parametrize("path", sources(LIBRARY), ids=label)
KERNEL_FILES = pytest.mark.parametrize("path", sources(KERNELS), ids=label)
SHIPPED_FILES = pytest.mark.parametrize("path", sources(LIBRARY, KERNELS), ids=label)
ALL_FILES = pytest.mark.parametrize("path", sources(LIBRARY, KERNELS, ROOT / "experiments", ROOT / "tests"), ids=label)


@LIBRARY_FILES
def test_every_module_of_the_library_has_a_level(path: Path):
    assert path.parent == LIBRARY, f"{label(path)}: smd_jax is one flat folder, so that LEVELS can name every module"
    level_of(path.stem)


@LIBRARY_FILES
def test_imports_never_go_up(path: Path):
    own = level_of(path.stem)
    upward = {name: level_of(name) for name in library_imports(path) if level_of(name) > own}
    assert not upward, f"{label(path)} is on level {own} and imports from above: {upward}"


@LIBRARY_FILES
def test_seams_are_not_crossed(path: Path):
    crossed = library_imports(path) & NEVER.get(path.stem, set())
    assert not crossed, f"{label(path)} must never import {sorted(crossed)}"


def test_modules_of_one_level_do_not_import_each_other_in_a_circle():
    graph = {path.stem: library_imports(path) for path in sources(LIBRARY)}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@LIBRARY_FILES
def test_library_never_imports_experiments_or_tests(path: Path):
    outside = {name for name in imported_names(path) if name.split(".")[0] in {"experiments", "tests"}}
    assert not outside, (
        f"{label(path)} imports {sorted(outside)}: experiments and tests use the library, never the reverse"
    )


@KERNEL_FILES
def test_kernels_depend_on_jax_alone(path: Path):
    # Relative imports begin with the folder's name, `kernels`, and stay inside.
    roots = {name.split(".")[0] for name in imported_names(path)} - {"kernels"}
    assert roots <= KERNELS_MAY_IMPORT, (
        f"{label(path)} imports {sorted(roots - KERNELS_MAY_IMPORT)}; kernels need JAX alone"
    )


def test_kernels_folder_is_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists(), (
        "kernels/__init__.py would take the import name `kernels`, which transformers expects from another distribution"
    )


@ALL_FILES
def test_file_is_short_enough(path: Path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{label(path)} has {lines} lines, at most {MAX_LINES} are allowed: split it by ideas"


def catches_everything(handler: ast.ExceptHandler) -> bool:
    """Whether the handler is `except:`, `except Exception:` or names such a class among others."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or ast.unparse(kind) in {"Exception", "BaseException"} for kind in caught)


@ALL_FILES
def test_no_broad_except(path: Path):
    handlers = (node for node in ast.walk(parse(path)) if isinstance(node, ast.ExceptHandler))
    broad = [handler.lineno for handler in handlers if catches_everything(handler)]
    assert not broad, f"{label(path)} catches everything on lines {broad}: name the exceptions that are expected"


@SHIPPED_FILES
def test_no_function_takes_any_keyword(path: Path):
    functions = (n for n in ast.walk(parse(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))
    catch_alls = {f"**{f.args.kwarg.arg} on line {f.lineno}" for f in functions if f.args.kwarg is not None}
    unnamed = {text for text in catch_alls if text.split()[0] not in GIVEN_SIGNATURES}
    assert not unnamed, f"{label(path)} takes {sorted(unnamed)}: name every argument"


def constraint_pins() -> dict[str, set[str]]:
    """Name -> exact versions in constraints.txt; more than one where Python versions differ."""
    pins: dict[str, set[str]] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if text := line.partition("#")[0].strip():
            requirement = Requirement(text)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", f"constraints.txt: expected an exact pin, got {text!r}"
            pins.setdefault(canonicalize_name(requirement.name), set()).add(specifier.version)
    return pins


def test_pre_commit_pins_are_those_of_the_environment():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    in_hooks = {Requirement(text) for hook in hooks for text in hook["additional_dependencies"]}
    expected = {name: {f"=={v}" for v in versions} for name, versions in constraint_pins().items()}
    for requirement in in_hooks:
        assert {str(requirement.specifier)} == expected[canonicalize_name(requirement.name)], requirement
    assert {requirement.name for requirement in in_hooks} >= {"ruff", "pyright"}


def test_every_direct_requirement_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    requirements = [Requirement(text) for text in project["dependencies"] + extras["experiments"] + extras["dev"]]
    unpinned = {requirement.name for requirement in requirements} - constraint_pins().keys()
    assert not unpinned, f"constraints.txt has no pin for {sorted(unpinned)}"


def test_torch_is_not_installed_by_us():
    assert not [name for name in constraint_pins() if re.match(r"torch|nvidia", name)]
