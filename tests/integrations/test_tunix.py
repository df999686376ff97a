"""Tunix' released GRPO learner with our rollout and our record: it trains the policy that sampled."""

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from orbax.checkpoint import CheckpointManagerOptions

pytest.importorskip("tunix", reason="needs google-tunix, whose pins differ from ours: see docs/tunix.md")

from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl import common
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, Mode, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

import smd_jax as smd
from smd_jax.integrations.tunix import Actor, Replay, SmdGRPOLearner, SmdRollout, TrainExample, policy_loss
from smd_jax.integrations.tunix.versions import check_version
from smd_jax.model.lora import LORA, LoraConfig, add_lora, base_params
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config
from tests.paths import ROOT

# Tunix and its imports emit deprecation warnings.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

MODEL = smd.Decoder(tiny_model_config())
GROUP = 4
PROMPTS = ["say a: ", "and then b: "]
LENGTHS = RolloutConfig(max_tokens_to_generate=20, max_prompt_length=16, temperature=1.0)
ENGINE = functools.partial(SmdRollout, policy=smd.eviction.H2O(), budget=6, buffer=4)


@pytest.fixture(autouse=True)
def allow_rank_promotion() -> Iterator[None]:
    """Tunix adds arrays of different ranks, which our tests forbid."""
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_rank_promotion", "raise")


def sharp_params(seed: int = 0):
    """Parameters under which an evicted key makes a difference."""
    return jax.tree.map(lambda x: 2 * x, random_params(MODEL.config, seed))


def one_device_mesh(device: int = 0) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[device]).reshape(1, 1), ("fsdp", "tp"))


def make_cluster(
    actor: nnx.Module | None = None, *, engine=ENGINE, reference=None, tokenizer=None, rollout_mesh=None, **training
) -> RLCluster:
    mesh = one_device_mesh()
    roles = {Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: rollout_mesh or mesh}
    sizes = {"mini_batch_size": 2, "train_micro_batch_size": 1} | training
    return RLCluster(
        actor=actor or Actor(MODEL, sharp_params()),
        reference=reference,
        tokenizer=tokenizer or byte_tokenizer(chat=False),
        cluster_config=ClusterConfig(
            role_to_mesh=roles,
            rollout_engine=engine,
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(1e-2), eval_every_n_steps=100, max_steps=100, **sizes
            ),
            rollout_config=LENGTHS,
        ),
    )


def reward(prompts, completions, **columns) -> list[float]:
    return [float(len(set(text))) for text in completions]


def train(cluster: RLCluster, *, steps: int = 2, **config) -> dict[str, np.ndarray]:
    """Trains, and returns the metrics that Tunix logged for the actor."""
    learner = SmdGRPOLearner(cluster, GRPOConfig(num_generations=GROUP, **{"beta": 0.0} | config), reward)
    learner.train([{"prompts": np.array(PROMPTS)}] * steps)
    logged = cluster.actor_trainer.metrics_logger
    names = ["loss", "kl", "grad_norm", "log_ratio/abs_mean", "is_ratio/max", "is_ratio/min"]
    return {name: logged.get_metric_history("actor", name, "train") for name in names}


def rolled_out(actor: Actor, lengths: RolloutConfig = LENGTHS, engine=ENGINE) -> smd.Trajectory:
    rollout = engine(actor, TokenizerAdapter(byte_tokenizer(chat=False)), one_device_mesh(), lengths)
    rollout.start_record(0)
    rollout.generate([text for text in PROMPTS for _ in range(GROUP)], lengths)
    return rollout.take_record()


def replayed_logps(actor: Actor, trajectory: smd.Trajectory, temperature: float = 1.0) -> np.ndarray:
    """From Tunix' own function, which passes a causal mask and divides by the temperature of the training."""
    graph, state = nnx.split(Replay(actor, trajectory, temperature))
    prompt, response = trajectory.tokens[:, : trajectory.prompt_width], trajectory.response
    return np.asarray(common.compute_per_token_logps(graph, state, prompt, response, 256, 258, temperature=temperature))


def test_learner_is_the_sampled_policy_in_every_step():
    before = sharp_params()
    cluster = make_cluster()
    logged = train(cluster, steps=3, policy_loss_fn="smd_grpo")
    assert len(logged["loss"]) == 3
    assert np.abs(np.log(logged["is_ratio/max"])).max() < 3e-5
    assert np.abs(np.log(logged["is_ratio/min"])).max() < 3e-5
    moved = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), before, cluster.rollout.model().params)
    assert min(jax.tree.leaves(moved)) > 1e-3, "every parameter is trained, and the sampler has the new ones"


