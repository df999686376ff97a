"""Checkpoints in Hugging Face's format: round trips and invalid files. Logits: tests/model/test_family_logits.py."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from smd_jax.config import ModelConfig
from smd_jax.model.hf_config import FloatName
from smd_jax.model.weights import check_export, load_checkpoint, read_config, save_checkpoint, tensor_table
from smd_jax.testing import random_params, tiny_model_config, write_random_checkpoint
from tests.paths import GOLDEN

CONFIGS = {
    "llama": tiny_model_config(qkv_bias=False, tie_embeddings=False),
    "qwen2": tiny_model_config(head_dim=16, norm_eps=1e-5),
    "qwen3": tiny_model_config(qkv_bias=False, qk_norm=True, head_dim=12, rope_theta=1e6, tie_embeddings=False),
}


def random_leaves(config: ModelConfig) -> dict[str, Any]:
    """Random parameters, including biases and norms."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: random_params(config)))
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in leaves])


# Loading and saving


@pytest.mark.parametrize(
    ("stored", "dtype"), [("float32", "bfloat16"), ("bfloat16", "float16"), ("float16", "float32")]
)
def test_every_stored_dtype_loads_as_every_dtype(tmp_path: Path, stored: FloatName, dtype: FloatName):
    config = replace(CONFIGS["qwen2"], dtype=dtype)
    params = random_leaves(config)
    save_checkpoint(tmp_path, params, config, dtype=stored)
    loaded_config, loaded = load_checkpoint(tmp_path, dtype=jnp.dtype(dtype))
    assert loaded_config == config
    chex.assert_trees_all_equal(loaded, jax.tree.map(lambda x: x.astype(stored).astype(dtype), params), strict=True)


