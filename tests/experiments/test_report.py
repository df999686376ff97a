"""The report: its statistics by hand, its tables on rows with known numbers, and that it is of the committed rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

import report
from lib.files import Row, read_rows, write_rows
from lib.intervals import Estimate
from reporting import collapse, dose, learned_eviction, reruns, room, wall
from reporting.page import difference, p_value, reflow, signed, table

pytestmark = pytest.mark.study


def test_the_committed_pages_are_those_of_the_rows():
    report.check_rows()
    assert not report.stale(report.all_rows()), "python experiments/report.py makes the pages and the figure again"


def test_pages_of_other_rows_are_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for name in report.FILES:
        write_rows(tmp_path / name, read_rows(report.RESULTS / name))
    for name, place in (("RESULTS", tmp_path), ("ROOT", tmp_path), ("PAGE", tmp_path / "REPORT.md")):
        monkeypatch.setattr(report, name, place)
    monkeypatch.setattr(report, "APPENDIX", tmp_path / "appendix.md")
    report.main(report.Args())
    assert report.stale(report.all_rows()) == []
    changed = read_rows(tmp_path / "room")
    shadow = (row for row in changed if room.key_of(row) == room.FIRST and row["arm"] == "shadow" and not row["pilot"])
    next(shadow)["sparse"] += 0.1
    write_rows(tmp_path / "room", changed)
    with pytest.raises(SystemExit) as ended:
        report.main(report.Args(check=True))
    assert ended.value.code == 1 and "report.png" in capsys.readouterr().out


def room_rows(arms: Sequence[str] = (*room.FRONT, *room.RIVALS)) -> list[dict[str, Any]]:
    """Every rate is best for one way of decoding; arm number n has n hundredths more than the first."""
    made = []
    for place, arm in enumerate(dict.fromkeys(arms)):
        for rate, better in ((1e-4, "sparse"), (1e-3, "dense")):
            for seed in (100, *room.SEEDS):
                rewards = {
                    kind: 0.01 * place + 0.1 * kind.startswith(better)
                    for kinds in room.COLUMNS.values()
                    for kind in kinds
                }
                row = {"arm": arm, "seed": seed, "pilot": seed == 100, "learning_rate": rate, "cpu_seconds": 1.0}
                made.append(row | dict(zip(("task", "policy", "budget"), room.FIRST, strict=True)) | rewards)
    return made


def test_each_column_has_the_rate_of_its_pilot():
    cell = room.first_cell(room_rows())
    assert cell.rate("shadow", "budget") == 1e-4 and cell.rate("shadow", "full cache") == 1e-3
    last = room.RIVALS[-1]  # the highest pilot reward of all dense learners
    assert cell.best_rival("budget") == cell.best_rival("full cache") == last
    order = list(dict.fromkeys((*room.FRONT, *room.RIVALS)))
    expected = 0.01 * (order.index(room.OURS) - order.index("naive"))
    assert cell.contrast(room.OURS, "naive", "dense_greedy").mean == pytest.approx(expected)


def test_nothing_is_reported_before_all_seeds_are_in():
    rows = room_rows()
    rows.remove(next(row for row in rows if row["arm"] == "gspo" and row["seed"] == 17))
    with pytest.raises(ValueError, match="got too few of gspo"):
        room.first_cell(rows)


@pytest.mark.parametrize(("commit", "start"), [("abcdef1+", "a"), ("abcdef1", "b")])
def test_rows_that_cannot_be_reported(commit: str, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    row = room_rows()[0] | {"commit": "abcdef1", "start": "a"}
    write_rows(tmp_path / "room", [row, row | {"arm": "tis"}])
    report.check_rows()
    write_rows(tmp_path / "room", [row, row | {"arm": "tis", "commit": commit, "start": start}])
    with pytest.raises(ValueError, match="expected"):
        report.check_rows()


def test_differences_are_paired_by_seed():
    ours = [{"seed": seed, "sparse": 0.70 + 0.01 * seed} for seed in (0, 1)]
    theirs = [{"seed": 1, "sparse": 0.55}, {"seed": 0, "sparse": 0.52}]
    found = difference(ours, theirs, "sparse")
    # Differences 0.18 and 0.16: mean 0.17, s = 0.0141, t(0.975, 1) = 12.706, half = 12.706 * 0.01.
    assert found.mean == pytest.approx(0.17) and found.half == pytest.approx(0.12706, rel=1e-3)
    assert signed(found) == "+0.170 ± 0.127"
    assert signed(Estimate(0.1, 0.05, 3)) == "**+0.100 ± 0.050**"
    assert signed(Estimate(-0.1, 0.2, 3)) == "−0.100 ± 0.200"
    # t = 0.17 / 0.01 = 17 with one degree of freedom: p = 1 - 2 atan(17) / pi.
    assert p_value(ours, theirs, "sparse") == pytest.approx(0.0374, rel=1e-2)


def test_tables_and_paragraphs():
    assert table(["a", "b"], [["x|y", 1]]) == "| a | b |\n| --- | --: |\n| x\\|y | 1 |"
    long = "word " * 40
    text = f"# Title\n\n{long}\n\n* {long}\n* b\n\n| a | b |\n| --- | --- |\n"
    lines = reflow(text).splitlines()
    assert max(map(len, lines)) <= 120 and lines[-2:] == ["| a | b |", "| --- | --- |"]
    assert [line for line in lines if line.startswith("* ")][1] == "* b"


def dose_rows(slope: float, offset: float) -> list[dict[str, Any]]:
    """Cells on a line: mixed-50 leads TIS, the better rival, by offset + slope · log(mismatch)."""
    made = []
    for budget, mismatch in ((20, 0.1), (14, 0.4), (8, 1.6)):
        lead = offset + slope * math.log(mismatch)
        rewards = {"untrained": 0.2, "naive": 0.3, "tis": 0.4, "shadow": 0.45, "mixed-50": 0.4 + lead}
        for arm, reward in rewards.items():
            for seed in dose.SEEDS:
                row = {"arm": arm, "seed": seed, "task": "sorting-12", "policy": "h2o", "budget": budget}
                row |= {"pilot": False, "sparse_greedy": reward + 0.01 * seed, "mismatch_kl": mismatch}
                made.append(row)
    return made


def test_the_lead_at_a_mismatch_is_on_the_line_of_the_cells():
    found = dose.cells_of(dose_rows(slope=0.05, offset=0.2))
    expected = 0.2 + 0.05 * math.log(0.15)
    assert dose.lead_at(found, "mixed-50", 0.15) == pytest.approx(expected)
    # 0.2 + 0.05 log 0.1, and 0.2 + 0.05 log 0.4.
    assert dose.beside(found) == " The cells next to 0.15 nats have +0.085 and +0.154."
    assert dose.beside(found[1:]) == ""
    # All seeds have the same lead, so the bootstrap has no spread.
    assert dose.interval_at(found, "mixed-50", 0.15) == pytest.approx((expected, expected))


def test_the_rival_is_the_better_one_of_the_reported_seeds():
    rows = dose_rows(slope=0.0, offset=0.1)
    for row in rows:
        row["sparse_greedy"] += 0.2 * (row["arm"] == "naive" and row["budget"] == 8)
    leads = {cell.label: (cell.rival(dose.SEEDS), cell.lead("mixed-50", dose.SEEDS)) for cell in dose.cells_of(rows)}
    assert leads["sorting-12, h2o, 8 keys"] == ("naive", pytest.approx(0.0))
    assert leads["sorting-12, h2o, 20 keys"] == ("tis", pytest.approx(0.1))


def test_a_cell_without_all_seeds_is_not_reported():
    rows = dose_rows(slope=0.0, offset=0.1)
    rows.remove(next(row for row in rows if row["arm"] == "shadow" and row["budget"] == 8))
    assert len(dose.cells_of(rows)) == 2


def test_cells_of_room_are_reported_when_all_seeds_are_in():
    pilots = [row for row in room_rows() if row["pilot"]]
    second = [row | {"policy": "snapkv"} for row in room_rows(room.MAIN) if not row["pilot"]]
    (cell,) = room.other_cells(pilots + second)
    assert cell.label == "sorting-12, snapkv, 11 keys" and cell.rate("shadow", "budget") == 1e-4
    # The pilot's best rival did not run in this cell.
    assert room.first_cell(pilots + room_rows()).best_rival("budget") == "gspo" and cell.best_rival("budget") == "tis"
    assert room.other_cells(pilots + second[1:]) == []


def test_a_collapse_is_three_low_evaluations_in_a_row():
    def after(*rewards: float) -> int | None:
        return collapse.collapsed_after([{"step": 20 * i, "sparse_greedy": x} for i, x in enumerate(rewards)])

    assert after(0.4, 0.19, 0.19, 0.2, 0.19, 0.19, 0.19) == 80  # half of the start is not below it
    assert after(0.4, 0.1, 0.1, 0.3, 0.1, 0.1) is None


def collapse_rows() -> list[dict[str, Any]]:
    """At 3e-4 under SnapKV four of ten runs of bypass collapse after 20 rollouts, none with shadow masks."""
    made = []
    for arm in ("bypass", "shadow"):
        for seed in collapse.SEEDS:
            end = 0.1 if arm == "bypass" and seed < 14 else 0.5
            curve = [{"step": 20 * i, "sparse_greedy": end if i else 0.4, "dense_greedy": 0.4} for i in range(4)]
            curve = [point | {"agreement_p5": 0.8 if arm == "bypass" else 1.0} for point in curve]
            row = {"arm": arm, "seed": seed, "policy": "snapkv", "learning_rate": 3e-4, "pilot": False}
            made.append(row | {"curve": curve, "sparse_greedy": end, "dense_greedy": 0.4, "cpu_seconds": 1.0})
    return made


def test_the_section_on_collapse_counts_runs():
    text = reflow(collapse.section(collapse_rows()))
    assert "| snapkv, bypass | 3e-4 | 4 of 10 | 20 | 10 of 10 | −0.060 ± 0.148 | +0.000 ± 0.000 |" in text
    assert "| snapkv, shadow | 3e-4 | 0 of 10 |  | 0 of 10 |" in text
    # All four among the ten of one arm, of either: 2 * C(10, 4) / C(20, 4) = 0.0867.
    assert "4 of 10 runs of bypass and 0 of 10 of shadow masks collapse (p = 0.087" in " ".join(text.split())
    assert collapse.section(collapse_rows()[1:]) == ""


def wall_rows() -> list[dict[str, Any]]:
    """In the pilot full-updates is the best full-cache way, in the reported seeds full-turns."""
    made = []
    for place, way in enumerate(wall.MEANING):
        for seed in (100, *wall.SEEDS):
            own = 0.3 + 0.01 * place + 0.1 * (way == ("full-updates" if seed == 100 else "full-turns"))
            row = {"way": way, "seed": seed, "pilot": seed == 100, "length": 1024, "learning_rate": 1e-3}
            row |= {"own": own + 0.002 * seed * (way == "mixed-50"), "sparse_greedy": 0.5, "dense_greedy": 0.6}
            made.append(row | {"rows_at_once": 4, "rollouts": 70, "tokens": 1e6, "seconds": 240.0})
    return made


def test_the_wall_compares_with_the_best_full_cache_way_of_the_pilot():
    rows = wall_rows()
    assert wall.best_full(rows, 1024) == "full-updates"
    # 0.35 - 0.31 + 0.002 * 12.5; t(0.975, 5) = 2.571, s = 0.00374.
    text = " ".join(wall.section(rows).split())
    assert "mixed-50 minus full-updates, the best full-cache way of the pilot: +0.065 ± 0.004" in text
    # 0.33 - 0.31 and 0.34 - 0.31 in every seed.
    assert "Exploratory: tis +0.020 ± 0.000, shadow +0.030 ± 0.000 against the same way" in text
    assert "Not run yet: walks of 512 steps." in text
    rows.remove(next(row for row in rows if row["way"] == "full-4-bit" and row["seed"] == 12))
    assert wall.section(rows) == ""


def rerun_rows(arm: str, seeds: Iterable[int], reward: float, rate: float = 1e-3) -> list[Row]:
    """Rows of both cells; the rewards of the seeds alternate around `reward`."""
    made = []
    for _, (task, policy, budget) in reruns.CELLS.values():
        cell = {"task": task, "policy": policy, "budget": budget, "pilot": False, "arm": arm, "learning_rate": rate}
        made += [cell | {"seed": seed, "sparse_greedy": reward + 0.01 * (-1) ** seed} for seed in seeds]
    return made


def test_a_rerun_is_compared_with_the_first_interval():
    first = rerun_rows("mixed-50", range(10, 16), 0.7) + rerun_rows("tis", range(10, 16), 0.6)
    # At the rate of the other column; and paired differences spread only where one arm's seeds do not alternate.
    first += rerun_rows("tis", range(10, 16), 0.1, rate=3e-4)
    for row in first:
        row["sparse_greedy"] += 0.01 * (-1) ** row["seed"] * (row["arm"] == "mixed-50")
    near = rerun_rows("mixed-50", reruns.SEEDS, 0.71) + rerun_rows("tis", reruns.SEEDS, 0.6)
    far = rerun_rows("mixed-50", reruns.SEEDS, 0.72) + rerun_rows("tis", reruns.SEEDS, 0.6)
    # Differences of 0.1 ± 0.01: their t interval over six seeds is 2.571 · 0.01095 / sqrt(6) = 0.0115 wide to a side.
    for again, answer in ((near, "+0.110 ± 0.000 | yes |"), (far, "+0.120 ± 0.000 | no |")):
        files = {file: [*first, *again] for file in ("room", "dose.json")}
        text = reruns.section(files)
        assert text.count(f"| 6 | +0.100 ± 0.011 | 6 | {answer}") == 2, text
        assert reruns.without(files)["room"] == first
    assert reruns.section({"room": first + near[:-1], "dose.json": first + near}) == ""


def eviction_rows() -> list[dict[str, Any]]:
    """The gate decides 0.1 better than attention, which pilots prefer at temperature 0.3."""
    rows: list[dict[str, Any]] = []
    for policy, arm in (learned_eviction.GATE, *learned_eviction.ATTENTION):
        for seed in (100, 101, *learned_eviction.SEEDS):
            reward = 0.8 + 0.001 * (seed % 3 - 1) if policy == "gate" else 0.7
            curve = [{"sparse_decided": 0.0}] * 4 + [{"sparse_decided": reward}] * 3
            found = {"sparse": reward, "sparse_greedy": reward + (0.01 if policy == "attention-cold" else 0.0)}
            found |= {"dense_greedy": 0.5, "dense_greedy_before": 0.99, "policy": policy, "arm": arm, "seed": seed}
            rows.append(found | {"learning_rate": 3e-4, "pilot": seed >= 100, "curve": curve})
    return rows


def test_the_gate_is_compared_with_the_attention_that_the_pilot_prefers():
    rows = eviction_rows()
    assert learned_eviction.best_attention(rows) == ("attention-cold", "attention-joint")
    text = learned_eviction.section(rows)
    assert "attention at temperature 0.3, trained, the better attention arm of the pilot, decided: +0.100" in text
    assert learned_eviction.section(rows[:-1]) == "", "a seed is missing"
