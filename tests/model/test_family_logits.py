"""Every family of transformers that the decoder supports: logits, exports and adapters.

golden/README.md says how the checkpoints and logits under golden/hf were made.
"""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.config import ModelConfig
from smd_jax.message.masks import dense_mask
from smd_jax.model.decoder import Decoder
from smd_jax.model.lora import TARGETS, LoraConfig
from smd_jax.model.peft_format import check_peft, load_peft, save_peft
from smd_jax.model.teacher_forced import apply_model
from smd_jax.model.weights import load_checkpoint, save_checkpoint
from tests import paths
from tests.adapted import adapted
from tests.bitwise import assert_bitwise_equal

GOLDEN = paths.GOLDEN / "hf"
ALL = sorted(path.parent.name for path in GOLDEN.glob("*/logits.npz"))
NAMES = [name for name in ALL if "valid" in np.load(GOLDEN / name / "logits.npz").files]
# Of logits of standard deviation 1.2; measured on CPU: at most 7e-6.
ATOL, RELATIVE = 5e-5, 1e-4
EVERY_FAMILY = pytest.mark.parametrize("name", NAMES)

apply_jitted = jax.jit(apply_model, static_argnums=0)


@functools.cache
def opened(name: str) -> tuple[ModelConfig, Any]:
    config, params = load_checkpoint(GOLDEN / name)
    # LongRoPE uses its long factors only if the context is longer than the original one.
    return (replace(config, max_positions=64) if name == "phi3_long" else config), params


def batch_of(name: str) -> dict[str, np.ndarray]:
    """Tokens, logits, positions and valid tokens; files without the last two have no padding."""
    batch = dict(np.load(GOLDEN / name / "logits.npz"))
    shape = batch["tokens"].shape
    return {"positions": np.indices(shape, np.int32)[1], "valid": np.ones(shape, bool), **batch}


def logits(config: ModelConfig, params: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Logits of the valid tokens."""
    valid = batch["valid"]
    positions = jnp.asarray(batch["positions"])
    out = apply_jitted(Decoder(config), params, jnp.asarray(batch["tokens"]), positions, dense_mask(jnp.asarray(valid)))
    return np.asarray(out)[valid]


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(actual - expected).max() <= RELATIVE * np.abs(expected).max()


@pytest.mark.parametrize("name", ALL)
def test_logits_match_transformers(name: str):
    config, params = opened(name)
    batch = batch_of(name)
    np.testing.assert_allclose(logits(config, params, batch), batch["logits"][batch["valid"]], atol=ATOL, rtol=0)


@EVERY_FAMILY
def test_exports_round_trip(name: str, tmp_path: Path):
    config, params = load_checkpoint(GOLDEN / name)
    save_checkpoint(tmp_path, params, config, dtype="bfloat16")
    again, weights = load_checkpoint(tmp_path)
    assert again == config
    assert_bitwise_equal(weights, params)
    if name == "phi3_long":  # the keys that the Phi-3 of transformers 4 accepts
        written = json.loads((tmp_path / "config.json").read_text())
        assert written["rope_scaling"].keys() == {"type", "short_factor", "long_factor"} and written["rope_theta"]


def with_adapters(name: str) -> Any:
    config, params = opened(name)
    # If some layers have an MLP and others experts, PEFT supports adapters of attention only.
    mlp = config.experts is None or not config.experts.layers
    targets: Any = TARGETS if mlp else TARGETS[:4]
    lora = LoraConfig(rank=2, alpha=3.0, targets=targets, rank_stabilised=True)
    return adapted(params, lora, size=0.5)


@EVERY_FAMILY
def test_adapters_round_trip_in_pefts_format(name: str, tmp_path: Path):
    (config, base), params = opened(name), with_adapters(name)
    save_peft(tmp_path, params, config, base_model=GOLDEN / name)
    assert_bitwise_equal(load_peft(tmp_path, base, config), params)


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("qwen3_moe_shares", ("q_proj", "down_proj"), r"experts in every layer for adapters of down_proj.*\[1\] of 2"),
        ("mixtral", ("up_proj",), "adapters on all of gate_proj, up_proj or on none.*got up_proj"),
    ],
)
def test_adapters_that_peft_cannot_express_are_refused(name: str, targets: Any, message: str, tmp_path: Path):
    config, params = opened(name)
    lora = LoraConfig(targets=targets)
    with pytest.raises(ValueError, match=message):
        check_peft(config, lora)
    with pytest.raises(ValueError, match=message):
        save_peft(tmp_path / "adapter", adapted(params, lora), config)
    assert not list(tmp_path.iterdir())


@EVERY_FAMILY
@pytest.mark.filterwarnings("default")  # PEFT warns of names that transformers will change
def test_peft_opens_what_we_save(name: str, tmp_path: Path):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    config, _ = opened(name)
    params, batch = with_adapters(name), batch_of(name)
    save_peft(tmp_path, params, config, base_model=GOLDEN / name)
    base = AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float32, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(base, str(tmp_path)).eval()
    assert_close(torch_logits(torch, model, batch), logits(config, params, batch))


@EVERY_FAMILY
def test_transformers_opens_an_export(name: str, tmp_path: Path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    config, params = load_checkpoint(GOLDEN / name)
    save_checkpoint(tmp_path, params, config, dtype="float32")
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    batch = batch_of(name)
    assert_close(torch_logits(torch, model, batch), batch["logits"][batch["valid"]])


def torch_logits(torch: Any, model: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    with torch.no_grad():
        out = model.eval()(
            input_ids=torch.from_numpy(batch["tokens"]).long(),
            attention_mask=torch.from_numpy(batch["valid"]).long(),
            position_ids=torch.from_numpy(batch["positions"]).long(),
        )
    return out.logits.numpy()[batch["valid"]]
