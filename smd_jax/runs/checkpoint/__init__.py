"""Checkpoints hold everything that a run needs to continue bitwise; orbax writes them atomically, in the background.

One checkpoint is a folder `<directory>/<step>` with two orbax items and one file:

    state            the pytree of arrays: parameters, optimizer state, step counter, typed PRNG keys
    meta             JSON: {"format": 1, "leaves": {path: "dtype[shape]"}, "config": ..., "metadata": ...}
    checksums.json   CRC-32 of every file in the two items

A checkpoint appears when its finished temporary folder is renamed. A run that is killed while it saves leaves the older
checkpoints unchanged.
"""

from smd_jax.runs.checkpoint.errors import DamagedCheckpointError as DamagedCheckpointError
from smd_jax.runs.checkpoint.errors import OtherConfigError as OtherConfigError
from smd_jax.runs.checkpoint.errors import OtherFormatError as OtherFormatError
from smd_jax.runs.checkpoint.errors import OtherStateError as OtherStateError
from smd_jax.runs.checkpoint.files import all_steps as all_steps
from smd_jax.runs.checkpoint.files import latest_step as latest_step
from smd_jax.runs.checkpoint.reading import Restored as Restored
from smd_jax.runs.checkpoint.reading import check_config as check_config
from smd_jax.runs.checkpoint.reading import restore as restore
from smd_jax.runs.checkpoint.reading import restore_part as restore_part
from smd_jax.runs.checkpoint.writing import Writer as Writer
from smd_jax.runs.checkpoint.writing import discard_after as discard_after
