"""Attention kernels with explicit and shadow masks. They depend on JAX alone, never on `smd_jax`."""
