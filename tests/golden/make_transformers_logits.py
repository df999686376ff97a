"""Writes tiny random checkpoints and their logits with transformers: the yardstick of tests/model/test_weights.py.

    pip install torch==2.13.0 transformers==5.23.0
    python tests/golden/make_transformers_logits.py

makes, for every case below, `hf/<name>/` with config.json and safetensors as transformers writes them, and logits.npz:

    tokens            int32   [2, 40]      a batch without padding
    logits            float32 [2, 40, 96]
    padded_tokens     int32   [2, 20]      rows of 20 and 13 tokens, padded on the left
    padded_mask       bool    [2, 20]      True at real tokens
    padded_positions  int32   [2, 20]      0, 1, ... from the first real token on; 0 at padding
    padded_logits     float32 [2, 20, 96]  meaningful at real tokens only

Weights are drawn with standard deviation 0.2, biases are not zero and norm scales are not one, so that a tensor put in
the wrong place, or transposed, shows. Rope scaling acts within 40 positions, sliding windows hold 6; the script checks
that both matter. Logits are computed in float32. `qwen2_yarn` and most of those with windows are stored in bfloat16,
`llama3` in shards with an index.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = Path(__file__).parent
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 0.25,
    "original_max_position_embeddings": 16,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
WINDOW = 6
NO_WINDOW = 64  # as long as the context
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}


@dataclass(frozen=True)
class Case:
    name: str
    model: PreTrainedModel
    without: PreTrainedModel | None = None  # the same shapes without rope scaling or windows: its logits must differ
    stored: torch.dtype = torch.float32
    max_shard_size: str = "5GB"


def mistral(window: int) -> PreTrainedModel:
    return MistralForCausalLM(
        MistralConfig(**SHAPE, num_key_value_heads=2, rope_parameters=PLAIN_ROPE, sliding_window=window)
    )


def qwen2(window: int) -> PreTrainedModel:
    """The second layer has a window."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            **SHAPE,
            num_key_value_heads=2,
            rope_parameters=PLAIN_ROPE,
            use_sliding_window=True,
            sliding_window=window,
            max_window_layers=1,
        )
    )


def qwen3(window: int) -> PreTrainedModel:
    """The first layer has a window; biases on all projections of attention."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            **SHAPE,
            num_key_value_heads=2,
            head_dim=8,
            rope_parameters=PLAIN_ROPE,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=window,
            layer_types=["sliding_attention", "full_attention"],
        )
    )


def gemma3(window: int) -> PreTrainedModel:
    """Two layers with a window and a base of RoPE of their own, one that sees all and is stretched."""
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **{**SHAPE, "num_hidden_layers": 3},
            num_key_value_heads=1,
            head_dim=12,
            query_pre_attn_scalar=20,
            rope_parameters=GEMMA3_ROPE,
            sliding_window=window,
            sliding_window_pattern=3,
        )
    )


def cases() -> list[Case]:
    plain = PLAIN_ROPE
    llama3 = {**SHAPE, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    yarn = {**SHAPE, "num_key_value_heads": 1}
    return [
        Case(
            "llama2",
            LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=4, rms_norm_eps=1e-5, rope_parameters=plain)),
        ),
        Case(
            "llama3",
            LlamaForCausalLM(LlamaConfig(**llama3, rope_parameters=LLAMA3_ROPE)),
            LlamaForCausalLM(LlamaConfig(**llama3, rope_parameters=plain)),
            max_shard_size="40KB",
        ),
        Case(
            "qwen2",
            Qwen2ForCausalLM(
                Qwen2Config(
                    **SHAPE,
                    num_key_value_heads=2,
                    tie_word_embeddings=True,
                    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
                )
            ),
        ),
        Case(
            "qwen3",
            Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=12, rope_parameters=plain)),
        ),
        Case(
            "qwen2_yarn",
            Qwen2ForCausalLM(Qwen2Config(**yarn, rope_parameters=YARN_ROPE)),
            Qwen2ForCausalLM(Qwen2Config(**yarn, rope_parameters={"rope_type": "default", "rope_theta": 1000.0})),
            stored=torch.bfloat16,
        ),
        Case(
            "llama_bias",
            LlamaForCausalLM(
                LlamaConfig(**SHAPE, num_key_value_heads=2, rope_parameters=plain, attention_bias=True, mlp_bias=True)
            ),
            stored=torch.bfloat16,
        ),
        Case("mistral", mistral(WINDOW), mistral(NO_WINDOW), stored=torch.bfloat16),
        Case("qwen2_window", qwen2(WINDOW), qwen2(NO_WINDOW), stored=torch.bfloat16),
        Case("qwen3_bias", qwen3(WINDOW), qwen3(NO_WINDOW)),
        Case("gemma3", gemma3(WINDOW), gemma3(NO_WINDOW), stored=torch.bfloat16),
    ]


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int, stored: torch.dtype) -> None:
    """Draws every parameter, rounded to what the file will hold."""
    generator = torch.Generator().manual_seed(seed)
    # Gemma's norms multiply by one more than what is stored.
    norm = 0.0 if isinstance(model, Gemma3ForCausalLM) else 1.0
    for name, parameter in model.named_parameters():
        centre = norm if "norm" in name else 0.0
        value = centre + 0.2 * torch.randn(parameter.shape, generator=generator)
        parameter.copy_(value.to(stored).float())


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: np.ndarray, mask: np.ndarray, positions: np.ndarray) -> np.ndarray:
    output = model.eval()(
        input_ids=torch.from_numpy(tokens).long(),
        attention_mask=torch.from_numpy(mask).long(),
        position_ids=torch.from_numpy(positions).long(),
        use_cache=False,
    )
    return output.logits.float().numpy()


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    mask = np.arange(20)[None, :] >= np.array([[0], [7]])
    return {
        "tokens": rng.integers(0, 96, (2, 40), dtype=np.int32),
        "padded_tokens": np.where(mask, rng.integers(0, 96, (2, 20), dtype=np.int32), 0).astype(np.int32),
        "padded_mask": mask,
        "padded_positions": np.maximum(np.cumsum(mask, axis=1) - 1, 0).astype(np.int32),
    }


def write(case: Case, seed: int) -> None:
    randomise(case.model, seed, case.stored)
    arrays = inputs()
    positions = np.broadcast_to(np.arange(40, dtype=np.int32), (2, 40)).copy()
    arrays["logits"] = logits(case.model, arrays["tokens"], np.ones((2, 40), bool), positions)
    arrays["padded_logits"] = logits(
        case.model, arrays["padded_tokens"], arrays["padded_mask"], arrays["padded_positions"]
    )
    if case.without is not None:
        case.without.load_state_dict(case.model.state_dict())
        other = logits(case.without, arrays["tokens"], np.ones((2, 40), bool), positions)
        difference = np.abs(other - arrays["logits"]).max()
        assert difference > 0.1, f"rope scaling or windows of {case.name} change logits by {difference} only"
    directory = HERE / "hf" / case.name
    shutil.rmtree(directory, ignore_errors=True)
    case.model.to(case.stored).save_pretrained(directory, max_shard_size=case.max_shard_size)
    (directory / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(directory / "logits.npz", **arrays)
    size = sum(file.stat().st_size for file in directory.iterdir())
    spread = arrays["logits"].std()
    print(f"{case.name}: {size / 1000:.0f} kB, {len(list(directory.iterdir()))} files, logits spread {spread:.2f}")


if __name__ == "__main__":
    for index, case in enumerate(cases()):
        write(case, seed=index)
