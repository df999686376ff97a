"""Random values of config fields, files and texts: each is accepted, or an error names it.

3,500 cases by default, and nothing is compiled; HYPOTHESIS_PERCENT=1000 tries ten times as many. Several config fields
at once: `test_configurations.py`.
"""

import dataclasses
import json
from typing import Any, cast, get_type_hints

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from smd_jax import corrections
from smd_jax.byte_sizes import parse_bytes
from smd_jax.commands.command_line import ALGORITHMS
from smd_jax.commands.config_file import as_flags, read_options
from smd_jax.commands.errors import UserError
from smd_jax.commands.policy_texts import parse_decode
from smd_jax.config import LinearRope, Llama3Rope, ModelConfig, YarnRope
from smd_jax.devices.processes import differences
from smd_jax.eviction import policies
from smd_jax.eviction.policies import LearnedGate
from smd_jax.eviction.wrappers import OnTokens, Protect, Pyramid
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.mismatch_guard import MismatchGuard
from smd_jax.learner.policy_term import DenseLearner
from smd_jax.learner.step import ReferenceSync
from smd_jax.losses.distillation import DistillConfig
from smd_jax.losses.dpo import DPOConfig
from smd_jax.losses.policy import LossConfig
from smd_jax.losses.surrogates import Clip, ClipWeight, SoftGate
from smd_jax.losses.value import ValueConfig
from smd_jax.losses.weighting import FixedLength
from smd_jax.message.gate import LinearGate
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.sampling import SamplingConfig
from smd_jax.message.spans import TokenSpans
from smd_jax.model.attention import AttentionConfig
from smd_jax.model.lora import LoraConfig
from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.runs.run_config import Objective, RunConfig
from smd_jax.runs.settings import to_jsonable
from smd_jax.sampler.config import RolloutConfig
from smd_jax.tasks.reward_functions import RougeL
from smd_jax.tasks.row_format import RowFormat
from smd_jax.testing import tiny_model_config
from smd_jax.train.evaluation import Decode
from smd_jax.train.grpo import GRPOConfig
from smd_jax.train.loop_config import LoopConfig
from smd_jax.train.online_dpo import OnlineDPOConfig
from smd_jax.train.optimizers import OptimizerConfig
from smd_jax.train.ppo import PPOConfig
from smd_jax.typed_fields import check_types
from tests.drawn_cases import cases, without_jaxtyping  # noqa: F401 - a fixture

H2O = policies.H2O()
ROLLOUT = RolloutConfig(max_new_tokens=8, budget=6, buffer=2)
LOOP: Any = {"prompts_per_step": 2, "group_size": 4, "prompt_width": 9, "policy": H2O, "rollout": ROLLOUT}
CONFIGS: list[Any] = [
    *(tiny_model_config(), ROLLOUT, SamplingConfig(), QuantConfig(bits=8), LoraConfig()),
    *(UpdateConfig(), UpdateConfig(pairs=DPOConfig()), LossConfig(), ValueConfig(), DPOConfig(), DistillConfig()),
    *(MismatchGuard(), ReferenceSync(0.5, 2), OptimizerConfig(), RunConfig(steps=3), Objective("x"), Decode("x", H2O)),
    *(LoopConfig(**LOOP), GRPOConfig(**LOOP), OnlineDPOConfig(**LOOP)),
    PPOConfig(**LOOP, update=UpdateConfig(value=ValueConfig())),
    *(policies.StreamingLLM(), policies.SnapKV(), policies.RKV(), policies.TOVA(), H2O),
    *(Protect(H2O, sinks=2, recent=2), Pyramid(H2O), LearnedGate(), LinearGate()),
    *(TokenSpans(open=3, close=4), OnTokens(TokenSpans(open=3, close=4), inner=H2O)),
    *(LinearRope(4.0), Llama3Rope(8.0, 1.0, 4.0, 8192), YarnRope(4.0, 32768)),
    *(corrections.TIS(), corrections.MIS(), corrections.OPSM(), corrections.DPPOTV()),
    *(corrections.Rejection(), corrections.Veto(), corrections.Chain((corrections.TIS(),)), DenseLearner()),
    *(Clip(), ClipWeight(), SoftGate(), FixedLength(), AttentionConfig(), RougeL()),
]
FIELDS = [(config, field.name) for config in CONFIGS for field in dataclasses.fields(config) if field.init]

NUMBERS = st.one_of(
    st.integers(-3, 40), st.sampled_from([10**12, -(10**12)]), st.floats(-2, 2), st.floats(), st.booleans()
)
TEXTS = st.one_of(st.text(max_size=8), st.sampled_from(["none", "full", "float32", "shadow", "h2o", "auto"]))
VALUES = st.one_of(
    NUMBERS,
    TEXTS,
    st.none(),
    st.lists(st.one_of(NUMBERS, TEXTS), max_size=3),
    st.lists(st.one_of(NUMBERS, TEXTS), max_size=3).map(tuple),
    st.dictionaries(st.text(max_size=3), NUMBERS, max_size=2),
    st.sampled_from([object(), H2O, SamplingConfig(), np.float32(0.5), np.int64(3), len]),
)


def names_of(name: str) -> set[str]:
    """Names by which an error may call a field."""
    return {name, name.replace("_", " "), name.removesuffix("s"), name.removeprefix("num_")}


@cases(2000)
@given(field=st.sampled_from(FIELDS), value=VALUES)
@example(field=FIELDS[0], value="a text")
def test_a_config_field_is_accepted_or_named(field: tuple[Any, str], value: Any):
    config, name = field
    try:
        changed = dataclasses.replace(config, **{name: value})
    except (ValueError, TypeError) as error:
        assert any(word in str(error) for word in names_of(name)), f"{type(config).__name__}({name}={value!r}): {error}"
        assert "not supported between" not in str(error)
    else:
        # An accepted value has its type and can be saved with a checkpoint.
        check_types(changed)
        assert to_jsonable(changed) == to_jsonable(dataclasses.replace(changed))


