"""Conversion of a GGUF file to a Hugging Face checkpoint: weights, rotation, tokenizer, and refused files."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from transformers import AutoTokenizer

import smd_jax as smd
import smollm2
from smd_jax.text.token_bytes import byte_alphabet

pytestmark = pytest.mark.study

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "h e", "Ġ he"]
TOKENS = [*SPECIAL, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
Q4_1 = gguf.GGMLQuantizationType.Q4_1
Q8_0 = gguf.GGMLQuantizationType.Q8_0
F32 = gguf.GGMLQuantizationType.F32


def random_tensors() -> dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]:
    """Values, in GGUF's order, and storage type of each tensor by its GGUF name."""
    rng = np.random.default_rng(0)
    shapes = {"attn_q": (HEADS * HEAD_DIM, HIDDEN), "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN)}
    shapes |= {"attn_v": (KV_HEADS * HEAD_DIM, HIDDEN), "attn_output": (HIDDEN, HEADS * HEAD_DIM)}
    shapes |= {"ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)}
    tensors = {"token_embd.weight": (rng.normal(size=(len(TOKENS), HIDDEN)), Q8_0)}
    for layer in range(LAYERS):
        tensors |= {f"blk.{layer}.{name}.weight": (rng.normal(size=shape), Q4_1) for name, shape in shapes.items()}
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = (rng.normal(size=HIDDEN), F32)
    tensors["output_norm.weight"] = (rng.normal(size=HIDDEN), F32)
    return {name: (values.astype(np.float32), kind) for name, (values, kind) in tensors.items()}


def write_gguf(
    path: Path,
    tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]],
    architecture: str = "llama",
    pre_tokenizer: str = "smollm",
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
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    smollm2.unpack(write_gguf(folder / "tiny.gguf", random_tensors()), folder / "model")
    return folder / "model"


def dequantized(name: str) -> np.ndarray:
    """Values of a tensor after quantization, in GGUF's order of rows."""
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
        np.testing.assert_array_equal(flat[path], dequantized(f"{name}.weight"))
    kernels = {"attention/v_proj": "attn_v", "attention/o_proj": "attn_output", "mlp/gate_proj": "ffn_gate"}
    kernels |= {"mlp/up_proj": "ffn_up", "mlp/down_proj": "ffn_down"}
    for path, name in kernels.items():
        np.testing.assert_array_equal(flat[f"layers_1/{path}/kernel"], dequantized(f"blk.1.{name}.weight").T)


def test_rows_of_queries_and_keys_are_in_transformers_order(unpacked: Path):
    """GGUF rotates channels 2i and 2i + 1 of a head together, transformers i and i + HEAD_DIM / 2."""
    attention = smd.load_checkpoint(unpacked)[1]["layers_0"]["attention"]
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        stored = dequantized(f"blk.0.attn_{name}.weight").reshape(heads, HEAD_DIM, HIDDEN)
        ours = np.asarray(attention[f"{name}_proj"]["kernel"]).T.reshape(heads, HEAD_DIM, HIDDEN)
        for i in range(HEAD_DIM // 2):
            np.testing.assert_array_equal(ours[:, i], stored[:, 2 * i])
            np.testing.assert_array_equal(ours[:, i + HEAD_DIM // 2], stored[:, 2 * i + 1])


def test_tokenizer(unpacked: Path):
    tokenizer = AutoTokenizer.from_pretrained(unpacked)
    number = {token: index for index, token in enumerate(TOKENS)}
    ids = tokenizer.encode("the  12", add_special_tokens=False)
    # Each digit is a token; a merge joins the two spaces before them.
    assert ids == [number[token] for token in ("t", "he", "ĠĠ", "1", "2")]
    for text in ("naïve 数学 🙂\n\t he  34", "", " <|im_end|>he"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert chat == "<|im_start|>he<|im_end|>"
    assert tokenizer.encode(chat, add_special_tokens=False) == [1, number["he"], 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_other_gguf_files_are_refused(tmp_path: Path):
    tensors = random_tensors()
    without = {name: value for name, value in tensors.items() if name != "blk.1.attn_v.weight"}
    cases = {
        "expected general.architecture 'llama'; got 'qwen2'": write_gguf(tmp_path / "a", tensors, architecture="qwen2"),
        "expected tokenizer.ggml.pre 'smollm'; got 'llama'": write_gguf(tmp_path / "b", tensors, pre_tokenizer="llama"),
        r"none for \['model.layers.1.self_attn.v_proj.weight'\]": write_gguf(tmp_path / "c", without),
    }
    for message, path in cases.items():
        with pytest.raises(ValueError, match=message):
            smollm2.unpack(path, tmp_path / "model")
    assert not (tmp_path / "model").exists()
