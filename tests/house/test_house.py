"""Structure of the repository, read from its sources without importing them: imports, lengths, pins.

Ruff (pyproject.toml) finds broad excepts and calls that execute the data they read.
"""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.paths import ROOT

LIBRARY = ROOT / "smd_jax"
KERNELS = ROOT / "kernels" / "smd_kernels"
MAX_LINES = 600
MAX_FUNCTION = 80  # lines of a function of the library
MAX_MODULES = {LIBRARY: 10, LIBRARY / "train": 20}  # modules of a folder, without its __init__
MAX_PUBLIC = 40  # names of smd_jax besides its packages
MAX_STEP = 50  # lines of `Loop.step`

# The packages from the bottom up; `base` are the modules outside of packages. A package imports those before it.
ORDER = (
    *("base", "devices", "message", "text", "eviction", "cache", "model", "sampler", "corrections", "losses"),
    *("learner", "tasks", "environments", "train", "monitor", "runs", "memory", "certify", "integrations"),
    "commands",
)

# Above all packages: test helpers for users.
TOP_MODULES = {"smd_jax.testing"}

# Packages and modules that a package must not import, directly or indirectly.
FORBIDDEN_IMPORTS = {
    "sampler": {"losses", "corrections", "learner", "smd_jax.model.value_head"},
    "losses": {"model", "sampler", "cache"},
    "corrections": {"model", "sampler", "cache"},
    "learner": {"sampler", "cache", "eviction"},
    "model": {"cache", "eviction", "sampler", "losses", "corrections"},
    "tasks": {"model", "sampler", "learner"},
}

# `smd_kernels` depends on JAX alone; jaxtyping carries the shapes in its annotations, numpy comes with JAX. Relative
# imports begin with the folder's name.
KERNELS_MAY_IMPORT = {"jax", "jaxlib", "jaxtyping", "numpy", "smd_kernels", "kernels"} | sys.stdlib_module_names


def sources(*folders: Path) -> list[Path]:
    """Every Python file under the folders, in a stable order."""
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache  # every rule reads the same sources
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def imported_names(path: Path) -> frozenset[str]:
    """Absolute dotted names of everything that the file imports, also inside functions.

    `from a.b import c` gives both `a.b` and `a.b.c`, because `c` may be a module.
    """
    package = path.relative_to(ROOT).parent.parts
    names: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *(node.module.split(".") if node.module else ())))
            names.update((base, *(f"{base}.{alias.name}" for alias in node.names)))
    return frozenset(names)


def exported_names(init: Path) -> set[str]:
    """The names that a package's `__init__` imports from its modules."""
    return {
        alias.asname or alias.name
        for node in parse(init).body
        if isinstance(node, ast.ImportFrom) and node.module != LIBRARY.name
        for alias in node.names
    }


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if (LIBRARY / parts[1]).is_dir() else "base"


