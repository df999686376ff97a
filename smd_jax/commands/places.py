"""Absolute paths of a run's files, so that it can be resumed from any folder, and their digests.

A resumed run compares digests, not paths, so files may be moved:

model, tokenizer    digest of all files except the weights, which are in the checkpoints, and the files of the run
data                digest of the files
eviction policy     name of the file, and its digest
reward, map,        name of the file; a changed digest is printed and allowed, so that bugs can be fixed
environment
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

from smd_jax.commands.arguments import Common
from smd_jax.commands.errors import UserError
from smd_jax.runs.settings import Json, to_jsonable
from smd_jax.tasks.build import PRESETS, PROCEDURAL

MODEL = ("model", "tokenizer")
PATHS = (*MODEL, "dataset", "dataset_source", "eval_dataset", "eval_source")
CODE = ("map_function", "reward", "environment", "eviction", "eval_decode")  # options that may name a file's function
CODE_FILE = re.compile(r"(.*\.py):(.*)", re.DOTALL)  # path/to/file.py:function
CODE_MODULE = re.compile(r"([^\W\d][\w.]*):([^\W\d].*)", re.DOTALL)  # package.module:function
EXPORTED = ("model", "adapter", "gate")  # folders that a run writes at its end
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".safetensors.index.json")


def full_path(name: str | Path) -> Path:
    """The absolute path of a name, with `~` expanded. Raises UserError for no such user, no home folder, a removed
    current folder, a loop of links, or characters that no file system has."""
    try:
        return Path(name).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"expected a path; got {str(name)[:200]!r}: {str(error)[:200]}") from error


def with_absolute_paths(args: Common) -> Common:
    """The arguments with absolute paths. Names, ids on the Hub and paths that do not exist are unchanged."""
    groups = {
        name: dataclasses.replace(group, **{option: _absolute(option, value) for option, value in vars(group).items()})
        for name, group in vars(args).items()
    }
    return dataclasses.replace(args, **groups)


def _absolute(option: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_absolute(option, item) for item in value)
    if isinstance(value, Path):
        return full_path(value)
    if option in PATHS and isinstance(value, str):
        return _existing(value)
    if option in CODE and isinstance(value, str) and (match := CODE_FILE.fullmatch(value)):
        return f"{_existing(match[1])}:{match[2]}"
    if option in CODE and isinstance(value, str) and (match := CODE_MODULE.fullmatch(value)):
        return f"{_file_here(match[1]) or match[1]}:{match[2]}"
    return value


def _file_here(module: str) -> str | None:
    """The file of a module that only the current folder has; None for others. A resume may start in another folder."""
    file = full_path(f"{module}.py")
    if "." in module or not file.is_file():
        return None
    spec = importlib.util.find_spec(module)
    # With `python -m` the current folder is on Python's path.
    return str(file) if spec is None or spec.origin is not None and full_path(spec.origin) == file else None


def _existing(name: str) -> str:
    """The absolute path of a path that exists. The name of a task stays, even if a folder has that name."""
    if not name or name in PRESETS or name.startswith(PROCEDURAL):
        return name
    path = full_path(name)
    return str(path) if os.path.exists(path) else name


def check_output_dir(args: Common) -> None:
    """Raises UserError for an --output-dir whose run would replace its own or another model, or whose files a resume
    would read as data or as files of the model. The paths are those of `with_absolute_paths`."""
    run = args.run.output_dir
    exported = full_path(run / "model")
    for option, value in (vars(args.model) | vars(args.data) | vars(args.evaluation)).items():
        if option not in PATHS or value is None or not Path(value).is_absolute():
            continue
        flag, folder = f"--{option.replace('_', '-')}", Path(value)
        if folder == exported:
            raise UserError(
                f"expected {flag} elsewhere than {exported}, where the trained model is written; got this folder. "
                "Choose another --output-dir"
            )
        if run == folder or option not in MODEL and folder in run.parents and not _is_hidden(run.relative_to(folder)):
            where = "other than" if option in MODEL else "outside"
            raise UserError(
                f"expected --output-dir {where} the folder of {flag}, {folder}, whose files a resume reads again; got "
                f"{run}. Choose another --output-dir"
            )
    for name in () if args.run.resume else EXPORTED:
        if (run / name).exists():
            raise UserError(
                f"expected nothing at {run / name}, which the run writes; got something that is not of this run. "
                "Choose another --output-dir"
            )


def by_content(args: Common) -> tuple[dict[str, dict[str, Json]], dict[str, Json]]:
    """The options of model, data, rewards and conversations, and the eviction policy, with digests of the files that
    they name by absolute paths; and these paths, with the digests of code. Raises OSError if a file cannot be read."""
    places: dict[str, Json] = {}

    def without_path(option: str, value: Json) -> Json:
        if isinstance(value, list):
            return [without_path(option, item) for item in value]
        if not isinstance(value, str):
            return value
        if option in CODE and (code := code_file(value)) is not None:
            file, name = code
            places[file.name] = [str(file), digest(file)]
            return f"{file.name}:{name}"
        if option in PATHS and Path(value).is_absolute() and Path(value).exists():
            places[option] = value
            return digest(Path(value), WEIGHTS, args.run.output_dir) if option in MODEL else digest(Path(value))
        return value

    groups: dict[str, dict[str, Json]] = {}
    for group in ("model", "data", "rewards", "conversations"):
        options = vars(getattr(args, group))
        groups[group] = {name: without_path(name, to_jsonable(value, name)) for name, value in options.items()}
    # The loop's settings name only the class of the policy, whose file may not change.
    own = code_file(args.sampler.eviction)
    if own is not None:
        groups["eviction"] = {"place": own[0].name, "holds": digest(own[0])}
    return groups, places


def code_file(value: str) -> tuple[Path, str] | None:
    """The file of `path/to/file.py:name` or `package.module:name`, and the name; None for other values."""
    if match := CODE_FILE.fullmatch(value):
        return Path(match[1]), match[2]
    match = CODE_MODULE.fullmatch(value)
    module = None if match is None else sys.modules.get(match[1])  # imported when the run was planned
    file = getattr(module, "__file__", None)
    return None if match is None or file is None else (Path(file), match[2])


def digest(path: Path, leave_out: tuple[str, ...] = (), run: Path | None = None) -> str:
    """SHA-256 of a file, or of the names and contents of a folder's files, without hidden ones, the endings to leave
    out, and a run inside the folder."""
    found = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        name = "" if file == path else str(file.relative_to(path))
        if run is not None and path in run.parents and run in file.parents:
            continue
        if file == path or file.is_file() and not _is_hidden(Path(name)) and not name.endswith(leave_out):
            found.update(name.encode())
            with file.open("rb") as content:
                found.update(hashlib.file_digest(content, "sha256").digest())
    return f"sha256:{found.hexdigest()[:16]}"


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