def test_without_the_record_the_ratio_is_not_one():
    logged = train(make_cluster(), steps=1, policy_loss_fn="grpo")
    assert logged["log_ratio/abs_mean"][0] > 0.05
    assert logged["is_ratio/max"][0] > 1.5


def test_training_raises_the_reward():
    learner = SmdGRPOLearner(
        make_cluster(), GRPOConfig(num_generations=GROUP, beta=0.0, policy_loss_fn="smd_grpo"), reward
    )
    learner.train([{"prompts": np.array(PROMPTS)}] * 30)
    means = learner.rl_cluster._rl_metrics_logger.get_metric_history("rewards", "score/mean", "train")
    assert np.mean(means[-3:]) > np.mean(means[:3]) + 1


def test_the_docs_page_runs(capsys: pytest.CaptureFixture[str]):
    page = (ROOT / "docs" / "tunix.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(code.splitlines()) <= 60
    exec(compile(code, "docs/tunix.md", "exec"), {"__name__": "page"})
    printed = capsys.readouterr().out
    assert abs(float(printed.strip("[]\n").split()[0]) - 1) < 1e-5


def test_gradient_is_that_of_our_replay():
    actor = Actor(MODEL, sharp_params())
    trajectory = rolled_out(actor)
    advantages = jnp.linspace(-1, 2, 2 * GROUP)
    config = GRPOConfig(num_generations=GROUP, beta=0.0, policy_loss_fn="smd_grpo", loss_agg_mode="token-mean")
    config.temperature = 1.0
    example = TrainExample(
        prompt_ids=trajectory.tokens[:, :16],
        prompt_mask=trajectory.valid[:, :16],
        completion_ids=trajectory.response,
        completion_mask=trajectory.response_mask,
        advantages=advantages,
        ref_per_token_logps=None,
        old_per_token_logps=trajectory.logprobs,
        trajectory=trajectory,
    )
    (loss, _), gradient = nnx.value_and_grad(policy_loss, has_aux=True)(actor, example, config, 256, 258)

    def ours(params):
        ratio = jnp.exp(smd.replay(MODEL, params, trajectory).logprobs - trajectory.logprobs)
        weight = trajectory.response_mask / trajectory.response_mask.sum()
        return -jnp.sum(weight * ratio * advantages[:, None])

    expected_loss, expected = jax.value_and_grad(ours)(sharp_params())
    assert abs(float(loss - expected_loss)) < 1e-5
    gradients = Actor(MODEL, sharp_params())
    nnx.update(gradients, gradient)
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        got = dict(jax.tree_util.tree_leaves_with_path(gradients.params))[path]
        assert np.allclose(got, leaf, atol=1e-5 * float(jnp.abs(leaf).max())), path


@pytest.mark.parametrize(
    ("lengths", "engine"),
    [
        ({"temperature": 0.7, "top_k": 40, "top_p": 0.9}, ENGINE),
        ({}, functools.partial(ENGINE, prefill_chunk=4)),
        ({}, functools.partial(ENGINE, quant=smd.QuantConfig(bits=4, group=4))),
    ],
    ids=["filters", "prefill_chunk", "quantised"],
)
def test_replay_through_tunix_gives_the_samplers_logprobs(lengths, engine):
    actor = Actor(MODEL, sharp_params())
    trajectory = rolled_out(actor, RolloutConfig(20, **{"max_prompt_length": 16, "temperature": 1.0} | lengths), engine)
    logprobs = replayed_logps(actor, trajectory, trajectory.temperature)
    error = np.abs(logprobs - trajectory.logprobs)[np.asarray(trajectory.response_mask)]
    assert error.max() < 3e-5


@pytest.mark.parametrize("sampled_at", [0.5, 0.0])
def test_an_evaluation_may_have_another_temperature_than_training(sampled_at):
    actor = Actor(MODEL, sharp_params())
    trajectory = rolled_out(actor, dataclasses.replace(LENGTHS, temperature=sampled_at))
    logprobs = replayed_logps(actor, trajectory, temperature=0.8)
    error = np.abs(logprobs - trajectory.logprobs)[np.asarray(trajectory.response_mask)]
    assert error.max() < 3e-5


def test_reference_has_the_shadow_mask():
    logged = train(make_cluster(reference=Actor(MODEL, sharp_params())), policy_loss_fn="smd_grpo", beta=0.1)
    assert abs(logged["kl"][0]) < 1e-6 < logged["kl"][1]


def test_several_iterations_keep_the_samplers_logprobs():
    cluster = make_cluster(train_micro_batch_size=2)
    logged = train(cluster, steps=1, policy_loss_fn="smd_grpo", num_iterations=2)
    assert logged["log_ratio/abs_mean"][0] < 3e-5 < logged["log_ratio/abs_mean"][1]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path):
    whole = make_cluster()
    train(whole, steps=3, policy_loss_fn="smd_grpo")
    saved = {"checkpoint_root_directory": str(tmp_path), "checkpointing_options": CheckpointManagerOptions(1)}
    first = make_cluster(**saved)
    train(first, steps=2, policy_loss_fn="smd_grpo")
    rest = make_cluster(**saved)
    train(rest, steps=3, policy_loss_fn="smd_grpo")
    assert rest.actor_trainer.train_steps == 3
    assert jax.tree.all(jax.tree.map(np.array_equal, rest.rollout.model().params, whole.rollout.model().params))


