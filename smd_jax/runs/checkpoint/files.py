"""Files of checkpoints: the steps in a directory, the JSON of a checkpoint, and its checksums.

Orbax keeps no checksums of array data, and a run would train on a flipped bit. So the CRC-32 of every file is written
after a save, and compared before a checkpoint is read.
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from smd_jax.disk import replaced
from smd_jax.runs.checkpoint.errors import OtherFormatError

FORMAT = 1
ITEMS = ("state", "meta")
CHECKSUMS = "checksums.json"
# Files that an interrupted deletion may leave; they do not show which library wrote the checkpoint.
REMAINS = {"_CHECKPOINT_METADATA", f"{CHECKSUMS}.tmp"}

# A checkpoint is moved here before its files are deleted, so that an interrupted deletion leaves no partial checkpoint.
DELETED = "deleted"

# Orbax merges the files of a checkpoint by a glob over its whole path, and TensorStore reads a backslash as a slash.
MISREAD = "*?[\\"


def check_path(directory: str | Path) -> None:
    """Raises ValueError for a path that orbax or TensorStore misreads: the checkpoints would be empty or elsewhere."""
    path = str(Path(directory).resolve())
    if found := sorted(set(path) & set(MISREAD)):
        raise ValueError(
            f"expected a path without {' '.join(MISREAD)} for checkpoints; got {' '.join(found)} in {path:.300}, which "
            "orbax would misread. Choose or rename the directory"
        )
    if any("\ud800" <= character <= "\udfff" for character in path):
        raise ValueError(f"expected a path in UTF-8 for checkpoints; got {path!r:.300}")


# --- steps


def all_steps(directory: str | Path) -> list[int]:
    """Steps of the finished checkpoints in `directory`, ascending; temporary directories do not count."""
    if not Path(directory).is_dir():
        return []
    # By names: managers of several processes wait for each other, and one may see a directory before the others.
    return sorted(found.step for found in ocp.path.step.standard_name_format().find_all(Path(directory).resolve()))


def latest_step(directory: str | Path) -> int | None:
    """The newest finished checkpoint in `directory`; None without any."""
    return max(all_steps(directory), default=None)


def existing_step(directory: str | Path, step: int | None) -> int:
    """The step, or the newest for None. Raises FileNotFoundError, which lists the existing steps."""
    steps = all_steps(directory)
    if not steps:
        raise FileNotFoundError(f"expected a checkpoint in {directory}; found none")
    if step is not None and step not in steps:
        raise FileNotFoundError(f"expected one of the steps {steps} in {directory}; got {step}")
    return steps[-1] if step is None else step


def delete_steps(directory: Path, steps: Iterable[int]) -> None:
    """Deletes these checkpoints, and those whose deletion was interrupted."""
    deleted = directory / DELETED
    shutil.rmtree(deleted, ignore_errors=True)
    for step in steps:
        deleted.mkdir(exist_ok=True)
        (directory / str(step)).rename(deleted / str(step))
    shutil.rmtree(deleted, ignore_errors=True)


# --- the JSON


def leaf_table(tree: Any) -> dict[str, str]:
    """Path -> `dtype[shape]` of every array. A typed key's dtype names its implementation, such as `key<fry>`.

    Raises:
      TypeError: a leaf is no array.
      ValueError: an array without elements, which orbax cannot save.
    """
    table = dict[str, str]()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            raise TypeError(f"expected an array as state leaf {name!r}; got {type(leaf).__name__} {leaf!r}")
        if math.prod(leaf.shape) == 0:
            raise ValueError(f"expected at least one element in state leaf {name!r}; got shape {leaf.shape}")
        table[name] = f"{leaf.dtype}{list(leaf.shape)}"
    return table


def read_meta(folder: Path) -> dict[str, Any]:
    """The JSON of a checkpoint.

    Raises:
      OtherFormatError: another library or another version of this one wrote the checkpoint.
      OSError, ValueError: it cannot be read.
    """
    names = sorted(path.name for path in folder.iterdir())
    if not {*ITEMS, CHECKSUMS} & set(names):
        what = f"{' and '.join(ITEMS)}; got {names}"
        if REMAINS.issuperset(names):
            raise ValueError(f"expected {what}")
        raise OtherFormatError(f"expected a checkpoint of smd_jax at {folder}, with {what}")
    meta = json.loads((folder / "meta" / "metadata").read_text(encoding="utf-8"))
    if meta["format"] != FORMAT:
        raise OtherFormatError(
            f"expected a checkpoint of format {FORMAT} at {folder}; got format {meta['format']!r}, which another "
            "version of smd_jax wrote"
        )
    return meta


# --- after a save


def stored_shapes(state: Any) -> list[tuple[int, ...]]:
    """The shapes of the arrays in a checkpoint of this state, sorted."""
    is_key = (jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(state))
    leaves = zip(jax.tree.leaves(state), is_key, strict=True)
    return sorted(jax.eval_shape(jax.random.key_data, leaf).shape if key else leaf.shape for leaf, key in leaves)


def check_opens(folder: Path, shapes: Sequence[tuple[int, ...]]) -> None:
    """Opens every array of a new checkpoint, and compares the shapes with the saved ones; reads no values.

    Raises:
      OSError: an array cannot be opened, or has another shape. The folder is renamed, so that no resume reads it.
    """
    try:
        tree = ocp.StandardCheckpointHandler().metadata(epath.Path(folder.resolve()) / "state").tree
        # By shapes and not by names: orbax renames some containers.
        found = sorted(tuple(leaf.shape) for leaf in jax.tree.leaves(tree))
        if found != shapes:
            raise ValueError(f"{len(found)} arrays of shapes {found!s:.80} for {len(shapes)} of {shapes!s:.80}")
    # Orbax and TensorStore raise these for files that are missing or truncated.
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        aside = folder.with_name(f"{folder.name}.unreadable")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OSError(f"expected to open it again; got {reason:.300}. Its files are in {aside.name}") from error


# --- checksums


def write_checksums(folder: Path) -> None:
    """Writes `checksums.json` into `folder`, with every file in its items."""
    sums = {file.relative_to(folder).as_posix(): _crc32(file) for item in ITEMS for file in _files(folder / item)}
    # Renamed when complete: a partial list would make good files look damaged.
    with replaced(folder / CHECKSUMS) as temporary:
        temporary.write_text(json.dumps(sums), encoding="utf-8")


def check_files(folder: Path, items: Sequence[str]) -> None:
    """Raises ValueError, which names every missing file, and every changed one in the folders `items`.

    Without a list of checksums nothing is compared: a run that is killed between the rename of a checkpoint and its
    checksums leaves a complete checkpoint.
    """
    if not (folder / CHECKSUMS).is_file():
        return
    expected = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
    there = {file.relative_to(folder).as_posix(): file for item in ITEMS for file in _files(folder / item)}
    damaged = list[str]()
    for name, value in expected.items():
        if name not in there:
            damaged.append(f"{name} (no file)")
        elif name.partition("/")[0] in items and _crc32(there[name]) != value:
            damaged.append(f"{name} (another CRC-32)")
    if damaged:
        raise ValueError(f"{len(damaged)} of {len(expected)} files are damaged: {', '.join(damaged)}")


def _files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("*")) if file.is_file()]


def _crc32(file: Path) -> int:
    value = 0
    with open(file, "rb") as stream:
        # 16 MiB at a time: a file may be larger than the free memory.
        while chunk := stream.read(1 << 24):
            value = zlib.crc32(chunk, value)
    return value
