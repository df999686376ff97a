"""A GGUF file, written here, as a Hugging Face checkpoint: weights, rotation, tokenizer; and what is refused."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import gguf
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from transformers import AutoTokenizer

import smd_jax as smd
from smd_jax.text.token_bytes import byte_alphabet
from tests.paths import ROOT

pytestmark = pytest.mark.study

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "h e", "Ġ he"]
TOKENS = [*SPECIAL, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
Q4_1 = gguf.GGMLQuantizationType.Q4_1
Q8_0 = gguf.GGMLQuantizationType.Q8_0
F32 = gguf.GGMLQuantizationType.F32


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with mock.patch.object(sys, "path", [str(ROOT / "experiments"), *sys.path]):
        return importlib.import_module("smollm2")


def random_tensors() -> dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]:
    """GGUF's name of every tensor, its values as GGUF orders them, and how it is stored."""
    rng = np.random.default_rng(0)
    shapes = {"attn_q": (HEADS * HEAD_DIM, HIDDEN), "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN)}
    shapes |= {"attn_v": (KV_HEADS * HEAD_DIM, HIDDEN), "attn_output": (HIDDEN, HEADS * HEAD_DIM)}
    shapes |= {"ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)}
    found = {"token_embd.weight": (rng.normal(size=(len(TOKENS), HIDDEN)), Q8_0)}
    for layer in range(LAYERS):
        found |= {f"blk.{layer}.{name}.weight": (rng.normal(size=shape), Q4_1) for name, shape in shapes.items()}
        for name in ("attn_norm", "ffn_norm"):
            found[f"blk.{layer}.{name}.weight"] = (rng.normal(size=HIDDEN), F32)
    found["output_norm.weight"] = (rng.normal(size=HIDDEN), F32)
    return {name: (values.astype(np.float32), kind) for name, (values, kind) in found.items()}


def write(
    path: Path,
    tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]],
    architecture: str = "llama",
    pre_tokenizer: str = "smollm",
    scaling: str | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if scaling is not None:
        writer.add_string("llama.rope.scaling.type", scaling)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(TOKENS)
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in TOKENS]
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def unpacked(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    script.unpack(write(folder / "tiny.gguf", random_tensors()), folder / "model")
    return folder / "model"


def widened(name: str) -> np.ndarray:
    """The values of a tensor after they were stored in few bits, in GGUF's order of rows."""
    values, kind = random_tensors()[name]
    return gguf.dequantize(gguf.quantize(values, kind), kind)


def test_shape_and_weights(unpacked: Path):
    config, params = smd.load_checkpoint(unpacked)
    expected = smd.ModelConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_positions=512,
        rope_theta=5000.0,
        norm_eps=1e-5,
        qkv_bias=False,
        tie_embeddings=True,
    )
    assert config == expected
    flat = flatten_dict(params, sep="/")
    plain = {"embed/embedding": "token_embd", "norm/scale": "output_norm", "layers_1/mlp_norm/scale": "blk.1.ffn_norm"}
    for path, name in plain.items():
        np.testing.assert_array_equal(flat[path], widened(f"{name}.weight"))
    kernels = {"attention/v_proj": "attn_v", "attention/o_proj": "attn_output", "mlp/gate_proj": "ffn_gate"}
    kernels |= {"mlp/up_proj": "ffn_up", "mlp/down_proj": "ffn_down"}
    for path, name in kernels.items():
        np.testing.assert_array_equal(flat[f"layers_1/{path}/kernel"], widened(f"blk.1.{name}.weight").T)


def turned(x: np.ndarray, position: int, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """`[heads, head_dim]` with the numbers at the places `first` turned with those at `second`, pair by pair."""
    angle = position * 5000.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    out = np.empty_like(x)
    out[:, first] = x[:, first] * np.cos(angle) - x[:, second] * np.sin(angle)
    out[:, second] = x[:, second] * np.cos(angle) + x[:, first] * np.sin(angle)
    return out


def test_rotated_queries_and_keys_have_the_same_scores(unpacked: Path):
    """GGUF's rows turned in neighbouring pairs, as llama.cpp does, against ours turned by halves."""
    x = np.random.default_rng(1).normal(size=(2, HIDDEN))
    attention = smd.load_checkpoint(unpacked)[1]["layers_0"]["attention"]
    places = np.arange(HEAD_DIM)
    orders = {"neighbours": (places[::2], places[1::2]), "halves": (places[: HEAD_DIM // 2], places[HEAD_DIM // 2 :])}
    stored = {"neighbours": [widened(f"blk.0.attn_{kind}.weight") for kind in ("q", "k")]}
    stored["halves"] = [np.asarray(attention[f"{kind}_proj"]["kernel"]).T for kind in ("q", "k")]
    scores = {}
    for name, (q, k) in stored.items():
        queries = turned((q @ x[0]).reshape(HEADS, HEAD_DIM), 7, *orders[name])
        keys = turned((k @ x[1]).reshape(KV_HEADS, HEAD_DIM), 3, *orders[name])
        scores[name] = np.einsum("gud,gd->gu", queries.reshape(KV_HEADS, -1, HEAD_DIM), keys)
    np.testing.assert_allclose(scores["halves"], scores["neighbours"], rtol=1e-5)


def test_tokenizer(unpacked: Path):
    tokenizer = AutoTokenizer.from_pretrained(unpacked)
    number = {token: index for index, token in enumerate(TOKENS)}
    ids = tokenizer.encode("the  12", add_special_tokens=False)
    # Digits one by one, and blanks before them as one piece, which a merge joins.
    assert ids == [number[token] for token in ("t", "he", "ĠĠ", "1", "2")]
    for text in ("naïve 数学 🙂\n\t he  34", "", " <|im_end|>he"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    said = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert said == "<|im_start|>he<|im_end|>"
    assert tokenizer.encode(said, add_special_tokens=False) == [1, number["he"], 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_what_is_no_such_model_is_refused(script: ModuleType, tmp_path: Path):
    tensors = random_tensors()
    without = {name: value for name, value in tensors.items() if name != "blk.1.attn_v.weight"}
    besides = tensors | {"blk.1.attn_q.bias": tensors["output_norm.weight"]}
    cases = {
        "expected general.architecture 'llama'; got 'qwen2'": write(tmp_path / "a", tensors, architecture="qwen2"),
        "expected tokenizer.ggml.pre 'smollm'; got 'llama-bpe'": write(
            tmp_path / "b", tensors, pre_tokenizer="llama-bpe"
        ),
        "expected rope without scaling; got 'yarn'": write(tmp_path / "c", tensors, scaling="yarn"),
        r"none for \['model.layers.1.self_attn.v_proj.weight'\]": write(tmp_path / "d", without),
        r"besides \['model.layers.1.self_attn.q_proj.bias'\]": write(tmp_path / "e", besides),
    }
    for message, path in cases.items():
        with pytest.raises(ValueError, match=message):
            script.unpack(path, tmp_path / "model")
    assert not (tmp_path / "model").exists()
