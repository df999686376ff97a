"""The sampler: reads prompts, samples tokens, evicts keys, and records everything that the learner needs.

`rollout` runs a fixed batch as one program, `Engine` keeps the rows of a cache busy with any number of prompts, and
`converse` samples conversations with an environment. All give a `Trajectory`, the whole message from the sampler to the
learner.
"""

from smd_jax.sampler.config import RolloutConfig as RolloutConfig
from smd_jax.sampler.config import cache_bytes as cache_bytes
from smd_jax.sampler.config import statistics_bytes as statistics_bytes
from smd_jax.sampler.fixed_batch import rollout as rollout
from smd_jax.sampler.engine import Engine as Engine
from smd_jax.sampler.engine import Progress as Progress
from smd_jax.sampler.engine import Stats as Stats
from smd_jax.sampler.engine import Rollout as Rollout
from smd_jax.sampler.conversation_loop import converse as converse
from smd_jax.sampler.conversation_loop import ConversationConfig as ConversationConfig
from smd_jax.sampler.conversation_loop import Conversed as Conversed
from smd_jax.sampler.conversation_loop import Reply as Reply
from smd_jax.sampler.conversation_loop import Respondent as Respondent
from smd_jax.sampler.compaction import CompactionConfig as CompactionConfig
from smd_jax.sampler.compaction import CompactingRespondent as CompactingRespondent
from smd_jax.sampler.compaction import converse_compacting as converse_compacting
