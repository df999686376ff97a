"""config.json: defaults and nulls as in transformers' configuration classes; errors that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoConfig

from smd_jax.model.families import FAMILIES, ModelType
from smd_jax.model.hf_config import model_config_from_hf
from smd_jax.model.hf_fields import shown

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "max_position_embeddings": "max_positions",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
every_family = pytest.mark.parametrize("model_type", FAMILIES)


@every_family
@pytest.mark.parametrize("absent", [(), *[(key,) for key in SMALL], tuple(SMALL)], ids=lambda keys: ",".join(keys))
def test_absent_keys_are_transformers_defaults(model_type: ModelType, absent: tuple[str, ...]):
    given = {key: value for key, value in SMALL.items() if key not in absent}
    if FAMILIES[model_type].rope:  # stretched, and with it the context
        given["rope_parameters"] = {"rope_type": "default"}
    expected = AutoConfig.for_model(model_type, **given)
    config = model_config_from_hf({"model_type": model_type, **given})
    assert {key: getattr(config, field) for key, field in FIELDS.items()} == {
        key: getattr(expected, key) for key in FIELDS
    }
    assert config.head_dim == (
        getattr(expected, "head_dim", None) or expected.hidden_size // expected.num_attention_heads
    )
    rope = expected.rope_parameters
    whole = rope.get("full_attention", rope)
    assert (config.rope_theta, config.rope_scaling) == (whole["rope_theta"], None)
    windows = [
        expected.sliding_window if kind == "sliding_attention" else None
        for kind in getattr(expected, "layer_types", None)
        or ["sliding_attention" if model_type == "mistral" else "full_attention"] * expected.num_hidden_layers
    ]
    assert config.sliding_windows == (tuple(windows) if any(windows) else ())


@every_family
@pytest.mark.parametrize("key", [*SMALL, "rms_norm_eps", "tie_word_embeddings", "rope_theta", "sliding_window"])
def test_null_is_what_transformers_makes_of_it_or_refused(model_type: str, key: str):
    fields = {**SMALL, key: None}
    try:
        config = model_config_from_hf({"model_type": model_type, **fields})
    except ValueError as error:
        assert key in str(error) and "None" in str(error)
        return
    expected = AutoConfig.for_model(model_type, **(fields if key != "num_key_value_heads" else {**fields, key: 32}))
    assert config.num_kv_heads == expected.num_key_value_heads
    assert config.head_dim == (getattr(expected, "head_dim", None) or 8)
    assert config.sliding_windows == () or set(config.sliding_windows) <= {expected.sliding_window, None}


@pytest.mark.parametrize("value", ["null", "true", '"8"', "[8]", "{}", "NaN", "1e400", "-1", "1.5", "0", "9" * 400])
@pytest.mark.parametrize("key", [*SMALL, "sliding_window", "max_window_layers"])
def test_sizes_of_the_wrong_type(key: str, value: str):
    content = {**SMALL, "model_type": "qwen3", "use_sliding_window": True, key: json.loads(value)}
    # Null turns these off, or is another default; zero layers without a window are allowed.
    if (key, value) in {("num_key_value_heads", "null"), ("sliding_window", "null"), ("max_window_layers", "0")}:
        model_config_from_hf(content)
        return
    with pytest.raises(ValueError, match=f"expected {key} as an integer") as caught:
        model_config_from_hf(content)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", ["null", "true", '"8"', "[8]", "{}", "NaN", "1e400", "-1", "0", "9" * 400])
@pytest.mark.parametrize(
    ("model_type", "place", "key"),
    [
        ("llama", (), "rms_norm_eps"),
        ("llama", (), "rope_theta"),
        ("gemma3_text", (), "rope_theta"),
        ("gemma3_text", (), "rope_local_base_freq"),
        ("gemma3_text", (), "query_pre_attn_scalar"),
        ("gemma3_text", ("rope_parameters", "full_attention"), "rope_theta"),
        ("qwen3", ("rope_parameters",), "rope_theta"),
        ("qwen3", ("rope_scaling",), "factor"),
        ("qwen3", ("rope_scaling",), "beta_fast"),
        ("qwen3", ("rope_scaling",), "attention_factor"),
        ("qwen3", ("rope_scaling",), "original_max_position_embeddings"),
    ],
)
def test_numbers_of_the_wrong_type(model_type: str, place: tuple[str, ...], key: str, value: str):
    content: dict[str, Any] = {**SMALL, "model_type": model_type}
    inner = content
    for name in place:
        inner[name] = {"rope_type": "yarn", "factor": 2.0} if name == "rope_scaling" else {}
        inner = inner[name]
    inner[key] = json.loads(value)
    if (key, value) == ("rms_norm_eps", "0") or (place and value == "null"):
        model_config_from_hf(content)
        return
    with pytest.raises(ValueError, match=f"expected {key} as an? ") as caught:
        model_config_from_hf(content)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [None, "false", 0, 1, [], {}])
@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_flags_of_the_wrong_type(key: str, value: object):
    with pytest.raises(ValueError, match=f"expected {key} as true or false; got "):
        model_config_from_hf({**SMALL, "model_type": "llama", key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": "yarn"}, "expected rope_scaling as an object, or null; got 'yarn'"),
        ({"rope_scaling": ["yarn"]}, r"expected rope_scaling as an object, or null; got \['yarn'\]"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope type must be one of .*; got \['yarn'\]"),
        ({"rope_scaling": {"rope_type": "yarn", "truncate": "no"}}, "expected truncate as true or false; got 'no'"),
        ({"layer_types": "full_attention"}, "expected layer_types as a list of texts, or null; got 'full"),
        ({"layer_types": [1, None]}, r"expected layer_types as a list of texts, or null; got \[1, None\]"),
        ({"layer_types": {"a": 1}}, "expected layer_types as a list of texts"),
        ({"model_type": ["qwen2"]}, r"model_type must be one of .*; got \['qwen2'\]"),
        ({"num_hidden_layers": 100_000}, "expected num_hidden_layers as an integer from 1 to 4096; got 100000"),
        ({"num_hidden_layers": 10**12}, "expected num_hidden_layers as an integer"),
        ({"head_dim": 2**31}, "expected head_dim as an integer from 1 to 2147483647; got 2147483648"),
        ({"hidden_act": "x" * 3_000_000}, "hidden_act='xxx"),
        ({"vocab_size": "x" * 3_000_000}, "expected vocab_size as an integer"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "x" * 3_000_000: 1}}, "got also xxx"),
    ],
)
def test_other_values_that_cannot_be(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message) as caught:
        model_config_from_hf({**SMALL, "model_type": "qwen2", **change})
    assert len(str(caught.value)) < 400


def test_shown_is_short():
    assert shown("a") == "'a'"
    assert shown(["x" * 1000]) == "['" + "x" * 77 + "…"
    assert len(shown("x" * 10**7)) == 80
