"""Writes a tiny random checkpoint of each family below, and its logits, with transformers on torch.

    pip install torch==2.13.0 transformers==5.23.0
    python tests/golden/make_family_logits.py [NAME …]

makes `hf/<name>/` with config.json and safetensors as transformers writes them, and one batch in logits.npz:

    tokens      int32   [3, 24]      rows of 24, 17 and 9 tokens, padded on the left
    valid       bool    [3, 24]      true at real tokens
    positions   int32   [3, 24]      0, 1, … from the first real token on; 0 at padding
    logits      float32 [3, 24, 40]  meaningful at real tokens

Weights are stored in bfloat16; logits are computed from these in float32. tests/model/test_family_logits.py compares.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 0.25,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2],
    "long_factor": [1.5, 3.0],
    "original_max_position_embeddings": 32,
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.75,
}

# Name of a case -> model type and what differs from SIZES.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 6,
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, SLIDING, FULL],
            "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 500.0}},
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0], "rope_theta": 2e6, "tie_word_embeddings": True}),
    "smollm3_window": ("smollm3", {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 6}),
    "phi3": ("phi3", {"sliding_window": 7}),
    "phi4_mini": (
        "phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
        },
    ),
    # All tokens of the batch are under the long factors, because its longest row is longer than 8.
    "phi3_long": (
        "phi3",
        {
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 8},
            "original_max_position_embeddings": 8,
        },
    ),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 1.7,
            "residual_multiplier": 0.22,
            "logits_scaling": 1.3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "ministral": ("ministral", {"sliding_window": 6, "layer_types": [SLIDING, FULL], "head_dim": 8}),
    "arcee": ("arcee", {"rope_parameters": YARN}),
    "ernie4_5": ("ernie4_5", {"use_bias": True, "head_dim": 8}),
    "seed_oss": ("seed_oss", {"attention_bias": True, "head_dim": 8}),
    "gemma": ("gemma", {"head_dim": 8, "num_key_value_heads": 1}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 6,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "head_dim": 8,
        },
    ),
    "qwen3_moe_shares": (
        "qwen3_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "mlp_only_layers": [0],
            "use_sliding_window": True,
            "sliding_window": 7,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "swiglu_limit": 0.5,
            "head_dim": 8,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "llama_dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 8,
            "sliding_window": 14,
            # The longest row has tokens in each of six original contexts.
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 4,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "gemma3_cap": (
        "gemma3_text",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 5,
            "final_logit_softcapping": 3.0,
            "sliding_window": 6,
            "layer_types": [SLIDING, FULL],
        },
    ),
}
# Gemma's norms multiply by one more than what is stored.
ZERO_CENTRED = ("gemma", "gemma2", "gemma3_cap")


def model_of(name: str) -> PreTrainedModel:
    model_type, changes = CASES[name]
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    config._attn_implementation = "eager"
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int) -> None:
    """Draws every parameter, rounded to bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    centre = 0.0 if model.config.model_type in ZERO_CENTRED else 1.0
    for name, parameter in model.named_parameters():
        value = (centre if "norm" in name else 0.0) + 0.25 * torch.randn(parameter.shape, generator=generator)
        parameter.copy_(value.bfloat16().float())


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    valid = np.arange(24)[None, :] >= np.array([[0], [7], [15]])
    return {
        "tokens": np.where(valid, rng.integers(1, 40, (3, 24)), 0).astype(np.int32),
        "valid": valid,
        "positions": np.maximum(np.cumsum(valid, axis=1) - 1, 0).astype(np.int32),
    }


@torch.no_grad()
def logits(model: PreTrainedModel, batch: dict[str, np.ndarray]) -> np.ndarray:
    output = model.eval()(
        input_ids=torch.from_numpy(batch["tokens"]).long(),
        attention_mask=torch.from_numpy(batch["valid"]).long(),
        position_ids=torch.from_numpy(batch["positions"]).long(),
        use_cache=False,
    )
    return output.logits.float().numpy()


def write(name: str, seed: int) -> None:
    model = model_of(name)
    randomise(model, seed)
    batch = inputs()
    batch["logits"] = logits(model, batch)
    directory = HERE / "hf" / name
    shutil.rmtree(directory, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(directory / "logits.npz", **batch)
    size = sum(file.stat().st_size for file in directory.iterdir())
    keys = len(json.loads((directory / "config.json").read_text()))
    print(f"{name}: {size / 1000:.0f} kB, {keys} keys, logits spread {batch['logits'][batch['valid']].std():.2f}")


if __name__ == "__main__":
    for index, case in enumerate(CASES):
        if not sys.argv[1:] or case in sys.argv[1:]:
            write(case, seed=100 + index)