def test_sharded_round_trip_is_exact(tmp_path: Path):
    config = CONFIGS["qwen3"]
    params = random_leaves(config)
    save_checkpoint(tmp_path, params, config, dtype="float32", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    sizes = {shard: sum(x.nbytes for x in load_file(tmp_path / shard).values()) for shard in shards}
    assert shards == sorted(set(index["weight_map"].values())) and len(shards) > 3
    assert all(size <= 20_000 or len(load_file(tmp_path / shard)) == 1 for shard, size in sizes.items())
    assert index["metadata"]["total_size"] == sum(sizes.values())
    chex.assert_trees_all_equal(load_checkpoint(tmp_path)[1], params, strict=True)


def test_parameters_sharded_over_devices_are_saved_whole(tmp_path: Path):
    config = CONFIGS["llama"]
    params = random_leaves(config)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    save_checkpoint(tmp_path, jax.device_put(params, spread), config, dtype="float32")
    chex.assert_trees_all_equal(load_checkpoint(tmp_path)[1], params, strict=True)


def test_files_hold_the_metadata_of_transformers(tmp_path: Path):
    config = CONFIGS["qwen2"]
    save_checkpoint(tmp_path, random_leaves(config), config)
    written = json.loads((tmp_path / "config.json").read_text())
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as tensors:
        assert tensors.metadata() == {"format": "pt"}
        assert {tensors.get_slice(name).get_dtype() for name in tensor_table(config)} == {"BF16"}
    assert written["model_type"] == "qwen2" and written["architectures"] == ["Qwen2ForCausalLM"]
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    modes = {file.stat().st_mode for file in tmp_path.iterdir()}
    assert len(modes) == 1, "all files have the same permissions"


def test_saving_replaces_a_checkpoint_and_leaves_nothing_else(tmp_path: Path):
    target = tmp_path / "model"
    first, second = CONFIGS["qwen2"], CONFIGS["llama"]
    save_checkpoint(target, random_leaves(first), first, dtype="float32", max_shard_bytes=20_000)
    save_checkpoint(target, random_leaves(second), second, dtype="float32")
    assert sorted(file.name for file in target.iterdir()) == ["config.json", "model.safetensors"]
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    assert load_checkpoint(target)[0] == second


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_weights_that_could_not_be_loaded_are_not_saved(tmp_path: Path, dtype: FloatName):
    config = tiny_model_config()
    params = random_params(config)
    save_checkpoint(tmp_path / "model", params, config)
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    factor = jnp.nan if dtype == "float32" else 1e6  # beyond float16
    with pytest.raises(ValueError, match=f"expected finite weights; got NaN or infinity in .*, as {dtype}"):
        save_checkpoint(tmp_path / "model", jax.tree.map(lambda x: x * factor, params), config, dtype=dtype)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


def test_saving_works_after_a_killed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a container, a process often has the same id as the killed one."""
    config = CONFIGS["qwen2"]
    params = random_leaves(config)
    save_checkpoint(tmp_path / "model", params, config, dtype="float32")
    (tmp_path / f".model.new-{os.getpid()}").mkdir()
    shutil.copytree(tmp_path / "model", tmp_path / f".model.old-{os.getpid()}")
    save_checkpoint(tmp_path / "model", params, config, dtype="float32")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    # After a kill between both renames, the old checkpoint stays until a new one is complete.
    (tmp_path / "model").rename(tmp_path / f".model.old-{os.getpid()}")
    with pytest.raises(ValueError, match="expected finite weights"):
        save_checkpoint(tmp_path / "model", jax.tree.map(lambda x: x * jnp.nan, params), config, dtype="float32")
    chex.assert_trees_all_equal(load_checkpoint(tmp_path / "model")[1], params, strict=True)


def test_the_model_type_of_the_source_is_kept_where_valid(tmp_path: Path):
    """A Mistral without windows equals a Llama."""
    config = CONFIGS["llama"]
    write_random_checkpoint(tmp_path / "from", config=config)
    file = tmp_path / "from" / "config.json"
    file.write_text(file.read_text().replace('"llama"', '"mistral"'))
    save_checkpoint(tmp_path / "to", random_leaves(config), config, tokenizer_from=tmp_path / "from")
    assert json.loads((tmp_path / "to" / "config.json").read_text())["model_type"] == "mistral"


# Checkpoints that are refused


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of golden/hf/qwen2 (tied embeddings, one file) to corrupt."""
    return Path(shutil.copytree(GOLDEN / "hf" / "qwen2", tmp_path / "checkpoint"))


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def rewrite(checkpoint: Path, add: dict[str, np.ndarray], drop: tuple[str, ...] = ()) -> None:
    tensors = load_file(checkpoint / WEIGHTS) | add
    save_file({k: v for k, v in tensors.items() if k not in drop}, checkpoint / WEIGHTS)


def write_index(checkpoint: Path, shard: Any) -> None:
    names = load_file(checkpoint / WEIGHTS)
    (checkpoint / WEIGHTS).rename(checkpoint / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors") | {"model.norm.weight": shard}}
    (checkpoint / INDEX).write_text(json.dumps(index))


def edit_config(checkpoint: Path, **changes: Any) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    (checkpoint / "config.json").write_text(json.dumps(config))


LAYER = "model.layers.1"
MISSING = ("model.norm.weight", f"{LAYER}.self_attn.k_proj.bias")
CORRUPTIONS: list[tuple[Callable[[Path], object], str]] = [
    (lambda x: (x / "config.json").unlink(), r"expected a checkpoint with config\.json in .*checkpoint"),
    (lambda x: (x / WEIGHTS).unlink(), r"expected model\.safetensors or .*index\.json"),
    (lambda x: (x / WEIGHTS).rename(x / "pytorch_model.bin"), r"expected .*got pytorch_model\.bin.*save it again"),
    (lambda x: rewrite(x, {}, MISSING), rf"missing {LAYER}\.self_attn\.k_proj\.bias, model\.norm\.weight"),
    (lambda x: rewrite(x, {f"{LAYER}.mlp.bias": np.zeros(9, np.float32)}), rf"unexpected {LAYER}\.mlp\.bias"),
    (lambda x: edit_config(x, tie_word_embeddings=False), r"missing lm_head\.weight"),
    (
        lambda x: rewrite(x, {f"{LAYER}.mlp.up_proj.weight": np.zeros((32, 48), np.float32)}),
        rf"{LAYER}\.mlp\.up_proj\.weight: expected \[48, 32\], got \[32, 48\]",
    ),
    (lambda x: rewrite(x, {"model.norm.weight": np.zeros(32, np.int8)}), r"stored as F32.*got model\.norm\.weight: I8"),
    (lambda x: (x / "config.json").write_text("[]"), r"config\.json must hold a JSON object; got list"),
    (lambda x: (x / WEIGHTS).write_bytes(b"version https"), r"model\.safetensors is not a readable safetensors file"),
    (lambda x: write_index(x, "model-00002-of-00002.safetensors"), "names shards that .*: model-00002-of-00002"),
    (lambda x: (x / WEIGHTS).rename(x / INDEX).write_text("{}"), r"must hold weight_map.*got None"),
]


@pytest.mark.parametrize(("corrupt", "message"), CORRUPTIONS)
def test_corrupt_checkpoints_are_refused(checkpoint: Path, corrupt: Callable[[Path], object], message: str):
    missing = ("expected a checkpoint", r"expected model\.safetensors or", "names shards")
    corrupt(checkpoint)
    with pytest.raises(FileNotFoundError if message.startswith(missing) else ValueError, match=message):
        load_checkpoint(checkpoint)


def test_names_of_the_hub_are_refused():
    with pytest.raises(
        FileNotFoundError, match=r"none at Qwen/Qwen2\.5-0\.5B\. A model of the Hugging Face Hub.*hf down"
    ):
        load_checkpoint("Qwen/Qwen2.5-0.5B")


@pytest.mark.parametrize("text", ["{", "[" * 200_000, '{"a":' * 200_000], ids=["cut", "lists", "objects"])
def test_configs_that_are_not_json_are_refused(text: str, checkpoint: Path):
    (checkpoint / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is not JSON") as caught:
        load_checkpoint(checkpoint)
    assert len(str(caught.value)) < 500


def test_oversized_json_is_refused(checkpoint: Path):
    with (checkpoint / "config.json").open("ab") as file:
        file.truncate(17 * 2**20)  # a sparse file
    with pytest.raises(ValueError, match="config.json of at most 16,777,216 bytes; got 17,825,792"):
        load_checkpoint(checkpoint)


@pytest.mark.parametrize(("stored", "value"), [("float32", np.nan), ("float16", -np.inf), ("bfloat16", np.inf)])
def test_non_finite_weights_are_refused(checkpoint: Path, stored: FloatName, value: float):
    name = "model.layers.0.mlp.up_proj.weight"
    tensor = load_file(checkpoint / "model.safetensors")[name].astype(jnp.dtype(stored))
    rewrite(checkpoint, {name: tensor})
    load_checkpoint(checkpoint, dtype=stored)
    tensor[-1, -1] = value
    rewrite(checkpoint, {name: tensor})
    with pytest.raises(ValueError, match="expected finite weights; got NaN or infinity in layers_0/mlp/up_proj/kernel"):
        load_checkpoint(checkpoint, dtype=stored)


def test_weights_beyond_the_range_of_the_dtype_are_refused(checkpoint: Path):
    name = "model.norm.weight"
    rewrite(checkpoint, {name: np.full_like(load_file(checkpoint / "model.safetensors")[name], 1e5)})
    load_checkpoint(checkpoint)
    with pytest.raises(ValueError, match="got NaN or infinity in norm/scale, as float16"):
        load_checkpoint(checkpoint, dtype="float16")


def test_redundant_tensors_are_tolerated(checkpoint: Path):
    expected = load_checkpoint(checkpoint)[1]
    copy = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    rewrite(checkpoint, rotary | {"lm_head.weight": copy})
    chex.assert_trees_all_equal(load_checkpoint(checkpoint)[1], expected, strict=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_projection_with_other_values_is_refused(checkpoint: Path, dtype: str):
    """transformers 4 drops it, transformers 5 does not tie it; both only warn."""
    other = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"].astype(jnp.dtype(dtype))
    other[-1, -1] += 1
    rewrite(checkpoint, {"lm_head.weight": other})
    for read in (load_checkpoint, read_config):
        with pytest.raises(ValueError, match=r"lm_head.weight in .* to equal .*; got another.*set tie_word"):
            read(checkpoint)
    rewrite(checkpoint, {"lm_head.weight": other[1:]})
    with pytest.raises(ValueError, match=r"expected lm_head.weight in .* to equal"):
        load_checkpoint(checkpoint)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_tied_embedding_under_either_name_is_loaded(checkpoint: Path, sharded: bool):
    """safetensors keeps one name of a shared tensor; the writer chooses which."""
    expected = load_checkpoint(checkpoint)[1]
    embedding = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(checkpoint, {"lm_head.weight": embedding}, drop=("model.embed_tokens.weight",))
    if sharded:
        write_index(checkpoint, "model-00001-of-00001.safetensors")
    chex.assert_trees_all_equal(load_checkpoint(checkpoint)[1], expected, strict=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 3, "layer_types": None}, r"missing model\.layers\.2\..* and 4 more"),
        ({"head_dim": 2**30}, r"q_proj.weight: expected \[4294967296, 32\], got \[32, 32\]"),
        ({"vocab_size": 2**31 - 1}, r"embed_tokens.weight: expected \[2147483647, 32\]"),
    ],
)
def test_wrong_sizes_are_refused_from_headers(checkpoint: Path, change: dict[str, Any], message: str):
    edit_config(checkpoint, **change)
    for read in (load_checkpoint, read_config):
        with pytest.raises(ValueError, match=message):
            read(checkpoint)


@pytest.mark.parametrize(
    "shard",
    ["../outside.safetensors", "/tmp/outside.safetensors", "a.bin", "x" * 3_000_000 + ".safetensors", 7, None],
    ids=lambda shard: repr(shard)[:20],
)
def test_shards_outside_the_directory_are_refused(checkpoint: Path, shard: Any):
    write_index(checkpoint, shard)
    with pytest.raises(ValueError, match="must name safetensors files in its own directory; got"):
        load_checkpoint(checkpoint)


def test_integer_dtypes_are_refused(checkpoint: Path):
    with pytest.raises(ValueError, match="expected the dtype of parameters to be one of float32, .*; got 'int8'"):
        load_checkpoint(checkpoint, dtype=jnp.int8)


# Saves that are refused


def test_parameters_of_another_config_are_refused(tmp_path: Path):
    config = CONFIGS["qwen2"]
    params = random_leaves(config)
    with pytest.raises(ValueError, match=r"tensors in params.*missing layers_2/.*and 4 more"):
        save_checkpoint(tmp_path, params, replace(config, num_layers=3))
    with pytest.raises(ValueError, match=r"unexpected layers_0/attention/k_proj/bias"):
        save_checkpoint(tmp_path, params, replace(config, qkv_bias=False))
    with pytest.raises(ValueError, match=r"embed/embedding: expected \[300, 32\], got \[264, 32\]"):
        save_checkpoint(tmp_path, params, replace(config, vocab_size=300))


def test_directory_with_other_files_is_left_alone(tmp_path: Path):
    config = CONFIGS["qwen2"]
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match=r"new, empty or a checkpoint; it also holds thesis\.tex"):
        save_checkpoint(tmp_path, random_leaves(config), config)
    with pytest.raises(FileExistsError, match="there is a file"):
        save_checkpoint(tmp_path / "thesis.tex", random_leaves(config), config)


