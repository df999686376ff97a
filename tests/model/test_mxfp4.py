"""gpt-oss' experts in MXFP4: dequantisation against bit arithmetic, loading onto one device and a mesh."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from smd_jax.devices.sharding import make_mesh, shard_tree
from smd_jax.model.stored_tensors import dequantised
from smd_jax.model.weights import load_checkpoint, save_checkpoint
from tests.bitwise import assert_bitwise_equal
from tests.model.test_family_logits import GOLDEN

HIDDEN, WIDTH, EXPERTS = 64, 96, 4


def from_bits(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Values in float64 from the bits of E2M1: sign, exponent with bias 1, mantissa; exponent 0 is subnormal."""
    halves = np.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*scales.shape, 32).astype(np.int64)
    sign, exponent, mantissa = 1.0 - 2 * (halves >> 3), (halves >> 1) & 3, halves & 1
    values = np.where(exponent == 0, 0.5 * mantissa, (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1))
    values = sign * values * 2.0 ** (scales.astype(np.float64) - 127)[..., None]
    return values.reshape(*scales.shape[:-1], -1)


def test_every_byte_and_scale():
    blocks = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 1, 16), (1, 253, 1))
    scales = np.tile(np.arange(253, dtype=np.uint8), (16, 1))
    np.testing.assert_array_equal(np.float64(dequantised(blocks, scales)), from_bits(blocks, scales))
    ends = dequantised(np.full((1, 3, 16), 0x77, np.uint8), np.array([[253, 254, 255]], np.uint8))[0, ::32].tolist()
    assert ends[:2] == [np.inf, np.inf] and np.isnan(ends[2]), "6 * 2 ** 126 is beyond bfloat16"


def random_blocks(rng: Any, out: int, width_in: int) -> tuple[np.ndarray, np.ndarray]:
    blocks = rng.integers(0, 256, (EXPERTS, out, width_in // 32, 16), dtype=np.uint8)
    return blocks, rng.integers(121, 126, blocks.shape[:-1], dtype=np.uint8)


MATRIX_SHAPES = {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In gpt-oss' format: experts in blocks over two files, other weights in bfloat16."""
    directory, rng = tmp_path_factory.mktemp("mxfp4"), np.random.default_rng(0)
    content = json.loads((GOLDEN / "gpt_oss" / "config.json").read_text())
    content |= {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_local_experts": EXPERTS}
    content["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(content))
    heads = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": HIDDEN}
    vocab = content["vocab_size"]
    shapes = {"model.embed_tokens": (vocab, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (vocab, HIDDEN)}
    blocks: dict[str, np.ndarray] = {}
    scales: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    for layer in range(2):
        path = f"model.layers.{layer}"
        for name, size in heads.items():
            shapes[f"{path}.self_attn.{name}"] = (size, 32 if name == "o_proj" else HIDDEN)
            plain[f"{path}.self_attn.{name}.bias"] = rng.normal(size=size)
        plain[f"{path}.self_attn.sinks"] = rng.normal(size=4)
        shapes |= {f"{path}.input_layernorm": (HIDDEN,), f"{path}.post_attention_layernorm": (HIDDEN,)}
        shapes[f"{path}.mlp.router"] = (EXPERTS, HIDDEN)
        plain[f"{path}.mlp.router.bias"] = rng.normal(size=EXPERTS)
        for name, (out, width_in) in MATRIX_SHAPES.items():
            blocks[f"{path}.mlp.experts.{name}_blocks"], scales[f"{path}.mlp.experts.{name}_scales"] = random_blocks(
                rng, out, width_in
            )
            plain[f"{path}.mlp.experts.{name}_bias"] = rng.normal(size=(EXPERTS, out))
    plain |= {f"{name}.weight": 0.2 * rng.normal(size=shape) for name, shape in shapes.items()}
    files = {
        "a.safetensors": {**blocks, **{k: v.astype(jnp.bfloat16) for k, v in plain.items()}},
        "b.safetensors": scales,
    }
    for file, tensors in files.items():
        save_file(tensors, directory / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def changed(checkpoint: Path, directory: Path, **tensors: np.ndarray | None) -> Path:
    """A copy with other tensors in the experts of the first layer; None removes a tensor."""
    shutil.copytree(checkpoint, directory)
    for file in ("a.safetensors", "b.safetensors"):
        stored = load_file(directory / file)
        for name, tensor in tensors.items():
            key = f"model.layers.0.mlp.experts.{name}"
            if tensor is None:
                stored.pop(key, None)
            elif key in stored:
                stored[key] = tensor
        save_file(stored, directory / file, metadata={"format": "pt"})
    return directory


def test_experts_are_loaded(checkpoint: Path):
    """Gate and up columns alternate; values are exact in both dtypes."""
    stored = load_file(checkpoint / "a.safetensors") | load_file(checkpoint / "b.safetensors")
    for dtype in (jnp.float32, jnp.bfloat16):
        _, params = load_checkpoint(checkpoint, dtype=dtype)
        for layer in range(2):
            found = params[f"layers_{layer}"]["mlp"]["experts"]
            prefix = f"model.layers.{layer}.mlp.experts"
            both, down = (
                from_bits(stored[f"{prefix}.{name}_blocks"], stored[f"{prefix}.{name}_scales"]).swapaxes(1, 2)
                for name in MATRIX_SHAPES
            )
            for name, expected in {"gate_proj": both[..., ::2], "up_proj": both[..., 1::2], "down_proj": down}.items():
                assert found[name].dtype == dtype
                np.testing.assert_array_equal(np.float64(found[name]), expected)


def test_experts_are_loaded_onto_a_mesh(checkpoint: Path):
    """Four devices read 16 of 64 columns each, half a group, and convert their part."""
    mesh = make_mesh(data=1, fsdp=4, tensor=2)
    _, found = load_checkpoint(checkpoint, dtype=jnp.bfloat16, mesh=mesh)
    _, whole = load_checkpoint(checkpoint, dtype=jnp.bfloat16)
    part = found["layers_0"]["mlp"]["experts"]["gate_proj"].addressable_shards[0].data
    assert part.shape == (2, 16, WIDTH)
    assert_bitwise_equal(found, shard_tree(whole, mesh))


def test_an_export_has_plain_weights(checkpoint: Path, tmp_path: Path):
    config, params = load_checkpoint(checkpoint)
    save_checkpoint(tmp_path / "out", params, config, dtype="bfloat16", tokenizer_from=None)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    again, weights = load_checkpoint(tmp_path / "out")
    assert again == config
    assert_bitwise_equal(weights, params)


def scales(groups: int, value: int = 0, dtype: Any = np.uint8) -> dict[str, np.ndarray]:
    return {"down_proj_scales": np.full((4, 64, groups), value, dtype)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"down_proj_scales": None}, "missing .*down_proj; unexpected .*down_proj_blocks"),
        (scales(2), r"in MXFP4 as uint8 .*got U8 \[4, 64, 3, 16\] and U8 \[4, 64, 2\]"),
        (scales(3, 0, np.int8), r"in MXFP4 as uint8 .*and I8 \[4, 64, 3\]"),
        (
            scales(2) | {"down_proj_blocks": np.zeros((4, 64, 2, 16), np.uint8)},
            r"expected \[4, 96, 64\], got \[4, 64, 64",
        ),
        (scales(3, 255), "got NaN or infinity in layers_0/mlp/experts/down_proj"),
    ],
)
def test_invalid_tensors_are_refused(tensors: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        load_checkpoint(changed(checkpoint, tmp_path / "other", **tensors))
