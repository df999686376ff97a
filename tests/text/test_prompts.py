"""Left padding, groups, decoding by mask, and the errors of prompts and vocabularies."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as TokenizersTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from smd_jax.tasks.task import prompt_length
from smd_jax.testing import byte_tokenizer
from smd_jax.text.prompts import (
    PromptBatch,
    Tokenizer,
    check_prompt_batch,
    check_vocabulary,
    decode_completions,
    encode_continuation,
    encode_prompt,
    encode_prompts,
    repeat_each,
    repeat_prompts,
)
from smd_jax.text.stop_strings import compile_stop_strings

TOKENIZER = byte_tokenizer()
A, B, C, D = b"abcd"  # their ids: a token is a byte
PAD, BOS, EOS = 256, 257, 258


def test_a_transformers_tokenizer_is_a_tokenizer():
    assert isinstance(TOKENIZER, Tokenizer)


def test_prompts_end_in_the_last_column():
    batch = encode_prompts(TOKENIZER, ["abc", "d"], width=4)
    np.testing.assert_array_equal(batch.tokens, [[PAD, A, B, C], [PAD, PAD, PAD, D]])
    np.testing.assert_array_equal(batch.valid, [[0, 1, 1, 1], [0, 0, 0, 1]])
    assert (batch.tokens.dtype, batch.valid.dtype) == (jnp.int32, jnp.bool_)


def test_padding_and_eos_may_be_one_token():
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    batch = encode_prompts(tokenizer, [f"a{tokenizer.eos_token}", "b"], width=3)
    np.testing.assert_array_equal(batch.tokens, [[EOS, A, EOS], [EOS, EOS, B]])
    np.testing.assert_array_equal(batch.valid, [[0, 1, 1], [0, 0, 1]])


@settings(deadline=None)
@given(texts=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6))
def test_valid_tokens_are_the_prompts(texts):
    batch = encode_prompts(TOKENIZER, texts, width=32)
    assert decode_completions(TOKENIZER, batch.tokens, batch.valid) == texts
    assert np.all(np.diff(np.asarray(batch.valid, int), axis=1) >= 0)  # padding, then tokens


def framing_tokenizer(template: str):
    """The byte tokenizer with a post-processor, as tokenizers saved with add_bos_token and add_eos_token have."""
    tokenizer = byte_tokenizer(chat=False)
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|im_start|>", "<|im_end|>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


@pytest.mark.parametrize(
    ("template", "text", "tokens"),
    [
        ("$A", "a", [A]),
        ("$A <|im_end|>", "a", [A]),
        ("<|im_start|> $A", "a", [BOS, A]),
        ("<|im_start|> $A <|im_end|>", "a", [BOS, A]),
        ("<|im_start|> $A <|im_end|>", "", [BOS]),
        ("<|im_start|> $A <|im_end|>", "a<|im_end|>", [BOS, A, EOS]),  # EOS of the text itself
        ("<|im_start|> $A", "<|im_start|>a", [BOS, A]),  # once, not twice
        ("<|im_start|> $A <|im_end|>", "<|im_start|>", [BOS]),
    ],
)
def test_special_tokens_are_added_only_in_front(template, text, tokens):
    tokenizer = framing_tokenizer(template)
    assert encode_prompt(tokenizer, text, add_special_tokens=True) == tokens
    assert encode_prompts(tokenizer, [text], add_special_tokens=True).tokens.tolist() == [tokens]
    assert encode_prompt(tokenizer, "ab", add_special_tokens=False) == [A, B]
    if text:
        assert prompt_length({"prompt": text}, tokenizer) == len(tokens)


def test_a_continuation_that_begins_with_newlines_gets_no_blank():
    """A tokenizer that puts a blank in front of every text, and has a token of two newlines."""
    vocabulary = {"<pad>": 0, "\u2581": 1, "\u2581a": 2, "a": 3, "\n": 4, "\n\n": 5, "\n\n\n": 6}
    words = TokenizersTokenizer(models.Unigram([(name, -float(index)) for name, index in vocabulary.items()], unk_id=0))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    words.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
    for text in ("a", "\na", "\n\na"):
        ids = [*tokenizer.encode("a", add_special_tokens=False), *encode_continuation(tokenizer, text)]
        assert tokenizer.decode(ids) == f"a{text}"


def test_rows_of_a_group_are_adjacent():
    groups = repeat_prompts(encode_prompts(TOKENIZER, ["ab", "c"]), 2)
    np.testing.assert_array_equal(groups.tokens, [[A, B], [A, B], [PAD, C], [PAD, C]])
    np.testing.assert_array_equal(groups.valid, [[1, 1], [1, 1], [0, 1], [0, 1]])
    assert repeat_each(["ab", "c"], 2) == decode_completions(TOKENIZER, groups.tokens, groups.valid)


def test_decoding_reads_the_mask_and_skips_special_tokens():
    tokens = np.array([[A, B, EOS, D], [A, B, C, D]])
    mask = np.array([[1, 1, 1, 0], [0, 1, 1, 1]], bool)
    assert decode_completions(TOKENIZER, tokens, mask) == ["ab", "bcd"]
    assert decode_completions(TOKENIZER, jnp.asarray(tokens), jnp.zeros_like(mask)) == ["", ""]


def test_ids_without_a_token_have_no_text():
    """A few are expected; many give a warning."""
    tokens = np.array([[A, 300, B, 1_000_000], [C] * 4, [D] * 4, [A] * 4, [B] * 4, [C] * 4])
    assert decode_completions(TOKENIZER, tokens, np.ones(tokens.shape, bool))[:2] == ["ab", "cccc"]
    tokens = np.array([[A, 300, B, C]])
    with pytest.warns(UserWarning, match="got 1 of 4 without one, such as 300"):
        assert decode_completions(TOKENIZER, tokens, tokens > 0) == ["abc"]
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<later>"])
    later = np.array([[A, tokenizer.convert_tokens_to_ids("<later>")]])
    assert decode_completions(tokenizer, later, later > 0) == ["a<later>"]


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, "at least one prompt; got none"),
        (["a", ""], {}, "prompt 1 is empty"),
        (["a", "bcde"], {"width": 3}, r"at most 3 tokens \(the prompt width; .*\); prompt 1 has 4"),
        (["abcde"], {"max_positions": 4}, r"at most 4 tokens \(the model's context; .*\); prompt 0 has 5"),
        (["a"], {"width": 9, "max_positions": 8}, "width from 1 to the model's context of 8 tokens; got 9"),
        (["a"], {"width": 0}, "^expected a width from 1; got 0$"),
    ],
)
def test_bad_prompts(texts, options, message):
    with pytest.raises(ValueError, match=message):
        encode_prompts(TOKENIZER, texts, **options)


def test_a_single_text_raises():
    """Its characters would become the prompts."""
    with pytest.raises(TypeError, match="expected a list of texts; got one text, 'abc'"):
        encode_prompts(TOKENIZER, "abc")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1, 2]], "expected prompts as a PromptBatch, as encode_prompts gives; got list"),
        (PromptBatch(jnp.ones((1, 2)), jnp.ones((1, 2), bool)), "got float32 and bool"),
        (PromptBatch(jnp.ones((1, 2), int), jnp.ones((1, 2), int)), r"int32 and int32.*attention_mask.astype\(bool"),
    ],
)
def test_wrong_prompt_batches_raise(prompts: Any, message: str):
    with pytest.raises(TypeError, match=message):
        check_prompt_batch(prompts)


def test_a_missing_pad_token_is_named():
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match=r"with a pad_token; got .*<\|im_end\|>.*; set tokenizer.pad_token"):
        encode_prompts(tokenizer, ["a"])


def test_an_embedding_has_the_largest_token_id_and_little_padding():
    for vocab_size in (259, 264, 259 + 129):
        check_vocabulary(TOKENIZER, vocab_size)
    words = models.WordLevel({"a": 0, "b": 100}, unk_token="a")
    sparse = PreTrainedTokenizerFast(tokenizer_object=TokenizersTokenizer(words))
    for tokenizer, vocab_size, message in (
        (
            TOKENIZER,
            255,
            "at least 256 rows, because the tokenizer has 259 tokens with ids up to 255; got vocab_size 255",
        ),
        (TOKENIZER, 259 + 130, "259 to 388 rows for a tokenizer of 259 tokens; got vocab_size 389"),
        (sparse, 64, "at least 101 rows, because the tokenizer has 2 tokens with ids up to 100"),
    ):
        with pytest.raises(ValueError, match=message):
            check_vocabulary(tokenizer, vocab_size)


@pytest.mark.parametrize("special", [True, False])
def test_an_added_token_may_be_outside_the_embedding(special: bool):
    """Gemma 3 1B: 262,145 tokens for 262,144 rows, the last one for images."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<image_soft_token>"], special_tokens=special)
    check_vocabulary(tokenizer, 259)
    assert compile_stop_strings(tokenizer, ["stop"], 259).next_state.shape == (5, 259)
    with pytest.raises(ValueError, match="an embedding of at least 256 rows"):
        check_vocabulary(tokenizer, 255)
