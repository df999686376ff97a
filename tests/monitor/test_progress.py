"""Progress: what is printed on a terminal, in a file, and in the table."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest

from smd_jax.monitor.progress import rollout_line, rollout_report, status, summary_table, training_progress
from smd_jax.sampler.engine import Progress

METRICS = {"reward": 0.55, "sampling/sampling_logp_difference/mean": 2.1e-6, "kl": 3.0}


def file_and_bytes(encoding: str = "utf-8") -> tuple[io.TextIOWrapper, io.BytesIO]:
    raw = io.BytesIO()
    return io.TextIOWrapper(raw, encoding=encoding, write_through=True), raw


class Terminal(io.StringIO):
    """A file that says that somebody is looking."""

    def isatty(self) -> bool:
        return True


def test_plain_lines_away_from_a_terminal():
    file, raw = file_and_bytes()
    with training_progress(25, every=10, file=file) as report:
        for step in range(1, 26):
            report(step, METRICS)
    lines = raw.getvalue().decode().splitlines()
    expected = [rf"train {step}/25 reward 0\.550 \|Δlogp\| 2\.1e-06 0:00:0\d" for step in (10, 20, 25)]
    assert len(lines) == 3
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line


def test_a_resumed_run_has_its_lines_after_as_many_steps_as_a_new_one():
    output = io.StringIO()
    with training_progress(50, start=14, file=output, clock=lambda: 0.0) as report:
        for step in range(15, 41):
            report(step, {})
    assert re.findall(r"train (\d+)/50", output.getvalue()) == ["24", "34"]


def test_plain_lines_are_not_wrapped_and_keep_brackets():
    file, raw = file_and_bytes()
    with training_progress(1, name="[bold]" + "x" * 80, file=file) as report:
        report(1, METRICS)
    (line,) = raw.getvalue().decode().splitlines()
    assert line.startswith("[bold]" + "x" * 80 + " 1/1 reward")


def test_plain_lines_in_ascii():
    file, raw = file_and_bytes("ascii")
    with training_progress(1, file=file) as report:
        report(1, METRICS)
    assert b"|dlogp| 2.1e-06" in raw.getvalue()


def test_status_shows_what_there_is():
    assert status({"reward": 1.0}) == "reward 1.000"
    assert status({"sampling/sampling_logp_difference/mean": 0.0}) == "|Δlogp| 0.0e+00"
    assert status({"loss": 2.0}) == ""
    evaluations = {"eval/dense/reward": 0.5, "eval/dense/reward_low": 0.4, "eval/sparse": 0.25}
    assert status({"reward": 1.0} | evaluations) == "reward 1.000 eval dense 0.500, sparse 0.250"


def test_every_evaluation_has_its_line():
    """Also the one before training, which the others are compared with."""
    output = io.StringIO()
    with training_progress(20, every=10, file=output, clock=lambda: 0.0) as report:
        report(0, {"eval/dense/reward": 0.955})
        for step in range(1, 21):
            report(step, {"eval/dense/reward": 0.76} if step == 4 else {})
    assert output.getvalue().splitlines() == [
        "train 0/20 eval dense 0.955 0:00:00",
        "train 4/20 eval dense 0.760 0:00:00",
        "train 14/20 0:00:00",
        "train 20/20 0:00:00",
    ]


def test_the_bar_of_a_terminal_keeps_the_newest_evaluation(monkeypatch):
    for name, value in {"TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    with training_progress(200, start=30, file=terminal) as report:
        report(30, {"eval/dense/reward": 0.955})
        report(34, METRICS)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert re.search(r"train +34/200 .*reward 0\.550 \|Δlogp\| 2\.1e-06 eval dense 0\.955 0:00:0\d", shown), shown


@pytest.mark.parametrize(
    ("start", "every", "message"),
    [(0, 0, "every must be at least 1 step; got 0"), (6, 1, "start must lie in 0 … total = 5; got 6")],
)
def test_values_that_do_not_fit(start, every, message):
    with pytest.raises(ValueError, match=message), training_progress(5, start=start, every=every):
        pass


HALFWAY = Progress(tokens=41_210, seconds=8.2, live=28, decode_rows=32, finished=96, rows=128)
HALFWAY_LINE = "rollout 96/128 done, 28/32 rows live, 41,210 tokens, 5,026 tokens/s, 0:00:08"


def test_a_line_about_a_rollout():
    assert rollout_line("rollout", HALFWAY) == HALFWAY_LINE


def test_rollout_lines_come_now_and_then():
    """At the first segment, after ten seconds, and at the end; the next rollout begins anew."""
    output = io.StringIO()
    report = rollout_report(file=output)
    for seconds, finished in [(1.0, 0), (8.0, 5), (11.5, 9), (12.0, 128), (0.5, 1)]:
        report(HALFWAY._replace(seconds=seconds, finished=finished))
    assert re.findall(r"rollout (\d+)/128", output.getvalue()) == ["0", "9", "128", "1"]


def test_summary_table():
    file, raw = file_and_bytes()
    summary_table(
        "Result [seed 0]",
        ["decoding", "before", "after"],
        [["sparse [budget]", 2.123456e-6, 0.45678], ["dense", None, 1], ["cache bytes", 1234567, True]],
        file=file,
    )
    text = raw.getvalue().decode()
    rows = [re.split(r"\s*[│┃]\s*", line.strip()) for line in text.splitlines()]
    assert "Result [seed 0]" in text
    assert ["", "decoding", "before", "after", ""] in rows
    assert ["", "sparse [budget]", "2.123e-06", "0.4568", ""] in rows
    assert ["", "dense", "-", "1", ""] in rows
    assert ["", "cache bytes", "1,234,567", "True", ""] in rows


WIDE = ["decode", *(f"column {number}" for number in range(6))], [["a long name of a row", *range(100_000, 100_006)]]


@pytest.mark.parametrize("width", [40, 80, 100, 160])
def test_no_width_cuts_off_a_number(width):
    """Where the numbers don't fit beside each other, each has a line."""
    terminal = Terminal()
    summary_table("title", *WIDE, file=terminal, width=width)
    text = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert all(len(line) <= width for line in text.splitlines())
    assert all(f"{number:,}" in text and f"column {number - 100_000}" in text for number in range(100_000, 100_006))
    assert "…" not in text


def test_a_pipe_has_room_for_any_table():
    file, raw = file_and_bytes()
    summary_table("title", *WIDE, file=file)
    assert "a long name of a row │  100,000 │  100,001 │" in raw.getvalue().decode()


def test_summary_table_refuses_ragged_rows():
    with pytest.raises(ValueError, match=r"row 1: expected 2 cells; got 1: \['dense'\]"):
        summary_table("t", ["a", "b"], [["x", 1], ["dense"]], file=file_and_bytes()[0])


def test_missing_extra_is_named():
    code = "import sys; sys.modules['matplotlib'] = None; import smd_jax.monitor.run_plots"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pictures of runs need matplotlib: pip install -e '.[train]'" in done.stderr


def test_the_library_itself_does_not_need_matplotlib():
    """Nor do training and checkpoints."""
    extras = {"matplotlib", "smd_jax.monitor.run_plots"}
    code = f"import smd_jax, smd_jax.runs.run, sys; found = {extras} & set(sys.modules); assert not found, found"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
