"""Imports a user's functions and classes by module or file: rewards, map functions, eviction policies.

import_function("my_project.rewards:brevity")       a module that Python finds
import_function("examples/rewards.py:brevity")      a file
import_object("my_policies.py:FadingH2O", EvictionPolicy)
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from smd_jax.tasks.reward_calls import Caught, load_file
from smd_jax.text.near_names import did_you_mean
from smd_jax.text.visible_text import one_line

T = TypeVar("T")

FILE_MODULE = "_file_"  # prefix of the names of modules that were files


def import_function(where: str) -> Callable[..., Any]:
    """Imports the function that `where` names.

    The file's folder (for a module: the working directory) is appended to the import path, so that a file finds its
    neighbours and shadows no installed package.

    Args:
      where: "package.module:name", or "path/to/file.py:name", relative to the working directory. A file is executed
        once, also for several of its functions.

    Raises:
      ValueError: another form; no such module; no such name in it (listing its functions and classes), or one that
        cannot be called; an error during the import (with its line).
      FileNotFoundError: no such file.
    """
    place, name, module = _located(where, "function")
    if not hasattr(module, name):
        callables = inspect.getmembers(module, callable)
        there = [own for own, found in callables if getattr(found, "__module__", None) == module.__name__]
        near = did_you_mean(name, there)
        raise ValueError(f"expected a function {name!r} in {place}; got {there}, without it{near}")
    found = getattr(module, name)
    if not callable(found):
        raise ValueError(f"expected a function as {name!r} in {place}; got {type(found).__name__} {found!r:.60}")
    return found


def import_object(where: str, base: type[T]) -> T | type[T]:
    """Imports the object of class `base`, or the subclass, that `where` names; errors as `import_function`."""
    place, name, module = _located(where, "class")
    found = vars(module).get(name)
    if not isinstance(found, base) and not (isinstance(found, type) and issubclass(found, base)):
        classes = inspect.getmembers(module, inspect.isclass)
        own = [other for other, x in classes if issubclass(x, base) and x.__module__ == module.__name__]
        got = f"the subclasses {own}, without it" if found is None else f"{type(found).__name__} {found!r:.60}"
        near = did_you_mean(name, own)
        raise ValueError(
            f"expected {name!r} in {place}, a subclass of {base.__name__} or an object of one; got {got}{near}"
        )
    return found


def _located(where: str, what: str) -> tuple[str, str, ModuleType]:
    """Splits `where` into the file or module as written, and the name; also imports the module."""
    place, _, name = where.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    if not name.isidentifier() or not (is_module or is_file_name(place)):
        raise ValueError(f"expected a {what} as 'package.module:name' or 'path/to/file.py:name'; got {where!r}")
    module = _file_module(Path(place).expanduser().resolve()) if is_file_name(place) else _module(place)
    return place, name, module


def is_file_name(place: str) -> bool:
    """Whether the part before the colon is a file rather than a module."""
    return place.endswith(".py") or "/" in place or os.sep in place


@functools.cache
def _file_module(path: Path) -> ModuleType:
    if not path.is_file():
        nearby = sorted(other.name for other in path.parent.glob("*.py"))
        near = did_you_mean(path.name, nearby)
        raise FileNotFoundError(
            f"expected a file of Python code at {path}; got none ({path.parent} has {nearby[:20]}){near}"
        )
    # A unique name: a user's `datasets.py` must not replace the library. Without dots: `my.rewards.py` would be a
    # module of a package `my`.
    name = f"{FILE_MODULE}{path.stem.replace('.', '_')}_{abs(hash(path)):x}"
    _look_in(path.parent)
    # The error must name the user's file, which may raise anything.
    with Caught(SystemExit) as caught:
        return load_file(name, str(path))
    assert caught.error is not None
    sys.modules.pop(name, None)
    lines = [x.lineno for x in traceback.extract_tb(caught.error.__traceback__) if Path(x.filename) == path]
    raise _import_error(str(path), caught.error, f" in line {lines[-1]}" if lines else "") from caught.error


def _module(name: str) -> ModuleType:
    _look_in(Path.cwd())
    with Caught(SystemExit) as caught:
        return importlib.import_module(name)
    assert caught.error is not None
    raise _import_error(name, caught.error) from caught.error


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _import_error(what: str, error: BaseException, place: str = "") -> ValueError:
    said = one_line(str(error), 300)
    return ValueError(f"expected to import {what}; it raised {type(error).__name__}{place}: {said}")
