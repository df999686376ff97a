"""Safetensors files with the umask's mode; safetensors itself makes files that only their owner can read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes the file atomically, with the mode that the umask gives.

    Raises:
      OSError: the file cannot be written.
    """
    new = path.with_name(f"{path.name}.new-{os.getpid()}")
    try:
        new.touch()
        mode = new.stat().st_mode
        save_file(dict(tensors), new, metadata=dict(metadata))
        new.chmod(mode)
        new.replace(path)
    except SafetensorError as error:
        raise OSError(f"{path.name} could not be written: {error}") from error
    finally:
        new.unlink(missing_ok=True)
