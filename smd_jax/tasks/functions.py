"""Imports a user's functions and classes by module or file: rewards, map functions, eviction policies.

import_function("my_project.rewards:brevity")       a module that Python finds
import_function("examples/rewards.py:brevity")      a file
import_class("my_policies.py:FadingH2O", EvictionPolicy)
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from smd_jax.tasks.reward_calls import Caught
from smd_jax.text.near_names import did_you_mean
from smd_jax.text.visible_text import one_line

T = TypeVar("T")

FILE_MODULE = "_file_"  # begins the names of modules that were files


def import_function(where: str) -> Callable[..., Any]:
    """Imports the function that `where` names.

    The file's folder (for a module: the working directory) is appended to the import path, so that a file finds its
    neighbours and shadows no installed package.

    Args:
      where: "package.module:name", or "path/to/file.py:name", relative to the working directory. A file is executed
        once, also for several of its functions.

    Raises:
      ValueError: another form; no such module; no such name in it (listing its functions), or one that cannot be
        called; an error during the import (with its line).
      FileNotFoundError: no such file.
    """
    place, name, module = _place(where, "function")
    members = vars(module)
    if name not in members:
        there = _functions_of(module)
        near = did_you_mean(name, there)
        raise ValueError(f"expected a function {name!r} in {place}; got {there}, without it{near}")
    found = members[name]
    if not callable(found):
        raise ValueError(f"expected a function as {name!r} in {place}; got {type(found).__name__} {found!r:.60}")
    return found


def import_class(where: str, base: type[T]) -> type[T]:
    """Imports the subclass of `base` that `where` names; errors as `import_function`."""
    place, name, module = _place(where, "class")
    found = vars(module).get(name)
    if not isinstance(found, type) or not issubclass(found, base):
        there = [x.__name__ for x in vars(module).values() if isinstance(x, type) and issubclass(x, base)]
        own = [other for other in there if vars(module)[other].__module__ == module.__name__]
        got = f"{own}, without it" if found is None else f"{type(found).__name__} {name}, which is none of {own}"
        raise ValueError(f"expected a class {name!r} in {place}, a subclass of {base.__name__}; got {got}")
    return found


def _place(where: str, what: str) -> tuple[str, str, ModuleType]:
    """Splits `where` into the file or module as written, and the name; also imports the module."""
    expected = f"expected a {what} as 'package.module:name' or 'path/to/file.py:name'"
    place, colon, name = where.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ValueError(f"{expected}; got {where!r}")
    if is_file_name(place):
        return place, name, _file_module(Path(place).expanduser().resolve())
    if not all(part.isidentifier() for part in place.split(".")):
        raise ValueError(f"{expected}; got {place!r} before the colon")
    return place, name, _module(place)


def is_file_name(place: str) -> bool:
    """Whether the part before the colon is a file rather than a module."""
    return place.endswith(".py") or "/" in place or os.sep in place


@functools.cache
def _file_module(path: Path) -> ModuleType:
    if not path.is_file():
        nearby = sorted(other.name for other in path.parent.glob("*.py"))
        raise FileNotFoundError(f"expected a file of Python code at {path}; got none ({path.parent} has {nearby[:20]})")
    # A name that no import uses: a user's `datasets.py` must not replace the library. Without dots: `my.rewards.py`
    # would be a module of a package `my`.
    stem = path.stem.replace(".", "_")
    spec = importlib.util.spec_from_file_location(f"{FILE_MODULE}{stem}_{abs(hash(path)):x}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"expected a file of Python code, named *.py; got {path}")
    _look_in(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    # The error must name the user's file, which may raise anything.
    with Caught(SystemExit) as caught:
        spec.loader.exec_module(module)
    if caught.error is not None:
        del sys.modules[spec.name]
        raise _import_error(str(path), path, caught.error) from caught.error
    return module


def _module(name: str) -> ModuleType:
    _look_in(Path.cwd())
    with Caught(SystemExit) as caught:
        return importlib.import_module(name)
    error = caught.error
    assert error is not None
    # The module itself or a package above it is missing, rather than one that it imports.
    if isinstance(error, ModuleNotFoundError) and error.name is not None and f"{name}.".startswith(f"{error.name}."):
        raise ValueError(
            f"expected a module {name!r} that can be imported, installed or in {Path.cwd()}; got none"
        ) from error
    raise _import_error(name, None, error) from error


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _import_error(what: str, path: Path | None, error: BaseException) -> ValueError:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if path is not None and Path(frame.filename) == path]
    place = f" in line {lines[-1]}" if lines else ""
    said = one_line(str(error), 300)
    return ValueError(f"expected to import {what}; it raised {type(error).__name__}{place}: {said}")


def _functions_of(module: ModuleType) -> list[str]:
    """Names of the functions that the module defines."""
    members = inspect.getmembers(module, inspect.isfunction)
    return [name for name, function in members if function.__module__ == module.__name__]
