"""Rollouts one step ahead: sampling parameters, staleness metrics, bitwise resumption."""

import signal
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from smd_jax.corrections.mismatch import TIS
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.mismatch_guard import MismatchGuard
from smd_jax.learner.state import TrainState
from smd_jax.losses.named import gspo
from smd_jax.runs.run import train
from smd_jax.runs.run_config import RunConfig
from smd_jax.runs.stop import RunStoppedError
from smd_jax.tasks.rewards import Rewards
from smd_jax.train.async_rollout import RolloutAhead, with_sampler_params
from smd_jax.train.grpo import GRPOLoop
from smd_jax.train.minibatches import shortened
from smd_jax.train.samples import RefusedRolloutError
from tests import toy_loop
from tests.bitwise import assert_bitwise_equal
from tests.reward_cases import length

STEPS = 3
AHEAD = replace(toy_loop.CONFIG, rollouts_ahead=1)


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


@pytest.mark.slow
def test_the_next_rollout_uses_the_parameters_before_the_update():
    loop = toy_loop.own_loop(AHEAD)
    state, rows, saved = with_sampler_params(toy_loop.new_state()), [], list[TrainState]()
    for step in range(STEPS):
        state, metrics = loop.step(state)
        rows.append(metrics)
        if step == 0:
            saved.append(copied(state))

    # The same steps in sequence. The guard is off, because it would take staleness for a mismatch.
    plain = replace(toy_loop.own_loop(), guard=None)
    by_hand = toy_loop.new_state()
    sampler_params = copied(by_hand.params)
    for index in range(STEPS):
        samples = plain.collect(by_hand.replace(sampler_params=sampler_params), index)
        samples = samples._replace(trajectory=shortened(samples.trajectory, plain.response_widths))
        sampler_params = copied(by_hand.params)
        by_hand, _ = plain.learn(by_hand, samples)
        assert rows[index]["reward"] == float(samples.metrics["reward"])
    assert_bitwise_equal(by_hand.params, state.params)
    assert_bitwise_equal(sampler_params, state.sampler_params)

    # After a restore, the loop does not use a rollout that another run began.
    again = toy_loop.run(loop, saved[0], STEPS - 1)
    assert_bitwise_equal(again[0].params, state.params)
    for row, before in zip(again[1], rows[1:], strict=True):
        assert all(value == before[name] for name, value in row.items())

    # The replay is exact at any age; rollouts are stale from the second one on.
    assert [row["staleness/rollouts"] for row in rows] == [0, 1, 1]
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows)
    assert abs(rows[0]["staleness/ratio_max"] - 1) < 1e-4
    assert all(row["staleness/ratio_max"] > 1.001 and row["staleness/kl"] > 0 for row in rows[1:])


@pytest.mark.slow
def test_a_refused_rollout_keeps_the_parameters_that_sampled_it():
    """A resumed run then samples the same rollout again, not one with newer parameters."""
    loop = toy_loop.new_loop(AHEAD)
    state, _ = toy_loop.run(loop, with_sampler_params(toy_loop.new_state()), 2)
    before = copied(state)
    loop.settle()
    strict = replace(loop, guard=MismatchGuard(1e-12))
    toy_loop.share_programs(strict)
    with pytest.raises(RefusedRolloutError) as caught:
        strict.step(state)
    strict.settle()
    assert_bitwise_equal(caught.value.state, before)


def test_an_evaluation_waits_for_the_rollout_ahead(tmp_path, monkeypatch):
    """They share devices and reward functions."""
    calls = []
    monkeypatch.setattr(GRPOLoop, "settle", lambda self: calls.append("settled"))

    def evaluate(state):
        calls.append("evaluated")
        return {"eval/sparse": 0.0}

    state = with_sampler_params(toy_loop.new_state())
    train(toy_loop.new_loop(AHEAD), state, RunConfig(steps=2, evaluate_every=1), tmp_path, evaluate=evaluate)
    assert calls == ["settled", "evaluated"] * 3


def record_rollouts(monkeypatch, before=lambda index: None) -> list[int]:
    """A list to which each rollout appends its index; then it calls `before` with the index."""
    sampled = list[int]()
    respond = GRPOLoop.respond

    def recording(loop, params, key, index):
        sampled.append(index)
        before(index)
        return respond(loop, params, key, index)

    monkeypatch.setattr(GRPOLoop, "respond", recording)
    return sampled


