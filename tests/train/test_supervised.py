"""The supervised warm start: layout of prompts and answers, and the loss against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smd_jax.learner.state import init_state
from smd_jax.message.masks import dense_mask, positions
from smd_jax.model.decoder import Decoder
from smd_jax.model.teacher_forced import apply_model
from smd_jax.testing import byte_tokenizer, count_compilations, random_params, tiny_model_config
from smd_jax.train.supervised import cross_entropy, encode_examples, make_supervised_update
from tests.stop_tokenizers import sentencepiece_tokenizer
from tests.under_test import bos_tokenizer

TOKENIZER = byte_tokenizer(chat=False)
MODEL = Decoder(tiny_model_config(max_positions=16))
apply_jitted, loss_jitted = (jax.jit(f, static_argnums=0) for f in (apply_model, cross_entropy))
PAD, EOS = 256, 258
A, B, C, X, Y = b"abcxy"  # token ids are bytes
PROMPTS, ANSWERS = ["abc", "a"], ["x", "xy"]


def examples(width: int = 6):
    return encode_examples(TOKENIZER, PROMPTS, ANSWERS, width=width)


def test_layout_by_hand():
    batch = examples()
    np.testing.assert_array_equal(batch.tokens, [[PAD, A, B, C, X, EOS], [PAD, PAD, A, X, Y, EOS]])
    np.testing.assert_array_equal(batch.valid, [[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    np.testing.assert_array_equal(batch.targets, [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]])
    assert (batch.tokens.dtype, batch.valid.dtype, batch.targets.dtype) == (jnp.int32, jnp.bool_, jnp.bool_)


@pytest.mark.parametrize("chat", [False, True])
def test_the_prompt_begins_with_bos(chat):
    """Unless a chat template has already written BOS. The answer never gets one."""
    batch = encode_examples(bos_tokenizer(chat=chat), ["ab"], ["x"], width=5)
    np.testing.assert_array_equal(batch.tokens, [[PAD, A, B, X, EOS] if chat else [257, A, B, X, EOS]])
    np.testing.assert_array_equal(batch.targets, [[0, 0, 0, 1, 1]])


def test_an_answer_gets_no_leading_space():
    """Sentencepiece tokenizers prepend a space to every text."""
    tokenizer = sentencepiece_tokenizer()
    batch = encode_examples(tokenizer, ["a"], ["b"], width=3)
    assert tokenizer.convert_ids_to_tokens(batch.tokens[0].tolist()) == ["▁a", "b", "</s>"]


def test_an_example_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match=r"expected prompt \+ answer within 4 tokens; example 0 has 5"):
        examples(width=4)


def test_loss_against_numpy():
    params, batch = random_params(MODEL.config), examples()
    logits = apply_jitted(MODEL, params, batch.tokens, positions(batch.valid), dense_mask(batch.valid))
    weights = np.exp(np.asarray(logits, np.float64))
    logprobs = np.log(weights / weights.sum(-1, keepdims=True))
    # The logits of a column are those of the token in the next one.
    targets = [(0, 3, X), (0, 4, EOS), (1, 2, X), (1, 3, Y), (1, 4, EOS)]
    expected = -np.mean([logprobs[target] for target in targets])
    np.testing.assert_allclose(loss_jitted(MODEL, params, batch), expected, rtol=1e-5)


def test_the_loss_falls_and_the_update_compiles_once():
    optimizer = optax.adam(1e-2)
    update = make_supervised_update(MODEL, optimizer)
    first = state = init_state(random_params(MODEL.config), optimizer, jax.random.key(0))
    losses = []
    with count_compilations() as counts:
        for _ in range(20):
            state, loss = update(state, examples())
            losses.append(float(loss))
    assert counts["update"] == 1
    assert int(state.step) == 20
    np.testing.assert_allclose(losses[0], np.log(MODEL.config.vocab_size), rtol=0.05)  # untrained: uniform
    assert losses[-1] < 0.5
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.params)), "the old buffers are donated"
