"""The KV cache of a rollout: its slots, their compression between two segments, and slots of a few bits.

`budget + buffer` slots per layer and KV head, whatever the length of the response.
"""

from smd_jax.cache.slots import KVCache as KVCache
from smd_jax.cache.slots import LayerCache as LayerCache
from smd_jax.cache.compression import Compression as Compression
