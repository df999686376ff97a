"""The sampler: prompts are read, tokens drawn, keys evicted, and all that a learner must know is recorded.

`rollout` runs a fixed batch as one program, `Engine` keeps the rows of a cache busy with any number of prompts. Both
give a `Trajectory`, the whole message from the sampler to the learner.
"""

from smd_jax.sampler.config import RolloutConfig as RolloutConfig
from smd_jax.sampler.config import cache_bytes as cache_bytes
from smd_jax.sampler.fixed_batch import rollout as rollout
from smd_jax.sampler.engine import Engine as Engine
from smd_jax.sampler.engine import Progress as Progress
from smd_jax.sampler.engine import Stats as Stats
from smd_jax.sampler.engine import Rollout as Rollout