def test_a_run_samples_no_unused_rollout(tmp_path, monkeypatch):
    sampled = record_rollouts(monkeypatch)
    loop = toy_loop.new_loop(AHEAD)

    def start(steps, directory, resume=False):
        state = train(loop, with_sampler_params(toy_loop.new_state()), RunConfig(steps=steps), directory, resume=resume)
        loop.settle()  # a rollout begun in the last step would end after the run
        return state

    whole = start(STEPS, tmp_path / "whole")
    assert sampled == [0, 1, 2]

    # A longer resumed run first samples the rollout that the last step did not begin.
    sampled.clear()
    start(1, tmp_path / "parts")
    assert sampled == [0]
    assert_bitwise_equal(start(STEPS, tmp_path / "parts", resume=True), whole)
    assert sampled == [0, 1, 2]


def test_rewards_in_this_process_run_in_its_main_thread(monkeypatch):
    """Only there can a timer stop a completion that math-verify never finishes."""
    graded, sampled = list[threading.Thread](), list[threading.Thread]()

    def recording(function, threads):
        def recorded(self, *arguments):
            threads.append(threading.current_thread())
            return function(self, *arguments)

        return recorded

    monkeypatch.setattr(Rewards, "grade_part", recording(Rewards.grade_part, graded))
    monkeypatch.setattr(GRPOLoop, "respond", recording(GRPOLoop.respond, sampled))
    loop = toy_loop.new_loop(AHEAD)
    state, _ = toy_loop.run(loop, with_sampler_params(toy_loop.new_state()), 2)
    loop.settle()
    main = threading.main_thread()
    assert graded == [main] * 2
    assert [thread is main for thread in sampled] == [True, False, False]

    # Rewards in a separate process do not wait for the main thread of this one.
    finish = replace(loop, rewards=Rewards((length,), seconds=60.0))._sample_ahead(state.params, state.key, 2)
    monkeypatch.setattr(Rewards, "grade_part", None)
    assert finish().rewards.tolist() == [float(len(text)) for text in finish().completions]


def test_a_stopped_run_begins_no_rollout(tmp_path, monkeypatch):
    """Python would wait for its thread at exit."""
    stopping = threading.Event()
    monkeypatch.setattr("smd_jax.runs.stop._say", lambda line: stopping.set())

    def stop_in_first(index):
        if not stopping.is_set():
            signal.raise_signal(signal.SIGTERM)
            stopping.wait()  # for the thread that handles the signal

    sampled = record_rollouts(monkeypatch, stop_in_first)
    loop = toy_loop.new_loop(AHEAD)
    with pytest.raises(RunStoppedError, match="after 1 of 3"):
        train(loop, with_sampler_params(toy_loop.new_state()), RunConfig(steps=STEPS), tmp_path)
    loop.settle()
    assert sampled == [0]
    stopped = train(loop, with_sampler_params(toy_loop.new_state()), RunConfig(steps=STEPS), tmp_path, resume=True)
    assert sampled == [0, 1, 2]
    assert_bitwise_equal(stopped, toy_loop.run(loop, with_sampler_params(toy_loop.new_state()), STEPS)[0])


def test_wait_blocks_until_the_rollout_is_done():
    finish = threading.Event()
    samples = toy_loop.new_loop().collect(toy_loop.new_state(), 0)

    def sample(params, key, index):
        finish.wait()
        return lambda: samples

    ahead = RolloutAhead(sample)
    ahead.wait()  # returns at once
    ahead.begin(1, {}, jax.random.key(0))
    waiting = threading.Thread(target=ahead.wait)
    waiting.start()
    assert waiting.is_alive()
    finish.set()
    waiting.join()
    assert ahead.take(1, {}) is samples and ahead.take(1, {}) is None


def test_sampler_params_must_match_rollouts_ahead():
    with pytest.raises(ValueError, match="expected a state from with_sampler_params.* with rollouts_ahead 1; got none"):
        toy_loop.own_loop(AHEAD).check(toy_loop.new_state())
    with pytest.raises(ValueError, match="expected a state without sampler_params with rollouts_ahead 0; got some"):
        toy_loop.new_loop().check(with_sampler_params(toy_loop.new_state()))


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 1)])
def test_rollouts_ahead_are_refused_on_several_devices(sizes):
    """Rollout and update both communicate, and devices could start them in different orders."""
    with pytest.raises(ValueError, match="expected a mesh of one device with rollouts_ahead 1, .*; got .*'data': "):
        toy_loop.own_loop(AHEAD, sizes=sizes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollouts_ahead": 2}, "expected rollouts_ahead 0 or 1; got 2"),
        ({"dynamic_sampling": 1}, "no dynamic_sampling"),
        ({"update": UpdateConfig(visibility="dense", correction=TIS())}, "visibility 'shadow'"),
        ({"update": UpdateConfig(loss=gspo())}, "expected ratio_level 'token' .* 16 bits .*; got 'geometric'"),
    ],
)
def test_incompatible_options(options, message):
    with pytest.raises(ValueError, match=message):
        replace(AHEAD, **options)
