"""Checkpoints: bitwise round trips, shardings, typed keys, refusals, damage and paths."""

import dataclasses
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from breaking.surroundings import FAILING_SAVE, MISREAD, UNUSUAL
from smd_jax.config import LinearRope, ModelConfig
from smd_jax.devices.sharding import make_mesh, shard_tree
from smd_jax.disk import OS_ERROR
from smd_jax.runs import checkpoint
from smd_jax.runs.checkpoint import errors, files, reading, writing
from smd_jax.testing import tiny_model_config
from tests.bitwise import assert_bitwise_equal

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


@dataclass(frozen=True)
class Config:
    """A stand-in for the config of a run."""

    model: ModelConfig = tiny_model_config()
    learning_rate: float = 1e-2
    budgets: tuple[int, ...] = (4, 8)


CONFIG = Config()


def initial_state() -> dict[str, Any]:
    """Parameters of two dtypes, a reference, optimizer state, step, typed keys of two implementations."""
    params = {"w": jax.random.normal(jax.random.key(0), (8, 4)), "b": jnp.full((4,), 1 / 3, jnp.bfloat16)}
    return {
        "params": params,
        "reference": jax.tree.map(lambda x: x + 1, params),
        "opt_state": OPTIMIZER.init(params),
        "step": jnp.int32(0),
        "key": jax.random.key(7),
        "row_keys": jax.random.split(jax.random.key(3, impl="rbg"), 8),
    }


def save(directory, *steps, state=None, config=CONFIG, max_to_keep=3):
    for step in steps:
        with checkpoint.Writer(directory, max_to_keep) as writer:
            writer.save(step, {"x": jnp.float32(step)} if state is None else state, config=config)


def read(directory, like=None, config=CONFIG, step=None) -> checkpoint.Restored:
    return checkpoint.restore(directory, {"x": jnp.float32(0)} if like is None else like, config=config, step=step)


def flip_one_bit(file: Path):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def item_files(folder: Path) -> list[Path]:
    return sorted(file for item in ("state", "meta") for file in (folder / item).rglob("*") if file.is_file())


# --- round trips


def test_round_trip_is_bitwise_with_typed_keys(tmp_path):
    state = initial_state() | {"counts": np.array([1, 2**40])}
    save(tmp_path, 1, state=state)
    restored = read(tmp_path, state)
    assert restored.step == 1 and restored.damaged == ()
    assert_bitwise_equal(restored.state, state)
    assert isinstance(restored.state["counts"], np.ndarray)
    assert str(jax.random.key_impl(restored.state["row_keys"])) == "rbg"
    draw = jax.random.normal(restored.state["row_keys"][2], (3,))
    assert np.array_equal(draw, jax.random.normal(state["row_keys"][2], (3,)))


def test_a_state_saved_on_eight_devices_loads_on_four_and_on_one(tmp_path):
    def sharded_state(devices: int) -> Any:
        return shard_tree(initial_state(), make_mesh(1, devices, 1, devices=jax.devices()[:devices]))

    save(tmp_path, 1, state=sharded_state(8))
    for devices in (4, 1):
        like = sharded_state(devices)
        restored = read(tmp_path, like).state
        assert_bitwise_equal(restored, initial_state())
        assert all(len(x.sharding.device_set) == devices for x in jax.tree.leaves(restored))
        assert restored["params"]["w"].sharding == like["params"]["w"].sharding
    like = jax.eval_shape(initial_state)
    assert read(tmp_path, like).state["params"]["w"].devices() == {jax.devices()[0]}


def test_an_indivisible_sharding_is_not_reported_as_damage(tmp_path):
    save(tmp_path, 1, state={"w": jnp.zeros((3, 4))})
    sharding = NamedSharding(make_mesh(8), PartitionSpec("data"))
    with pytest.raises(ValueError, match="evenly divide|divisible"):
        read(tmp_path, {"w": jax.ShapeDtypeStruct((3, 4), jnp.float32, sharding=sharding)})


# --- steps


def test_only_the_newest_and_the_best_checkpoints_are_kept(tmp_path):
    save(tmp_path, 2, 4, 6, 8, max_to_keep=2)
    assert checkpoint.all_steps(tmp_path) == [6, 8] and checkpoint.latest_step(tmp_path) == 8
    assert read(tmp_path).state["x"] == 8 and read(tmp_path, step=6).state["x"] == 6
    with pytest.raises(FileNotFoundError, match=r"expected one of the steps \[6, 8\].*got 4"):
        read(tmp_path, step=4)
    with checkpoint.Writer(tmp_path, 2) as writer:
        for step in (10, 12):
            writer.save(step, {"x": jnp.float32(step)}, config=CONFIG, best=6)
    assert checkpoint.all_steps(tmp_path) == [6, 10, 12]
    with pytest.raises(FileNotFoundError, match="expected a checkpoint in .*nowhere; found none"):
        read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="expected max_to_keep >= 1; got 0"):
        save(tmp_path, 14, max_to_keep=0)


