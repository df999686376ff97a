"""`python -m smd_jax.train` is `smd-train`."""

from smd_jax.commands.console_scripts import smd_train

smd_train()
