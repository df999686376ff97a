"""Digests of the files that a run reads. A resumed run compares digests, not paths, so files may be moved.

model, tokenizer    digest of all files except the weights, which are in the checkpoints
data                digest of the files
eviction policy     name of the file, and its digest
reward, map,        name of the file; a changed digest is printed and allowed, so that bugs can be fixed
environment
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from smd_jax.commands.arguments import Common
from smd_jax.commands.places import CODE, CODE_FILE, CODE_MODULE, PATHS
from smd_jax.runs.settings import Json, to_jsonable

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".safetensors.index.json")
GROUPS = ("model", "data", "rewards", "conversations")


class Contents(NamedTuple):
    """Settings that name files.

    Attributes:
      groups: model, data, rewards, conversations and the eviction policy, with digests instead of paths.
      places: the paths, and the digests of code.
    """

    groups: dict[str, dict[str, Json]]
    places: dict[str, Json]


def by_content(args: Common) -> Contents:
    """Reads the files that a run names by absolute paths.

    Raises:
      OSError: a file cannot be read.
    """
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
            return digest(Path(value), leave_out=WEIGHTS if option in ("model", "tokenizer") else ())
        return value

    groups: dict[str, dict[str, Json]] = {}
    for group in GROUPS:
        options = vars(getattr(args, group))
        groups[group] = {name: without_path(name, to_jsonable(value, name)) for name, value in options.items()}
    # The loop's settings name only the class of the policy, whose file may not change.
    own = code_file(args.sampler.eviction)
    if own is not None:
        groups["eviction"] = {"place": own[0].name, "holds": digest(own[0])}
    return Contents(groups, places)


def code_file(value: str) -> tuple[Path, str] | None:
    """The file of `path/to/file.py:name` or `package.module:name`, and the name; None for other values."""
    if match := CODE_FILE.fullmatch(value):
        return Path(match[1]), match[2].removeprefix(":")
    match = CODE_MODULE.fullmatch(value)
    module = None if match is None else sys.modules.get(match[1])  # imported when the run was planned
    file = getattr(module, "__file__", None)
    return None if match is None or file is None else (Path(file), match[2].removeprefix(":"))


def digest(path: Path, leave_out: tuple[str, ...] = ()) -> str:
    """SHA-256 of a file, or of the names and contents of all files in a folder except hidden ones.

    Args:
      leave_out: endings of files in a folder that do not count.
    """
    found = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(_inside(path, leave_out)):
        found.update(b"" if file == path else str(file.relative_to(path)).encode())
        with file.open("rb") as content:
            found.update(hashlib.file_digest(content, "sha256").digest())
    return f"sha256:{found.hexdigest()[:16]}"


def _inside(folder: Path, leave_out: tuple[str, ...]) -> Iterator[Path]:
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.is_file() and not hidden and not file.name.endswith(leave_out):
            yield file
