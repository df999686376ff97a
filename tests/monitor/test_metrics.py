"""Metrics worked out by hand, and a metrics file that survives crashes."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smd_jax.metrics import completion_metrics, reward_metrics, sampler_learner_metrics
from smd_jax.monitor.metrics_log import MetricsWriter, read_metrics

ONES = ("ratio/min", "ratio/mean", "ratio/max", "eff_sample_size", "agreement_p5")  # of equal policies


def test_mismatch_without_tokens():
    metrics = sampler_learner_metrics(jnp.full((2, 3), -jnp.inf), jnp.full((2, 3), jnp.nan), jnp.zeros((2, 3), bool))
    for name, value in metrics.items():
        assert float(value) == (1.0 if name.endswith(ONES) else 0.0), name


def test_completions_by_hand():
    mask = jnp.arange(6)[None, :] < jnp.array([[1], [4], [6], [5]])
    got = completion_metrics(mask, jnp.array([True, True, False, True]))
    assert {name: float(value) for name, value in got.items()} == {
        "completions/mean_length": 4.0,
        "completions/min_length": 1.0,
        "completions/max_length": 6.0,
        "completions/clipped_ratio": 0.25,
    }


def test_rewards_by_hand():
    # Groups (0, 2), (1, 1), (3, 5): deviations from the mean 2 are -2 0 -1 -1 1 3, whose squares sum to 16.
    got = reward_metrics(jnp.array([0.0, 2.0, 1.0, 1.0, 3.0, 5.0]), group_size=2)
    assert float(got["reward"]) == 2.0
    assert float(got["reward_std"]) == pytest.approx(math.sqrt(16 / 5), rel=1e-6)
    assert float(got["reward_std_within_group"]) == pytest.approx(2 * math.sqrt(2) / 3, rel=1e-6)
    assert float(got["frac_reward_zero_std"]) == pytest.approx(1 / 3, rel=1e-6)


def test_equal_rewards_have_zero_std_despite_rounding():
    assert float(reward_metrics(jnp.full((14,), 1234.1), group_size=7)["frac_reward_zero_std"]) == 1.0


def test_groups_of_one_have_zero_std():
    got = reward_metrics(jnp.array([1.0, 3.0]), group_size=1)
    assert float(got["reward_std_within_group"]) == 0.0
    assert float(got["frac_reward_zero_std"]) == 1.0
    assert float(got["reward_std"]) == pytest.approx(math.sqrt(2), rel=1e-6)
    assert float(reward_metrics(jnp.array([1.0]), group_size=1)["reward_std"]) == 0.0


@pytest.mark.parametrize("group_size", [0, 4])
def test_group_size_must_divide_the_batch(group_size):
    with pytest.raises(ValueError, match=f"expected a multiple of group_size {group_size} rewards; got 6"):
        reward_metrics(jnp.zeros(6), group_size)


def test_rows_are_read_as_written(tmp_path, monkeypatch):
    """Each takes one transfer, and is in the file at once."""
    path, calls, device_get = tmp_path / "run" / "metrics.jsonl", [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: calls.append(len(tree)) or device_get(tree))
    with pytest.raises(FileNotFoundError, match="expected a metrics file; found none"):
        read_metrics(path)
    with MetricsWriter(path) as writer:
        row = writer.write(0, {"reward": jnp.float32(0.1), "num_tokens": 12, "entropy": jnp.bfloat16(1.5)})
        assert read_metrics(path) == [row]
        writer.write(1, {"reward": np.float64(0.1), "step_time": 1 / 3})
    assert row == {"step": 0, "reward": float(np.float32(0.1)), "num_tokens": 12, "entropy": 1.5}
    assert read_metrics(path) == [row, {"step": 1, "reward": 0.1, "step_time": 1 / 3}]
    assert path.read_bytes().count(b"\n") == 2 and calls == [3, 2]


def test_numbers_outside_json_become_null_and_read_as_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(0, {"kl": jnp.nan, "ratio": jnp.float32(jnp.inf), "reward": 1.0})
    assert json.loads(path.read_text()) == {"step": 0, "kl": None, "ratio": None, "reward": 1.0}
    (row,) = read_metrics(path)
    assert math.isnan(row["kl"]) and math.isnan(row["ratio"])


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": np.zeros(2)}, r"expected a scalar as metric 'loss'; got shape \(2,\)"),
        ({"loss": np.complex64(1)}, "expected a real number as metric 'loss'; got complex"),
        ({"step": 1}, "without the reserved name 'step'"),
    ],
)
def test_invalid_metrics_are_refused_and_not_written(tmp_path, metrics, message):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        with pytest.raises(ValueError, match=message):
            writer.write(0, metrics)
        writer.write(0, {"reward": 1.0})
    assert read_metrics(path) == [{"step": 0, "reward": 1.0}]


def test_steps_must_increase(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(3, {})
        with pytest.raises(ValueError, match="expected a step later than 3, the last in .*; got 3"):
            writer.write(3, {})
    with MetricsWriter(path, next_step=4) as writer, pytest.raises(ValueError, match="later than 3.*got 2"):
        writer.write(2, {})


def test_a_new_run_never_overwrites_an_older_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(0, {"reward": 1.0})
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="expected no metrics in .* for a new run; got 1 rows"):
        MetricsWriter(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", ['{"step": 1, "rew', "[1, 2]", '{"reward": 0.5}', '{"step": 1.0}', ""])
def test_a_broken_line_in_the_middle_raises_and_changes_nothing(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    before = path.read_bytes()
    with pytest.raises(ValueError, match="line 2: expected a JSON object"):
        MetricsWriter(path, next_step=3)
    with pytest.raises(ValueError, match="line 2: expected a JSON object"):
        read_metrics(path)
    assert path.read_bytes() == before


FINITE = st.floats(allow_nan=False, allow_infinity=False)
ROWS = st.lists(
    st.dictionaries(st.text(min_size=1).filter(lambda name: name != "step"), FINITE, max_size=3), max_size=6
)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, data=st.data())
def test_a_crash_at_any_byte_costs_at_most_the_last_row(tmp_path_factory, rows, data):
    """Complete rows survive, and after a resume every step has one row."""
    path = tmp_path_factory.mktemp("crash") / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        written = [writer.write(step, row) for step, row in enumerate(rows)]
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content)), label="cut")
    path.write_bytes(content[:cut])
    ends = np.cumsum([len(line) for line in content.splitlines(keepends=True)]).astype(int)
    # A row that lacks only its newline is complete.
    survivors = written[: int((ends - 1 <= cut).sum())]
    assert read_metrics(path) == survivors
    resumed_at = data.draw(st.integers(0, len(survivors)), label="resumed_at")
    with MetricsWriter(path, next_step=resumed_at) as writer:
        rewritten = [writer.write(step, {"again": 1.0}) for step in range(resumed_at, len(rows) + 1)]
    assert read_metrics(path) == survivors[:resumed_at] + rewritten
