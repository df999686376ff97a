"""Checkpoints at paths of any name, and what is checked after every save."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from smd_jax.runs import checkpoint
from smd_jax.runs.checkpoint import integrity


def save(directory, step, state=None, max_to_keep=3):
    state = {"x": jnp.ones(3)} if state is None else state
    checkpoint.save(directory, step, state, data_position={}, config=None, max_to_keep=max_to_keep)


@pytest.mark.parametrize("name", ["sweep[lr=1]", "[", "a*", "a?", "back\\slash", "\udcff"])
def test_a_path_that_orbax_misreads_is_refused_before_anything_is_written(tmp_path, name):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / name)
    for directory in (tmp_path / name, link):
        with pytest.raises(ValueError, match="expected a path .* for checkpoints; got"):
            save(directory / "checkpoints", 1)
    assert list(tmp_path.iterdir()) == [link]


@pytest.mark.parametrize(
    "name", ["a b", "new\nline", "'\"", "~", "{a,b}", "%s", "$HOME", "a]", "#;&|", "-x", "ünï 日本", " ", "x" * 200]
)
def test_any_other_path_holds_checkpoints(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(Path(name), 1, {"x": jnp.arange(3.0)})
    assert checkpoint.restore(tmp_path / name, {"x": jnp.zeros(3)}, config=None).state["x"].tolist() == [0, 1, 2]


def test_a_checkpoint_that_cannot_be_opened_again_takes_no_other_ones_place(tmp_path, monkeypatch):
    save(tmp_path, 1, {"x": jnp.ones(3)}, max_to_keep=1)
    # As with a path that a later orbax misreads: its files are written, and not joined.
    monkeypatch.setattr(
        "orbax.checkpoint._src.serialization.ocdbt_utils.merge_ocdbt_per_process_files", lambda *a, **k: nothing()
    )
    with pytest.raises(OSError, match=r"checkpoint 2 in .* expected to open it again; got .*Checkpoints \[1\] are"):
        save(tmp_path, 2, {"x": jnp.ones(3)}, max_to_keep=1)
    monkeypatch.undo()
    assert checkpoint.all_steps(tmp_path) == [1] and (tmp_path / "2.unreadable" / "state").is_dir()
    save(tmp_path, 2, {"x": jnp.ones(3)}, max_to_keep=1)
    assert checkpoint.all_steps(tmp_path) == [2]


async def nothing() -> None:
    """In place of the merge."""


def test_what_is_opened_again_has_the_shapes_that_were_saved(tmp_path):
    state = {"key": jax.random.key(0), "rbg": jax.random.key(0, impl="rbg"), "w": jnp.ones((2, 3)), "n": jnp.int32(1)}
    save(tmp_path, 1, state)
    assert integrity.stored_shapes(state) == [(), (2,), (2, 3), (4,)]
    for other in ([(), (2,), (2, 3)], [(), (2,), (2, 4), (4,)]):
        with pytest.raises(OSError, match="expected to open it again; got 4 arrays of shapes"):
            integrity.verify(tmp_path / "1", other)
        (tmp_path / "1.unreadable").rename(tmp_path / "1")
    integrity.verify(tmp_path / "1", integrity.stored_shapes(state))
