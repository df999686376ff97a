"""The live panel: what it says, where it is drawn, and plain lines where it is not."""

from __future__ import annotations

import io
import re
import sys

import pytest

from smd_jax.monitor.panel import RunStatus, sparkline, training_panel

METRICS = {
    "reward": 0.55,
    "reward_std": 0.31,
    "completions/mean_length": 112.4,
    "completions/clipped_ratio": 0.03,
    "sampling/sampling_logp_difference/mean": 2.1e-6,
    "sampling/sampling_logp_difference/max": 3.3e-5,
    "rollout/tokens_per_second": 5127.3,
    "update/tokens_per_second": 3020.0,
    "step_time": 2.34,
    "memory/host_bytes": 1.25 * 2**30,
    "memory/device_bytes": 12 * 2**30,
    "eval/sparse": 0.5,
    "eval/snapkv:64/reward": 0.25,
    "eval/snapkv:64/reward_low": 0.125,
}


class Clock:
    """Says what it is told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A file that says that somebody is looking."""

    def isatty(self) -> bool:
        return True


def test_what_the_panel_says():
    status = RunStatus("grpo", 200)
    status.add(1, {"reward": 0.1})
    status.add(2, {"reward": float("nan")})
    status.add(3, METRICS)
    assert status.rows() == [
        ("reward", "0.550 ± 0.31  ▁█  sparse 0.500, snapkv:64 0.250"),
        ("length", "112 tokens, 3 % truncated"),
        ("mismatch", "|Δ log p| 2.1e-06 mean, 3.3e-05 max"),
        ("speed", "rollout 5,127 tokens/s, update 3,020 tokens/s, step 2.3 s"),
        ("memory", "1.2 GiB host, 12.0 GiB device"),
    ]


def test_without_unicode():
    status = RunStatus("grpo", 200, unicode=False)
    status.add(1, METRICS)
    assert all(text.isascii() for _, text in status.rows()) and status.headline().isascii()


def test_what_there_is_no_metric_for_is_not_shown():
    status = RunStatus("warm start", 5)
    status.add(1, {})
    assert status.rows() == []


def test_the_time_that_is_left_follows_the_newest_steps():
    clock = Clock()
    status = RunStatus("grpo", 10, start=2, clock=clock)
    assert status.remaining is None and status.headline() == "2/10 · 0:00:00"
    clock.now += 60  # compiles
    status.add(3, {})
    assert status.remaining == 7 * 60
    for step in (4, 5):
        clock.now += 4
        status.add(step, {})
    assert status.remaining == 5 * 4, "the first step does not count any more"
    clock.now += 3  # in the middle of a step
    assert status.remaining == 17
    assert status.headline() == "5/10 · 0:01:11 · 0:00:17 left"


def test_sparkline():
    assert sparkline([float(level) for level in range(8)], 40) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0], 40) == "▅▅"
    assert sparkline([], 40) == ""
    assert sparkline([0.0, 0.0, 1.0, 1.0], 2) == "▁█"


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    for name, value in {"TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    return Terminal()


def test_on_a_terminal(terminal):
    with training_panel(200, start=30, name="grpo [a]", file=terminal) as report:
        report(34, METRICS)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "grpo [a]" in shown and re.search(r"34/200 · 0:00:0\d", shown)
    assert "rollout 5,127 tokens/s" in shown and "0.550 ± 0.31" in shown


def test_without_rich_and_away_from_a_terminal(terminal, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.live", None)
    monkeypatch.delitem(sys.modules, "smd_jax.monitor.rich_output", raising=False)
    for file in (terminal, io.StringIO()):
        with training_panel(2, every=1, file=file) as report:
            report(1, METRICS)
        assert re.fullmatch(r"train 1/2 reward 0\.550 \|Δlogp\| 2\.1e-06 0:00:0\d\n", file.getvalue())


def test_away_from_a_terminal_slow_steps_are_not_silent():
    """A line where ten steps or 30 seconds have passed since the last one."""
    clock, output = Clock(), io.StringIO()
    with training_panel(100, start=3, file=output, clock=clock) as report:
        for step, seconds in [(4, 29), (5, 1), (6, 120), *((step, 2.5) for step in range(7, 18)), (18, 10)]:
            clock.now += seconds
            report(step, {})
    assert output.getvalue().splitlines() == [
        "train 5/100 0:00:30",
        "train 6/100 0:02:30",
        "train 16/100 0:02:55",
    ]


def test_values_that_do_not_fit(terminal):
    with (
        pytest.raises(ValueError, match="start must lie in 0 … total = 5; got 6"),
        training_panel(5, start=6, file=terminal),
    ):
        pass
