"""Checkpoints: bitwise round trips, shardings, typed keys, refusals, damage."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from smd_jax.config import LinearRope, ModelConfig
from smd_jax.devices.sharding import make_mesh, shard_tree
from smd_jax.disk import OS_ERROR
from smd_jax.runs import checkpoint
from smd_jax.runs.checkpoint import integrity, reading, steps, writing
from smd_jax.runs.checkpoint.integrity import write_checksums
from smd_jax.runs.checkpoint.ownership import FORMAT, OtherFormatError
from smd_jax.runs.jsonable import to_jsonable
from tests.bitwise import assert_bitwise_equal

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
MODEL = ModelConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_positions=32,
)


@dataclass(frozen=True)
class Config:
    """Stands for the resolved configuration of a run."""

    model: ModelConfig = MODEL
    learning_rate: float = 1e-2
    budgets: tuple[int, ...] = (4, 8)
    num_steps: int = 6


CONFIG = Config()


def initial_state():
    """Parameters of two dtypes, optimizer state, step and typed keys of two implementations."""
    params = {"w": jax.random.normal(jax.random.key(0), (8, 4)), "b": jnp.full((4,), 1 / 3, jnp.bfloat16)}
    return {
        "params": params,
        "opt_state": OPTIMIZER.init(params),
        "step": jnp.int32(0),
        "key": jax.random.key(7),
        "row_keys": jax.random.split(jax.random.key(3, impl="rbg"), 8),
    }


@jax.jit
def train_step(state):
    """One noisy step whose result depends on every part of the state."""
    key, now = jax.random.split(state["key"])
    inputs = jax.random.normal(now, (5, 8))

    def loss(params):
        return jnp.sum((inputs @ params["w"] + params["b"].astype(jnp.float32)[None]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return state | {"params": params, "opt_state": opt_state, "step": state["step"] + 1, "key": key}, value


def mesh_of_eight():
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def save(directory, step, state=None, config=CONFIG, position=None, max_to_keep=3):
    state = initial_state() if state is None else state
    position = {"row": step} if position is None else position
    checkpoint.save(directory, step, state, data_position=position, config=config, max_to_keep=max_to_keep)


def flip_one_bit(file: Path):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_round_trip_is_bitwise_with_typed_keys(tmp_path):
    state, _ = train_step(initial_state())
    save(tmp_path, 1, state, position={"epoch": 2, "rows": [3, 1], "name": "train"})
    restored = checkpoint.restore(tmp_path, jax.eval_shape(initial_state), config=CONFIG)
    assert restored.step == 1
    assert restored.data_position == {"epoch": 2, "rows": [3, 1], "name": "train"}
    assert_bitwise_equal(restored.state, state)
    assert str(jax.random.key_impl(restored.state["key"])) == "threefry2x32"
    assert str(jax.random.key_impl(restored.state["row_keys"])) == "rbg"
    draw = jax.random.normal(restored.state["row_keys"][2], (3,))
    assert np.array_equal(draw, jax.random.normal(state["row_keys"][2], (3,)))


def test_restore_puts_arrays_on_the_mesh_of_like(tmp_path):
    state = initial_state()
    save(tmp_path, 1, state)
    mesh = mesh_of_eight()
    specs = {"w": PartitionSpec("data", "tensor"), "row_keys": PartitionSpec(("data", "tensor"))}

    def abstract(path, leaf):
        spec = specs.get(path[-1].key if isinstance(path[-1], jax.tree_util.DictKey) else "", PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    like = jax.tree_util.tree_map_with_path(abstract, state)
    restored = checkpoint.restore(tmp_path, like, config=CONFIG).state
    assert_bitwise_equal(restored, state)
    jax.tree.map(lambda got, wanted: got.sharding == wanted.sharding or pytest.fail(str(got.sharding)), restored, like)
    assert restored["params"]["w"].addressable_shards[0].data.shape == (2, 2)
    assert len(restored["row_keys"].sharding.device_set) == 8


def test_sharded_state_returns_to_one_device(tmp_path):
    sharding = NamedSharding(mesh_of_eight(), PartitionSpec("data", "tensor"))
    weights = jax.device_put(jnp.arange(32.0).reshape(8, 4), sharding)
    save(tmp_path, 1, {"w": weights})
    like = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    restored = checkpoint.restore(tmp_path, like, config=CONFIG).state["w"]
    assert restored.devices() == {jax.devices()[0]}
    assert np.array_equal(restored, np.arange(32.0).reshape(8, 4))


def test_numpy_leaves_stay_on_the_host(tmp_path):
    save(tmp_path, 1, {"counts": np.array([1, 2**40])})
    restored = checkpoint.restore(tmp_path, {"counts": np.zeros(2, np.int64)}, config=CONFIG).state["counts"]
    assert isinstance(restored, np.ndarray)
    assert restored.dtype == np.int64
    assert restored.tolist() == [1, 2**40]


def test_only_the_newest_are_kept(tmp_path):
    for step in (2, 4, 6, 8):
        save(tmp_path, step, {"x": jnp.float32(step)}, max_to_keep=2)
    assert checkpoint.all_steps(tmp_path) == [6, 8]
    assert checkpoint.latest_step(tmp_path) == 8
    like = {"x": jnp.float32(0)}
    assert checkpoint.restore(tmp_path, like, config=CONFIG).state["x"] == 8
    assert checkpoint.restore(tmp_path, like, config=CONFIG, step=6).state["x"] == 6
    with pytest.raises(FileNotFoundError, match=r"expected one of the steps \[6, 8\].*got 4"):
        checkpoint.restore(tmp_path, like, config=CONFIG, step=4)


def test_a_deletion_that_is_killed_leaves_no_checkpoint_that_does_not_load(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        # The process is killed before a file of a checkpoint is deleted, or after some of them are.
        for module in (steps, writing):
            patch.setattr(module, "delete_gone", lambda directory: None)
        for step in (3, 6):
            save(tmp_path, step, {"x": jnp.float32(step)}, max_to_keep=1)
        assert checkpoint.all_steps(tmp_path) == [6] and list(tmp_path.glob("deleted/3/*"))
        checkpoint.discard_after(tmp_path, 0)
    assert checkpoint.all_steps(tmp_path) == [] and {path.name for path in tmp_path.glob("deleted/*")} == {"3", "6"}
    # Steps of the same numbers are saved and deleted again.
    for step in (3, 6, 9):
        save(tmp_path, step, {"x": jnp.float32(step)}, max_to_keep=1)
    assert checkpoint.all_steps(tmp_path) == [9] and not (tmp_path / "deleted").exists()
    assert checkpoint.restore(tmp_path, {"x": jnp.float32(0)}, config=CONFIG).state["x"] == 9


def test_no_checkpoint_is_said(tmp_path):
    assert checkpoint.latest_step(tmp_path) is None
    assert checkpoint.latest_step(tmp_path / "nowhere") is None
    with pytest.raises(FileNotFoundError, match="expected a checkpoint in .*nowhere; found none"):
        checkpoint.restore(tmp_path / "nowhere", initial_state(), config=CONFIG)
    assert not (tmp_path / "nowhere").exists()


def test_another_configuration_is_refused_field_by_field(tmp_path):
    save(tmp_path, 1)
    other = dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(MODEL, rope_theta=500.0, rope_scaling=LinearRope(2.0)),
        budgets=(4, 9),
    )
    with pytest.raises(ValueError) as caught:
        checkpoint.restore(tmp_path, initial_state(), config=other)
    lines = str(caught.value).splitlines()[1:]
    assert "  model.rope_theta: expected 10000.0, got 500.0" in lines
    assert "  budgets.1: expected 8, got 9" in lines
    assert "  model.rope_scaling.factor: expected (absent), got 2.0" in lines
    assert not any("learning_rate" in line or "budgets.0" in line for line in lines)


def test_another_structure_is_refused_leaf_by_leaf(tmp_path):
    save(tmp_path, 1)
    like = initial_state()
    like["params"] = {"w": jnp.zeros((8, 5)), "extra": jnp.zeros(1)}
    like["key"] = jax.random.key(0, impl="rbg")
    with pytest.raises(ValueError) as caught:
        checkpoint.restore(tmp_path, like, config=CONFIG)
    assert set(str(caught.value).splitlines()[1:]) == {
        "  params/w: expected float32[8, 4], got float32[8, 5]",
        "  params/b: expected bfloat16[4], got (absent)",
        "  params/extra: expected (absent), got float32[1]",
        "  key: expected key<fry>[], got key<rbg>[]",
    }


def test_unfinished_temporary_directory_is_ignored(tmp_path):
    save(tmp_path, 3)
    for name in ("6.orbax-checkpoint-tmp", "6.orbax-checkpoint-tmp-1700000000"):
        shutil.copytree(tmp_path / "3", tmp_path / name)
    assert checkpoint.all_steps(tmp_path) == [3]
    assert checkpoint.restore(tmp_path, initial_state(), config=CONFIG).step == 3
    save(tmp_path, 6)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["3", "6"], "a save clears what was left unfinished"
    assert checkpoint.restore(tmp_path, initial_state(), config=CONFIG).step == 6


def test_a_save_that_fails_leaves_the_older_one(tmp_path, monkeypatch):
    save(tmp_path, 3, {"x": jnp.float32(3)}, max_to_keep=1)

    def full_disk(self, target):
        raise OSError("No space left on device")

    # Orbax finishes a checkpoint by renaming its temporary directory; let exactly that fail.
    monkeypatch.setattr("pathlib.Path.rename", full_disk)
    monkeypatch.setattr("os.rename", lambda *_: full_disk(None, None))
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 6, {"x": jnp.float32(6)}, max_to_keep=1)
    monkeypatch.undo()
    assert checkpoint.all_steps(tmp_path) == [3]
    assert checkpoint.restore(tmp_path, {"x": jnp.float32(0)}, config=CONFIG).state["x"] == 3


def damageable_files(folder: Path) -> list[Path]:
    return sorted(file for item in ("state", "meta") for file in (folder / item).rglob("*") if file.is_file())


@pytest.mark.parametrize("damage", ["delete", "truncate", "flip"])
def test_damage_to_any_file_is_named_and_the_older_one_is_there(tmp_path, damage):
    origin = tmp_path / "origin"
    save(origin, 3)
    save(origin, 6)
    files = damageable_files(origin / "6")
    assert any("/d/" in file.as_posix() for file in files), "expected array data among the files"
    for number, file in enumerate(files):
        directory = tmp_path / str(number)
        shutil.copytree(origin, directory)
        target = directory / file.relative_to(origin)
        if damage == "delete":
            target.unlink()
        elif damage == "truncate":
            target.write_bytes(target.read_bytes()[:-1])
        else:
            flip_one_bit(target)
        with pytest.raises(checkpoint.DamagedCheckpointError, match=r"checkpoint 6 in .*Steps \[3\] remain") as caught:
            checkpoint.restore(directory, initial_state(), config=CONFIG)
        assert file.relative_to(origin / "6").as_posix() in str(caught.value)
    assert checkpoint.restore(directory, initial_state(), config=CONFIG, step=3).step == 3


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "Stale file handle"), ValueError(f"{OS_ERROR}'13'")])
def test_a_disk_that_fails_is_no_damage(tmp_path, monkeypatch, error):
    """The newest would be thrown away, and it may be whole."""
    save(tmp_path, 3)
    save(tmp_path, 6)

    def unreadable(folder: Path, items: Sequence[str], left_out: Sequence[str]) -> None:
        raise error

    monkeypatch.setattr(reading, "check_files", unreadable)
    with pytest.raises(OSError, match=r"expected to read checkpoint 6 in .*; got .*It stays as it is"):
        checkpoint.restore_newest(tmp_path, initial_state(), config=CONFIG)
    monkeypatch.undo()
    assert checkpoint.restore_newest(tmp_path, initial_state(), config=CONFIG).step == 6


def test_a_look_at_settings_and_shapes_reads_no_arrays(tmp_path, monkeypatch):
    save(tmp_path, 3)
    read = list[Path]()
    crc = integrity._crc32
    monkeypatch.setattr(integrity, "_crc32", lambda file: (read.append(file.relative_to(tmp_path / "3")), crc(file))[1])
    checkpoint.check_config(tmp_path, CONFIG)
    checkpoint.check_state(tmp_path, initial_state())
    assert read and all(file.parts[0] == "meta" for file in read)
    flip_one_bit(next(file for file in damageable_files(tmp_path / "3") if "meta" in file.parts))
    with pytest.raises(checkpoint.DamagedCheckpointError, match="meta"):
        checkpoint.check_config(tmp_path, CONFIG)


def test_going_back_needs_the_later_ones_discarded(tmp_path):
    for step in (3, 6, 9):
        save(tmp_path, step, {"x": jnp.float32(step)})
    for step in (4, 9):
        with pytest.raises(ValueError, match=f"expected a step later than 9.*got {step}"):
            save(tmp_path, step, {"x": jnp.float32(0)})
    assert checkpoint.discard_after(tmp_path, 3) == [6, 9]
    assert checkpoint.discard_after(tmp_path, 3) == []
    save(tmp_path, 4, {"x": jnp.float32(4)})
    assert checkpoint.all_steps(tmp_path) == [3, 4]


def test_checkpoint_without_checksums_is_read(tmp_path):
    save(tmp_path, 3)
    (tmp_path / "3" / "checksums.json").unlink()
    assert checkpoint.restore(tmp_path, initial_state(), config=CONFIG).step == 3


def test_a_sharding_that_does_not_fit_is_no_damage(tmp_path):
    save(tmp_path, 1, {"w": jnp.zeros((3, 4))})
    sharding = NamedSharding(mesh_of_eight(), PartitionSpec("data"))
    like = {"w": jax.ShapeDtypeStruct((3, 4), jnp.float32, sharding=sharding)}
    with pytest.raises(ValueError, match="evenly divide|divisible"):
        checkpoint.restore(tmp_path, like, config=CONFIG)


def empty(folder: Path, but: Sequence[str]):
    for path in folder.iterdir():
        if path.name not in but:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def truncate_all(folder: Path):
    for file in damageable_files(folder):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("checksums", [True, False], ids=["with checksums", "killed before its checksums"])
def test_the_newest_that_can_be_read(tmp_path, checksums):
    for step in (3, 6, 9):
        save(tmp_path, step, {"x": jnp.arange(50_000.0) + step})
    like = {"x": jnp.zeros(50_000)}
    assert checkpoint.restore_newest(tmp_path, like, config=CONFIG).damaged == ()
    flip_one_bit(tmp_path / "6" / "meta" / "metadata")
    for file in damageable_files(tmp_path / "9"):
        if "/d/" in file.as_posix():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    if not checksums:
        (tmp_path / "9" / "checksums.json").unlink()
    restored = checkpoint.restore_newest(tmp_path, like, config=CONFIG)
    assert restored.step == 3 and np.array_equal(restored.state["x"], np.arange(50_000.0) + 3)
    assert [line.partition(" in ")[0] for line in restored.damaged] == ["checkpoint 9", "checkpoint 6"]
    assert checkpoint.all_steps(tmp_path) == [3, 6, 9], "reading deletes nothing"
    # Another configuration is no damage: it is refused, not passed over.
    with pytest.raises(checkpoint.OtherConfigError, match="budgets.1"):
        checkpoint.restore_newest(tmp_path, like, config=dataclasses.replace(CONFIG, budgets=(4, 9)))


@pytest.mark.parametrize("left", [(), ("_CHECKPOINT_METADATA",), ("_CHECKPOINT_METADATA", "checksums.json.tmp")])
def test_an_emptied_checkpoint_beside_one_of_ours_is_damaged(tmp_path, left):
    """As a process leaves it that is killed while it deletes, or a power cut."""
    for step in (3, 6, 9):
        save(tmp_path, step)
    for step in (6, 9):
        (tmp_path / str(step) / "checksums.json").rename(tmp_path / str(step) / "checksums.json.tmp")
        empty(tmp_path / str(step), but=left)
    restored = checkpoint.restore_newest(tmp_path, initial_state(), config=CONFIG)
    assert restored.step == 3
    assert restored.damaged == tuple(
        f"checkpoint {step} in {tmp_path} cannot be read: expected state and meta; got {list(left)}" for step in (9, 6)
    )
    assert checkpoint.saved_config(tmp_path) == to_jsonable(CONFIG)
    assert checkpoint.discard_after(tmp_path, 3) == [6, 9]
    save(tmp_path, 6)
    assert checkpoint.restore_newest(tmp_path, initial_state(), config=CONFIG).step == 6


def test_a_delete_that_was_cut_off_anywhere(tmp_path):
    origin = tmp_path / "origin"
    for step in (3, 6):
        save(origin, step, {"x": jnp.float32(step)})
    # In the order in which shutil.rmtree goes: what is in a folder before the folder.
    doomed = [Path(at) / name for at, _, files in os.walk(origin / "6", topdown=False) for name in (*files, "")]
    assert len(doomed) > 10
    for count in range(1, len(doomed)):  # all of them: then there is no step 6
        directory = tmp_path / str(count)
        shutil.copytree(origin, directory)
        for path in doomed[:count]:
            target = directory / path.relative_to(origin)
            target.rmdir() if target.is_dir() else target.unlink()
        restored = checkpoint.restore_newest(directory, {"x": jnp.float32(0)}, config=CONFIG)
        assert (restored.step, len(restored.damaged)) == (3, 1), f"after {count} of {len(doomed)}"


@pytest.mark.parametrize("left", [(), ("_CHECKPOINT_METADATA",)])
def test_an_emptied_checkpoint_with_none_of_ours_beside_it_is_refused(tmp_path, left):
    """Nothing says that it ever was one of ours."""
    save(tmp_path, 6)
    empty(tmp_path / "6", but=left)
    (tmp_path / "3" / "default").mkdir(parents=True)
    with pytest.raises(OtherFormatError, match=r"expected a checkpoint of smd_jax at .*6, with state and"):
        checkpoint.restore_newest(tmp_path, initial_state(), config=CONFIG)


def test_a_checkpoint_of_somebody_else_beside_ours_is_refused(tmp_path):
    save(tmp_path, 3)
    (tmp_path / "6" / "default").mkdir(parents=True)
    with pytest.raises(OtherFormatError, match=r"got \['default'\]"):
        checkpoint.restore_newest(tmp_path, initial_state(), config=CONFIG)


def test_no_checkpoint_can_be_read(tmp_path):
    for step in (3, 6):
        save(tmp_path, step)
        truncate_all(tmp_path / str(step))
    with pytest.raises(
        checkpoint.DamagedCheckpointError, match="up to step 6; got none:\n.*checkpoint 6(.|\n)*ckpoint 3"
    ) as caught:
        checkpoint.restore_newest(tmp_path, initial_state(), config=CONFIG)
    assert "step=" not in str(caught.value), "each is damaged: none of them is one to choose"
    remains = r"cannot be read: .*\. Steps \[3\] remain: choose"
    with pytest.raises(checkpoint.DamagedCheckpointError, match=remains):
        checkpoint.restore(tmp_path, initial_state(), config=CONFIG)
    with pytest.raises(checkpoint.DamagedCheckpointError, match=remains):
        checkpoint.restore_part(tmp_path, initial_state())


def test_another_format_is_refused(tmp_path):
    save(tmp_path, 3)
    save(tmp_path, 6)
    meta = tmp_path / "6" / "meta" / "metadata"
    content = json.loads(meta.read_text())
    assert content["format"] == FORMAT
    meta.write_text(json.dumps(content | {"format": 7, "shards": []}))
    (tmp_path / "6" / "checksums.json").unlink()
    with pytest.raises(OtherFormatError, match=r"expected a checkpoint of format 1 at .*6; got format 7"):
        checkpoint.restore_newest(tmp_path, initial_state(), config=CONFIG)


def test_a_checkpoint_of_somebody_else_is_refused(tmp_path):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(4, args=ocp.args.StandardSave({"w": jnp.zeros(3)}))
    with pytest.raises(
        OtherFormatError,
        match=r"expected a checkpoint of smd_jax at .*4, with state and meta; got .*default",
    ):
        checkpoint.restore_newest(tmp_path, {"w": jnp.zeros(3)}, config=CONFIG)


def test_saving_goes_on_beside_the_updates(tmp_path, monkeypatch):
    update = jax.jit(lambda state: jax.tree.map(lambda x: 2 * x + 1, state), donate_argnums=0)
    state = update({"w": jnp.arange(300_000.0)})
    expected = np.array(state["w"])
    written, go_on = threading.Event(), threading.Event()

    def slow(folder: Path, items: Sequence[str]) -> None:
        assert go_on.wait(60)
        write_checksums(folder, items)
        written.set()

    monkeypatch.setattr(writing, "write_checksums", slow)
    with checkpoint.Writer(tmp_path) as writer:
        writer.save(1, state, data_position={}, config=CONFIG)
        for _ in range(3):
            state = update(state)  # takes the buffers
        assert not written.is_set(), "returned before it was whole"
        go_on.set()
        writer.save(2, state, data_position={}, config=CONFIG)
        assert written.is_set(), "one after the other"
    assert np.array_equal(
        checkpoint.restore(tmp_path, {"w": jnp.zeros(300_000)}, config=CONFIG, step=1).state["w"], expected
    )
    assert checkpoint.all_steps(tmp_path) == [1, 2]


def test_what_fails_beside_the_updates_is_said_at_the_next_look(tmp_path, monkeypatch):
    failed = threading.Event()

    def full_disk(folder: Path, items: Sequence[str]) -> None:
        failed.set()
        raise OSError(28, "No space left on device")

    with checkpoint.Writer(tmp_path) as writer:
        writer.save(1, {"x": jnp.ones(3)}, data_position={}, config=CONFIG)
        writer.wait()
        monkeypatch.setattr(writing, "write_checksums", full_disk)
        writer.save(2, {"x": jnp.ones(3)}, data_position={}, config=CONFIG)
        assert failed.wait(60)
        with pytest.raises(OSError, match=r"checkpoint 2 in .* could not be written \(.*No space left"):
            writer.wait()
        writer.wait()  # said once


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ETIMEDOUT, "Connection timed out"), r"checkpoint 1 in .* could not be written \(.*timed out"),
        (TimeoutError("barrier"), r"expected all processes to write their parts of checkpoint 1 in .*did not: barrier"),
    ],
)
def test_a_disk_that_takes_too_long_is_no_process_that_is_missing(tmp_path, monkeypatch, error, said):
    def late(folder: Path, items: Sequence[str]) -> None:
        raise error

    monkeypatch.setattr(writing, "write_checksums", late)
    with pytest.raises(OSError, match=said):
        checkpoint.save(tmp_path, 1, {"x": jnp.ones(3)}, data_position={}, config=CONFIG)


def test_saved_on_eight_devices_and_read_on_four_and_on_one(tmp_path):
    """Fully sharded, with the optimizer's state and the keys, which lie on all of them."""

    def lay(devices: int, state: Any) -> Any:
        mesh = make_mesh(1, devices, 1, devices=jax.devices()[:devices])
        return shard_tree(state, mesh)

    state = lay(8, train_step(initial_state())[0])
    assert len(state["params"]["w"].sharding.device_set) == 8
    save(tmp_path, 1, state)
    for devices in (4, 1):
        like = lay(devices, initial_state())
        restored = checkpoint.restore_newest(tmp_path, like, config=CONFIG).state
        assert_bitwise_equal(restored, state)
        assert all(len(x.sharding.device_set) == devices for x in jax.tree.leaves(restored))


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"step": 3}, TypeError, "'step' must be an array; got int 3"),
        ({"a": [jnp.zeros(2), None, "text"]}, TypeError, "'a/2' must be an array; got str"),
        ({"a": jnp.zeros((0, 3))}, ValueError, r"'a' must have at least one element; got shape \(0, 3\)"),
    ],
)
def test_state_that_cannot_be_saved(tmp_path, state, error, message):
    with pytest.raises(error, match=message):
        save(tmp_path, 1, state)
    assert checkpoint.all_steps(tmp_path) == []


@pytest.mark.parametrize("position", [{"rows": (1, 2)}, {"row": {1: 2}}])
def test_data_position_must_survive_json(tmp_path, position):
    with pytest.raises(TypeError, match="data_position must come back from JSON unchanged"):
        checkpoint.save(tmp_path, 1, {"x": jnp.zeros(1)}, data_position=position, config=CONFIG)


def test_max_to_keep_below_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match="max_to_keep must be at least 1; got 0"):
        save(tmp_path, 1, max_to_keep=0)
