"""The report: its statistics by hand, its tables on rows with known numbers, and that it is of the committed rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import report
from lib.files import read_rows, write_rows
from lib.intervals import Estimate
from reporting import cells, dose, others, real_model, room, walks
from reporting.page import compared, difference, holm, p_value, reflow, signed, table

pytestmark = pytest.mark.study

REWARDS = {  # under the budget and with the full cache, of seed 0; every further seed has a point more
    "untrained": (0.50, 0.97),
    "naive": (0.40, 0.90),
    "tis": (0.52, 0.95),
    "shadow": (0.70, 0.80),
}


def rows_of(policy: str = "tova-heads", seeds: int = 2, **fields: Any) -> list[dict[str, Any]]:
    made = []
    for seed in range(seeds):
        for arm, rewards in REWARDS.items():
            sparse, dense = (reward + 0.01 * seed for reward in rewards)
            row = {"arm": arm, "seed": seed, "task": "sorting-12", "policy": policy, "budget": 11, "pilot": False}
            row |= {"sparse": sparse, "dense": dense, "sparse_greedy": sparse, "dense_greedy": dense, "buffer": 2}
            row |= {"learning_rate": 1e-4, "mismatch_kl": 0.5 + seed, "entropy/end": 0.25, "sparse_before": 0.5}
            made.append(row | fields)
    return made


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
    changed = read_rows(tmp_path / "room.json")
    shadow = (row for row in changed if (row["task"], row["arm"], row["pilot"]) == ("sorting-12", "shadow", False))
    next(shadow)["sparse"] += 0.1
    write_rows(tmp_path / "room.json", changed)
    with pytest.raises(SystemExit) as ended:
        report.main(report.Args(check=True))
    assert ended.value.code == 1 and "report.png" in capsys.readouterr().out


def test_a_seed_of_two_starts_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    rows = [row | {"sparse_before": 0.5 + 0.1 * (row["arm"] == "tis" and row["seed"] == 1)} for row in rows_of()]
    write_rows(tmp_path / "map.json", rows)
    assert {row["seed"] for row in report.usable_rows("map.json")} == {0}


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
    first, second, *_ = (row | {"commit": "abcdef1", "start": "a"} for row in rows_of())
    write_rows(tmp_path / "room.json", [first, second])
    report.check_rows()
    write_rows(tmp_path / "room.json", [first, second | {"commit": commit, "start": start}])
    with pytest.raises(ValueError, match="expected"):
        report.check_rows()


def test_differences_are_paired_by_seed():
    rows = rows_of()
    ours, theirs = ([row for row in rows if row["arm"] == arm] for arm in ("shadow", "tis"))
    theirs[1]["sparse"] += 0.02
    found = difference(ours, theirs[::-1], "sparse")
    # Differences 0.18 and 0.16: mean 0.17, s = 0.0141, t(0.975, 1) = 12.706, half = 12.706 * 0.01.
    assert found.mean == pytest.approx(0.17) and found.half == pytest.approx(0.12706, rel=1e-3)
    assert signed(found) == "+0.170 ± 0.127" and compared(ours, theirs, "sparse") == "+0.180, +0.160"
    assert signed(Estimate(0.1, 0.05, 3)) == "**+0.100 ± 0.050**"
    assert signed(Estimate(-0.1, 0.2, 3)) == "−0.100 ± 0.200"
    # t = 0.17 / 0.01 = 17 with one degree of freedom: p = 1 - 2 atan(17) / pi.
    assert p_value(ours, theirs, "sparse") == pytest.approx(0.0374, rel=1e-2)


def test_holm_multiplies_and_never_falls():
    # 3 * 0.01, 2 * 0.04, and the last one is not below the one before it.
    assert holm([0.04, 0.01, 0.06]) == pytest.approx([0.08, 0.03, 0.08])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_tables_and_paragraphs():
    assert table(["a", "b"], [["x|y", 1]]) == "| a | b |\n| --- | --: |\n| x\\|y | 1 |"
    long = "word " * 40
    text = f"# Title\n\n{long}\n\n* {long}\n* b\n\n| a | b |\n| --- | --- |\n"
    lines = reflow(text).splitlines()
    assert max(map(len, lines)) <= 120 and lines[-2:] == ["| a | b |", "| --- | --- |"]
    assert [line for line in lines if line.startswith("* ")][1] == "* b"


def test_cells_have_leads_and_mismatches():
    rows = rows_of(seeds=3)
    last = next(row for row in rows if (row["arm"], row["seed"]) == ("tis", 2))
    last |= {"sparse": last["sparse"] + 0.003, "sparse_greedy": last["sparse_greedy"] + 0.003}
    rows += rows_of("random") + rows_of("h2o")[:2]
    found = cells.cells_of(rows)
    assert [cell.policy for cell in found] == ["tova-heads", "random"], "a cell without its arms is left out"
    assert found[1].mismatch == pytest.approx(1.0) and found[0].is_decided and not found[1].is_decided
    (line,) = cells.decided_table(found).splitlines()[2:]
    # Differences 0.18, 0.18 and 0.177: s = 0.00173, half = 4.303 * 0.001; t = 179 with two degrees of freedom.
    assert "| 0.51 / 0.98 | 1.5 | 1e-4 / 1e-4 | **+0.179 ± 0.004** (3.1e-05) |" in line
    assert "| sorting-12, random, 11 keys | 2 | 0.51 / 0.97 | 1 | +0.180, +0.180 |" in cells.every_table(found)
    assert cells.median_lead(found, "dense", "naive") == "−0.100"


def test_walks():
    made = [row for n in (64, 16) for row in rows_of(seeds=3, task=f"walk-{n}", budget=12, buffer=4)]
    lengths = walks.by_sampler(made)["tova-heads, 12 + 4 keys"]
    assert list(lengths) == [16, 64]
    gains = "**+0.020 ± 0.000** | **+0.020 ± 0.000** | **−0.020 ± 0.000**"
    assert f"| `tis` | 1e-4 | {gains} | 1e-4 | {gains} |" in walks.gains_table(lengths)
    (first, _) = walks.short_table(made).splitlines()[2:]
    assert first.startswith("| 16 tokens, tova-heads | 0.51 / 0.51 | 1e-4 / 1e-4 | **+0.180 ± 0.000** |")
    other = [row | {"sparse": 0.65} for row in made if (row["task"], row["arm"]) == ("walk-16", "tis")]
    assert "lead TIS in walk-16 under tova-heads by +0.060 ± 0.025 at temperature 1" in walks.one_rate(made, other)


def test_gates():
    rows = []
    for policy, arm, sparse in (
        *(("h2o", "untrained", 0.7), ("h2o", "shadow", 0.8), ("random", "shadow", 0.6), ("oldest", "untrained", 0.85)),
        *(("gate", "gate-alone", 0.75), ("gate", "gate-joint", 0.9)),
    ):
        for task in ("sorting-12", "sums-12"):
            rows += [
                row | {"arm": arm, "policy": policy, "sparse": sparse, "dense": 0.9}
                for row in rows_of(task=task, seeds=2)
                if row["arm"] == "tis"
            ]
    said = others.gate_sentence(rows)
    assert "sorting-12: +0.050 ± 0.000 over the best untrained rule (`oldest`), +0.100 ± 0.000 over" in said
    assert "| `gate-joint` | 2 | 0.900 | 0.525 | 0.900 | +0.050 ± 0.000 |" in others.gate_table(rows, "sums-12")


def test_collapses_are_counted():
    rows = [{"arm": "bypass", "learning_rate": 1e-4, "sparse": 0.3, "sparse_before": 0.5}]
    rows += [{"arm": "naive", "learning_rate": rate, "sparse": 0.36, "sparse_before": 0.5} for rate in (3e-4, 1e-3)]
    rows.append(rows[-1] | {"sparse": 0.34})
    said = others.collapse_sentence(rows)
    assert "in 0 of 1 runs at rates up to 3e-4, and in 1 of 2 at 1e-3; bypass in 1 of 1" in said


def test_the_real_models_pilot_seed_counts_at_the_reported_rate():
    shared = {"policy": "snapkv", "finished": True, "learning_rate": 3e-4}
    rows = [row | shared for row in rows_of(seeds=2)]
    pilots = [row | {"seed": 100, "pilot": True, "sparse": 0.1} for row in rows if row["seed"] == 0]
    other_rate = [row | {"learning_rate": 1e-3} for row in pilots]
    lead = real_model.lead([*rows, *pilots, *other_rate], "snapkv", "tis", "sparse", pilot=True)
    # Differences 0.18, 0.18 and, of the pilot seed, 0.
    assert lead.mean == pytest.approx(0.12) and lead.count == 3
    shown = real_model.trained_table([*rows, *pilots], "snapkv")
    assert "| `shadow` | 3e-4 | 0.70 0.71 (0.10) |" in shown


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
    assert room.other_cells(pilots + second[1:]) == []
