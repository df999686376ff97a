"""Checkpoints: everything that a run needs to continue bitwise, written atomically with orbax, beside the run.

One checkpoint is a directory `<directory>/<step>` with two orbax items and a file beside them:

    state            the pytree of arrays: parameters, optimizer state, step counter, typed PRNG keys
    meta             JSON: {"format": 1, "leaves": {path: "dtype[shape]"}, "data_position": ..., "config": ...,
                     "noted": ..., "machine": ...}
    checksums.json   CRC-32 of every file of the two

The `meta` item is read first, so that a run under another configuration, or a state of another shape, is refused with
names before any array is read. A checkpoint appears by renaming a finished temporary directory: a run that is killed
while it saves leaves the older checkpoints as they were.

    main thread    rollout 8 ─► update ─► save: arrays to the host ─► rollout 9 ─► update …
    beside it                                                   └─► files ─► rename ─► checksums

The checksums are written after the rename and compared before anything is read. A checkpoint without them, from a run
killed in between, is complete and is read.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.options import MultiprocessingOptions

from smd_jax.processes import all_or_none, gather_json, is_first
from smd_jax.train.checkpoint_folder import FORMAT, ITEMS, check_format, check_keys, check_not_emptied, check_ours
from smd_jax.train.checkpoint_leaves import check_leaves, leaf_table, placed
from smd_jax.train.checksums import check_files, check_there, names_in, write_checksums
from smd_jax.train.disk import OS_ERROR, failure, is_trouble
from smd_jax.train.jsonable import Json, config_differences, to_jsonable

# Where a checkpoint is moved before its files are deleted one by one: half a deletion must not look like a checkpoint.
_GONE = "deleted"
META = ("meta",)
_Read = TypeVar("_Read")


class OtherConfigError(ValueError):
    """A checkpoint was made under another configuration than the one that would go on from it."""


class DamagedCheckpointError(RuntimeError):
    """A checkpoint is there but cannot be read; the message says which step and why, and of a checkpoint that was asked
    for also what remains."""


@dataclass(frozen=True)
class Restored:
    """What `restore` gives back.

    Attributes:
      step: the step under which the checkpoint was saved.
      state: pytree with the structure, shapes, dtypes and shardings of `like`.
      data_position: the JSON object given to `save`.
      noted, machine: what was given to `save`, as JSON; None also for checkpoints from before there was such a thing.
      damaged: one line on each later checkpoint that cannot be read, the newest first; see `restore_newest`.
    """

    step: int
    state: Any
    data_position: dict[str, Json]
    noted: Json
    machine: Json = None
    damaged: tuple[str, ...] = ()


class Writer:
    """Writes the checkpoints of one run beside its steps. `save` returns when the arrays are on the host, so that an
    update may take their buffers; one checkpoint is written at a time.

    Args:
      directory: where the checkpoints of one run lie; made when the first is saved.
      max_to_keep: the newest that stay, at least 1.
    """

    def __init__(self, directory: str | Path, max_to_keep: int = 3) -> None:
        if max_to_keep < 1:
            raise ValueError(f"max_to_keep must be at least 1; got {max_to_keep}")
        self.directory = Path(directory)
        self._max_to_keep = max_to_keep
        self._manager: ocp.CheckpointManager | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: tuple[int, Future[None]] | None = None

    def save(
        self,
        step: int,
        state: Any,
        *,
        data_position: Mapping[str, Any],
        config: object,
        noted: object = None,
        machine: Mapping[str, Json] | None = None,
    ) -> None:
        """Begins to write checkpoint `step`, after which all but the newest `max_to_keep` are deleted. Arguments and
        errors are those of the function `save`; an OSError may come from a later call."""
        # Whatever can be refused is refused before a file is written.
        meta = {
            "format": FORMAT,
            "leaves": leaf_table(state),
            "data_position": _checked_position(data_position),
            "config": to_jsonable(config),
            "noted": to_jsonable(noted, "noted"),
            "machine": to_jsonable(machine, "machine"),
        }
        self.wait()
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        # What fails in one of several processes, such as the list of checksums that the first one writes, ends all.
        with all_or_none():
            _check_later(self.directory, step)
            with _failure_named(self.directory, step):
                self._manager = self._manager or _manager(self.directory, self._max_to_keep)
                self._manager.save(step, args=items)
            self._writing = step, self._thread.submit(self._finish, self._manager, step)
            if jax.process_count() > 1:
                # Beside it the processes wait for each other, which must not come between those of the next step.
                self.wait()

    def wait(self) -> None:
        """Waits until the last checkpoint is whole, and raises OSError, as `save`, if it could not be written."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        step, written = writing
        try:
            with _failure_named(self.directory, step):
                written.result()
        except OSError:
            self._manager = None  # which would raise once more when it is closed
            raise

    def discard_after(self, step: int) -> list[int]:
        """The function `discard_after` of this directory."""
        self.wait()
        self._close_manager()  # it remembers which checkpoints there are
        return discard_after(self.directory, step)

    def close(self) -> None:
        """Waits, and raises, as `wait`."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._close_manager()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _finish(self, manager: ocp.CheckpointManager, step: int) -> None:
        manager.wait_until_finished()
        if jax.process_index() == 0:
            write_checksums(_folder(self.directory, step), ITEMS)
            _delete_gone(self.directory)

    def _close_manager(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()


def save(
    directory: str | Path,
    step: int,
    state: Any,
    *,
    data_position: Mapping[str, Any],
    config: object,
    noted: object = None,
    machine: Mapping[str, Json] | None = None,
    max_to_keep: int = 3,
) -> None:
    """Writes checkpoint `step`, waits until it is whole, and then deletes all but the newest `max_to_keep`.

    Args:
      directory: where the checkpoints of one run lie; made when absent.
      step: number of finished updates. Later than every step already there.
      state: pytree whose leaves are jax or numpy arrays with at least one element; typed PRNG keys are allowed.
      data_position: what the data source needs to continue, as JSON values with string keys.
      config: the resolved configuration, see `to_jsonable`. A run that continues must have the same.
      noted: settings that are kept, and that a run which continues may change.
      machine: what the run stands on, see `smd_jax.train.machine`; None: nothing is kept of it.
      max_to_keep: how many checkpoints stay, at least 1.

    Raises:
      ValueError: `step` is not later than the newest one; an empty array; `max_to_keep` below 1.
      TypeError: a leaf of `state` is no array, or `data_position`, `config` or `noted` does not fit into JSON.
      OSError: the disk is full, or fails; in one line. The checkpoints that were there are as they were.
    """
    with Writer(directory, max_to_keep) as writer:
        writer.save(step, state, data_position=data_position, config=config, noted=noted, machine=machine)


def restore(
    directory: str | Path,
    like: Any,
    *,
    config: object,
    step: int | None = None,
    may_differ: Sequence[str] = (),
) -> Restored:
    """Reads a checkpoint into the structure and onto the devices of `like`.

    Args:
      directory: as given to `save`.
      like: pytree of arrays or `jax.ShapeDtypeStruct`; a jax leaf is placed by the leaf's `sharding` (none: the first
        device), a numpy leaf stays on the host. Dtypes and shapes must be those that were saved.
      config: the configuration of the run that continues; it must equal the saved one.
      step: which checkpoint; None means the newest.
      may_differ: dotted names of fields (with all below them) that may differ, such as `("num_steps",)`.

    Raises:
      FileNotFoundError: no checkpoint in `directory`, or none with this `step`.
      OtherConfigError, OtherStateError: the configuration or the structure of the state differs; the message lists
        every difference. Both are ValueErrors, as is a sharding that does not divide an array.
      OtherFormatError: this is no checkpoint of this library, or one of a later version.
      DamagedCheckpointError: the checkpoint cannot be read, or is empty beside others of this library. Older ones are
        untouched and are named.
    """
    step = _existing_step(directory, step)
    with _others_named(directory, step):
        return _restored(directory, like, config, step, may_differ)


def _restored(
    directory: str | Path, like: Any, config: object, step: int, may_differ: Sequence[str], checked: bool = False
) -> Restored:
    """`restore`, of a checkpoint that is there; where it is damaged without a word on others.

    Args:
      checked: its files are known to be as they were written.
    """
    meta = _read_meta(directory, step, () if checked else ITEMS)
    # Both before any array is read: they name the difference where orbax would fail on a shape.
    _check_config(meta["config"], to_jsonable(config), may_differ)
    check_leaves(meta["leaves"], leaf_table(like))
    target = jax.tree.map(placed, like)
    # The sharding fits, so what fails here is the file: of a checkpoint whose checksums were never written.
    with _DamageNamed(directory, step):
        state = _read_item(directory, step, ocp.args.Composite(state=ocp.args.StandardRestore(target)))["state"]
    return Restored(step, state, meta["data_position"], meta.get("noted"), meta.get("machine"))


def restore_newest(directory: str | Path, like: Any, *, config: object, may_differ: Sequence[str] = ()) -> Restored:
    """Reads the newest checkpoint that can be read; arguments and errors are those of `restore`. The later ones, which
    are damaged, stay as they are, see `discard_after`. Of several processes all must call it, and all read the same.

    Raises:
      DamagedCheckpointError: none can be read.
      OSError: the disk fails, which says nothing of what lies on it.
      OtherProcessError: another process sees less of the checkpoint than the first.
    """
    if jax.process_count() == 1:
        restored, damaged = _newest_readable(
            directory, lambda step: _restored(directory, like, config, step, may_differ)
        )
    else:
        step, damaged = _agreed_step(directory)
        # None of them may go back to an older one by itself.
        with all_or_none():
            restored = _restored(directory, like, config, step, may_differ, checked=True)
    return dataclasses.replace(restored, damaged=tuple(damaged))


def _agreed_step(directory: str | Path) -> tuple[int, list[str]]:
    """The newest checkpoint whose files are as they were written, and a line on each later one. The first process reads
    them all; the others take its word, because every host would read the checkpoints of all, and might come to another
    step."""

    def whole(step: int) -> tuple[int, list[str]]:
        _read_meta(directory, step)
        return step, names_in(_folder(directory, step), ITEMS)

    found = None
    with all_or_none():
        if is_first():
            found = _newest_readable(directory, whole)
    (step, names), damaged = gather_json(found)[0]
    # A host may not have heard yet of files that others wrote.
    with all_or_none(), _DamageNamed(directory, step):
        check_there(_folder(directory, step), names)
    return step, damaged


def saved_config(directory: str | Path) -> Json:
    """The configuration of the newest checkpoint that can be read.

    Raises:
      FileNotFoundError, OtherFormatError, DamagedCheckpointError: as `restore_newest`.
    """
    return _newest_readable(directory, lambda step: _read_meta(directory, step, META))[0]["config"]


def restore_part(directory: str | Path, like: dict[str, Any], step: int | None = None) -> dict[str, Any]:
    """Reads some fields of a checkpoint's state, such as its parameters without the optimizer's state.

    Args:
      like: for each field a pytree as `restore` takes it: `{"params": ...}`.
      step: which checkpoint; None means the newest.

    Raises:
      FileNotFoundError, DamagedCheckpointError: as `restore`.
      ValueError: these fields have another structure in the checkpoint.
    """
    step = _existing_step(directory, step)
    with _others_named(directory, step):
        meta = _read_meta(directory, step)
    saved = {name: what for name, what in meta["leaves"].items() if name.partition("/")[0] in like}
    check_leaves(saved, leaf_table(like))
    target = jax.tree.map(placed, like)
    part = ocp.args.PyTreeRestore(
        item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
    )
    return _read_item(directory, step, ocp.args.Composite(state=part))["state"]


def all_steps(directory: str | Path) -> list[int]:
    """Steps of the finished checkpoints in `directory`, ascending; unfinished temporary directories do not count."""
    if not Path(directory).is_dir():
        return []
    # Names alone: managers of several processes wait for each other, and one may see a directory before the others.
    return sorted(found.step for found in ocp.path.step.standard_name_format().find_all(Path(directory).resolve()))


def latest_step(directory: str | Path) -> int | None:
    """The newest finished checkpoint in `directory`, None when there is none."""
    return max(all_steps(directory), default=None)


def unfinished_bytes(directory: str | Path) -> int:
    """Bytes that saves which did not come to their end have left in `directory`; the next save deletes them before it
    writes."""
    files = [file for folder in _unfinished(directory) for file in folder.rglob("*")]
    return sum(file.stat().st_size for file in files if file.is_file())


def check_config(directory: str | Path, config: object) -> None:
    """Raises OtherConfigError if the newest checkpoint, if there is one, is of another configuration: as
    `restore_newest` does, before anything is read that takes long. It waits for no other process."""
    if latest_step(directory) is not None:
        _check_config(saved_config(directory), to_jsonable(config), ())


def check_state(directory: str | Path, like: Any) -> None:
    """Raises OtherStateError if the newest checkpoint, if there is one, is of other arrays than `like`: as
    `restore_newest` does, before any array is read. It waits for no other process."""
    if latest_step(directory) is not None:
        meta, _ = _newest_readable(directory, lambda step: _read_meta(directory, step, META))
        check_leaves(meta["leaves"], leaf_table(like))


def discard_after(directory: str | Path, step: int) -> list[int]:
    """Deletes the checkpoints later than `step` and returns their steps.

    For a run that goes back, by choice or because the newest checkpoint is damaged: `save` refuses to write behind a
    later one, since that one would be taken for the newest at the next resume.
    """
    later = [found for found in all_steps(directory) if found > step]
    if later:
        with _manager(directory, max_to_keep=None) as manager:
            for found in later:
                manager.delete(found)
        if jax.process_index() == 0:
            _delete_gone(directory)
    return later


def _checked_position(position: Mapping[str, Any]) -> dict[str, Json]:
    """The position, proven to come back from JSON as it went in (a tuple or an integer key would not)."""
    plain = dict(position)
    text = json.dumps(plain, allow_nan=False)
    if json.loads(text) != plain:
        raise TypeError(f"data_position must come back from JSON unchanged; {plain!r} comes back as {text}")
    return plain


def _check_config(saved: Json, given: Json, may_differ: Sequence[str]) -> None:
    lines = config_differences(saved, given, may_differ)
    if lines:
        raise OtherConfigError(
            "the checkpoint was made under another configuration; expected is what it holds, got is what this run "
            "has:\n  " + "\n  ".join(lines)
        )


def _check_later(directory: str | Path, step: int) -> None:
    # orbax answers False, without a word, when asked to save behind its newest step.
    newest = latest_step(directory)
    if newest is not None and step <= newest:
        raise ValueError(
            f"expected a step later than {newest}, the newest in {directory}; got {step}. To go back to an earlier "
            f"step call discard_after(directory, step) first"
        )


def _existing_step(directory: str | Path, step: int | None) -> int:
    steps = all_steps(directory)
    if not steps:
        raise FileNotFoundError(f"expected a checkpoint in {directory}; found none")
    if step is not None and step not in steps:
        raise FileNotFoundError(f"expected one of the steps {steps} in {directory}; got {step}")
    return steps[-1] if step is None else step


def _newest_readable(directory: str | Path, read: Callable[[int], _Read]) -> tuple[_Read, list[str]]:
    """What `read` gives of the newest checkpoint for which it raises no DamagedCheckpointError, and those errors."""
    damaged = list[str]()
    last = _existing_step(directory, None)
    for step in sorted(all_steps(directory), reverse=True):
        try:
            return read(step), damaged
        except DamagedCheckpointError as error:
            damaged.append(str(error))
    raise DamagedCheckpointError(
        f"expected a checkpoint that can be read, up to step {last}; got none:\n" + "\n".join(damaged)
    )


def _read_meta(directory: str | Path, step: int, check: Sequence[str] = ITEMS) -> dict[str, Any]:
    """What lies beside the arrays of a checkpoint.

    Args:
      check: the items whose files must be as they were written, for which all of them are read.
    """
    check_ours(_folder(directory, step), [_folder(directory, other) for other in all_steps(directory) if other != step])
    with _DamageNamed(directory, step):
        check_not_emptied(_folder(directory, step))
        check_files(_folder(directory, step), check, left_out=[item for item in ITEMS if item not in check])
        # By each process for itself: where one fails, and never comes to read, nobody waits for it.
        with _reader(directory, alone=True) as manager:
            meta = manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        check_keys(meta)
    check_format(meta, _folder(directory, step))
    return meta


def _read_item(directory: str | Path, step: int, args: ocp.args.Composite) -> Any:
    with _reader(directory) as manager:
        return manager.restore(step, args=args)


class _DamageNamed:
    """Whatever reading a damaged file raises becomes one error that says which checkpoint it is, and why. Where the
    disk fails, or a permission is missing, nothing is known of the file: an OSError says so."""

    def __init__(self, directory: str | Path, step: int) -> None:
        self.directory = directory
        self.step = step

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What the checks here, JSON and orbax raise for files that are missing, cut off or changed; for an array that
        # is cut off, orbax raises no other class than Exception itself.
        if not isinstance(error, ValueError | KeyError | OSError) and kind is not Exception:
            return
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if error is not None and is_trouble(error):
            raise OSError(
                f"expected to read checkpoint {self.step} in {self.directory}; got {reason}. It stays as it is: try "
                "again, or move it away to go on from an older one"
            ) from error
        raise DamagedCheckpointError(f"checkpoint {self.step} in {self.directory} cannot be read: {reason}") from error


@contextmanager
def _others_named(directory: str | Path, step: int) -> Iterator[None]:
    """Adds to a DamagedCheckpointError which other steps there are. For a caller who can name one: what looks for the
    newest that can be read tries them all by itself."""
    try:
        yield
    except DamagedCheckpointError as error:
        others = [found for found in all_steps(directory) if found != step]
        advice = f"Steps {others} remain: choose one with step=..." if others else "No other step remains"
        raise DamagedCheckpointError(f"{error}. {advice}") from error.__cause__


@contextmanager
def _failure_named(directory: str | Path, step: int) -> Iterator[None]:
    """What orbax raises when the disk fails becomes one line, and what is half written makes room."""
    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).addFilter(_said_once)  # which adds the same filter no second time
    try:
        yield
    # Files that orbax writes by itself say OSError; TensorStore says ValueError, and the system's code in its text.
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) and OS_ERROR not in str(error):
            raise
        # As far as TensorStore has stopped: its threads may write a file more, which the next manager deletes.
        for unfinished in _unfinished(directory):
            shutil.rmtree(unfinished, ignore_errors=True)
        # Orbax's own, after it has waited for others. A disk in a network has a number for what it took too long for.
        if isinstance(error, TimeoutError) and error.errno is None:
            said = f"expected all processes to write their parts of checkpoint {step} in {directory}; one did not: "
            raise OSError(f"{said}{error}") from error
        there = all_steps(directory)
        kept = f"Checkpoints {there} are as they were" if there else "There is no checkpoint yet"
        raise OSError(f"{failure(f'checkpoint {step} in {directory}', directory, error)}. {kept}") from error


def _said_once(record: logging.LogRecord) -> bool:
    """Keeps orbax's threads from printing the error of the disk, which is raised, each with its traceback."""
    error = record.exc_info[1] if record.exc_info else None
    return OS_ERROR not in f"{record.getMessage()} {error}"


