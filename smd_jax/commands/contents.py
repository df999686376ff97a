"""What a run's files hold, wherever they lie: a resume compares that, and only notes the paths.

model, tokenizer    a digest of all their files but the weights, which checkpoints hold
data                a digest of the files
eviction policies   the name of the file, and its digest
rewards, maps       the name of the file; its digest is noted, so that a function that raised can be mended, and the
                    change is printed
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
from smd_jax.runs.jsonable import Json, to_jsonable
from smd_jax.tasks.functions import is_file_name

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".safetensors.index.json")
MODELS = ("model", "tokenizer")
DATA = ("dataset", "dataset_source")
CODE = ("map_function", "reward")
# Options that came later, with their defaults, which leave a run as it was: runs from before them go on.
LATER = (
    ("model_revision", None),
    ("tokenizer_revision", None),
    ("chat_template", "auto"),
    ("chat_template_kwargs", []),
)
LARGE = 64 * 2**20
END = 2**20


class Contents(NamedTuple):
    """Settings that name files.

    Attributes:
      groups: model, data, rewards and, where it is one's own, eviction, with what files hold in place of their paths.
      places: the paths, with the digests of code.
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
    for group in ("model", "data", "rewards"):
        fields = to_jsonable(getattr(rooted, group), group)
        assert isinstance(fields, dict)
        kept = {name: value for name, value in fields.items() if (name, value) not in LATER}
        groups[group] = {RENAMED.get(name, name): of(name, value) for name, value in kept.items()}
    # Of one's own policy the loop's settings have name and parameters: another file may have a class of that name.
    place = own_place(rooted.sampler.eviction)
    if place is not None and is_file_name(place):
        # What is forgotten is part of the policy that is trained: its file is compared, and not mended on the way.
        path = Path(place)
        holds = digest(path)
        groups["eviction"] = {"place": path.name, "holds": holds}
        noted[path.name] = [place, holds]
    elif place is not None:
        groups["eviction"] = {"place": place}
    return Contents(groups, noted)


def digest(path: Path, leave_out: tuple[str, ...] = ()) -> str:
    """Of what a file holds; of a folder, of all its files and their names, hidden ones left out, which are caches. Of a
    file above 64 MiB size, begin and end stand for the rest, so that a resume need not read a corpus.

    Args:
      leave_out: endings of files of a folder.
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
