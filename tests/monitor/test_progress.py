"""Progress on a terminal and in a file, and summary tables."""

import io
import re
import subprocess
import sys
from typing import Any

import pytest

from smd_jax.monitor.progress import rollout_report, status, summary_table, training_progress
from smd_jax.sampler.engine import Progress

METRICS = {"reward": 0.55, "sampling/sampling_logp_difference/mean": 0.3, "mismatch_kl": 2.1e-2, "kl": 3.0}


def file_and_bytes(encoding: str = "utf-8") -> tuple[io.TextIOWrapper, io.BytesIO]:
    raw = io.BytesIO()
    return io.TextIOWrapper(raw, encoding=encoding, write_through=True), raw


class Terminal(io.StringIO):
    """A file that reports to be a terminal."""

    def isatty(self) -> bool:
        return True


def lines_of(total: int, rows: list[tuple[int, dict[str, float]]], **options: Any) -> list[str]:
    """The plain lines of a run, without the time at their ends."""
    output = io.StringIO()
    with training_progress(total, file=output, **options) as report:
        for step, metrics in rows:
            report(step, metrics)
    lines = output.getvalue().splitlines()
    assert all(re.search(r" 0:00:0\d$", line) for line in lines)
    return [line[:-8] for line in lines]


def test_plain_lines_without_a_terminal():
    """Every ten steps, counted from a resume, at evaluations and at the end; names are not wrapped or interpreted."""
    rows = [(step, METRICS) for step in range(15, 51)]
    shown = "reward 0.550 mismatch_kl 2.1e-02"
    assert lines_of(50, rows, start=14) == [f"train {step}/50 {shown}" for step in (24, 34, 44, 50)]
    rows = [(0, {"eval/dense/reward": 0.955}), *((step, {}) for step in range(1, 21))]
    rows.insert(5, (4, {"eval/dense/reward": 0.76}))
    evaluations = ["train 0/20 eval dense 0.955", "train 4/20 eval dense 0.760"]
    assert lines_of(20, rows) == [*evaluations, "train 14/20", "train 20/20"]
    (line,) = lines_of(1, [(1, METRICS)], name="[bold]" + "x" * 80)
    assert line.startswith("[bold]" + "x" * 80 + " 1/1 reward")


def test_status_shows_the_available_metrics():
    assert status({"reward": 1.0}) == "reward 1.000"
    assert status({"loss": 2.0}) == ""
    evaluations = {"eval/dense/reward": 0.5, "eval/dense/reward_low": 0.4, "eval/sparse": 0.25}
    assert status({"reward": 1.0} | evaluations) == "reward 1.000 eval dense 0.500, sparse 0.250"


@pytest.mark.parametrize("columns", [80, 120])
def test_the_progress_bar_keeps_the_newest_evaluation(monkeypatch, columns):
    """Nothing is cut: a narrow terminal gets the status in several lines."""
    for name, value in {"TERM": "xterm", "COLUMNS": str(columns), "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    with training_progress(1000, start=30, name="online-dpo", file=terminal) as report:
        report(30, {"eval/sampler/reward": 0.412, "eval/dense/reward": 0.955})
        report(500, METRICS)
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).rpartition("\r")[2]
    bar = r"online-dpo +500/1000 [━╸]+ +(.*) 0:00:0\d left [0-9:-]+ *"
    first, *others = last.rstrip("\n").split("\n")
    found = re.fullmatch(bar, first)
    assert found is not None and all(len(line) <= columns for line in (first, *others)), last
    shown = " ".join(" ".join([found[1], *others]).split())
    assert shown == "reward 0.550 mismatch_kl 2.1e-02 eval sampler 0.412, dense 0.955"


HALFWAY = Progress(tokens=41_210, seconds=8.2, live=28, decode_rows=32, finished=96, rows=128)


def test_rollout_lines_every_ten_seconds():
    """Also at the first segment and at the end of each rollout."""
    output = io.StringIO()
    report = rollout_report(file=output)
    for seconds, finished in [(1.0, 0), (8.0, 5), (11.5, 9), (12.0, 128), (0.5, 1)]:
        report(HALFWAY._replace(seconds=seconds, finished=finished))
    assert re.findall(r"rollout (\d+)/128", output.getvalue()) == ["0", "9", "128", "1"]
    line = "rollout 9/128 done, 28/32 rows live, 41,210 tokens, 3,583 tokens/s, 0:00:11"
    assert output.getvalue().splitlines()[1] == line


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


TABLE = ["decode", *(f"column {number}" for number in range(6))], [["a long name of a row", *range(100_000, 100_006)]]


@pytest.mark.parametrize("width", [40, 80, 100, 160])
def test_numbers_are_complete_at_every_width(width):
    """Numbers that do not fit side by side have a line each."""
    terminal = Terminal()
    summary_table("title", *TABLE, file=terminal, width=width)
    text = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert all(len(line) <= width for line in text.splitlines())
    assert all(f"{number:,}" in text and f"column {number - 100_000}" in text for number in range(100_000, 100_006))
    assert "…" not in text


def test_tables_in_a_pipe_are_not_narrowed():
    file, raw = file_and_bytes()
    title = "a title that is longer than its table" * 10
    summary_table(title, *TABLE, file=file)
    first, *others = raw.getvalue().decode().splitlines()
    assert first == title and "a long name of a row │  100,000 │  100,001 │" in "\n".join(others)


def test_summary_table_refuses_ragged_rows():
    with pytest.raises(ValueError, match=r"row 1: expected 2 cells; got 1: \['dense'\]"):
        summary_table("t", ["a", "b"], [["x", 1], ["dense"]])


def test_a_missing_extra_is_named():
    """Only plots need it."""
    code = "import sys; sys.modules['matplotlib'] = None; import smd_jax.runs.run; print('imported')"
    code += "; import smd_jax.monitor.run_plots"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "imported\n"
    assert "pictures of runs need matplotlib: pip install 'smd_jax[train]'" in result.stderr