@cache
def import_graph() -> dict[str, set[str]]:
    """Module -> modules of smd_jax that it imports. Without the packages' `__init__`, which only list public names."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in sources(LIBRARY)
        if path.name != "__init__.py"
    }
    return {module: set(imported_names(path)) & files.keys() for module, path in files.items()}


def reached_from(module: str) -> set[str]:
    """All modules that the module imports, directly or indirectly."""
    seen, waiting = set(), [module]
    while waiting:
        new = import_graph()[waiting.pop()] - seen
        seen |= new
        waiting.extend(new)
    return seen


def test_imports_never_go_up_and_have_no_cycles():
    folders = {path.name for path in LIBRARY.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(ORDER) - {"base"}
    table = re.findall(r"^\| `smd_jax/(\w+)/` \|", (ROOT / "docs" / "data.md").read_text(), re.MULTILINE)
    assert table == [package for package in ORDER if package != "base"], "docs/data.md lists them in this order"
    graph = import_graph()
    rank = {module: ORDER.index(package_of(module)) for module in graph}
    upward = {
        f"{module} imports {name}"
        for module in graph.keys() - TOP_MODULES
        for name in graph[module]
        if rank[name] > rank[module]
    }
    assert not upward, sorted(upward)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_packages_do_not_reach_forbidden_packages():
    crossed = {
        f"{module} reaches {name}"
        for module in import_graph()
        if (forbidden := FORBIDDEN_IMPORTS.get(package_of(module)))
        for name in reached_from(module)
        if {package_of(name), name} & forbidden
    }
    assert not crossed, sorted(crossed)


def test_modules_import_modules():
    """Not the public names of a package, so that the import graph has every dependency."""
    packages = {f"{LIBRARY.name}.{name}" for name in ORDER} | {LIBRARY.name}
    public = {
        f"{label(path)} imports {alias.name} from the package {node.module}"
        for path in sources(LIBRARY)
        if path.name != "__init__.py"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom) and node.module in packages
        for alias in node.names
        if f"{node.module}.{alias.name}" not in import_graph()
    }
    assert not public, sorted(public)


def test_public_names_are_few_and_hide_no_module():
    """`smd_jax.rollout` is either a module or a function."""
    for init in LIBRARY.rglob("__init__.py"):
        modules = {path.stem for path in init.parent.glob("*.py")} | {
            path.parent.name for path in init.parent.glob("*/__init__.py")
        }
        assert not modules & exported_names(init), label(init)
    assert len(exported_names(LIBRARY / "__init__.py")) <= MAX_PUBLIC


def foreign_imports(paths: Iterable[Path], allowed: set[str] | None = None, refused: Iterable[str] = ()) -> set[str]:
    """Imports of packages that are refused or not allowed."""
    names = {(label(path), name.split(".")[0]) for path in paths for name in imported_names(path)}
    return {f"{file} imports {name}" for file, name in names if name in refused or (allowed and name not in allowed)}


def test_imports_of_other_packages():
    assert not foreign_imports(sources(LIBRARY), refused=("experiments", "tests"))
    assert not foreign_imports(sources(KERNELS), allowed=KERNELS_MAY_IMPORT)
    # It would take the import name `kernels`, which transformers expects from another distribution.
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_importing_the_library_stays_light():
    """Slow packages are imported by the functions that use them: kernel compilers, tokenizers, checkpoints."""
    heavy = ("jax.experimental.pallas", "jax._src.pallas", "jax.experimental.mosaic")
    heavy += ("transformers", "orbax", "matplotlib", "reasoning_gym", "math_verify", "tyro", "datasets")
    program = "import sys, flax; flax_brings = set(sys.modules); import smd_jax; print(*set(sys.modules) - flax_brings)"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{KERNELS.parent}"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    loaded = {name for name in result.stdout.split() if name in heavy or name.startswith(tuple(f"{x}." for x in heavy))}
    assert not loaded, f"`import smd_jax` imports {sorted(loaded)}: import them in the functions that use them"


def test_files_functions_and_folders_are_short_enough():
    everything = sources(LIBRARY, KERNELS, ROOT / "experiments", ROOT / "tests")
    files = {label(path): len(path.read_text(encoding="utf-8").splitlines()) for path in everything}
    functions = {
        f"{label(path)}:{node.lineno}: {node.name}": node.end_lineno - node.lineno + 1
        for path in sources(LIBRARY, KERNELS)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None
    }
    folders = {label(folder): len(list(folder.glob("*.py"))) - 1 for folder in MAX_MODULES}
    assert not {name: lines for name, lines in files.items() if lines > MAX_LINES}
    assert not {name: lines for name, lines in functions.items() if lines > MAX_FUNCTION}
    (step,) = (lines for name, lines in functions.items() if re.fullmatch(r"smd_jax/train/loop.py:\d+: step", name))
    assert step <= MAX_STEP
    assert all(folders[label(folder)] <= most for folder, most in MAX_MODULES.items()), folders


def test_configurations_are_keyword_only():
    positional = [
        f"{label(path)}:{node.lineno}: {node.name}"
        for path in sources(LIBRARY)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config")
        if "kw_only=True" not in " ".join(map(ast.unparse, node.decorator_list))
    ]
    assert not positional, f"expected keyword-only fields; got positional ones in {positional}"


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_wheel_has_every_data_file():
    for package in (LIBRARY, KERNELS):
        patterns = project()["tool"]["setuptools"]["package-data"][package.name]
        shipped = {pattern: set(package.glob(pattern)) for pattern in patterns}
        assert all(shipped.values()), f"patterns without a file: {[p for p, files in shipped.items() if not files]}"
        data_files = {path for path in package.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}}
        assert set().union(*shipped.values()) == data_files


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


EXTRAS = ("train", "wandb", "experiments", "notebooks", "dev", "docs")


def test_every_direct_requirement_is_pinned():
    """Pre-commit hooks have the same versions; torch is not pinned."""
    pins, table = constraint_pins(), project()["project"]
    texts = table["dependencies"] + [text for extra in EXTRAS for text in table["optional-dependencies"][extra]]
    # An extra may require another extra of smd-jax.
    assert not {canonicalize_name(Requirement(text).name) for text in texts} - pins.keys() - {"smd-jax"}
    assert not [name for name in pins if re.match(r"torch|nvidia", name)]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    in_hooks = [
        Requirement(text) for repo in hooks for hook in repo["hooks"] for text in hook["additional_dependencies"]
    ]
    assert {requirement.name for requirement in in_hooks} >= {"ruff", "pyright"}
    for requirement in in_hooks:
        assert {str(requirement.specifier)} == {f"=={x}" for x in pins[canonicalize_name(requirement.name)]}
