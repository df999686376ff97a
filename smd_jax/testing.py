"""Helpers for tests without downloaded weights: a tiny model, a byte tokenizer, a random checkpoint, a compile counter.

    python -m smd_jax.testing DIR

writes a small random Qwen2-style checkpoint with a byte-level tokenizer and a chat template into DIR. transformers and
`smd_jax.model.weights.load_checkpoint` open it.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jaxtyping import Array, Key
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from smd_jax.config import FloatName, ModelConfig, RopeScaling, check_seed
from smd_jax.message.masks import NEVER, Segments, ShadowMask
from smd_jax.model.decoder import Decoder
from smd_jax.model.weights import save_checkpoint
from smd_jax.text.hugging_face import PreTrainedTokenizerFast
from smd_jax.text.token_bytes import byte_alphabet

PAD = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
BYTE_VOCAB_SIZE = 256 + 3
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_model_config(
    *,
    vocab_size: int = 264,
    hidden_size: int = 32,
    intermediate_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    max_positions: int = 4096,
    rope_theta: float = 10_000.0,
    rope_scaling: RopeScaling | None = None,
    norm_eps: float = 1e-6,
    qkv_bias: bool = True,
    qk_norm: bool = False,
    tie_embeddings: bool = True,
    dtype: FloatName = "float32",
) -> ModelConfig:
    """A Qwen2-style decoder of 27,000 parameters; its vocabulary is that of `byte_tokenizer`, rounded up to 8s."""
    return ModelConfig(**locals())  # arguments and fields have the same names


def random_evictions(
    tokens: int,
    segments: Segments,
    *,
    batch: int = 1,
    layers: int = 1,
    kv_heads: int = 1,
    padding: tuple[int, ...] = (),
    seed: int = 0,
) -> ShadowMask:
    """The mask of a sampler that keeps `segments.budget` random keys at every boundary, without running one.

    Args:
      tokens: columns of prompt and response. padding: columns of padding at the left of each row.
    """
    rng = np.random.default_rng(seed)
    evicted_at = np.full((batch, layers, kv_heads, tokens), NEVER, np.int32)
    for row, width in enumerate(padding):
        evicted_at[row, :, :, :width] = 0
    for column in range(segments.first, tokens, segments.length):
        visible = evicted_at[..., :column] > column
        # argsort twice gives ranks. Evicted keys rank last, because 2.0 exceeds every random number.
        rank = np.argsort(np.argsort(np.where(visible, rng.random(visible.shape), 2.0), axis=-1), axis=-1)
        evicted_at[..., :column][visible & (rank >= segments.budget)] = column
    return ShadowMask(jnp.asarray(evicted_at)).with_segments((segments,))


def random_params(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
    """Freshly initialised float32 parameters for `Decoder(config).apply({"params": params}, ...)`."""
    check_seed("seed", seed)
    return _initialised(Decoder(config), jax.random.key(seed))


# At module level, so that a configuration is traced once.
@partial(jax.jit, static_argnums=0)
def _initialised(model: Decoder, key: Key[Array, ""]) -> dict[str, Any]:
    # No parameter's shape depends on the length.
    one = jnp.zeros((1, 1), jnp.int32)
    mask = jnp.ones((1, 1, 1, 1, 1), bool)
    variables: Any = model.init(key, one, one, mask)
    return variables["params"]


def byte_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """A transformers tokenizer whose ids 0 to 255 are the bytes of UTF-8, so that any text round-trips.

    Qwen's special tokens follow: `<|endoftext|>` pads (256); `<|im_start|>` (257) and `<|im_end|>` (258, also EOS)
    frame the messages of the ChatML template. The tokenizer adds no special tokens and pads on the left. `chat=False`
    omits the template.

    Saved with a Qwen2 model and opened with AutoTokenizer, it becomes a Qwen2Tokenizer with the same ids, which like
    every Qwen tokenizer first composes accents (Unicode NFC).
    """
    # Without merges every byte is a token, and special tokens get the next ids.
    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, START, END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[START],
        padding_side="left",
        # Clean-up would remove blanks from decoded text.
        clean_up_tokenization_spaces=False,
        chat_template=CHATML if chat else None,
    )


def write_random_checkpoint(
    directory: str | Path, *, seed: int = 0, config: ModelConfig | None = None, dtype: FloatName = "float32"
) -> ModelConfig:
    """Writes config.json, model.safetensors and the files of `byte_tokenizer`.

    Args:
      directory: an existing checkpoint in it is replaced.
      seed: of the parameters.
      config: the shape, with at least `BYTE_VOCAB_SIZE` rows of vocabulary; None: `tiny_model_config()`.
      dtype: of the stored parameters.

    Returns:
      The configuration.

    Raises:
      ValueError: the vocabulary is too small for the tokenizer.
      FileExistsError: `directory` holds files that belong to no checkpoint.
    """
    config = tiny_model_config() if config is None else config
    if config.vocab_size < BYTE_VOCAB_SIZE:
        raise ValueError(f"the byte tokenizer needs vocab_size of at least {BYTE_VOCAB_SIZE}; got {config.vocab_size}")
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer = byte_tokenizer()
        tokenizer.save_pretrained(temporary)
        token_ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        # `save_checkpoint` copies the ids of special tokens from these files.
        for name in ("config.json", "generation_config.json"):
            (Path(temporary) / name).write_text(json.dumps(token_ids))
        save_checkpoint(directory, random_params(config, seed), config, dtype=dtype, tokenizer_from=temporary)
    return config


@contextmanager
def count_compilations() -> Iterator[Counter[str]]:
    """Counts how often each jitted function is compiled inside the block, by the function's name.

        with count_compilations() as counts:
            for batch in batches:
                state = update(state, batch)
        assert counts["update"] == 1

    Functions that were compiled before the block are not counted, nor are those inlined into another jitted function.
    """
    counts: Counter[str] = Counter()

    def listen(event: str, duration_secs: float, **tags: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":  # reported for every compiled program
            counts[re.sub(r"\w+\((.*)\)", r"\1", str(tags["fun_name"]))] += 1  # `jit(update)` -> `update`

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def main() -> None:
    """Command line, see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m smd_jax.testing", description="Write a small random checkpoint.")
    parser.add_argument("directory", help="where to write it")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters")
    arguments = parser.parse_args()
    config = write_random_checkpoint(arguments.directory, seed=arguments.seed)
    print(f"wrote a random decoder ({config.num_layers} layers, width {config.hidden_size}) to {arguments.directory}")


if __name__ == "__main__":
    main()
