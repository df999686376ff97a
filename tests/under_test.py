"""Eviction policies under test, in one table: a policy with a row in POLICIES gets all tests.

Their constants are small enough for budgets of about 16 keys.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from smd_jax.config import ModelConfig
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import H2O, RKV, TOVA, Dense, KeyDiff, Knorm, Random, Recent, SnapKV, StreamingLLM
from smd_jax.eviction.wrappers import Protect, Pyramid
from smd_jax.learner.forward import replay
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.sampler.fixed_batch import RolloutConfig, rollout_program
from smd_jax.testing import START, byte_tokenizer, random_params, tiny_model_config
from smd_jax.text.prompts import PromptBatch

POLICIES: dict[str, EvictionPolicy] = {
    "Dense": Dense(),
    "Recent": Recent(),
    "StreamingLLM": StreamingLLM(sinks=2),
    "H2O": H2O(),
    "TOVA": TOVA(),
    "SnapKV": SnapKV(window=4, kernel=3),
    "RKV": RKV(window=4, kernel=3),
    "KeyDiff": KeyDiff(),
    "Knorm": Knorm(),
    "Random": Random(),
    "Pyramid": Pyramid(SnapKV(window=4, kernel=3), beta=4.0),
    "Protect": Protect(Knorm(), sinks=2, recent=4),
    "Pyramid of H2O": Pyramid(H2O(), beta=4.0),
    "Protect of StreamingLLM": Protect(StreamingLLM(sinks=2), recent=5),
}

# Without tied embeddings, fresh parameters give logits of unit variance: sampling is neither flat nor certain.
SHAPES: dict[str, ModelConfig] = {
    "MHA": tiny_model_config(vocab_size=768, num_layers=2, num_heads=4, num_kv_heads=4, tie_embeddings=False),
    "GQA": tiny_model_config(vocab_size=768, num_layers=2, num_heads=4, num_kv_heads=2, tie_embeddings=False),
}

make_params = cache(random_params)
replay_jitted = jax.jit(replay, static_argnums=0)


def gap(model: Any, trajectory: Trajectory, mask: Any = None, params: Any = None) -> np.ndarray:
    """|log p_sampler - log p_learner| of the tokens that the policy sampled.

    Args:
      mask: replaces the recorded one, broadcast to its shape, so that one program serves all masks.
      params: `make_params(model.config)` unless given.
    """
    if mask is not None:
        evicted_at = jnp.broadcast_to(mask.evicted_at, trajectory.mask.evicted_at.shape)
        trajectory = trajectory.replace(mask=mask.replace(evicted_at=evicted_at, segments=mask.segments))
    scores = replay_jitted(model, make_params(model.config) if params is None else params, trajectory)
    difference = np.asarray(scores.logprobs) - np.asarray(trajectory.logprobs)
    return np.abs(difference)[np.asarray(trajectory.response_mask)]


# The compiler's defaults, which `tests/conftest.py` turns off.
POLISHED: dict[str, str | bool] = {
    "xla_backend_optimization_level": "3",
    "xla_llvm_disable_expensive_passes": False,
    "xla_cpu_use_fusion_emitters": True,
}


def polished_rollout(
    model: LanguageModel,
    params: Params,
    prompts: PromptBatch,
    key: Any,
    *,
    policy: EvictionPolicy,
    config: RolloutConfig,
) -> Trajectory:
    """`rollout`, compiled with the default options."""
    lowered = rollout_program.lower(model, params, prompts, key, policy=policy, config=config)
    return lowered.compile(POLISHED)(params, prompts, key)


def left_padded(lengths: list[int], width: int, vocab_size: int, seed: int = 0) -> PromptBatch:
    """Random prompts of these lengths; token 0 is the padding and occurs nowhere else."""
    rng = np.random.default_rng(seed)
    valid = np.arange(width)[None, :] >= width - np.array(lengths)[:, None]
    tokens = np.where(valid, rng.integers(1, vocab_size, valid.shape), 0).astype(np.int32)
    return to_prompts(tokens, valid)


def bos_tokenizer(*, chat: bool) -> PreTrainedTokenizerFast:
    """A byte tokenizer that, like Llama's, begins every text with BOS (257), as its chat template does."""
    tokenizer = byte_tokenizer(chat=chat)
    begin = TemplateProcessing(single=f"{START} $A", special_tokens=[(START, 257)])
    tokenizer.backend_tokenizer.post_processor = begin
    assert tokenizer.encode("a", add_special_tokens=True) == [257, ord("a")]
    return tokenizer


def to_prompts(tokens: Any, valid: Any) -> PromptBatch:
    """Converts anything that NumPy accepts."""
    return PromptBatch(jnp.asarray(tokens, jnp.int32), jnp.asarray(valid, bool))


def eviction_times(trajectory: Trajectory) -> np.ndarray:
    """`evicted_at` of the shadow mask, `[batch, layers, kv_heads, T]`."""
    return np.asarray(trajectory.mask.evicted_at)


def records_of(trajectory: Trajectory) -> dict[str, Any]:
    """Arguments of `Trajectory.from_records` for these rows, as another engine would report them."""
    width, valid = trajectory.prompt_width, np.asarray(trajectory.valid)
    tokens, logprobs = np.asarray(trajectory.tokens), np.asarray(trajectory.logprobs)
    evicted_at = eviction_times(trajectory)
    rows = range(len(valid))
    return {
        "prompts": [tokens[row, :width][valid[row, :width]] for row in rows],
        "responses": [tokens[row, width:][valid[row, width:]] for row in rows],
        "logprobs": [logprobs[row, valid[row, width:]] for row in rows],
        "terminated": np.asarray(trajectory.terminated),
        "layers": evicted_at.shape[1],
        "kv_heads": evicted_at.shape[2],
        "evicted_at": [evicted_at[row][..., valid[row]] - valid[row].argmax() for row in rows],
    }
