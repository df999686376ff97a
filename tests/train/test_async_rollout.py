"""One rollout ahead: what it is drawn with, what is logged of its age, and that a restored state goes on bitwise."""

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
def test_the_next_rollout_is_drawn_with_the_parameters_before_the_update():
    loop = toy_loop.own_loop(AHEAD)
    state, rows, kept = with_sampler_params(toy_loop.new_state()), [], list[TrainState]()
    for step in range(STEPS):
        state, metrics = loop.step(state)
        rows.append(metrics)
        if step == 0:
            kept.append(copied(state))

    # By hand, one after the other, on a loop that knows nothing of it.
    # Its guard would take age for a mismatch.
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

    # Restored: no rollout was begun, and one that another run of the loop began is not taken.
    again = toy_loop.run(loop, kept[0], STEPS - 1)
    assert_bitwise_equal(again[0].params, state.params)
    for row, before in zip(again[1], rows[1:], strict=True):
        assert all(value == before[name] for name, value in row.items())

    # Off-policy by eviction it is not, at any age; by age it is from the second rollout on.
    assert [row["staleness/rollouts"] for row in rows] == [0, 1, 1]
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows)
    assert abs(rows[0]["staleness/ratio_max"] - 1) < 1e-4
    assert all(row["staleness/ratio_max"] > 1.001 and row["staleness/kl"] > 0 for row in rows[1:])


@pytest.mark.slow
def test_a_refused_rollout_leaves_the_parameters_that_drew_it():
    """A run that goes on draws the rollout that was refused, and not one with newer parameters under its number."""
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


def test_an_evaluation_waits_for_the_rollout_that_was_begun(tmp_path, monkeypatch):
    """They share devices and reward functions."""
    told = []
    monkeypatch.setattr(GRPOLoop, "settle", lambda self: told.append("settled"))

    def evaluate(state):
        told.append("evaluated")
        return {"eval/sparse": 0.0}

    state = with_sampler_params(toy_loop.new_state())
    train(toy_loop.new_loop(AHEAD), state, RunConfig(steps=2, evaluate_every=1), tmp_path, evaluate=evaluate)
    assert told == ["settled", "evaluated"] * 3


def counted_draws(monkeypatch, before=lambda index: None) -> list[int]:
    """Numbers of the rollouts that are drawn from now on; `before` is called with each, before it is drawn."""
    drawn = list[int]()
    respond = GRPOLoop.respond

    def counted(loop, params, key, batch):
        drawn.append(batch)
        before(batch)
        return respond(loop, params, key, batch)

    monkeypatch.setattr(GRPOLoop, "respond", counted)
    return drawn


def test_a_run_draws_no_rollout_that_nobody_learns_from(tmp_path, monkeypatch):
    drawn = counted_draws(monkeypatch)
    loop = toy_loop.new_loop(AHEAD)

    def start(steps, directory, resume=False):
        state = train(loop, with_sampler_params(toy_loop.new_state()), RunConfig(steps=steps), directory, resume=resume)
        loop.settle()  # what is begun in the last step would end after the run
        return state

    whole = start(STEPS, tmp_path / "whole")
    assert drawn == [0, 1, 2]

    # A run that goes on sampler_params its former last step begins with the rollout that was not begun there.
    drawn.clear()
    start(1, tmp_path / "parts")
    assert drawn == [0]
    assert_bitwise_equal(start(STEPS, tmp_path / "parts", resume=True), whole)
    assert drawn == [0, 1, 2]


def test_rewards_in_this_process_are_computed_where_a_clock_can_be_set(monkeypatch):
    """A thread has none: a completion that math-verify never finishes would stop the run for ever."""
    graded, drawn = list[threading.Thread](), list[threading.Thread]()

    def noting(function, threads):
        def noted(self, *arguments):
            threads.append(threading.current_thread())
            return function(self, *arguments)

        return noted

    monkeypatch.setattr(Rewards, "grade_part", noting(Rewards.grade_part, graded))
    monkeypatch.setattr(GRPOLoop, "respond", noting(GRPOLoop.respond, drawn))
    loop = toy_loop.new_loop(AHEAD)
    state, _ = toy_loop.run(loop, with_sampler_params(toy_loop.new_state()), 2)
    loop.settle()
    here = threading.main_thread()
    assert graded == [here] * 2
    assert [thread is here for thread in drawn] == [True, False, False]

    # In a process of its own a reward has a main thread there, and no need to wait for ours.
    finish = replace(loop, rewards=Rewards((length,), seconds=60.0))._sample_ahead(state.params, state.key, 2)
    monkeypatch.setattr(Rewards, "grade_part", None)
    assert finish().rewards.tolist() == [float(len(text)) for text in finish().completions]


def test_a_run_that_was_told_to_stop_begins_no_rollout(tmp_path, monkeypatch):
    """Python would wait for it before the process ends."""
    heard = threading.Event()
    monkeypatch.setattr("smd_jax.runs.stop._say", lambda line: heard.set())

    def stop_the_first(index):
        if not heard.is_set():
            signal.raise_signal(signal.SIGTERM)
            heard.wait()  # for the thread that listens

    drawn = counted_draws(monkeypatch, stop_the_first)
    loop = toy_loop.new_loop(AHEAD)
    with pytest.raises(RunStoppedError, match="after 1 of 3"):
        train(loop, with_sampler_params(toy_loop.new_state()), RunConfig(steps=STEPS), tmp_path)
    loop.settle()
    assert drawn == [0]
    stopped = train(loop, with_sampler_params(toy_loop.new_state()), RunConfig(steps=STEPS), tmp_path, resume=True)
    assert drawn == [0, 1, 2]
    assert_bitwise_equal(stopped, toy_loop.run(loop, with_sampler_params(toy_loop.new_state()), STEPS)[0])


def test_waiting_for_a_rollout():
    drawn = threading.Event()
    samples = toy_loop.new_loop().collect(toy_loop.new_state(), 0)

    def sample(params, key, index):
        drawn.wait()
        return lambda: samples

    ahead = RolloutAhead(sample)
    ahead.wait()  # for nothing
    ahead.begin(1, {}, jax.random.key(0))
    waiting = threading.Thread(target=ahead.wait)
    waiting.start()
    assert waiting.is_alive()
    drawn.set()
    waiting.join()
    assert ahead.take(1, {}) is samples and ahead.take(1, {}) is None


def test_a_state_must_fit():
    with pytest.raises(ValueError, match="expected a state from with_sampler_params.* with rollouts_ahead 1; got none"):
        toy_loop.own_loop(AHEAD).check(toy_loop.new_state())
    with pytest.raises(ValueError, match="expected a state without sampler_params with rollouts_ahead 0; got some"):
        toy_loop.new_loop().check(with_sampler_params(toy_loop.new_state()))


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 1)])
def test_several_devices_run_no_two_programs_at_once(sizes):
    """Both communicate, a rollout over its rows after every token, and devices could start them in other orders."""
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
def test_choices_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        replace(AHEAD, **options)
