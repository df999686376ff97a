"""Imports Hugging Face's packages without their installation advice.

transformers advises to install PyTorch, and tqdm to install ipywidgets in a notebook; the library needs neither. Only
the first import prints this advice. No environment variable is set, and other messages are printed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _without_advice() -> Iterator[None]:
    # A filter, because transformers sets the level of this logger during its import.
    logger = logging.getLogger("transformers")

    def is_needed(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger.addFilter(is_needed)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="IProgress not found")
            yield
    finally:
        logger.removeFilter(is_needed)


@contextmanager
def errors_only() -> Iterator[None]:
    """Silences the log messages of transformers below errors."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


with _without_advice():
    from huggingface_hub import snapshot_download as snapshot_download
    from huggingface_hub.errors import StrictDataclassError as StrictDataclassError
    from transformers import CONFIG_MAPPING as CONFIG_MAPPING
    from transformers import AutoTokenizer as AutoTokenizer
    from transformers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
