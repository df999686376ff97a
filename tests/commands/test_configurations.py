"""Random combinations of config fields: each raises an error that names one of them, or traces.

A rollout, the learner's batch and an update are traced with shapes only; nothing is compiled. 100 cases by default,
always the same; HYPOTHESIS_PERCENT=1000 draws ten times as many. Single fields, files and texts: `test_properties.py`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from smd_jax import corrections
from smd_jax.devices.sharding import AXES, make_mesh
from smd_jax.eviction import policies
from smd_jax.eviction.policies import LearnedGate
from smd_jax.eviction.wrappers import Protect, Pyramid
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.packs import Packs
from smd_jax.learner.policy_term import DenseLearner
from smd_jax.learner.state import init_state, reference_params
from smd_jax.learner.step import ReferenceSync
from smd_jax.losses.distillation import Direction, DistillConfig
from smd_jax.losses.dpo import DPOConfig
from smd_jax.losses.surrogates import Clip, ClipWeight, SoftGate
from smd_jax.losses.value import ValueConfig
from smd_jax.losses.weighting import FixedLength, SequenceMean
from smd_jax.message.gate import LinearGate, add_gate
from smd_jax.message.quantization import QuantConfig
from smd_jax.model.decoder import Decoder
from smd_jax.model.lora import LoraConfig, add_lora
from smd_jax.model.value_head import add_value_head
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.fixed_batch import rollout_program
from smd_jax.tasks.dataset_task import DatasetTask
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config
from smd_jax.text.prompts import PromptBatch
from smd_jax.train.grpo import GRPOConfig, GRPOLoop
from smd_jax.train.loop import Loop
from smd_jax.train.online_dpo import OnlineDPOConfig, OnlineDPOLoop
from smd_jax.train.optimizers import OptimizerConfig, make_optimizer
from smd_jax.train.ppo import PPOConfig, PPOLoop
from tests.drawn_cases import SLOW, cases, without_jaxtyping  # noqa: F401 - a fixture

Fields = dict[str, st.SearchStrategy[Any]]


# One layer: tracing layers takes half of the time.
MODEL = Decoder(tiny_model_config(num_layers=1, max_positions=32))
TOKENIZER = byte_tokenizer(chat=False)
TASK = DatasetTask([{"prompt": "3 1 2"}, {"prompt": "2 1"}], lambda completions: [0.0 for _ in completions])
STEPS = 3


def weighted(*common: Any, rare: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Samples one of the values; the rare ones, valid in few configs or none, a third as often."""
    return st.sampled_from([*common * 3, *rare])


POLICIES = [
    *(policies.Dense(), policies.H2O(), policies.H2O(1.0), policies.TOVA(), policies.TOVA(shared=False)),
    *(policies.Recent(), policies.StreamingLLM(2), policies.StreamingLLM(0), policies.SnapKV(2, 3)),
    *(policies.RKV(2, 3), policies.RKV(1, 40), policies.KeyDiff(), policies.Knorm(), policies.Random()),
    *(LearnedGate(), LearnedGate(greedy=True), Protect(policies.H2O(), 1, 1), Protect(LearnedGate(), 1)),
    *(Pyramid(policies.SnapKV(2)), Pyramid(policies.Knorm(), 2.0), Pyramid(LearnedGate())),
    Pyramid(Protect(policies.TOVA(), 1, 2), 1.5),
]
QUANTS = [
    QuantConfig(bits=8, group=2),
    QuantConfig(bits=4, group=1, value_group=4),
    QuantConfig(bits=2, group=2, value_group=8),
    QuantConfig(bits=8, group=3),
    QuantConfig(bits=4, group=2, value_group=3),
]
CORRECTIONS = [
    *(corrections.Shadow(), corrections.Naive(), corrections.Bypass(), corrections.TIS(), corrections.MIS()),
    *(corrections.TIS("sequence", batch_normalize=True), corrections.IcePop(), corrections.OPSM()),
    *(corrections.DPPOTV(), corrections.Rejection("geometric"), corrections.Veto(), corrections.SparseRL()),
    corrections.Chain((corrections.TIS(), corrections.OPSM())),
    corrections.Chain((corrections.DPPOTV(), corrections.Veto())),
    corrections.Chain((corrections.Shadow(), corrections.OPSM())),
]
DISTILLS = [DistillConfig(direction=direction) for direction in get_args(Direction)]
MODELS = {
    "plain": MODEL,
    "windows": Decoder(dataclasses.replace(MODEL.config, num_layers=2, sliding_windows=(4, None))),
    "bfloat16": Decoder(dataclasses.replace(MODEL.config, dtype="bfloat16", num_heads=2, num_kv_heads=1)),
}

