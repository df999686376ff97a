"""Meshes and shardings of one host or many, and collectives between processes."""

from smd_jax.devices.sharding import make_mesh as make_mesh
from smd_jax.devices.sharding import batch_sharding as batch_sharding
from smd_jax.devices.sharding import shard_batch as shard_batch
from smd_jax.devices.sharding import shard_tree as shard_tree
from smd_jax.devices.process_rows import data_shards as data_shards
