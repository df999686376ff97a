"""Eviction policies for a fixed-size cache.

A policy is a frozen dataclass that scores keys, higher = keep. It sees only a `CacheView`, so a policy from outside the
library works like these. Data about the past is a `Statistic`, which the policy declares and the sampler keeps.
"""

from smd_jax.eviction.base import CacheView as CacheView
from smd_jax.eviction.base import EvictionPolicy as EvictionPolicy
from smd_jax.eviction.base import at_least_float32 as at_least_float32
from smd_jax.eviction.base import newest_slots as newest_slots
from smd_jax.eviction.base import protect as protect
from smd_jax.eviction.statistics import CacheShape as CacheShape
from smd_jax.eviction.statistics import Observation as Observation
from smd_jax.eviction.statistics import Statistic as Statistic
from smd_jax.eviction.statistics import ReceivedAttention as ReceivedAttention
from smd_jax.eviction.statistics import NewestQueries as NewestQueries
from smd_jax.eviction.policies import Dense as Dense
from smd_jax.eviction.policies import Recent as Recent
from smd_jax.eviction.policies import StreamingLLM as StreamingLLM
from smd_jax.eviction.policies import H2O as H2O
from smd_jax.eviction.policies import TOVA as TOVA
from smd_jax.eviction.policies import SnapKV as SnapKV
from smd_jax.eviction.policies import RKV as RKV
from smd_jax.eviction.policies import KeyDiff as KeyDiff
from smd_jax.eviction.policies import Knorm as Knorm
from smd_jax.eviction.policies import Random as Random
from smd_jax.eviction.policies import TriAttention as TriAttention
from smd_jax.eviction.policies import LearnedGate as LearnedGate
from smd_jax.eviction.wrappers import Protect as Protect
from smd_jax.eviction.wrappers import Pyramid as Pyramid
from smd_jax.eviction.wrappers import OnTokens as OnTokens
from smd_jax.message.query_centers import QueryCenters as QueryCenters
from smd_jax.message.spans import TokenSpans as TokenSpans
from smd_jax.message.gate import AttentionGate as AttentionGate
from smd_jax.message.gate import Gate as Gate
from smd_jax.message.gate import LinearGate as LinearGate
from smd_jax.message.gate import add_gate as add_gate
from smd_jax.message.gate import drop_gate as drop_gate