@pytest.mark.parametrize("name", ["eviction_gate.safetensors", "model-1-of-2.safetensors", "model.safetensors.bak"])
def test_safetensors_of_other_writers_are_kept(tmp_path: Path, name: str):
    config = CONFIGS["qwen2"]
    save_checkpoint(tmp_path, random_leaves(config), config)
    (tmp_path / name).write_bytes(b"trained")
    for save in (save_checkpoint, lambda *_: check_export(tmp_path, 0)):
        with pytest.raises(FileExistsError, match=f"new, empty or a checkpoint; it also holds {name}"):
            save(tmp_path, random_leaves(config), config)
    assert (tmp_path / name).read_bytes() == b"trained"


def test_an_adapter_next_to_the_weights_is_not_applied(checkpoint: Path):
    expected = load_checkpoint(checkpoint)[1]
    (checkpoint / "adapter_config.json").write_text("{}")
    with pytest.warns(UserWarning, match="checkpoint also holds an adapter, which is not applied; smd.model.load_peft"):
        chex.assert_trees_all_equal(load_checkpoint(checkpoint)[1], expected, strict=True)


def test_a_missing_tokenizer_is_refused(tmp_path: Path):
    config = CONFIGS["qwen2"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"expected tokenizer\.json.*got \[\]"):
        save_checkpoint(tmp_path / "new", random_leaves(config), config, tokenizer_from=tmp_path / "empty")
    assert not (tmp_path / "new").exists()


def test_shards_of_size_zero_are_refused(tmp_path: Path):
    config = CONFIGS["qwen2"]
    with pytest.raises(ValueError, match="expected max_shard_bytes > 0; got 0"):
        save_checkpoint(tmp_path, random_leaves(config), config, max_shard_bytes=0)
