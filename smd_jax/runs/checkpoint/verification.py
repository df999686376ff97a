"""Opens a checkpoint that was just written: an empty one must not take the place of the one before it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from smd_jax.runs.checkpoint.ownership import check_keys

UNREADABLE = ".unreadable"


def verify(folder: Path, expected: Sequence[tuple[int, ...]]) -> None:
    """Opens every array of a checkpoint and compares its shape. Reads the descriptions of the arrays, not their values.

    Args:
      folder: of the checkpoint.
      expected: shapes of what was saved, see `stored_shapes`.

    Raises:
      OSError: an array or the JSON cannot be opened, or has another shape. The folder is then renamed, so that no
        resume takes it for a checkpoint.
    """
    try:
        check_keys(json.loads((folder / "meta" / "metadata").read_text(encoding="utf-8")))
        tree = ocp.StandardCheckpointHandler().metadata(epath.Path(folder.resolve()) / "state").tree
        found = sorted(tuple(leaf.shape) for leaf in jax.tree.leaves(tree))
        # By shapes and not by names: orbax names some containers otherwise.
        if found != [*expected]:
            raise ValueError(f"{len(found)} arrays of shapes {found!s:.80} for {len(expected)} of {[*expected]!s:.80}")
    # What orbax and TensorStore raise for files that are missing or cut off.
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        aside = folder.with_name(folder.name + UNREADABLE)
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OSError(f"expected to open it again; got {reason:.300}. Its files are in {aside.name}") from error


def stored_shapes(state: Any) -> list[tuple[int, ...]]:
    """The shapes of the arrays that a checkpoint of this state holds, sorted."""
    return sorted(_stored_shape(leaf) for leaf in jax.tree.leaves(state))


def _stored_shape(leaf: Any) -> tuple[int, ...]:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.eval_shape(jax.random.key_data, leaf).shape
    return tuple(leaf.shape)