def test_an_earlier_step_is_saved_only_after_later_ones_are_discarded(tmp_path):
    save(tmp_path, 3, 6, 9)
    for step in (4, 9):
        with pytest.raises(ValueError, match=f"expected a step later than 9.*got {step}"):
            save(tmp_path, step)
    assert checkpoint.discard_after(tmp_path, 3) == [6, 9]
    assert checkpoint.discard_after(tmp_path, 3) == []
    save(tmp_path, 4)
    assert checkpoint.all_steps(tmp_path) == [3, 4]


def test_an_interrupted_deletion_leaves_no_broken_checkpoint(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        # As if the process were killed before it deletes the first file.
        patch.setattr(shutil, "rmtree", lambda *args, **options: None)
        save(tmp_path, 3, 6, max_to_keep=1)
        assert checkpoint.all_steps(tmp_path) == [6] and list(tmp_path.glob("deleted/3/*"))
    save(tmp_path, 9, max_to_keep=1)
    assert checkpoint.all_steps(tmp_path) == [9] and not (tmp_path / "deleted").exists()


def test_unfinished_temporary_directory_is_ignored(tmp_path):
    save(tmp_path, 3)
    for name in ("6.orbax-checkpoint-tmp", "6.orbax-checkpoint-tmp-1700000000"):
        shutil.copytree(tmp_path / "3", tmp_path / name)
    assert checkpoint.all_steps(tmp_path) == [3] and read(tmp_path).step == 3
    save(tmp_path, 6)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["3", "6"], "a save removes unfinished checkpoints"


@pytest.mark.parametrize("name", MISREAD)
def test_a_path_that_orbax_misreads_is_refused_before_anything_is_written(tmp_path, name):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / name)
    for directory in (tmp_path / name, link):
        with pytest.raises(ValueError, match="expected a path .* for checkpoints; got"):
            save(directory / "checkpoints", 1)
    assert list(tmp_path.iterdir()) == [link]


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_paths_hold_checkpoints(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(Path(name), 1)
    assert read(tmp_path / name).state["x"] == 1


# --- refusals


def test_an_unreadable_new_checkpoint_does_not_replace_an_older_one(tmp_path, monkeypatch):
    save(tmp_path, 1, max_to_keep=1)

    async def no_merge() -> None: ...

    # orbax writes the files of the processes but does not merge them, as in a path that it misreads.
    with monkeypatch.context() as patched:
        patched.setattr(
            "orbax.checkpoint._src.serialization.ocdbt_utils.merge_ocdbt_per_process_files", lambda *a, **k: no_merge()
        )
        with pytest.raises(OSError, match=r"checkpoint 2 in .* expected to open it again; got .*Earlier checkpoints"):
            save(tmp_path, 2, max_to_keep=1)
    assert checkpoint.all_steps(tmp_path) == [1] and (tmp_path / "2.unreadable" / "state").is_dir()
    save(tmp_path, 2, max_to_keep=1)
    assert checkpoint.all_steps(tmp_path) == [2]
    with pytest.raises(OSError, match="expected to open it again; got .* arrays of shapes"):
        files.check_opens(tmp_path / "2", [(), (3,)])


def test_a_config_mismatch_names_every_field(tmp_path):
    save(tmp_path, 1)
    model = dataclasses.replace(CONFIG.model, rope_theta=500.0, rope_scaling=LinearRope(2.0))
    with pytest.raises(checkpoint.OtherConfigError) as caught:
        read(tmp_path, config=dataclasses.replace(CONFIG, model=model, budgets=(4, 9)))
    assert str(caught.value).splitlines()[1:] == [
        "  model.rope_theta: expected 10000.0, got 500.0",
        '  model.rope_scaling: expected null, got {"_class": "LinearRope", "factor": 2.0}',
        "  budgets.1: expected 8, got 9",
    ]


def test_a_structure_mismatch_names_every_leaf(tmp_path):
    save(tmp_path, 1, state=initial_state())
    like = initial_state()
    like["params"] = {"w": jnp.zeros((8, 5)), "extra": jnp.zeros(1)}
    like["key"] = jax.random.key(0, impl="rbg")
    with pytest.raises(checkpoint.OtherStateError) as caught:
        read(tmp_path, like)
    assert set(str(caught.value).splitlines()[1:]) == {
        '  params/w: expected "float32[8, 4]", got "float32[8, 5]"',
        '  params/b: expected "bfloat16[4]", got (absent)',
        '  params/extra: expected (absent), got "float32[1]"',
        '  key: expected "key<fry>[]", got "key<rbg>[]"',
    }


def test_another_format_is_refused(tmp_path):
    save(tmp_path, 3, 6)
    meta = tmp_path / "6" / "meta" / "metadata"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"format": 7}))
    (tmp_path / "6" / "checksums.json").unlink()
    with pytest.raises(checkpoint.OtherFormatError, match=r"expected a checkpoint of format 1 at .*6; got format 7"):
        read(tmp_path)


