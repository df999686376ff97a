"""Checks that the files of a checkpoint are readable and unchanged.

After a save every array is opened again. Then the CRC-32 of every file is written, and compared before a checkpoint is
read: orbax keeps no checksums of array data, and a run would train on a flipped bit.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from smd_jax.runs.checkpoint.ownership import CHECKSUMS, check_keys, read_meta_file

UNREADABLE = ".unreadable"

# --- after a save


def verify(folder: Path, expected: Sequence[tuple[int, ...]]) -> None:
    """Opens every array of a checkpoint and compares its shape, without reading values.

    Args:
      folder: of the checkpoint.
      expected: shapes of the saved arrays, see `stored_shapes`.

    Raises:
      OSError: an array or the JSON cannot be opened, or has another shape. The folder is then renamed, so that no
        resume reads it.
    """
    try:
        check_keys(read_meta_file(folder))
        tree = ocp.StandardCheckpointHandler().metadata(epath.Path(folder.resolve()) / "state").tree
        found = sorted(tuple(leaf.shape) for leaf in jax.tree.leaves(tree))
        # By shapes and not by names: orbax renames some containers.
        if found != [*expected]:
            raise ValueError(f"{len(found)} arrays of shapes {found!s:.80} for {len(expected)} of {[*expected]!s:.80}")
    # Orbax and TensorStore raise these for files that are missing or truncated.
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        aside = folder.with_name(folder.name + UNREADABLE)
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OSError(f"expected to open it again; got {reason:.300}. Its files are in {aside.name}") from error


def stored_shapes(state: Any) -> list[tuple[int, ...]]:
    """The shapes of the arrays in a checkpoint of this state, sorted."""
    return sorted(_stored_shape(leaf) for leaf in jax.tree.leaves(state))


def _stored_shape(leaf: Any) -> tuple[int, ...]:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.eval_shape(jax.random.key_data, leaf).shape
    return tuple(leaf.shape)


def write_checksums(folder: Path, items: Sequence[str]) -> None:
    """Writes `checksums.json` into `folder`, with every file in the folders `items`."""
    # Renamed when complete: a partial list would make good files look damaged.
    temporary = folder / f"{CHECKSUMS}.tmp"
    temporary.write_text(json.dumps(_checksums(folder, items)), encoding="utf-8")
    temporary.replace(folder / CHECKSUMS)


# --- before a restore


def check_files(folder: Path, items: Sequence[str], left_out: Sequence[str] = ()) -> None:
    """Raises ValueError, which names every file that has changed since it was written.

    Without a list of checksums nothing is compared: a run that is killed between the rename of a checkpoint and its
    checksums leaves a complete checkpoint.

    Args:
      items: folders whose files are read.
      left_out: folders whose files are listed and not read.
    """
    expected = {name: value for name, value in _listed(folder).items() if name.partition("/")[0] not in left_out}
    if not expected:
        return
    found = _checksums(folder, items)
    damaged = [name for name in expected if expected[name] != found.get(name)]
    if damaged:
        lines = [f"{name} (CRC-32 expected {expected[name]}, got {found.get(name, 'no file')})" for name in damaged]
        raise ValueError(f"{len(lines)} of {len(expected)} files are damaged: {', '.join(lines)}")


def names_in(folder: Path, items: Sequence[str]) -> list[str]:
    """Relative paths of all files in the items, and of the list of checksums if there is one."""
    return [file.relative_to(folder).as_posix() for file in _files(folder, items)] + [CHECKSUMS] * bool(_listed(folder))


def check_there(folder: Path, names: Sequence[str]) -> None:
    """Raises ValueError, which names every missing file; reads none of them."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{len(missing)} files are not there: {', '.join(missing)}")


def _listed(folder: Path) -> dict[str, int]:
    """The list of checksums; empty if there is none."""
    file = folder / CHECKSUMS
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _checksums(folder: Path, items: Sequence[str]) -> dict[str, int]:
    """Relative path -> CRC-32 of every file in the items."""
    return {file.relative_to(folder).as_posix(): _crc32(file) for file in _files(folder, items)}


def _files(folder: Path, items: Sequence[str]) -> list[Path]:
    return [file for item in items for file in sorted((folder / item).rglob("*")) if file.is_file()]


def _crc32(file: Path) -> int:
    value = 0
    with open(file, "rb") as stream:
        # 16 MiB at a time: a file may be larger than the free memory.
        while chunk := stream.read(1 << 24):
            value = zlib.crc32(chunk, value)
    return value