def _folder(directory: str | Path, step: int) -> Path:
    return Path(directory) / str(step)


def _unfinished(directory: str | Path) -> list[Path]:
    """What the next save deletes: checkpoints that are not whole, and one whose deletion has not ended."""
    return [*Path(directory).glob("*.orbax-checkpoint-tmp*"), *Path(directory).glob(_GONE)]


def _delete_gone(directory: str | Path) -> None:
    """Deletes what was moved there, by this run or by one that was killed before it could."""
    shutil.rmtree(Path(directory) / _GONE, ignore_errors=True)


def _manager(directory: str | Path, max_to_keep: int | None) -> ocp.CheckpointManager:
    if jax.process_index() == 0:
        _delete_gone(directory)  # a step of the same number could not be moved there
    options = ocp.CheckpointManagerOptions(
        # None keeps all: `discard_after` chooses for itself.
        preservation_policy=ocp.checkpoint_managers.LatestN(max_to_keep),
        enable_async_checkpointing=True,
        # What a killed save left behind is removed.
        cleanup_tmp_directories=True,
        todelete_subdir=_GONE,
    )
    return ocp.CheckpointManager(Path(directory).resolve(), options=options)


def _reader(directory: str | Path, alone: bool = False) -> ocp.CheckpointManager:
    """A manager that reads. Of several processes all must read together, unless each is to do it `alone`."""
    own = jax.process_index()
    who = MultiprocessingOptions(own, {own}) if alone else MultiprocessingOptions()
    # Looking for checkpoints must not make a directory.
    options = ocp.CheckpointManagerOptions(create=False, enable_async_checkpointing=False, multiprocessing_options=who)
    return ocp.CheckpointManager(Path(directory).resolve(), options=options)
