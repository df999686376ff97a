"""Seeing a run: its metrics on disk, progress on the terminal, pictures."""

from smd_jax.monitor.metrics_log import MetricsWriter as MetricsWriter
from smd_jax.monitor.metrics_log import read_metrics as read_metrics
from smd_jax.monitor.progress import summary_table as summary_table
from smd_jax.monitor.progress import training_progress as training_progress