LOOP_FIELDS: Fields = {
    "prompts_per_step": weighted(1, 2, 4, rare=(3, 0)),
    "group_size": weighted(2, 4, rare=(1, 3)),
    "prompt_width": weighted(4, 9, rare=(1, 27, 60)),
    "policy": st.sampled_from(POLICIES),
    "decode_rows": weighted(None, 1, 3, rare=(0,)),
    "prefill_rows": weighted(1, 8, rare=(0,)),
    "stop_strings": weighted((), ("a",), rare=(("", "b"),)),
    "minibatches": weighted(1, 2, rare=(4, 0)),
    "num_iterations": weighted(1, 2),
    "update_widths": weighted(1, 4, rare=(50,)),
    "seed": weighted(0, 7, rare=(-1,)),
    "rollout.max_new_tokens": weighted(1, 6, 8, rare=(0, 29)),
    "rollout.budget": weighted(4, 6, 40, rare=(1, 2)),
    "rollout.buffer": weighted(1, 2, 4, 9),
    "rollout.eos_token_id": weighted(None, 5, 258, rare=(264, -1)),
    "rollout.pad_token_id": weighted(0, 256, rare=(400, -2)),
    "rollout.min_new_tokens": weighted(0, 2, rare=(7,)),
    "rollout.prefill_chunk": weighted(None, 1, 3, 20),
    "rollout.quant": st.sampled_from([None, *QUANTS]),
    "rollout.sampling.temperature": weighted(1.0, 0.7, rare=(0.0,)),
    "rollout.sampling.top_k": weighted(0, 3, 500),
    "rollout.sampling.top_p": weighted(1.0, 0.9),
    "rollout.sampling.min_p": weighted(0.0, 0.1, rare=(1.0,)),
}
UPDATE_FIELDS: Fields = {
    "update.visibility": weighted("shadow", "dense"),
    "update.policy_coef": weighted(1.0, 0.5, rare=(0.0,)),
    "update.entropy_coef": weighted(0.0, 0.1),
    "update.top_entropy_quantile": weighted(1.0, 0.2),
    "update.eviction_coef": weighted(0.0, 1.0),
    "update.correction": st.sampled_from(CORRECTIONS),
    "update.distill": st.sampled_from([None, *DISTILLS]),
    "update.dense_learner": st.sampled_from([None, *(DenseLearner(0.5, x) for x in CORRECTIONS[1:])]),
    "update.kl_in_reward": st.booleans(),
    "update.reference_sync": weighted(None, ReferenceSync(0.5, 2), ReferenceSync.ema(0.9)),
    "update.mask_truncated_completions": st.booleans(),
    "update.microbatch_size": weighted(None, 1, 2, 4, rare=(3, 0)),
    "update.pack_columns": weighted(None, 17, 24, rare=(2, 90)),
    "update.rows_per_prompt": weighted(1, 2, rare=(3, 4, 0)),
    "update.loss.weighting": st.sampled_from([SequenceMean(), FixedLength(), FixedLength(9)]),
    "update.loss.surrogate": st.sampled_from([Clip(), Clip(0.1, 0.3, 3.0), ClipWeight(), SoftGate()]),
    "update.loss.ratio_level": weighted("token", "geometric", rare=("sequence",)),
    "update.loss.beta": weighted(0.0, 0.1),
    "update.loss.kl_estimator": weighted("k3", "k1", rare=("k2",)),
    "update.loss.use_bias_correction_kl": st.booleans(),
}
GRPO_FIELDS: Fields = {
    "advantages": weighted("group_relative", "leave_one_out"),
    "scale_rewards": weighted("group", "batch", "none"),
    "dynamic_sampling": weighted(None, 0, 2, rare=(-1,)),
    "rollouts_ahead": weighted(0, 1, rare=(2,)),
}
PPO_FIELDS: Fields = {
    "gamma": weighted(1.0, 0.0, rare=(1.5,)),
    "lam": weighted(0.95, 1.0, rare=(-1.0,)),
    "whiten_advantages": st.booleans(),
    "update.value": weighted(ValueConfig(), ValueConfig(coef=1.0, clip_range=None), rare=(None,)),
}
DPO_FIELDS: Fields = {
    "missing_eos_penalty": weighted(None, 1.0, rare=(0.0,)),
    "update.visibility": weighted("shadow", "dense"),
    "update.pairs": weighted(DPOConfig(), DPOConfig(beta=0.5, loss_type="ipo"), rare=(None,)),
    "update.correction": weighted(corrections.Shadow(), rare=(corrections.TIS(),)),
    "update.microbatch_size": weighted(None, 2, 4, rare=(3, 0)),
    "update.reference_sync": weighted(None, ReferenceSync(0.5, 2), ReferenceSync.ema(0.9)),
}
OPTIMIZER_FIELDS: Fields = {
    "optimizer.optim": weighted("adamw", "adafactor"),
    "optimizer.lr_scheduler_type": weighted("constant", "linear", "cosine"),
    "optimizer.warmup_steps": weighted(0, 1, 0.5, rare=(40, 1.5)),
    "optimizer.min_lr_rate": weighted(0.0, 0.1),
    "optimizer.weight_decay": weighted(0.0, 0.1),
    "optimizer.momentum_dtype": weighted("float32", "bfloat16"),
    "optimizer.max_grad_norm": weighted(None, 1.0),
    "optimizer.gate_speed": weighted(None, 10.0),
}
SETUP_FIELDS: Fields = {
    "mesh": weighted((1, 1, 1), rare=((2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (4, 1, 1), (1, 1, 1, 2))),
    "model": weighted("plain", "windows", "bfloat16"),
    "lora": weighted(None, LoraConfig(rank=2), LoraConfig(rank=2, targets=("q_proj",), rank_stabilised=True)),
    "gate": st.booleans(),
    "reference": st.booleans(),
}
BASE: dict[str, Any] = {
    **{"prompts_per_step": 2, "group_size": 4, "prompt_width": 9},
    **{"policy": policies.H2O(), "rollout": RolloutConfig(max_new_tokens=8, budget=6, buffer=2)},
}
SHARED_FIELDS = LOOP_FIELDS | UPDATE_FIELDS
ALGORITHMS: dict[str, tuple[Any, type, Fields]] = {
    "grpo": (GRPOConfig(**BASE), GRPOLoop, SHARED_FIELDS | GRPO_FIELDS),
    "ppo": (PPOConfig(**BASE, update=UpdateConfig(value=ValueConfig())), PPOLoop, SHARED_FIELDS | PPO_FIELDS),
    "dpo": (OnlineDPOConfig(**BASE), OnlineDPOLoop, LOOP_FIELDS | DPO_FIELDS),
}


@st.composite
def runs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """An algorithm, and values for two to seven fields of its config and setup."""
    name = draw(st.sampled_from(["grpo", "grpo", "ppo", "dpo"]))
    fields = ALGORITHMS[name][2] | OPTIMIZER_FIELDS | SETUP_FIELDS
    paths = draw(st.lists(st.sampled_from(sorted(fields)), min_size=2, max_size=7, unique=True))
    return name, {path: draw(fields[path]) for path in paths}


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """Replaces fields by their paths, such as `rollout.budget`, all at once: no intermediate config is built."""
    inner = dict[str, dict[str, Any]]()
    own = dict[str, Any]()
    for path, value in values.items():
        first, _, rest = path.partition(".")
        if rest:
            inner.setdefault(first, {})[rest] = value
        else:
            own[first] = value
    own |= {first: with_values(getattr(config, first), below) for first, below in inner.items()}
    return dataclasses.replace(config, **own)


@functools.cache
def param_shapes(model: str, lora: LoraConfig | None, gate: bool, critic: bool) -> Any:
    config = MODELS[model].config

    def build() -> Any:
        params = random_params(config)
        if gate:
            params = add_gate(
                params,
                LinearGate(),
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
            )
        if critic:
            params = add_value_head(params, config)
        return params if lora is None else add_lora(params, lora, jax.random.key(0))

    return jax.eval_shape(build)


KEY = jax.eval_shape(lambda: jax.random.key(0))


def array_shape(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def build_loop(name: str, values: dict[str, Any]) -> tuple[Loop, Any]:
    """Builds the loop and the shapes of its state, as a user does before the first step."""
    setup = {path: value for path, value in values.items() if path in SETUP_FIELDS}
    options = {p.removeprefix("optimizer."): value for p, value in values.items() if p.startswith("optimizer.")}
    config = with_values(ALGORITHMS[name][0], {p: x for p, x in values.items() if p in ALGORITHMS[name][2]})
    model = setup.get("model", "plain")
    optimizer = make_optimizer(OptimizerConfig(**options), STEPS * config.steps_per_rollout)
    mesh = make_mesh(*setup.get("mesh", (1, 1, 1)))
    loop = ALGORITHMS[name][1](MODELS[model], TASK, TOKENIZER, optimizer, config, mesh)
    params = param_shapes(model, setup.get("lora"), setup.get("gate", False), name == "ppo")
    has_reference = setup.get("reference", True)
    state = jax.eval_shape(lambda p, k: init_state(p, optimizer, k, p if has_reference else None), params, KEY)
    if isinstance(config, GRPOConfig) and config.rollouts_ahead:
        state = state.replace(sampler_params=params)
    loop.check(state)
    return loop, state


def minibatch_of(batch: Any, minibatches: int) -> Any:
    return jax.tree.map(lambda x: array_shape(x.shape[0] // minibatches, *x.shape[1:], dtype=x.dtype), batch)


def trace(loop: Loop, state: Any) -> None:
    """Traces one step with shapes only."""
    config = loop.config
    prompts, rows = config.prompts_per_step, config.completions_per_step
    shape = (prompts, config.prompt_width)
    tokens = PromptBatch(array_shape(*shape, dtype=jnp.int32), array_shape(*shape, dtype=bool))
    with jax.set_mesh(loop.mesh):
        sample = partial(
            rollout_program,
            loop.model,
            policy=config.policy,
            config=config.rollout,
            group_size=config.group_size,
            stop=loop.rollouts.stop,
        )
        trajectory = jax.eval_shape(sample, loop.policy_params(state.params), tokens, KEY)
        counted = None if loop.config.extra_rollouts is None else array_shape(rows, dtype=bool)
        batch = jax.eval_shape(loop.learner_batch, state.params, trajectory, array_shape(rows), counted)
        minibatch = minibatch_of(batch, config.minibatches)
        packs = () if config.update.pack_columns is None else (pack_shapes(config.update),)
        loop.update.eval_shape(state, minibatch, *packs)
        if config.update.kl_in_reward:
            jax.eval_shape(loop.replay, reference_params(state), trajectory)


def pack_shapes(config: UpdateConfig) -> Packs:
    """Two microbatches of packed rows; their shapes do not depend on the packing."""
    assert config.pack_columns is not None and config.microbatch_size is not None
    places = array_shape(2, config.microbatch_size, config.pack_columns, dtype=jnp.int32)
    return Packs(*(places,) * 7)


def names_of(path: str, value: Any) -> set[str]:
    """Names by which an error may call a field, its value or a part of it."""
    name = path.rpartition(".")[2]
    if name == "mesh":
        return set(AXES)
    if dataclasses.is_dataclass(value):
        inside = (names_of(field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {name, type(value).__name__}.union(*inside)
    return {name, name.replace("_", " "), name.removesuffix("s")}


def check_error_names_a_field(error: Exception, values: Mapping[str, Any]) -> None:
    message = str(error)
    named = any(word in message for item in values.items() for word in names_of(*item))
    assert named and "expected" in message and "got" in message, f"{values}: {type(error).__name__}: {message}"


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("grpo", {"prefill_rows": 0}, "expected prefill_rows >= 1; got 0"),
        ("grpo", {"prompt_width": 60}, r"expected prompt_width \+ max_new_tokens within .* 32 tokens; got 60 \+ 8"),
        ("grpo", {"rollout.budget": 1, "policy": policies.SnapKV(2)}, "expected a budget of at least 2 keys .*; got 1"),
        (
            "grpo",
            {"rollout.quant": QuantConfig(bits=4, group=2, value_group=3)},
            "value_group that divides head_dim .*; got 3",
        ),
        ("grpo", {"stop_strings": ("",)}, "expected stop strings of at least one character; got ''"),
        ("grpo", {"update.eviction_coef": 1.0}, r"expected an eviction policy that records its draws.*; got H2O\("),
        ("grpo", {"policy": LearnedGate()}, "expected parameters with 'eviction_gate', .*; got "),
    ],
)
def test_invalid_configs_raise_before_compilation(name: str, values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        build_loop(name, values)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:expected fewer warmup_steps")
@settings(cases(100), derandomize=True, suppress_health_check=[*SLOW, HealthCheck.filter_too_much])
@given(runs())
@example(("grpo", {}))
@example(("ppo", {}))
@example(("dpo", {}))
def test_accepted_configs_trace(run: tuple[str, dict[str, Any]]):
    name, values = run
    try:
        loop, state = build_loop(name, values)
    except (ValueError, TypeError) as error:
        check_error_names_a_field(error, values)
        return
    trace(loop, state)
