"""Digests of the files that a run reads. A resumed run compares digests, not paths, so files may be moved.

model, tokenizer    digest of all files except the weights, which are in the checkpoints
data                digest of the files
eviction policy     name of the file, and its digest
reward, map,        name of the file; a changed digest is printed and allowed, so that bugs can be fixed
environment
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from smd_jax.commands.arguments import RENAMED, Common
from smd_jax.commands.places import from_the_root
from smd_jax.commands.policy_names import own_place
from smd_jax.runs.settings import Json, to_jsonable
from smd_jax.tasks.functions import is_file_name

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".safetensors.index.json")
MODELS = ("model", "tokenizer")
DATA = ("dataset", "dataset_source")
CODE = ("map_function", "reward", "environment")
# Options of later versions with their defaults. Runs from before them can be resumed.
LATER = (
    ("model_revision", None),
    ("tokenizer_revision", None),
    ("chat_template", "auto"),
    ("chat_template_kwargs", []),
    ("contexts", 1),
    ("context_length", None),
    ("summary_request", None),
    ("summary_heading", ""),
)
LARGE = 64 * 2**20
END = 2**20


class Contents(NamedTuple):
    """Settings that name files.

    Attributes:
      groups: model, data, rewards, environment and the user's eviction policy, with digests in place of paths.
      places: the paths, and the digests of code.
    """

    groups: dict[str, dict[str, Json]]
    places: dict[str, Json]


def by_content(args: Common) -> Contents:
    """Reads the files that a run names.

    Raises:
      OSError: a file cannot be read.
    """
    rooted = from_the_root(args)
    noted: dict[str, Json] = {}

    def of_code(where: str) -> str:
        place, colon, name = where.rpartition(":")
        if is_file_name(place):
            path = Path(place)
            noted[path.name] = [place, digest(path)]
            place = path.name
        return f"{place}{colon}{name}"

    def of(name: str, value: Json) -> Json:
        if isinstance(value, list):
            return [of(name, item) for item in value]
        if not isinstance(value, str):
            return value
        if name in CODE:
            return of_code(value)
        path = Path(value)
        if name not in (*MODELS, *DATA) or not path.is_absolute() or not path.exists():
            return value
        noted[name] = value
        return digest(path, leave_out=WEIGHTS if name in MODELS else ())

    groups: dict[str, dict[str, Json]] = {}
    of_files = ["model", "data", "rewards"]
    if args.conversations.environment is not None:  # runs from before there were any have no such group
        of_files.append("conversations")
    for group in of_files:
        fields = to_jsonable(getattr(rooted, group), group)
        assert isinstance(fields, dict)
        kept = {name: value for name, value in fields.items() if (name, value) not in LATER}
        groups[group] = {RENAMED.get(name, name): of(name, value) for name, value in kept.items()}
    # The loop's settings have the name of the policy's class only, and another file may have a class of that name.
    place = own_place(rooted.sampler.eviction)
    if place is not None and is_file_name(place):
        # The eviction policy is part of the trained policy, so its file may not change.
        path = Path(place)
        holds = digest(path)
        groups["eviction"] = {"place": path.name, "holds": holds}
        noted[path.name] = [place, holds]
    elif place is not None:
        groups["eviction"] = {"place": place}
    return Contents(groups, noted)


def digest(path: Path, leave_out: tuple[str, ...] = ()) -> str:
    """SHA-256 of a file, or of the names and contents of all files in a folder except hidden ones.

    Of a file above 64 MiB only size, beginning and end count, so that a resume does not read a whole corpus.

    Args:
      leave_out: endings of files in a folder that do not count.
    """
    found = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(_inside(path, leave_out)):
        found.update(b"" if file == path else str(file.relative_to(path)).encode())
        size = file.stat().st_size
        found.update(str(size).encode())
        with file.open("rb") as read:
            if size <= LARGE:
                found.update(read.read())
                continue
            found.update(read.read(END))
            read.seek(-END, os.SEEK_END)
            found.update(read.read(END))
    return f"sha256:{found.hexdigest()[:16]}"


def _inside(folder: Path, leave_out: tuple[str, ...]) -> Iterator[Path]:
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.is_file() and not hidden and not file.name.endswith(leave_out):
            yield file
