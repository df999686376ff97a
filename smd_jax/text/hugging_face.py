"""What the library takes from Hugging Face's packages, imported without their advice.

transformers advises to install PyTorch, and in a notebook tqdm to install ipywidgets; the library needs neither. Only
the first import prints this advice, so that later imports of transformers print none. No environment variable is set,
and no other message is lost.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _without_advice() -> Iterator[None]:
    # A filter: the level of this logger is set by transformers during its import.
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


with _without_advice():
    from huggingface_hub import snapshot_download as snapshot_download
    from transformers import AutoTokenizer as AutoTokenizer
    from transformers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
