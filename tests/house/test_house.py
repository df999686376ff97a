"""The rules of the house, read from the sources without importing them: who imports whom, lengths, habits, pins."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.paths import ROOT

LIBRARY = ROOT / "smd_jax"
KERNELS = ROOT / "kernels" / "smd_kernels"
MAX_LINES = 600
MAX_FUNCTION = 80  # lines of a function of the library
MAX_MODULES = {LIBRARY: 10, LIBRARY / "train": 20}  # modules of a folder, without its __init__
SCREEN = 50  # lines of `Loop.step`

# The packages from the bottom up. `message` are the modules that lie flat: what sampler and learner tell each other,
# and the arithmetic that both share. A package imports those before it, never one behind it.
ORDER = (
    *("base", "devices", "message", "text", "tasks", "environments", "eviction", "cache", "model", "sampler"),
    *("corrections", "losses", "learner", "monitor", "train", "runs", "memory", "certify", "integrations", "commands"),
)

# Flat modules that stand on the packages: what users test with.
ABOVE = {"testing"}

# `python -m` for a package runs a command, which stands above it.
DOORS = {"smd_jax.train.__main__"}

# The seams: what a package must not reach, neither by itself nor through what it imports: packages, and single modules.
NEVER_REACHES = {
    "sampler": {"losses", "corrections", "learner", "smd_jax.model.value_head"},
    "losses": {"model", "sampler", "cache"},
    "corrections": {"model", "sampler", "cache"},
    "learner": {"sampler", "cache", "eviction"},
    "model": {"cache", "eviction", "sampler", "losses", "corrections"},
    "tasks": {"model", "sampler", "learner"},
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


def module_of(path: Path) -> str:
    """`smd_jax.cache.slots`; a package by its own name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def package_of(module: str) -> str:
    """The package of a module of smd_jax; `base` for modules outside of packages."""
    parts = module.split(".")
    return parts[1] if (LIBRARY / parts[1]).is_dir() else "base"


@cache
def import_graph() -> dict[str, set[str]]:
    """Module -> modules of smd_jax that it imports. Packages' `__init__` are left out: they only say what is public."""
    modules = {module_of(path) for path in sources(LIBRARY) if path.name != "__init__.py"}
    return {
        module_of(path): set(imported_names(path)) & modules for path in sources(LIBRARY) if path.name != "__init__.py"
    }


def reached_from(module: str, graph: dict[str, set[str]]) -> set[str]:
    """Everything that importing the module imports."""
    seen, waiting = set(), [module]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting.extend(new)
    return seen


SHIPPED = sources(LIBRARY, KERNELS)
ALL_FILES = [*SHIPPED, *sources(ROOT / "experiments", ROOT / "tests")]


def test_every_package_has_its_place():
    folders = {path.name for path in LIBRARY.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(ORDER) - {"base"}


def test_imports_never_go_up():
    graph = import_graph()
    rank = {module: ORDER.index(package_of(module)) for module in graph}
    upward = {
        f"{module} imports {name}"
        for module in graph
        if module.split(".")[1] not in ABOVE and module not in DOORS
        for name in graph[module]
        if rank[name] > rank[module]
    }
    assert not upward, sorted(upward)


def test_seams_are_not_crossed():
    graph = import_graph()
    crossed = {
        f"{module} reaches {name}"
        for module in graph
        if (forbidden := NEVER_REACHES.get(package_of(module)))
        for name in reached_from(module, graph)
        if {package_of(name), name} & forbidden
    }
    assert not crossed, sorted(crossed)


def test_modules_import_modules():
    """Not the public names of a package: so the graph above says who needs whom."""
    packages = {f"{LIBRARY.name}.{name}" for name in ORDER} | {LIBRARY.name}
    modules = import_graph().keys()
    public = {
        f"{module} imports {alias.name} from the package {node.module}"
        for module in modules
        for node in ast.walk(parse(LIBRARY.parent / (module.replace(".", "/") + ".py")))
        if isinstance(node, ast.ImportFrom) and node.module in packages
        for alias in node.names
        if f"{node.module}.{alias.name}" not in modules
    }
    assert not public, sorted(public)


def test_imports_are_no_circle():
    TopologicalSorter(import_graph()).prepare()  # raises CycleError, which names the circle


def test_public_names_are_few():
    names = [
        alias.name
        for node in parse(LIBRARY / "__init__.py").body
        if isinstance(node, ast.ImportFrom) and node.module != LIBRARY.name
        for alias in node.names
    ]
    assert len(names) <= 40, f"smd_jax exports {len(names)} names besides its packages: the main path only, at most 40"


def test_no_module_is_hidden_by_a_name_of_its_package():
    """`smd_jax.rollout` is either a module or a function."""
    for path in sources(LIBRARY):
        if path.name == "__init__.py":
            inside = {other.stem for other in path.parent.glob("*.py")} | {
                other.name for other in path.parent.iterdir() if (other / "__init__.py").exists()
            }
            exported = {
                alias.asname or alias.name
                for node in parse(path).body
                if isinstance(node, ast.ImportFrom) and node.module != LIBRARY.name
                for alias in node.names
            }
            assert not inside & exported, f"{label(path)} hides the modules {sorted(inside & exported)}"


def test_library_never_imports_experiments_or_tests():
    outside = {
        f"{label(path)} imports {name}"
        for path in sources(LIBRARY)
        for name in imported_names(path)
        if name.split(".")[0] in {"experiments", "tests"}
    }
    assert not outside, sorted(outside)


def test_kernels_depend_on_jax_alone():
    # Relative imports begin with the folder's name, `kernels`, and stay inside.
    allowed = KERNELS_MAY_IMPORT | {"kernels"}
    others = {
        f"{label(path)} imports {name}"
        for path in sources(KERNELS)
        for name in imported_names(path)
        if name.split(".")[0] not in allowed
    }
    assert not others, sorted(others)


def test_importing_the_library_stays_light():
    """What takes long to import is imported where it is used: compilers for accelerators, tokenizers, checkpoints."""
    heavy = ("jax.experimental.pallas", "jax._src.pallas", "jax.experimental.mosaic")
    heavy += ("transformers", "orbax", "matplotlib", "reasoning_gym", "math_verify", "tyro", "datasets")
    program = "import sys, flax; flax_brings = set(sys.modules); import smd_jax; print(*set(sys.modules) - flax_brings)"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{KERNELS.parent}"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    loaded = {name for name in result.stdout.split() if name in heavy or name.startswith(tuple(f"{x}." for x in heavy))}
    assert not loaded, f"`import smd_jax` imports {sorted(loaded)}: import them in the functions that use them"


def test_kernels_folder_is_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists(), (
        "kernels/__init__.py would take the import name `kernels`, which transformers expects from another distribution"
    )


def test_files_are_short_enough():
    lines = {label(path): len(path.read_text(encoding="utf-8").splitlines()) for path in ALL_FILES}
    long = {name: count for name, count in lines.items() if count > MAX_LINES}
    assert not long, f"expected at most {MAX_LINES} lines a file; got {long}"


def functions_of(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef)]