def test_every_config_checks_its_types():
    assert len(FIELDS) > 150
    for config in CONFIGS:
        with pytest.raises((TypeError, ValueError), match="expected"):
            first = next(f.name for f in dataclasses.fields(config) if f.init)
            # No field of a configuration is a set.
            dataclasses.replace(config, **{first: {1}})


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        (RolloutConfig, "budget", "6", "expected budget of RolloutConfig to be int; got '6', str"),
        (RolloutConfig, "budget", 6.0, "expected budget of RolloutConfig to be int; got 6.0, float"),
        (RolloutConfig, "budget", True, "expected budget of RolloutConfig to be int; got True, bool"),
        (
            RolloutConfig,
            "sampling",
            {"top_k": 3},
            "expected sampling of .* to be SamplingConfig; got {'top_k': 3}, dict",
        ),
        (OptimizerConfig, "max_grad_norm", "1", r"expected max_grad_norm .* to be float \| None; got '1', str"),
        (LoopConfig, "stop_strings", ["a"], r"expected stop_strings .* to be tuple\[str, \.\.\.\]; got \['a'\], list"),
        (OptimizerConfig, "optim", "lion", "expected optim to be one of adamw, adafactor; got 'lion'"),
        (corrections.TIS, "level", "geometric", "expected level to be one of token, sequence; got 'geometric'"),
        (QuantConfig, "bits", "8", r"expected bits of QuantConfig to be Literal\[8, 4, 2\]; got '8', str"),
    ],
)
def test_type_errors(kind: type, field: str, value: Any, message: str):
    config = next(config for config in CONFIGS if type(config) is kind)
    with pytest.raises((TypeError, ValueError), match=message):
        dataclasses.replace(config, **{field: value})


def test_numbers_of_numpy_are_accepted():
    config = dataclasses.replace(
        ROLLOUT, budget=np.int64(6), sampling=SamplingConfig(temperature=cast(float, np.float32(0.5)))
    )
    assert config.budget == 6
    for wrong in (jnp.float32(0.5), jnp.linspace(0.5, 1.0, 3)[1], np.array(0.5)):  # arrays cannot be hashed
        with pytest.raises(TypeError, match="expected temperature of SamplingConfig to be float; got"):
            SamplingConfig(temperature=cast(float, wrong))
    assert get_type_hints(ModelConfig)["hidden_size"] is int


@cases(300)
@given(st.text(max_size=20))
@example("h2o:0")
@example("h2o:6+-2")
@example("snapkv(window=0):6")
@example("snapkv(" + "(" * 300)
@example("a:b")
@example("/:A")
def test_decode_texts(text: str):
    try:
        assert parse_decode(text).policy is not None
    except FileNotFoundError as error:
        assert "expected a file of Python code" in str(error)
    except ValueError as error:
        parts = [text, text.rpartition(":")[0], text.partition(":")[0]]
        quoted = [repr(part.strip()) for part in parts] + [repr(part) for part in parts]
        assert any(part in str(error) for part in quoted) or "budget" in str(error), f"{text!r}: {error}"


@cases(300)
@given(st.one_of(st.text(max_size=12), st.from_regex(r"\A\d{1,4}(\.\d)?[kKMG]i?B?\Z")))
def test_sizes_in_bytes(text: str):
    try:
        assert parse_bytes(text) >= 1
    except ValueError as error:
        assert repr(text) in str(error)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(-2, 2), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)


@cases(200)
@given(rows=st.lists(st.one_of(JSON.map(lambda x: json.dumps(x).encode()), st.binary(max_size=12)), max_size=4))
def test_metrics_files(rows: list[bytes], tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"\n".join([b'{"step": 0}', *rows, b""]))
    try:
        assert all("step" in row for row in read_metrics(file))
    except ValueError as error:
        assert str(file) in str(error) and "line" in str(error) and "expected" in str(error)


MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", ""]), "content": JSON}), max_size=3
)


@cases(300)
@given(row=st.dictionaries(st.sampled_from(["prompt", "answer", "a"]), st.one_of(JSON, MESSAGES)), system=st.booleans())
def test_dataset_rows(row: dict[str, Any], system: bool):
    try:
        formatted = RowFormat(system_prompt="Add." if system else None).row(row, "rows.jsonl, row 7")
        assert formatted["prompt"] is not None
    except ValueError as error:
        assert str(error).startswith("rows.jsonl, row 7: expected")


OPTIONS = st.dictionaries(
    st.one_of(
        st.sampled_from(["budget", "stop", "model", "learning_rate", "report_to", "budgett"]), st.text(max_size=6)
    ),
    JSON,
    max_size=3,
)


@cases(200)
@given(st.one_of(OPTIONS.map(lambda x: yaml.safe_dump(x)), st.text(max_size=20)))
def test_config_files(tmp_path, text: str):
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    try:
        assert all(isinstance(word, str) for word in as_flags(read_options(file), ALGORITHMS["grpo"], str(file)))
    except UserError as error:
        assert str(file) in str(error)


@cases(200)
@given(JSON, JSON)
def test_differences_of_settings(one: Any, other: Any):
    assert differences(one, one) == []
    lines = differences({"a": one}, {"a": other})
    # Under Python's equality, where 1 == 1.0.
    assert bool(lines) == (one != other)
    assert all(line.startswith("a") and "expected" in line and "got" in line for line in lines)
