"""What an error leaves of a run: everything that was reached before it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from breaking.disks import files_end_at
from tests.bitwise import assert_bitwise_equal
from tests.plain_loop import PlainLoop, new_state
from tests.plain_runs import DENSE, rows, saved, start


def raises_at(last: int) -> Callable[[int], None]:
    def begins(number: int) -> None:
        if number == last:
            raise ConnectionError("503")

    return begins


def test_what_was_reached_is_saved_before_an_error_goes_on(tmp_path):
    whole = start(tmp_path / "whole", 6)
    parts = tmp_path / "parts"
    with pytest.raises(ConnectionError, match="503") as caught:
        start(parts, 6, PlainLoop(begins=raises_at(4)))
    assert caught.value.__notes__ == [f"saved after 4 of 6 rollouts in {parts}; resume continues the run"]
    assert saved(parts) == [4] and [row["step"] for row in rows(parts)] == [0, 1, 2, 3]
    # It fails again at once: nothing new.
    with pytest.raises(ConnectionError) as caught:
        start(parts, 6, PlainLoop(begins=raises_at(4)), resume=True)
    assert caught.value.__notes__ == ["after 4 of 6 rollouts; nothing is lost but the rollout that failed"]
    assert_bitwise_equal(start(parts, 6, resume=True), whole)
    assert rows(parts) == rows(tmp_path / "whole")


def test_an_evaluation_that_fails_loses_no_rollout(tmp_path):
    def evaluate(state: Any) -> dict[str, float]:
        return {DENSE: {0: 0.4, 2: 0.5}[int(state.step)]}

    with pytest.raises(KeyError) as caught:
        start(tmp_path, 6, evaluate_every=2, evaluate=evaluate)
    assert saved(tmp_path) == [4]
    assert "saved after 4 of 6 rollouts" in caught.value.__notes__[0]
    assert len(rows(tmp_path)) == 4


def test_a_state_that_a_failing_update_has_taken_over_is_not_saved(tmp_path):
    class Taking(PlainLoop):
        def step(self, state: Any, follows: Callable[[], bool] = lambda: True) -> Any:
            if int(state.step) == 3:
                state.params["w"].delete()
                raise RuntimeError("RESOURCE_EXHAUSTED")
            return super().step(state, follows)

    with pytest.raises(RuntimeError, match="EXHAUSTED") as caught:
        start(tmp_path, 6, Taking())
    (said,) = caught.value.__notes__
    assert said == "the failed update has donated the state: the last 3 rollouts are not saved"
    assert saved(tmp_path) == []


# TensorStore's other writes fail, too, and may tell an event loop that is closed by then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("collected")
def test_where_nothing_can_be_saved_the_error_is_the_first_one(tmp_path):
    with files_end_at(3000), pytest.raises(ConnectionError, match="503") as caught:
        start(tmp_path, 6, PlainLoop(begins=raises_at(4)), new_state(size=100_000))
    assert re.match("the last 4 rollouts could not be saved: checkpoint 4 in .*", caught.value.__notes__[0])
    assert saved(tmp_path) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("collected")
def test_a_save_that_fails_beside_the_next_rollout_does_not_count(tmp_path):
    with files_end_at(3000), pytest.raises(OSError, match="checkpoint 2 in .*") as caught:
        start(tmp_path, 6, state=new_state(size=100_000), checkpoint_every=2)
    assert re.match("the last [23] rollouts could not be saved: checkpoint [23] in .*", caught.value.__notes__[0])
    assert saved(tmp_path) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("collected")
def test_an_error_beside_a_save_that_fails_says_what_is_lost(tmp_path):
    with files_end_at(3000), pytest.raises(ConnectionError, match="503") as caught:
        start(tmp_path, 6, PlainLoop(begins=raises_at(2)), new_state(size=100_000), checkpoint_every=2)
    assert re.match("the last 2 rollouts could not be saved: checkpoint 2 in .*", caught.value.__notes__[0])
    assert saved(tmp_path) == []
