"""Language models: the protocol (`LanguageModel`), a decoder for the families in `smd_jax.model.families` with its
weights on disk, low-rank adapters (LoRA), and attention.

Pure functions of a plain parameter pytree, which take the attention as an argument.
"""

from smd_jax.model.decoder import Decoder as Decoder
from smd_jax.model.protocol import LanguageModel as LanguageModel
from smd_jax.model.protocol import ModelShape as ModelShape
from smd_jax.model.protocol import Attend as Attend
from smd_jax.model.protocol import Params as Params
from smd_jax.model.protocol import LayerRun as LayerRun
from smd_jax.model.protocol import AtLayer as AtLayer
from smd_jax.model.teacher_forced import apply_model as apply_model
from smd_jax.model.teacher_forced import hidden_states as hidden_states
from smd_jax.model.attention import AttentionConfig as AttentionConfig
from smd_jax.model.attention import BlockSizes as BlockSizes
from smd_jax.model.attention import attend as attend
from smd_jax.model.modules import from_nnx as from_nnx
from smd_jax.model.modules import from_equinox as from_equinox
from smd_jax.model.weights import load_checkpoint as load_checkpoint
from smd_jax.model.weights import save_checkpoint as save_checkpoint
from smd_jax.model.stacked_params import stack_params as stack_params
from smd_jax.model.stacked_params import unstack_params as unstack_params
from smd_jax.model.lora import LoraConfig as LoraConfig
from smd_jax.model.lora import add_lora as add_lora
from smd_jax.model.lora import base_params as base_params
from smd_jax.model.lora import merge_lora as merge_lora
from smd_jax.model.peft_format import load_peft as load_peft
from smd_jax.model.peft_format import save_peft as save_peft
from smd_jax.model.query_centers import measure_query_centers as measure_query_centers
from smd_jax.model.value_head import add_value_head as add_value_head
from smd_jax.model.value_head import drop_value_head as drop_value_head
