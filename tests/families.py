"""Tiny configurations of several families, with optional fields of config.json: biases, windows, Gemma's own."""

from dataclasses import replace

from smd_jax.config import LinearRope, ModelConfig
from smd_jax.model.families import FAMILIES
from smd_jax.testing import tiny_model_config

PLAIN = tiny_model_config(qkv_bias=False, tie_embeddings=False)
GEMMA3 = replace(
    tiny_model_config(num_layers=3, qkv_bias=False, head_dim=12, num_kv_heads=1),
    **FAMILIES["gemma3_text"].always,
    query_pre_attn_scalar=20.0,
    rope_theta=1e6,
    rope_scaling=LinearRope(8.0),
    local_rope_theta=1e3,
    sliding_windows=(8, 8, None),
)
FAMILY_CONFIGS: dict[str, ModelConfig] = {
    "llama-bias": replace(PLAIN, qkv_bias=True, o_bias=True, mlp_bias=True),
    "mistral": replace(PLAIN, sliding_windows=(8, 8)),
    "qwen2-window": replace(PLAIN, qkv_bias=True, sliding_windows=(None, 8)),
    "qwen3-bias-window": replace(PLAIN, qkv_bias=True, o_bias=True, qk_norm=True, sliding_windows=(8, None)),
    "gemma3": GEMMA3,
    "gemma3-bias": replace(GEMMA3, qkv_bias=True, o_bias=True, sliding_windows=(), local_rope_theta=None),
}
