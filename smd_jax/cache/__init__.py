"""The KV cache of a rollout: slots, compression between segments, and quantised slots."""

from smd_jax.cache.slots import KVCache as KVCache
from smd_jax.cache.slots import LayerCache as LayerCache
from smd_jax.cache.compression import Compression as Compression