def test_a_checkpoint_of_another_program_is_refused(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(4, args=ocp.args.StandardSave({"w": jnp.zeros(3)}))
    with pytest.raises(checkpoint.OtherFormatError, match=r"smd_jax at .*4, with state and meta; got .*default"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"step": 3}, TypeError, "expected an array as state leaf 'step'; got int 3"),
        ({"a": [jnp.zeros(2), None, "text"]}, TypeError, "expected an array as state leaf 'a/2'; got str"),
        ({"a": jnp.zeros((0, 3))}, ValueError, r"at least one element in state leaf 'a'; got shape \(0, 3\)"),
    ],
)
def test_unsupported_leaves_are_refused(tmp_path, state, error, message):
    with pytest.raises(error, match=message):
        save(tmp_path, 1, state=state)
    assert checkpoint.all_steps(tmp_path) == []


# --- damage


@pytest.mark.parametrize("damage", [Path.unlink, flip_one_bit])
def test_damage_to_any_file_is_named_and_the_older_checkpoint_restored(tmp_path, damage: Callable[[Path], None]):
    origin = tmp_path / "origin"
    save(origin, 3, 6)
    paths = item_files(origin / "6")
    assert any("/d/" in file.as_posix() for file in paths), "expected array data among the files"
    for number, file in enumerate(paths):
        directory = tmp_path / str(number)
        shutil.copytree(origin, directory)
        damage(directory / file.relative_to(origin))
        with pytest.raises(checkpoint.DamagedCheckpointError, match=r"checkpoint 6 in .*") as caught:
            read(directory, step=6)
        assert file.relative_to(origin / "6").as_posix() in str(caught.value)
        restored = read(directory)
        assert restored.step == 3 and restored.damaged == (str(caught.value),)