def test_lora_trains_only_the_adapters():
    params = add_lora(sharp_params(), LoraConfig(rank=2, alpha=4.0), jax.random.key(0))
    cluster = make_cluster(Actor(MODEL, params))
    logged = train(cluster, policy_loss_fn="smd_grpo")
    assert logged["is_ratio/max"].max() - 1 < 1e-5
    trained = cluster.rollout.model().params
    assert jax.tree.all(jax.tree.map(np.array_equal, base_params(trained), base_params(params)))
    assert all(jnp.abs(pair["lora_B"]).max() > 0 for pair in trained[LORA].matrices["layers_0"]["mlp"].values())


def test_an_end_token_equal_to_padding_is_trained():
    tokenizer = byte_tokenizer(chat=False)
    tokenizer.pad_token = tokenizer.eos_token
    params = sharp_params()
    # Makes the end token, which equals the padding, likely.
    params["embed"]["embedding"] = params["embed"]["embedding"].at[258].multiply(6.0)
    graded = []

    def recording_reward(prompts, completions, **columns) -> list[float]:
        graded.extend(completions)
        return reward(prompts, completions)

    example = train_example(make_cluster(Actor(MODEL, params), tokenizer=tokenizer), recording_reward)
    assert example.trajectory.terminated.any()
    assert np.array_equal(example.completion_mask.sum(1), example.trajectory.lengths())
    assert np.array_equal(example.completion_ids, example.trajectory.response)
    assert not np.array_equal(example.completion_mask, example.completion_ids != 258)
    assert not [text for text in graded if tokenizer.eos_token in text]


def train_example(cluster: RLCluster, function=reward, step: int = 0, mode: Mode = Mode.TRAIN) -> TrainExample:
    """The learner's batch for one batch of prompts."""
    learner = SmdGRPOLearner(cluster, GRPOConfig(num_generations=GROUP, beta=0.0), function)
    learner._rollout_micro_batch_size = 2
    learner._iter_steps = learner._eval_iter_steps = step
    return learner._generate_and_compute_advantage({"prompts": [text for text in PROMPTS for _ in range(GROUP)]}, mode)


def test_steps_and_evaluations_sample_with_their_own_keys():
    cluster = make_cluster()
    steps = [(0, Mode.TRAIN), (1, Mode.TRAIN), (0, Mode.EVAL)]
    drawn = [np.asarray(train_example(cluster, step=step, mode=mode).completion_ids) for step, mode in steps * 2]
    assert all(np.array_equal(first, again) for first, again in zip(drawn[:3], drawn[3:], strict=True))
    assert not any(np.array_equal(drawn[a], drawn[b]) for a, b in [(0, 1), (0, 2), (1, 2)])


def test_rollout_keeps_the_order_of_prompts_and_changes_its_samples():
    actor = Actor(MODEL, sharp_params())
    rollout = ENGINE(actor, TokenizerAdapter(byte_tokenizer(chat=False)), one_device_mesh(), LENGTHS)
    prompts = ["a", "a", "a", "a", "bc", "bc", "a", "a"]
    first, second = (rollout.generate(prompts, LENGTHS) for _ in range(2))
    starts = [bytes(int(token) for token in row if token < 256).decode() for row in first.left_padded_prompt_tokens]
    assert starts == prompts
    assert first.text != second.text
    rollout.start_record(5)
    again = [rollout.generate(prompts, LENGTHS).text for _ in range(2)]
    assert again[0] != again[1]
    assert rollout.take_record().tokens.shape == (16, 36)
    with pytest.raises(ValueError, match="expected rollouts since start_record"):
        rollout.take_record()
    rollout.start_record(5)
    assert rollout.generate(prompts, LENGTHS).text == again[0]