def test_functions_are_short_enough():
    lines = {
        f"{label(path)}: {node.name}": node.end_lineno - node.lineno + 1
        for path in SHIPPED
        for node in functions_of(path)
        if node.end_lineno is not None
    }
    long = {name: count for name, count in lines.items() if count > MAX_FUNCTION}
    assert not long, f"expected functions of at most {MAX_FUNCTION} lines; got {long}"
    step = lines["smd_jax/train/loop.py: step"]
    assert step <= SCREEN, f"expected Loop.step to fit a screen of {SCREEN} lines; got {step}"


def test_folders_hold_few_modules():
    for folder, most in MAX_MODULES.items():
        there = sorted(path.stem for path in folder.glob("*.py") if path.name != "__init__.py")
        assert len(there) <= most, f"expected at most {most} modules in {label(folder)}; got {len(there)}: {there}"


def catches_everything(handler: ast.ExceptHandler) -> bool:
    """Whether the handler is `except:`, `except Exception:` or names such a class among others."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or ast.unparse(kind) in {"Exception", "BaseException"} for kind in caught)


@pytest.mark.slow
def test_no_broad_except():
    broad = [
        f"{label(path)}:{node.lineno}"
        for path in ALL_FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ExceptHandler) and catches_everything(node)
    ]
    assert not broad, f"expected the names of exceptions; got handlers of everything: {broad}"


def test_no_function_takes_any_keyword():
    catch_alls = [
        f"{label(path)}:{node.lineno}: **{node.args.kwarg.arg}"
        for path in SHIPPED
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        and node.args.kwarg is not None
        and f"**{node.args.kwarg.arg}" not in GIVEN_SIGNATURES
    ]
    assert not catch_alls, f"expected named arguments; got {catch_alls}"


def test_configurations_are_keyword_only():
    """A `*Config` names its values, but for the sizes of a rollout and a rank, which a KW_ONLY ends."""
    positional = [
        f"{label(path)}:{node.lineno}: {node.name}"
        for path in sources(LIBRARY)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config")
        if "kw_only=True" not in " ".join(map(ast.unparse, node.decorator_list))
        if not any(isinstance(line, ast.AnnAssign) and ast.unparse(line.annotation) == "KW_ONLY" for line in node.body)
    ]
    assert not positional, f"expected keyword-only fields; got positional ones in {positional}"


@pytest.mark.parametrize("package", [LIBRARY, KERNELS], ids=label)
def test_the_wheel_has_every_file_that_is_no_module(package: Path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"][package.name]
    shipped = {pattern: set(package.glob(pattern)) for pattern in patterns}
    assert all(shipped.values()), f"patterns without a file: {[p for p, files in shipped.items() if not files]}"
    ignored = {".py", ".pyc"}
    there = {path for path in package.rglob("*") if path.is_file() and path.suffix not in ignored}
    assert set().union(*shipped.values()) == there


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


EXTRAS = ("train", "wandb", "experiments", "notebooks", "dev", "docs")


def test_every_direct_requirement_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked_for = project["dependencies"] + [text for extra in EXTRAS for text in extras[extra]]
    requirements = [Requirement(text) for text in asked_for]
    # An extra may ask for another one of ours.
    unpinned = (
        {canonicalize_name(requirement.name) for requirement in requirements} - constraint_pins().keys() - {"smd-jax"}
    )
    assert not unpinned, f"constraints.txt has no pin for {sorted(unpinned)}"


def test_torch_is_not_installed_by_us():
    assert not [name for name in constraint_pins() if re.match(r"torch|nvidia", name)]
