"""The public helpers for tests: byte tokenizer, random checkpoint, compile counter."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer

from smd_jax.model.weights import load_checkpoint
from smd_jax.testing import (
    BYTE_VOCAB_SIZE,
    byte_tokenizer,
    count_compilations,
    random_params,
    tiny_model_config,
    write_random_checkpoint,
)
from tests.paths import ROOT

TOKENIZER = byte_tokenizer()


@settings(deadline=None)
@given(st.text())
def test_token_ids_are_bytes_and_any_text_round_trips(text: str):
    """Hypothesis also draws constants of the sources: special tokens, whose ids are not bytes."""
    assume(not any(token in text for token in TOKENIZER.all_special_tokens))
    ids = TOKENIZER.encode(text)
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_special_tokens():
    ids = TOKENIZER.encode("<|im_start|>a<|im_end|><|endoftext|>")
    assert ids == [257, 97, 258, 256]
    assert TOKENIZER.decode(ids) == "<|im_start|>a<|im_end|><|endoftext|>"
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "a"
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id) == (256, 258)


def test_chat_template_is_chatml():
    pytest.importorskip("jinja2")
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    text = TOKENIZER.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    conversation = TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert conversation == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"


def test_random_checkpoint_opens_here_and_in_transformers(tmp_path: Path):
    config = write_random_checkpoint(tmp_path, seed=1)
    loaded_config, params = load_checkpoint(tmp_path)
    assert loaded_config == config == tiny_model_config()
    for path, leaf in flatten_dict(random_params(config, seed=1), sep="/").items():
        np.testing.assert_array_equal(flatten_dict(params, sep="/")[path], leaf, err_msg=path)
    hf_config = AutoConfig.from_pretrained(tmp_path)
    assert (hf_config.model_type, hf_config.eos_token_id, hf_config.pad_token_id) == ("qwen2", 258, 256)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "  Größe 数学\t🦊\n\n<|im_start|>"
    assert tokenizer.encode(text) == TOKENIZER.encode(text)
    assert tokenizer.chat_template == TOKENIZER.chat_template and tokenizer.padding_side == "left"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (256, 258, BYTE_VOCAB_SIZE)


def test_vocabulary_must_hold_the_tokenizer(tmp_path: Path):
    with pytest.raises(ValueError, match="at least 259; got 100"):
        write_random_checkpoint(tmp_path, config=tiny_model_config(vocab_size=100))


@pytest.mark.slow
def test_the_documented_command(tmp_path: Path):
    command = [sys.executable, "-m", "smd_jax.testing", str(tmp_path / "model"), "--seed", "3"]
    result = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=True, timeout=120)
    assert "wrote a random decoder" in result.stdout
    assert load_checkpoint(tmp_path / "model")[0] == tiny_model_config()


def test_compilations_are_counted_by_name():
    @jax.jit
    def inner(x):
        return x + 1

    @jax.jit
    def update(x):
        return inner(x) * 2

    three, four = jnp.ones(3), jnp.ones(4)
    warm = jax.jit(lambda x: x - 1)
    warm(three)
    with count_compilations() as counts:
        warm(three)
        update(three)
        update(three)
        assert counts["update"] == 1
        update(four)
        inner(three)
    update(jnp.ones(5))
    assert (counts["update"], counts["inner"], counts["<lambda>"]) == (2, 1, 0)


def test_counting_stops_when_the_block_fails():
    @jax.jit
    def later(x):
        return x + 1

    with pytest.raises(RuntimeError), count_compilations() as counts:
        raise RuntimeError
    later(jnp.ones(3))
    assert counts["later"] == 0
