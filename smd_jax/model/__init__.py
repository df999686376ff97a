"""Language models: the decoder (Llama, Qwen2, Qwen3 by configuration), its attention, and its weights on disk.

Pure functions of a plain parameter pytree, which take the attention mask as an argument.
"""

from smd_jax.model.decoder import Decoder as Decoder
from smd_jax.model.decoder import Params as Params
from smd_jax.model.attention import BlockSizes as BlockSizes
from smd_jax.model.attention import attend as attend
from smd_jax.model.weights import load_checkpoint as load_checkpoint
from smd_jax.model.weights import save_checkpoint as save_checkpoint
from smd_jax.model.value_head import add_value_head as add_value_head
from smd_jax.model.value_head import drop_value_head as drop_value_head
