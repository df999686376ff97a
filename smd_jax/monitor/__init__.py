"""Metrics of a run on disk and elsewhere, its completions, and its progress on the terminal.

`smd_jax.monitor.run_plots` draws curves, and `smd_jax.monitor.page` makes a page of curves and shadow masks. Both need
matplotlib, and `import smd_jax.monitor` imports neither.
"""

from smd_jax.monitor.metrics_log import MetricsWriter as MetricsWriter
from smd_jax.monitor.metrics_log import read_metrics as read_metrics
from smd_jax.monitor.loggers import Logger as Logger
from smd_jax.monitor.loggers import TensorBoardLogger as TensorBoardLogger
from smd_jax.monitor.loggers import WandbLogger as WandbLogger
from smd_jax.monitor.completions import CompletionsLog as CompletionsLog
from smd_jax.monitor.completions import SavedMask as SavedMask
from smd_jax.monitor.completions import extract_mask as extract_mask
from smd_jax.monitor.completions import load_masks as load_masks
from smd_jax.monitor.progress import summary_table as summary_table
from smd_jax.monitor.progress import training_progress as training_progress
