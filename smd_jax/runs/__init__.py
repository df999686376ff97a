"""Training runs in a folder: loop until done, checkpoints, resume, metrics.jsonl, signals."""

from smd_jax.runs.run import train as train
from smd_jax.runs.run_config import RunConfig as RunConfig
from smd_jax.runs.run_config import Objective as Objective
from smd_jax.runs.settings import split_settings as split_settings
