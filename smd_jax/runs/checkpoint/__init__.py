"""Checkpoints hold everything that a run needs to continue bitwise; orbax writes them atomically, in the background.

One checkpoint is a folder `<directory>/<step>` with two orbax items and one file:

    state            the pytree of arrays: parameters, optimizer state, step counter, typed PRNG keys
    meta             JSON: {"format": 1, "leaves": {path: "dtype[shape]"}, "data_position": ..., "config": ...,
                     "noted": ..., "machine": ...}
    checksums.json   CRC-32 of every file in the two items

A checkpoint appears when its finished temporary folder is renamed. A run that is killed while it saves leaves the older
checkpoints unchanged.

    writing       save, and the Writer that saves during the steps of a run
    reading       restore, restore_newest, and checks that read no arrays
    steps         steps and paths of a directory
    integrity     verification after a save, checksums before a restore
    ownership, leaves, errors     refusals and their messages
"""

from smd_jax.runs.checkpoint.errors import DamagedCheckpointError as DamagedCheckpointError
from smd_jax.runs.checkpoint.leaves import OtherStateError as OtherStateError
from smd_jax.runs.checkpoint.ownership import OtherFormatError as OtherFormatError
from smd_jax.runs.checkpoint.reading import OtherConfigError as OtherConfigError
from smd_jax.runs.checkpoint.reading import Restored as Restored
from smd_jax.runs.checkpoint.reading import check_config as check_config
from smd_jax.runs.checkpoint.reading import check_state as check_state
from smd_jax.runs.checkpoint.reading import restore as restore
from smd_jax.runs.checkpoint.reading import restore_newest as restore_newest
from smd_jax.runs.checkpoint.reading import restore_part as restore_part
from smd_jax.runs.checkpoint.reading import saved_config as saved_config
from smd_jax.runs.checkpoint.steps import all_steps as all_steps
from smd_jax.runs.checkpoint.steps import latest_step as latest_step
from smd_jax.runs.checkpoint.steps import unfinished_bytes as unfinished_bytes
from smd_jax.runs.checkpoint.writing import Writer as Writer
from smd_jax.runs.checkpoint.writing import discard_after as discard_after
from smd_jax.runs.checkpoint.writing import save as save
