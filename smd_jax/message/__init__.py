"""The data that the sampler sends to the learner: trajectories, masks, sampling support, recorded evictions."""

from smd_jax.message.trajectory import Trajectory as Trajectory
from smd_jax.message.masks import ShadowMask as ShadowMask
from smd_jax.message.masks import KeyInterval as KeyInterval
from smd_jax.message.masks import Segments as Segments
from smd_jax.message.masks import dense_mask as dense_mask
from smd_jax.message.masks import head_mask as head_mask
from smd_jax.message.sampling import SamplingConfig as SamplingConfig
from smd_jax.message.quantization import QuantConfig as QuantConfig
from smd_jax.message.query_centers import load_query_centers as load_query_centers
from smd_jax.message.drawable_tokens import DrawableTokens as DrawableTokens
from smd_jax.message.draws import EvictionDraws as EvictionDraws
from smd_jax.message.engine_records import MementoBlocks as MementoBlocks
from smd_jax.message.engine_records import memento_evictions as memento_evictions
from smd_jax.message.engine_records import Round as Round
from smd_jax.message.engine_records import tensorrt_llm_evictions as tensorrt_llm_evictions
from smd_jax.message.packing import Packing as Packing
from smd_jax.message.packing import shared_beginning as shared_beginning
