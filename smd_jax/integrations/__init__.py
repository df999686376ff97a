"""Adapters to other RL libraries. Each is an extra with its own dependency, and the core imports none of them.

`smd_jax.integrations.tunix` trains with the GRPO learner of Tunix (google-tunix).
`smd_jax.integrations.tokamax` converts masks to tokamax's and back.
"""
