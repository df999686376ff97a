"""GRPO on conversations of one or several contexts: exact replay, bitwise resumption, losses of sampled tokens."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow.parquet
import pytest

from smd_jax.corrections.trust_region import OPSM
from smd_jax.devices.sharding import make_mesh, shard_tree
from smd_jax.environments.processes import EnvironmentsHere
from smd_jax.eviction.policies import Dense, SnapKV
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.evictions import EvictionTerm
from smd_jax.learner.policy_term import DenseLearner
from smd_jax.learner.state import TrainState, init_state
from smd_jax.losses.named import gspo
from smd_jax.memory.compiled import rollout_memory
from smd_jax.memory.fit import fit_loop
from smd_jax.message.sampling import SamplingConfig
from smd_jax.model.decoder import Decoder
from smd_jax.monitor.completions import CompletionsLog, load_masks
from smd_jax.sampler.compaction import COMPACTED
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.conversation_loop import ConversationConfig
from smd_jax.tasks.rewards import TooManyFailures
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config
from smd_jax.train.conversations import EnvironmentConfig, TextCompaction
from smd_jax.train.grpo import GRPOConfig, GRPOLoop, advantages
from smd_jax.train.rollouts import Sampled
from smd_jax.train.samples import RefusedRolloutError, Samples, select_groups
from tests.bitwise import assert_bitwise_equal
from tests.toy_loop import run, share_programs

TOKENIZER = byte_tokenizer(chat=False)
MODEL = Decoder(tiny_model_config(num_layers=1, max_positions=80, tie_embeddings=False))
# Every sixth byte ends a turn. With top_k, each column has its own drawable tokens.
ROLLOUT = RolloutConfig(
    max_new_tokens=64,
    budget=12,
    buffer=4,
    eos_token_id=tuple(range(0, 256, 6)),
    pad_token_id=256,
    sampling=SamplingConfig(top_k=64),
)
CONFIG = GRPOConfig(
    prompts_per_step=2, group_size=4, prompt_width=8, policy=SnapKV(window=4), rollout=ROLLOUT, minibatches=1
)
COMPACTION = TextCompaction(contexts=3, after_tokens=6, ask="?!?", heading="#")
# For three contexts per conversation, whose prompts also hold a summary.
WIDER = dataclasses.replace(CONFIG, prompt_width=32, rollout=dataclasses.replace(ROLLOUT, max_new_tokens=48))
CALLS = {"made": 0, "interrupt": -1}


class Rows:
    """Rows with the kind of their environment and its last turn."""

    def __init__(self, kind: str = "judges", last: int = 3) -> None:
        self.kind, self.last = kind, last

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": f"{index}?", "kind": self.kind, "last": self.last}

    def reward(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        raise AssertionError("the environment gives the rewards")


class Judge:
    """Rewards small bytes. Interrupts call number `CALLS["interrupt"]`, and fails in rows of kind "fails"."""

    def reset(self, row: dict[str, Any]) -> str:
        self.row, self.turn = row, 0
        return row["prompt"]

    def step(self, text: str) -> tuple[str, float, bool]:
        self.turn += 1
        if CALLS["made"] == CALLS["interrupt"]:
            raise KeyboardInterrupt
        CALLS["made"] += 1
        if self.row["kind"] == "fails":
            raise OSError("no disk")
        return f"({self.turn})", float(sum(ord(c) < 80 for c in text)) / 4, self.turn == self.row["last"]


@functools.cache
def optimizer() -> optax.GradientTransformation:
    return optax.adam(1e-3)


def new_loop(
    compaction: TextCompaction | None = None,
    kind: str = "judges",
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> GRPOLoop:
    """`changes` go to the GRPOConfig, `options` to the EnvironmentConfig."""
    options = {"conversation": ConversationConfig(turns=4)} | options
    environment = EnvironmentConfig(environments=EnvironmentsHere(Judge), compaction=compaction, **options)
    # Several contexts need conversations that do not end by themselves.
    rows, config = (Rows(kind), CONFIG) if compaction is None else (Rows(kind, last=5), WIDER)
    config = dataclasses.replace(config, **changes or {})
    loop = GRPOLoop(MODEL, rows, TOKENIZER, optimizer(), config, make_mesh(1, 1, 1), environment=environment)
    share_programs(loop)
    return loop


def new_state() -> TrainState:
    state = init_state(random_params(MODEL.config), optimizer(), jax.random.key(4))
    return shard_tree(jax.tree.map(jnp.copy, state), make_mesh(1, 1, 1))


@functools.cache
def two_steps(compaction: TextCompaction | None) -> tuple[TrainState, list[dict[str, float]]]:
    return run(new_loop(compaction), new_state(), 2)


def first_rollout(loop: GRPOLoop) -> Samples:
    return loop.grade(loop.respond(new_state().params, jax.random.key(0), 0))


@functools.cache
def sampled(compaction: TextCompaction | None = None) -> Samples:
    return first_rollout(new_loop(compaction))


one_and_several_contexts = pytest.mark.parametrize(
    "compaction", [None, pytest.param(COMPACTION, marks=pytest.mark.slow)], ids=["one context", "several contexts"]
)


@one_and_several_contexts
def test_the_replay_is_exact_and_the_gradient_is_not_zero(compaction: TextCompaction | None):
    for row in two_steps(compaction)[1]:
        assert row["sampling/sampling_logp_difference/max"] <= 2e-5
        assert row["grad_norm"] > 0 and row["update/skipped"] == 0
        assert 1 < row["conversations/turns"] <= 4 and row["conversations/read_tokens"] > 3
        assert row["rollout/tokens"] == 8 * row["completions/mean_length"] and row["rollout/evicted_share"] > 0
        assert compaction is None or 1.5 < row["conversations/contexts"] <= 3


def test_memory_is_not_measured_with_an_environment():
    loop = new_loop(None)
    for measure in (lambda: fit_loop(loop, new_state(), 2**40), lambda: rollout_memory(loop, new_state())):
        with pytest.raises(ValueError, match="expected single completions, whose programs are measured; got an env"):
            measure()


@one_and_several_contexts
def test_a_run_interrupted_in_a_conversation_resumes_bitwise(compaction: TextCompaction | None):
    """Interrupted in the last call of the second rollout, which is in the last context."""
    whole, rows = two_steps(compaction)
    state, first = run(new_loop(compaction), new_state(), 1)
    kept = [jax.tree.map(jnp.copy, state) for _ in range(2)]
    CALLS["made"] = 0
    resumed, second = run(new_loop(compaction), kept[0], 1)
    CALLS.update(made=0, interrupt=CALLS["made"] - 1)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(new_loop(compaction), state, 1)
    finally:
        CALLS["interrupt"] = -1
    again, third = run(new_loop(compaction), kept[1], 1)
    assert first + second == first + third == rows
    assert_bitwise_equal(resumed, whole)
    assert_bitwise_equal(again, whole)


def test_tokens_of_the_environment_have_no_loss():
    """Other log-probabilities and entropies of unsampled tokens give the same step, bit for bit."""
    loop, samples = new_loop(), sampled()
    trajectory = samples.trajectory
    mask = np.asarray(trajectory.response_mask)
    read = np.asarray(trajectory.valid)[:, trajectory.prompt_width :] & ~mask
    assert read.sum() > 30 and mask.sum() > 30
    assert trajectory.entropy is not None
    other = trajectory.replace(
        logprobs=jnp.where(mask, trajectory.logprobs, -7.0), entropy=jnp.where(mask, trajectory.entropy, 9.0)
    )
    states = [loop.learn(new_state(), samples._replace(trajectory=each))[0] for each in (trajectory, other)]
    assert_bitwise_equal(*states)
    moved, first = (np.asarray(jax.tree.leaves(x.params)[0]) for x in (states[0], new_state()))
    assert not np.array_equal(moved, first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compaction", "policy", "packed"),
    [
        (None, CONFIG.policy, {"pack_columns": 80}),
        (COMPACTION, CONFIG.policy, {"pack_columns": 160, "rows_per_prompt": 2}),
        (COMPACTION, Dense(), {"pack_columns": 160, "rows_per_prompt": 2}),
    ],
)
def test_packed_rows_give_the_same_step(compaction: TextCompaction | None, policy: Any, packed: dict[str, Any]):
    """Also if the packed update shares the common beginnings of contexts."""
    update = UpdateConfig(microbatch_size=4)
    updates = [update, dataclasses.replace(update, **packed)]
    loops = [new_loop(compaction, changes={"policy": policy, "update": update}) for update in updates]
    samples = first_rollout(loops[0])
    (one, metrics), (two, other) = (loop.learn(new_state(), samples) for loop in loops)
    assert float(other["loss"]) == pytest.approx(float(metrics["loss"]), abs=1e-6)
    for name in ("grad_norm", "entropy"):
        assert float(other[name]) == pytest.approx(float(metrics[name]), rel=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), one.params, two.params)
    if isinstance(policy, Dense):
        assert float(other["update/shared"]) > 0.05


@pytest.mark.parametrize("scale", ["group", "none"])
def test_each_turn_has_its_own_advantage(scale: str):
    loop = new_loop(credit="turn", changes={"scale_rewards": scale})
    samples = sampled()
    _, metrics = loop.learn(new_state(), samples)
    assert float(metrics["grad_norm"]) > 0
    turns = np.asarray(samples.trajectory.turns())
    result = np.asarray(loop.rollout_batch(new_state().params, samples, None)[0].advantages)
    for first in (0, 4):
        group = samples.conversations[first : first + 4]
        counts = [int(turns[first + i].max()) for i in range(4)]
        rewards = [list(each.rewards) + [0.0] * (n - len(each.rewards)) for each, n in zip(group, counts, strict=True)]
        pooled = np.concatenate(rewards)
        deviation = pooled.std(ddof=1) + 1e-4 if scale == "group" else 1.0
        normalised = [(np.array(x) - pooled.mean()) / deviation for x in rewards]
        for i in range(4):
            expected = np.array([0.0, *(normalised[i][k:].sum() for k in range(counts[i]))])
            np.testing.assert_allclose(result[first + i], expected[turns[first + i]], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_too_many_failed_environments_end_the_run():
    message = "25% of the completions without a reward; got 8 of 8.*OSError: no disk"
    with pytest.warns(UserWarning, match="no disk"), pytest.raises(TooManyFailures, match=message):
        new_loop(kind="fails").step(new_state())
    with pytest.warns(UserWarning, match="no disk"):
        state, metrics = new_loop(kind="fails", max_failed=1.0).step(new_state())
    assert metrics["rewards/failed"] == 8 and int(state.step) == 1
    with pytest.warns(UserWarning, match="no disk"):
        samples = first_rollout(new_loop(COMPACTION, "fails", max_failed=1.0))
    assert not samples.counted_rows.any() and np.isnan(samples.rewards).all()


@pytest.mark.slow
@one_and_several_contexts
def test_the_guard_refuses_a_mismatch_in_a_conversation(compaction: TextCompaction | None):
    """One log-probability of a later turn or context is off by more than the guard allows."""
    loop = new_loop(compaction, changes={"minibatches": 2})

    def grade_with_mismatch(sampled: Sampled) -> Samples:
        samples = GRPOLoop.grade(loop, sampled)
        turns = samples.trajectory.turns()
        row = int(jnp.argmax(turns.max(axis=1)))
        if compaction is not None:  # the second context of a conversation
            row = int(np.flatnonzero(np.asarray(samples.trajectory.lengths()).reshape(-1, 3)[:, 1])[0]) * 3 + 1
        logprobs = samples.trajectory.logprobs.at[row, int(jnp.argmax(turns[row]))].add(-0.5)
        return samples._replace(trajectory=samples.trajectory.replace(logprobs=logprobs))

    object.__setattr__(loop, "grade", grade_with_mismatch)
    with pytest.raises(RefusedRolloutError, match=r"nats at every token; got 0\.5"):
        loop.step(new_state())


@pytest.mark.parametrize(
    ("compaction", "changes", "options", "message"),
    [
        (None, {"rollouts_ahead": 1, "minibatches": 2}, {}, "expected rollouts_ahead 0 with an environment"),
        (None, {"rollout": dataclasses.replace(ROLLOUT, eos_token_id=None)}, {}, "to end a turn; got neither"),
        (
            None,
            {"rollout": dataclasses.replace(ROLLOUT, min_new_tokens=9)},
            {"conversation": ConversationConfig(turn_tokens=9)},
            "expected min_new_tokens below turn_tokens and .*, 9, .*; got 9",
        ),
        (None, {"decode_rows": 2}, {}, "that divide 8 conversations into parts of whole groups of 4; got 2"),
        (COMPACTION, {"decode_rows": 3}, {}, "that divide 8 conversations into parts of whole groups of 1; got 3"),
        (TextCompaction(after_tokens=47), {}, {}, "below max_new_tokens 48 together"),
        (COMPACTION, {}, {"credit": "turn"}, "expected credit 'trajectory' with compaction"),
        (COMPACTION, {"update": UpdateConfig(rows_per_prompt=2)}, {}, "expected pack_columns with rows_per_prompt"),
        (None, {"update": UpdateConfig(loss=gspo())}, {"credit": "turn"}, "expected ratio_level .* 'geometric'"),
        (None, {"update": UpdateConfig(correction=OPSM())}, {"credit": "turn"}, "a correction of tokens .*OPSM"),
        (
            None,
            {"update": UpdateConfig(dense_learner=DenseLearner(correction=OPSM()))},
            {"credit": "turn"},
            "a correction of tokens .*OPSM",
        ),
        (
            None,
            {"update": UpdateConfig(terms=(EvictionTerm(1.0),))},
            {},
            "that records its draws, .* got .*EvictionTerm",
        ),
        (None, {"dynamic_sampling": 1}, {"credit": "turn"}, "expected dynamic_sampling None with credit 'turn'.*got 1"),
    ],
)
def test_incompatible_options(compaction: Any, changes: dict[str, Any], options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        new_loop(compaction, changes=changes, **options)


@pytest.mark.parametrize(
    ("wrong", "message"), [({"contexts": 1}, "expected contexts >= 2"), ({"ask": ""}, "expected a text in ask")]
)
def test_compaction_needs_contexts_and_a_request(wrong: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        TextCompaction(after_tokens=4, **wrong)


# --- several contexts


def test_each_context_begins_with_the_prompt_and_the_last_summary():
    samples = sampled(COMPACTION)
    assert samples.contexts == 3 and len(samples.rewards) == 8
    present = np.asarray(samples.trajectory.lengths()) > 0
    np.testing.assert_array_equal(samples.counted_rows, present)
    assert 8 < present.sum() < 24
    for number, conversation in enumerate(samples.conversations):
        assert len(conversation.contexts) == present[3 * number : 3 * number + 3].sum()
        assert len(conversation.turns) <= 4 and conversation.ending != COMPACTED
        for before, after in zip(conversation.contexts, conversation.contexts[1:], strict=False):
            summary = before.rpartition("?!?")[2]
            assert after.startswith(f"{conversation.prompt}#{summary}")
    assert samples.completions[0].count("?!?") >= len(samples.conversations[0].contexts) - 1


@pytest.mark.parametrize("heading", ["#", "#" * 28], ids=["summary fits", "summary does not fit"])
def test_a_summary_is_no_turn(heading: str):
    """Sampled tokens right after the request are summaries; all other runs of sampled tokens are turns."""
    samples = sampled(dataclasses.replace(COMPACTION, heading=heading))
    tokens, mask = np.asarray(samples.trajectory.response), np.asarray(samples.trajectory.response_mask)
    begins = np.argwhere(mask & ~np.pad(mask, [(0, 0), (1, 0)])[:, :-1])
    ask = TOKENIZER.encode("?!?", add_special_tokens=False)
    asked = [tokens[row, max(column - 3, 0) : column].tolist() == ask for row, column in begins]
    assert sum(asked) >= 4 and (len(heading) == 1) == (samples.metrics["conversations/contexts"] > 1)
    assert samples.metrics["conversations/turns"] == pytest.approx((len(begins) - sum(asked)) / 8)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_each_context_has_the_advantage_of_its_conversation(penalty: float):
    """With kl_in_reward, too: the penalty, here 1 per sampled token, is subtracted before the group's mean."""
    loop, samples = new_loop(COMPACTION), sampled(COMPACTION)
    with jax.set_mesh(loop.mesh):
        batch, _ = loop.rollout_batch(new_state().params, samples, penalty * samples.trajectory.response_mask)
    lengths = np.asarray(samples.trajectory.lengths()).reshape(8, 3).sum(axis=1)
    expected = np.asarray(advantages(WIDER, samples.rewards - np.float32(penalty) * lengths))
    result = np.asarray(batch.advantages).reshape(8, 3)
    np.testing.assert_allclose(result, np.repeat(expected[:, None], 3, axis=1), atol=1e-6)
    np.testing.assert_array_equal(np.asarray(batch.counted_rows), samples.counted_rows)


