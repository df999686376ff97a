"""Several end tokens: in the sampler, the drawable tokens and the commands."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.commands.errors import UserError
from smd_jax.commands.model_source import end_token_ids, shown_tokens
from smd_jax.commands.train import main
from smd_jax.eviction.policies import Knorm
from smd_jax.message.drawable_tokens import DrawableTokens
from smd_jax.message.sampling import forbid
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.fixed_batch import rollout
from smd_jax.testing import byte_tokenizer, tiny_model_config, write_random_checkpoint
from tests.command_errors import error_of
from tests.under_test import left_padded, make_params

TINY = tiny_model_config(vocab_size=16, num_layers=1, tie_embeddings=False)
ENDING = RolloutConfig(max_new_tokens=40, budget=8, buffer=4, eos_token_id=(3, 1), pad_token_id=1)
PROMPTS = left_padded([6, 2, 5, 6, 1, 4], 6, 16)


def with_generation_config(folder: Path, **values: object) -> Path:
    """Writes a generation_config.json like those on the Hub, and returns the folder."""
    text = {"bos_token_id": 256, "do_sample": True, "temperature": 0.7, "transformers_version": "4.37.0", **values}
    (folder / "generation_config.json").write_text(json.dumps(text))
    return folder


def test_no_end_token_before_the_minimum_length():
    logits = jnp.zeros((2, 4))
    got = forbid(logits, (1, 3), jnp.array([False, True]))
    np.testing.assert_array_equal(got, [[0, 0, 0, 0], [0, -np.inf, 0, -np.inf]])
    drawable = DrawableTokens(None, min_new_tokens=1, eos_token_id=(1, 3))
    np.testing.assert_array_equal(drawable.to_boolean(4, jnp.arange(2))[0], [[1, 0, 1, 0], [1, 1, 1, 1]])
    config = replace(ENDING, min_new_tokens=9)
    ended = rollout(Decoder(TINY), make_params(TINY), PROMPTS, jax.random.key(2), policy=Knorm(), config=config)
    assert not np.isin(ended.response[:, :9], (1, 3)).any() and ended.terminated.any()


def test_invalid_end_token_ids():
    with pytest.raises(ValueError, match=r"expected eos_token_id as one id, several, or None without any; got \(\)"):
        replace(ENDING, eos_token_id=())
    with pytest.raises(ValueError, match="expected eos_token_id from 0 to 15, the model's vocabulary; got 16"):
        config = replace(ENDING, eos_token_id=(3, 16))
        rollout(Decoder(TINY), make_params(TINY), PROMPTS, jax.random.key(2), policy=Knorm(), config=config)


@pytest.mark.parametrize(
    ("config_ids", "ends"), [(258, (258,)), (256, (256, 258)), ([258, 256], (256, 258)), ([], (258,)), (None, (258,))]
)
def test_end_tokens_of_generation_config_and_tokenizer(config_ids: object, ends: tuple[int, ...], tmp_path: Path):
    assert end_token_ids(with_generation_config(tmp_path, eos_token_id=config_ids), byte_tokenizer(), ()) == ends
    assert end_token_ids(tmp_path, byte_tokenizer(), ("<|im_start|>",)) == (257,)


def test_default_and_named_end_tokens(tmp_path: Path):
    tokenizer = byte_tokenizer()
    assert end_token_ids(tmp_path, tokenizer, ()) == (258,)
    assert end_token_ids(with_generation_config(tmp_path), tokenizer, ()) == (258,)
    assert shown_tokens(tokenizer, (256, 258)) == "<|endoftext|> (256), <|im_end|> (258)"
    with pytest.raises(
        UserError, match=r"as tokens of the tokenizer, whose special tokens are .*im_end.*; got \['</s>'"
    ):
        end_token_ids(tmp_path, tokenizer, ("<|im_end|>", "</s>"))


def test_a_dry_run_prints_end_tokens_and_special_stops_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_random_checkpoint(tmp_path / "model", config=tiny_model_config(num_layers=1, max_positions=2048))
    with_generation_config(tmp_path / "model", eos_token_id=[258, 256])
    flags = ["grpo", "--model", f"{tmp_path}/model", "--dataset", "reasoning_gym:basic_arithmetic", "--dataset-size"]
    flags += ["20", "--budget", "96", "--output-dir", f"{tmp_path}/run", "--dry-run"]
    main(flags)
    assert "a completion ends with: <|endoftext|> (256), <|im_end|> (258)" in capsys.readouterr().out
    message = error_of([*flags, "--stop", "<|im_end|>"], capsys)
    assert "special token '<|im_end|>'" in message and "eos_token_id is --eos-token" in message
