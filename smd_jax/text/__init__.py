"""Text: prompts as padded token batches, chat templates, bytes of tokens, and stop strings.

Prompts are left-padded, so that every response of a batch begins at column P.
"""

from smd_jax.text.prompts import PromptBatch as PromptBatch
from smd_jax.text.prompts import Tokenizer as Tokenizer
from smd_jax.text.prompts import encode_prompts as encode_prompts
from smd_jax.text.prompts import decode_completions as decode_completions
from smd_jax.text.prompts import repeat_prompts as repeat_prompts
from smd_jax.text.prompts import eos_token_id as eos_token_id
from smd_jax.text.prompts import pad_token_id as pad_token_id
from smd_jax.text.stop_strings import StopTable as StopTable
from smd_jax.text.stop_strings import compile_stop_strings as compile_stop_strings
from smd_jax.text.tokenizer_file import open_tokenizer as open_tokenizer