def test_prompts_that_do_not_divide_over_the_mesh():
    """A prompt is prefilled once for its group; with compaction, once for each conversation."""
    with pytest.raises(ValueError, match=r"expected prompts_per_step with an environment that divides .* = 4; got 2"):
        dataclasses.replace(new_loop(), mesh=make_mesh(4))
    dataclasses.replace(new_loop(COMPACTION), mesh=make_mesh(4))


@pytest.mark.slow
def test_a_mesh_gives_the_same_step():
    loop = new_loop(COMPACTION)
    state, metrics = loop.step(new_state())
    other = dataclasses.replace(loop, mesh=make_mesh(2, 1, 1))
    with_mesh, over_mesh = other.step(shard_tree(jax.device_get(new_state()), other.mesh))
    for name in ("reward", "conversations/contexts", "completions/mean_length", "loss", "grad_norm"):
        assert over_mesh[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), state.params, with_mesh.params)


def test_dynamic_sampling_selects_groups_with_all_their_contexts():
    """In both rollouts only the second group has unequal rewards."""
    one = sampled(COMPACTION)
    flat = one._replace(rewards=np.array([1, 1, 1, 1, 0, 1, 0, 1], np.float32))
    chosen = select_groups([flat, flat], 4, 2)
    second = np.arange(12, 24)
    for got, of in ((chosen.trajectory.tokens, one.trajectory.tokens), (chosen.counted_rows, one.counted_rows)):
        np.testing.assert_array_equal(np.asarray(got), np.concatenate([np.asarray(of)[second]] * 2))
    assert chosen.contexts == 3
    assert [x.turns for x in chosen.conversations[:4]] == [x.turns for x in one.conversations[4:]]


def test_completion_files_show_the_contexts(tmp_path: Path):
    samples = sampled(COMPACTION)
    CompletionsLog(tmp_path, TOKENIZER, table_rows=0, masks=2)(0, samples)
    table = pyarrow.parquet.read_table(tmp_path / "completions" / "completions_00000.parquet").to_pydict()
    assert len(table["prompt"]) == 8 and table["contexts"] == [each.contexts for each in samples.conversations]
    lengths = np.asarray(samples.trajectory.lengths()).reshape(8, 3).sum(axis=1)
    assert table["length"] == lengths.tolist()
    assert table["truncated"] == [each.ending in ("turns", "length", "room") for each in samples.conversations]
    masks = load_masks(tmp_path / "completions" / "masks_00000.npz")
    expected = [(row, i + 1) for row in (0, 1) for i in range(len(samples.conversations[row].contexts))]
    assert [(mask.row, mask.context) for mask in masks] == expected
    text = samples.conversations[expected[1][0]].contexts[expected[1][1] - 1]
    assert "".join(masks[1].pieces) == text
