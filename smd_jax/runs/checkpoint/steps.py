"""The directory of a run's checkpoints: which there are, and what saves that were cut off have left between them."""

from __future__ import annotations

import shutil
from pathlib import Path

import orbax.checkpoint as ocp

# Where a checkpoint is moved before its files are deleted one by one: half a deletion must not look like a checkpoint.
GONE = "deleted"


def all_steps(directory: str | Path) -> list[int]:
    """Steps of the finished checkpoints in `directory`, ascending; unfinished temporary directories do not count."""
    if not Path(directory).is_dir():
        return []
    # Names alone: managers of several processes wait for each other, and one may see a directory before the others.
    return sorted(found.step for found in ocp.path.step.standard_name_format().find_all(Path(directory).resolve()))


def latest_step(directory: str | Path) -> int | None:
    """The newest finished checkpoint in `directory`, None when there is none."""
    return max(all_steps(directory), default=None)


def existing_step(directory: str | Path, step: int | None) -> int:
    """The step, or the newest for None. Raises FileNotFoundError, which names those that there are."""
    steps = all_steps(directory)
    if not steps:
        raise FileNotFoundError(f"expected a checkpoint in {directory}; found none")
    if step is not None and step not in steps:
        raise FileNotFoundError(f"expected one of the steps {steps} in {directory}; got {step}")
    return steps[-1] if step is None else step


def folder_of(directory: str | Path, step: int) -> Path:
    """Where the files of one checkpoint lie."""
    return Path(directory) / str(step)


def unfinished_bytes(directory: str | Path) -> int:
    """Bytes that saves which did not come to their end have left in `directory`; the next save deletes them before it
    writes."""
    files = [file for folder in unfinished(directory) for file in folder.rglob("*")]
    return sum(file.stat().st_size for file in files if file.is_file())


def unfinished(directory: str | Path) -> list[Path]:
    """What the next save deletes: checkpoints that are not whole, and one whose deletion has not ended."""
    return [*Path(directory).glob("*.orbax-checkpoint-tmp*"), *Path(directory).glob(GONE)]


def delete_gone(directory: str | Path) -> None:
    """Deletes what was moved there, by this run or by one that was killed before it could."""
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
