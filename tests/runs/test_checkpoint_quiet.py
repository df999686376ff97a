"""A save that fails is one error: the tracebacks of orbax's threads are not printed, those of other code are."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from breaking.surroundings import FAILING_SAVE
from smd_jax.runs.checkpoint import errors


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "said"), [("size", "File too large"), ("files", "expected 32 free file handles")])
def test_a_failing_save_prints_nothing_but_its_error(tmp_path, limit, said):
    words = [sys.executable, "-c", FAILING_SAVE, str(tmp_path), limit]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr == ""
    assert (
        said in done.stdout and "Earlier checkpoints are as they were" in done.stdout and done.stdout.count("\n") == 1
    )


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