def test_the_newest_readable_checkpoint_is_restored(tmp_path):
    """A checkpoint without checksums is checked by reading its arrays. No checkpoint is deleted."""
    state = {"x": jnp.arange(50_000.0)}
    save(tmp_path, 3, 6, 9, state=state)
    flip_one_bit(tmp_path / "6" / "meta" / "metadata")
    (tmp_path / "9" / "checksums.json").unlink()
    assert read(tmp_path, state).step == 9, "a run killed before writing checksums leaves a whole checkpoint"
    for file in item_files(tmp_path / "9"):
        if "/d/" in file.as_posix():
            truncate(file)
    restored = read(tmp_path, state)
    assert restored.step == 3 and np.array_equal(restored.state["x"], state["x"])
    assert [line.partition(" in ")[0] for line in restored.damaged] == ["checkpoint 9", "checkpoint 6"]
    assert checkpoint.all_steps(tmp_path) == [3, 6, 9]
    with pytest.raises(checkpoint.OtherConfigError, match="budgets.1"):
        read(tmp_path, state, config=dataclasses.replace(CONFIG, budgets=(4, 9)))
    flip_one_bit(tmp_path / "3" / "meta" / "metadata")
    with pytest.raises(checkpoint.DamagedCheckpointError, match="up to step 9; got none:\n.*t 9(.|\n)*t 6(.|\n)*t 3"):
        read(tmp_path, state)


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "Stale file handle"), ValueError(f"{OS_ERROR}'13'")])
def test_a_read_error_is_not_treated_as_damage(tmp_path, monkeypatch, error):
    """The newest checkpoint may be whole, and falling back would discard it."""
    save(tmp_path, 3, 6)

    def unreadable(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(reading, "check_files", unreadable)
        with pytest.raises(OSError, match=r"expected to read checkpoint 6 in .*; got .*It is unchanged"):
            read(tmp_path)
    assert read(tmp_path).step == 6


def test_check_config_reads_no_arrays(tmp_path, monkeypatch):
    save(tmp_path, 3)
    seen = list[str]()
    crc = files._crc32
    monkeypatch.setattr(files, "_crc32", lambda file: (seen.append(file.parent.name), crc(file))[1])
    checkpoint.check_config(tmp_path, CONFIG)
    assert set(seen) == {"meta"}


def test_a_partly_deleted_checkpoint_falls_back_to_the_older_one(tmp_path):
    origin = tmp_path / "origin"
    save(origin, 3, 6)
    # In shutil.rmtree's order: the contents of a folder before the folder.
    paths = [Path(folder) / name for folder, _, files in os.walk(origin / "6", topdown=False) for name in (*files, "")]
    assert len(paths) > 10
    for count in range(1, len(paths)):  # without all of them there is no step 6
        directory = tmp_path / str(count)
        shutil.copytree(origin, directory)
        for path in paths[:count]:
            target = directory / path.relative_to(origin)
            target.rmdir() if target.is_dir() else target.unlink()
        restored = read(directory)
        assert (restored.step, len(restored.damaged)) == (3, 1), f"after {count} of {len(paths)}"


# --- asynchronous saves


def test_saves_run_during_updates(tmp_path, monkeypatch):
    update = jax.jit(lambda state: jax.tree.map(lambda x: 2 * x + 1, state), donate_argnums=0)
    state = update({"w": jnp.arange(300_000.0)})
    expected = np.array(state["w"])
    written, release = threading.Event(), threading.Event()

    def write_after_release(folder: Path) -> None:
        assert release.wait(60)
        files.write_checksums(folder)
        written.set()

    monkeypatch.setattr(writing, "write_checksums", write_after_release)
    with checkpoint.Writer(tmp_path) as writer:
        writer.save(1, state, config=CONFIG)
        for _ in range(3):
            state = update(state)  # donates the buffers
        assert not written.is_set(), "a save returns before the checkpoint is complete"
        release.set()
        writer.save(2, state, config=CONFIG)
        assert written.is_set(), "a second save waits for the first"
    assert np.array_equal(read(tmp_path, {"w": jnp.zeros(300_000)}, step=1).state["w"], expected)
    assert checkpoint.all_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left"), r"checkpoint 2 in .* could not be written \(.*No space left"),
        (OSError(errno.ETIMEDOUT, "Connection timed out"), r"checkpoint 2 in .* could not be written \(.*timed out"),
        (TimeoutError("barrier"), r"expected all processes to write their parts of checkpoint 2 in .*did not: barrier"),
    ],
)
def test_a_failed_asynchronous_save_raises_at_the_next_wait(tmp_path, monkeypatch, error, message):
    failed = threading.Event()

    def failing(folder: Path) -> None:
        failed.set()
        raise error

    save(tmp_path, 1)
    monkeypatch.setattr(writing, "write_checksums", failing)
    with checkpoint.Writer(tmp_path) as writer:
        writer.save(2, {"x": jnp.ones(3)}, config=CONFIG)
        assert failed.wait(60)
        with pytest.raises(OSError, match=message):
            writer.wait()
        writer.wait()  # raised once


# --- a failed save is one error, without the tracebacks of orbax's threads


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "message"), [("size", "File too large"), ("files", "expected 32 free file handles")])
def test_a_failing_save_prints_only_its_error(tmp_path, limit, message):
    command = [sys.executable, "-c", FAILING_SAVE, str(tmp_path), limit]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert result.stderr == ""
    assert message in result.stdout and "Earlier checkpoints are unchanged" in result.stdout
    assert result.stdout.count("\n") == 1


def test_errors_of_other_code_are_printed(caplog: pytest.LogCaptureFixture):
    with errors.disk_failure_named(Path("anywhere"), 1):
        pass
    try:
        raise OSError(28, "No space left on device")
    except OSError:
        logging.getLogger("asyncio").exception("somebody's task")
    logging.getLogger("absl").error("os_error_code='28'")
    assert [record.getMessage() for record in caplog.records] == ["somebody's task"]


def test_other_unraisable_errors_are_printed(monkeypatch):
    seen = list[object]()
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    with errors.disk_failure_named(Path("anywhere"), 1):
        pass
    error = RuntimeError("Event loop is closed")
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    args = SimpleNamespace(exc_type=RuntimeError, exc_value=error, exc_traceback=None, err_msg=None, object=None)
    sys.unraisablehook(args)  # pyright: ignore[reportArgumentType]
    assert len(seen) == 1


def test_only_orbax_warnings_about_unstarted_writes_are_dropped():
    async def async_serialize_from_host() -> None: ...

    async def other() -> None: ...

    async_serialize_from_host.__qualname__ = "async_serialize_from_host.<locals>.write_fragment"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with errors.disk_failure_named(Path("anywhere"), 1):
            pass
        for function in (async_serialize_from_host, other):
            function()  # pyright: ignore[reportUnusedCoroutine]
    assert ["other" in str(warning.message) for warning in seen] == [True]
