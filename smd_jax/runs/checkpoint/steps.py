"""The directory of a run's checkpoints: its steps, the remains of interrupted saves, and paths that orbax misreads."""

from __future__ import annotations

import shutil
from pathlib import Path

import orbax.checkpoint as ocp

# A checkpoint is moved here before its files are deleted, so that an interrupted deletion leaves no partial checkpoint.
GONE = "deleted"

# Orbax merges the files of a checkpoint by a glob over its whole path.
GLOB = "*?["
# TensorStore reads a backslash as a slash.
BACKSLASH = "\\"


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


def folder_of(directory: str | Path, step: int) -> Path:
    """The folder of one checkpoint."""
    return Path(directory) / str(step)


def unfinished(directory: str | Path) -> list[Path]:
    """Folders that the next save deletes: incomplete checkpoints, and checkpoints whose deletion was interrupted."""
    return [*Path(directory).glob("*.orbax-checkpoint-tmp*"), *Path(directory).glob(GONE)]


def unfinished_bytes(directory: str | Path) -> int:
    """Size of the `unfinished` folders."""
    files = [file for folder in unfinished(directory) for file in folder.rglob("*")]
    return sum(file.stat().st_size for file in files if file.is_file())


def delete_gone(directory: str | Path) -> None:
    """Deletes the checkpoints that were moved to `GONE`, also by an earlier process."""
    shutil.rmtree(Path(directory) / GONE, ignore_errors=True)


def delete_oldest(directory: str | Path, keep: int) -> None:
    """Deletes all finished checkpoints but the newest `keep`."""
    gone = Path(directory) / GONE
    for step in all_steps(directory)[:-keep]:
        gone.mkdir(exist_ok=True)
        target = gone / str(step)
        if target.exists():
            shutil.rmtree(target)
        folder_of(directory, step).rename(target)
    delete_gone(directory)


def check_writable_path(directory: str | Path) -> None:
    """Raises ValueError for a path that orbax reads as a pattern: its checkpoints would be empty."""
    _check_characters(directory, GLOB + BACKSLASH, "orbax reads it as a pattern and would write empty checkpoints")


def check_readable_path(directory: str | Path) -> None:
    """Raises ValueError for a path that TensorStore reads as another one."""
    _check_characters(directory, BACKSLASH, "TensorStore would look for checkpoints elsewhere")


def _check_characters(directory: str | Path, refused: str, why: str) -> None:
    path = str(Path(directory).resolve())
    if found := sorted(set(path) & set(refused)):
        raise ValueError(
            f"expected a path without {' '.join(refused)} for checkpoints; got {' '.join(found)} in {path:.300}: "
            f"{why}. Choose or rename the directory"
        )
    if any("\ud800" <= character <= "\udfff" for character in path):
        raise ValueError(f"expected a path in UTF-8 for checkpoints; got {path!r:.300}")
