"""`python -m smd_jax.train` is `smd-train`."""

from smd_jax.commands.train import main

main()