def test_records_with_groups_of_different_sizes_join_under_a_gate():
    gate = smd.eviction.LearnedGate(smd.eviction.AttentionGate())
    tokenizer = TokenizerAdapter(byte_tokenizer(chat=False))
    engine = SmdRollout(
        Actor(MODEL, sharp_params()), tokenizer, one_device_mesh(), LENGTHS, policy=gate, budget=6, buffer=4
    )
    engine.start_record(0)
    for prompts in (["a", "a", "bc", "bc"], ["d"] * 4):
        engine.generate(prompts, LENGTHS)
    assert engine.take_record().tokens.shape == (8, 36)


def test_version_outside_of_the_tested_range_is_refused():
    check_version("0.1.7")
    for version in ("0.1.6", "0.2.0"):
        with pytest.raises(
            ImportError, match=f"google-tunix: expected a tested version, >=0.1.7,<0.1.8; got {version}"
        ):
            check_version(version)


def test_tokenizer_of_another_model_is_refused():
    for vocab_size in (200, 1000):
        model = smd.Decoder(tiny_model_config(vocab_size=vocab_size))
        with pytest.raises(ValueError, match=f"tokenizer and embedding .* expected .*; got vocab_size {vocab_size}"):
            make_cluster(Actor(model, random_params(model.config)))


class CharacterTokenizer:
    """A tokenizer with only the methods that Tunix requires."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return 999

    def pad_id(self) -> int:
        return 1


def test_end_token_outside_of_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="tokenizer: expected pad_id and eos_id from 0 to 263; got .*'eos_id': 999"):
        make_cluster(tokenizer=CharacterTokenizer())


def test_errors_name_the_field():
    with pytest.raises(TypeError, match="actor: expected .*Actor; got Linear"):
        make_cluster(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="expected a budget of at least"):
        make_cluster(engine=functools.partial(SmdRollout, policy=smd.eviction.SnapKV(window=8), budget=4, buffer=4))
    config = GRPOConfig(num_generations=GROUP, beta=0.0)
    with pytest.raises(ValueError, match="max_seq_token_per_tpu: expected None.*; got 64"):
        SmdGRPOLearner(make_cluster(max_seq_token_per_tpu=64), config, reward)
    with pytest.raises(ValueError, match="role_to_mesh: expected one mesh for actor and rollout; got"):
        SmdGRPOLearner(make_cluster(rollout_mesh=one_device_mesh(1)), config, reward)
    with pytest.raises(ValueError, match="max_prompt_length: expected 1 to 16 tokens; got 17"):
        make_cluster().generate(["a" * 17])
    with pytest.raises(TypeError, match="prompts: expected strings, .*; got ndarray"):
        make_cluster().generate([np.array(["a", "b"])])
    rollout = make_cluster().rollout
    with pytest.raises(ValueError, match="expected rollouts since start_record, .*; got none"):
        rollout.take_record()


def test_logprobs_are_returned_for_recorded_rows_only():
    rollout = make_cluster().rollout
    rollout.start_record(0)
    rollout.generate(PROMPTS, LENGTHS)
    record = rollout.take_record()
    rollout.start_record(0)
    rollout.generate(PROMPTS, LENGTHS)
    with pytest.raises(ValueError, match="completion_tokens: expected .* of the last rollout; got other tokens"):
        rollout.get_per_token_logps(record.tokens[1:, :16], record.response[1:])
    rows = [rollout.get_per_token_logps(record.tokens[row, None, :16], record.response[row, None]) for row in (0, 1)]
    assert np.array_equal(jnp.concatenate(rows), record.logprobs)


def test_tunix_learner_without_a_record_raises():
    learner = GRPOLearner(
        make_cluster(), GRPOConfig(num_generations=GROUP, beta=0.0, policy_loss_fn="smd_grpo"), reward
    )
    with pytest.raises(TypeError, match="train_example: expected one with a trajectory, .*; got one without"):
        learner.train([{"prompts": np.array(PROMPTS)}])


def test_actor_under_tunix_mask_is_the_dense_policy():
    actor = Actor(MODEL, sharp_params())
    trajectory = rolled_out(actor)
    logits, cache = actor(
        trajectory.tokens,
        trajectory.positions,
        cache=None,
        attention_mask=trajectory.dense_mask().to_boolean()[:, 0, 0],
    )
    expected = MODEL.apply({"params": sharp_params()}, trajectory.tokens, trajectory.positions, trajectory.dense_mask())
    assert cache is None and np.allclose(logits, expected, atol=1e-5)
    with pytest.raises(ValueError, match="cache: expected None, .*; got dict"):
        actor(trajectory.tokens, trajectory.positions, {}, None)
    with pytest.raises(ValueError, match="attention_mask: expected booleans .*; got None"):
        actor(trajectory.tokens, trajectory.positions, None, None)
