"""The report: statistics by hand, tables of known rows, and committed pages that match the committed rows."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

import report
from lib.files import Row, read_rows, write_rows
from lib.intervals import Estimate
from reporting import collapse, contrasts, dose, figure, front, learned_eviction, reruns, room, wall
from reporting.page import difference, p_value, reflow, signed, table

pytestmark = pytest.mark.study

FIGURES = (front.FIGURE, dose.FIGURE, collapse.FIGURE)


def test_the_committed_pages_match_the_committed_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    report.check_rows()
    committed = {"REPORT.md": report.PAGE.read_text("utf-8"), "appendix.md": report.APPENDIX.read_text("utf-8")}
    pictures = [report.made_of(report.RESULTS / name) for name in FIGURES]
    for name in report.FILES:
        write_rows(tmp_path / name, read_rows(report.RESULTS / name))
    for name, place in (("RESULTS", tmp_path), ("ROOT", tmp_path), ("PAGE", tmp_path / "REPORT.md")):
        monkeypatch.setattr(report, name, place)
    monkeypatch.setattr(report, "APPENDIX", tmp_path / "appendix.md")
    report.main(report.Args())
    hint = "python experiments/report.py makes the pages and the figures again"
    for name, text in committed.items():
        assert text == (tmp_path / name).read_text("utf-8"), f"{name}: {hint}"
    assert pictures == [report.made_of(tmp_path / name) for name in FIGURES], hint
    changed = read_rows(tmp_path / "room")
    shadow = (row for row in changed if room.key_of(row) == room.FIRST and row["arm"] == "shadow" and not row["pilot"])
    next(shadow)["sparse"] += 0.1
    write_rows(tmp_path / "room", changed)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        report.main(report.Args(check=True))
    output = capsys.readouterr().out
    assert ended.value.code == 1 and front.FIGURE in output and dose.FIGURE not in output
    changed = read_rows(tmp_path / "smollm2.json")
    next(row for row in changed if row["arm"] == "tis")["mismatch_kl"] += 0.1
    write_rows(tmp_path / "smollm2.json", changed)
    assert tmp_path / dose.FIGURE in report.stale(report.all_rows()), "it shows the mismatch of SmolLM2"


def room_rows(arms: Sequence[str] = (*room.FRONT, *room.RIVALS, *room.SHARES)) -> list[dict[str, Any]]:
    """Each rate is best for one way of decoding; arm n earns 0.01 n more than the first."""
    rows = []
    for place, arm in enumerate(dict.fromkeys(arms)):
        for rate, better in ((1e-4, "sparse"), (1e-3, "dense")):
            for seed in (100, *room.SEEDS):
                rewards = {
                    kind: 0.01 * place + 0.1 * kind.startswith(better)
                    for kinds in room.COLUMNS.values()
                    for kind in kinds
                }
                row = {"arm": arm, "seed": seed, "pilot": seed == 100, "learning_rate": rate, "cpu_seconds": 1.0}
                rows.append(row | dict(zip(("task", "policy", "budget"), room.FIRST, strict=True)) | rewards)
    return rows


def test_each_column_has_the_rate_of_its_pilot():
    cell = room.first_cell(room_rows())
    assert cell.rate("shadow", "budget") == 1e-4 and cell.rate("shadow", "full cache") == 1e-3
    last = room.RIVALS[-1]  # the highest pilot reward of all dense learners
    assert cell.best_rival("budget") == cell.best_rival("full cache") == last
    order = list(dict.fromkeys((*room.FRONT, *room.RIVALS, *room.SHARES)))
    expected = 0.01 * (order.index(room.OURS) - order.index("naive"))
    assert cell.contrast(room.OURS, "naive", "dense_greedy").mean == pytest.approx(expected)


def test_the_first_cell_needs_all_seeds():
    rows = room_rows()
    rows.remove(next(row for row in rows if row["arm"] == "gspo" and row["seed"] == 17))
    with pytest.raises(ValueError, match="got too few of gspo"):
        room.first_cell(rows)


@pytest.mark.parametrize(("commit", "start"), [("abcdef1+", "a"), ("abcdef1", "b")])
def test_unreportable_rows_are_refused(commit: str, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    row = room_rows()[0] | {"commit": "abcdef1", "start": "a"}
    write_rows(tmp_path / "room", [row, row | {"arm": "tis"}])
    report.check_rows()
    write_rows(tmp_path / "room", [row, row | {"arm": "tis", "commit": commit, "start": start}])
    with pytest.raises(ValueError, match="expected"):
        report.check_rows()


def test_rows_of_the_report_without_a_start_need_a_clean_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    write_rows(tmp_path / "older.json", [{"commit": "abcdef1+"}])
    write_rows(tmp_path / "smollm2.json", [{"commit": "abcdef1"}])
    report.check_rows()
    write_rows(tmp_path / "smollm2.json", [{"commit": "abcdef1+"}])
    with pytest.raises(ValueError, match="rows of clean commits in smollm2.json"):
        report.check_rows()


def test_differences_are_paired_by_seed():
    ours = [{"seed": seed, "sparse": 0.70 + 0.01 * seed} for seed in (0, 1)]
    # In another order, and one without a partner.
    theirs = [{"seed": 1, "sparse": 0.55}, {"seed": 0, "sparse": 0.52}, {"seed": 2, "sparse": 9.0}]
    lead = difference(ours, theirs, "sparse")
    # Differences 0.18 and 0.16: mean 0.17, s = 0.0141, t(0.975, 1) = 12.706, half = 12.706 * 0.01.
    assert tuple(lead) == pytest.approx((0.17, 0.12706, 2), rel=1e-3)
    with pytest.raises(ValueError, match="expected a seed in common"):
        difference(ours, theirs[2:], "sparse")
    assert signed(lead) == "+0.170 ± 0.127"
    assert signed(Estimate(0.1, 0.05, 3)) == "**+0.100 ± 0.050**"
    assert signed(Estimate(-0.1, 0.2, 3)) == "−0.100 ± 0.200"
    # t = 0.17 / 0.01 = 17 with one degree of freedom: p = 1 - 2 atan(17) / pi.
    assert p_value(ours, theirs, "sparse") == pytest.approx(0.0374, rel=1e-2)


def test_tables_and_paragraphs():
    assert table(["a", "b"], [["x|y", 1]]) == "| a | b |\n| --- | --: |\n| x\\|y | 1 |"
    with pytest.raises(ValueError, match="at least one row of the table"):
        table(["a", "b"], [])
    long = "word " * 40
    text = f"# Title\n\n{long}\n\n* {long}\n* b\n\n| a | b |\n| --- | --- |\n"
    lines = reflow(text).splitlines()
    assert max(map(len, lines)) <= 120 and lines[-2:] == ["| a | b |", "| --- | --- |"]
    assert [line for line in lines if line.startswith("* ")][1] == "* b"


def test_the_mixture_is_stopped_when_it_has_cost_the_rival_s_run():
    steps = range(0, 260, 20)
    rows = room_rows()
    for row in rows:
        ours = row["arm"] == room.OURS
        curve = [{"step": step} | dict.fromkeys(room.KINDS, step / 1000 if ours else 0.1) for step in steps]
        # The mixture costs 1.5 times as much; what another CPU says is left out.
        row |= {"curve": curve, "cpu": "a", "cpu_seconds": 1.5 if ours else 1.0} | dict.fromkeys(room.KINDS, 0.1)
        if ours and row["seed"] == 17:
            row |= {"cpu": "b", "cpu_seconds": 0.1}
    cell = room.first_cell(rows)
    rollouts, lead = room.in_equal_time(cell, "tis", "sparse_greedy")
    # 240 / 1.5 = 160 rollouts; the mean of 120, 140 and 160 is 140.
    assert rollouts == 160 and lead.mean == pytest.approx(0.14 - 0.1) and lead.count == len(room.SEEDS)
    assert room.all_in_equal_time([cell], "sparse_greedy") == "median +0.040, established above in 1 and below in 0"


def test_reruns_leave_out_their_seeds_of_their_studies_only():
    rows = [{"seed": 17}, {"seed": 18}]
    assert reruns.without({"room": rows, "collapse.json": rows}) == {"room": rows[:1], "collapse.json": rows}


def test_other_cells_of_room_need_all_seeds():
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

    assert after(0.4, 0.19, 0.19, 0.2, 0.19, 0.19, 0.19) == 80  # 0.2 is not below half of the start
    assert after(0.4, 0.1, 0.1, 0.3, 0.1, 0.1) is None


def test_a_run_that_recovers_has_collapsed_and_is_not_low_at_the_end():
    def run(rewards: Sequence[float], agreement: Sequence[float]) -> Row:
        points = zip(rewards, (1.0, *agreement), strict=True)
        curve = [{"step": 20 * i, "sparse_greedy": x, "agreement_p5": y} for i, (x, y) in enumerate(points)]
        return {"curve": curve, "sparse_greedy": sum(rewards[-3:]) / 3}

    def cell(*runs: Row) -> collapse.CollapseCell:
        return collapse.CollapseCell("snapkv", "naive", 1e-3, runs)

    low = (0.4, 0.3, 0.1, 0.1, 0.1)  # collapsed after 40
    early, late = run(low, (0.8, 0.9, 0.9, 0.9)), run(low, (0.9, 0.8, 0.8, 0.8))
    assert [collapse.crossed_after(each["curve"]) for each in (early, late)] == [20, 40]
    assert cell(early, late).below_threshold == 2
    back = run((*low, 0.3, 0.3, 0.3), (0.9,) * 7)
    assert cell(back).collapsed == 1 and cell(back).low_at_the_end == 0 and cell(back).below_threshold == 0
    assert cell(run(low, (0.9,) * 4), back).low_at_the_end == 1


def test_holms_correction():
    # Sorted: 4 x 0.01; 3 x 0.02; 2 x 0.025 is below the one before; 1 x 0.4.
    assert contrasts.holm([0.4, 0.01, 0.025, 0.02]) == pytest.approx([0.4, 0.04, 0.06, 0.06])
    assert contrasts.holm([0.9, 0.6, 0.01]) == pytest.approx([1.0, 1.0, 0.03])
    made = contrasts.Contrast("room", "a minus b", "+0.1", 0.01)
    assert "| room | a minus b | +0.1 | 0.01 | 0.03 |" in contrasts.section([made, *[made._replace(p=0.9)] * 2])


def test_the_lead_at_a_mismatch_is_read_off_a_line_over_its_logarithm():
    def cell(nats: float, lead: float) -> dose.DoseCell:
        seeds = {seed: 0.01 * seed for seed in dose.SEEDS}
        rewards = {"naive": seeds, "tis": {seed: x - 0.1 for seed, x in seeds.items()}}
        rewards["mixed-50"] = {seed: x + lead + 0.0012 * seed for seed, x in seeds.items()}
        return dose.DoseCell("sorting-12, h2o, 1 keys", {}, rewards, dict.fromkeys(dose.SEEDS, nats))

    # On a line over log10: 0.1 at 0.015 nats, 0.2 at 0.15 nats.
    cells = [cell(0.0015, 0.0), cell(0.015, 0.1), cell(1.5, 0.3)]
    assert cells[0].rival == "naive" and cells[0].lead("mixed-50").mean == pytest.approx(0.015)
    assert dose.at_nats(cells) == pytest.approx([0.2 + 0.0012 * seed for seed in dose.SEEDS])
    assert [one.nats for one in dose.neighbours(cells)] == [0.015, 1.5]
    assert dose.by_task(cells) == "sorting-12 +0.215 ± 0.002 by its own line, +0.215 ± 0.002 between these cells"
    assert dose.established([*cells, cell(15, -0.9)]) == "sorting-12 3 of 4, with up to 15 nats"
    steep = [*cells[:2], cell(1.5, 0.1), cell(15, 0.9)]
    assert "by its own line, which lies above both cells next to it, +0.115 ± 0.002" in dose.by_task(steep)


def test_names_in_figures_are_those_of_the_pages():
    pages = {path: path.read_text("utf-8") for path in (report.PAGE, report.APPENDIX, report.ROOT / "README.md")}
    first, appendix, readme = pages.values()
    assert [arm for arm in figure.CURVES if f"| {arm} | {room.NAMES[arm]} |" not in first] == []
    assert [arm for arm in room.RIVALS if f"| {arm} | {room.NAMES[arm]} |" not in appendix] == []
    assert [arm for arm in figure.CURVES if f"| {room.NAMES[arm]}" not in readme] == []


def drawn(draw: Callable[..., None], *arguments: Any) -> Figure:
    """The figure of these arguments, before it is saved."""
    with pytest.MonkeyPatch.context() as patch:
        found: list[Figure] = []
        patch.setattr(figure, "saved", lambda picture, path, made_of: found.append(picture))
        draw(*arguments, Path("unwritten.png"), "")
    return found[0]


def test_cells_that_evict_nothing_are_not_in_the_figure():
    cells = dose.cells_of(report.all_rows()["dose"])
    rewards = drawn(figure.draw_doses, cells, {}).axes[1]
    shown = {nats for line in rewards.get_lines() for nats, _ in np.asarray(line.get_xydata())}
    assert shown == {cell.nats for cell in cells if cell.task == "sorting-12" and cell.evicts}
    assert len(shown) == 10 < dose.CELLS


def test_a_survival_curve_falls_when_a_run_collapses():
    def run(*rewards: float) -> Row:
        return {"curve": [{"step": 20 * i, "sparse_greedy": x} for i, x in enumerate(rewards)]}

    cell = collapse.CollapseCell("h2o", "naive", 1e-3, (run(0.4, 0.4, 0.1, 0.1, 0.1), run(0.4, 0.4, 0.4, 0.4, 0.4)))
    other = collapse.CollapseCell("snapkv", "naive", 1e-3, cell.rows)
    for axes in drawn(figure.draw_survival, [cell, other]).axes:
        (line,) = axes.get_lines()
        assert np.asarray(line.get_xydata()).tolist() == [[0, 1], [20, 1], [40, 0.5], [60, 0.5], [80, 0.5]]


def without_one(rows: Sequence[Row], **of: Any) -> list[Row]:
    """The rows without the first reported one that has these values."""
    missing = next(row for row in rows if not row["pilot"] and of.items() <= row.items())
    return [row for row in rows if row is not missing]


def test_every_study_needs_all_seeds_of_its_primary_contrast():
    files = report.all_rows()
    walls, collapses, gates = (files[name] for name in ("wall.json", "collapse.json", "learned_eviction.json"))
    policy, rate = collapse.PRIMARY
    collapse_arm = {"policy": policy, "learning_rate": rate, "arm": "bypass"}
    task, policy, budget = reruns.CELLS["other cells: sorting-12, snapkv, 11 keys"][1]
    rerun = {"task": task, "policy": policy, "budget": budget, "arm": "tis", "seed": reruns.SEEDS[0]}
    cases: list[tuple[Any, Any, Any]] = [
        (wall.section, walls, without_one(walls, way="full-4-bit", length=wall.PRIMARY)),
        (collapse.section, collapses, without_one(collapses, **collapse_arm)),
        (learned_eviction.section, gates, without_one(gates, arm="gate-joint")),
        (reruns.section, files, files | {"room": without_one(files["room"], **rerun)}),
    ]
    for section, rows, fewer in cases:
        assert section(rows)
        with pytest.raises(ValueError, match="expected all seeds of"):
            section(fewer)
    doses = files["dose"]
    fewer = without_one(doses, task="sorting-12", arm="shadow", seed=dose.SEEDS[0])
    assert {cell.task for cell in dose.cells_of(doses)} - {cell.task for cell in dose.cells_of(fewer)} == {"sorting-12"}


def test_the_rival_at_the_wall_is_the_full_cache_way_of_the_best_pilot():
    made = [("full-turns", 0.5, True), ("full-updates", 0.4, True), ("tis", 0.9, True), ("full-updates", 0.8, False)]
    rows = [{"way": way, "own": own, "pilot": pilot, "length": wall.PRIMARY} for way, own, pilot in made]
    assert wall.best_full(rows, wall.PRIMARY) == "full-turns"


def test_a_way_of_the_wall_is_compared_with_its_own_start():
    start = {"dense": 0.1, "dense_greedy": 0.5, "sparse": 0.2, "sparse_greedy": 0.3}
    end = {"dense": 0.4, "dense_greedy": 0.4, "sparse": 0.0, "sparse_greedy": 0.0}
    rows = [{"way": "full-turns", "seed": seed, "curve": [start, end]} for seed in (1, 2)]
    assert wall.gained(rows, *wall.BOTH).mean == pytest.approx(0.1)
    assert wall.gained(rows, "_greedy").mean == pytest.approx(-0.1)
    assert wall.gained([row | {"way": "tis"} for row in rows], "").mean == pytest.approx(-0.2)


def test_a_rerun_is_compared_at_its_own_rate():
    made = [(10, 1e-3), (11, 3e-4), (reruns.SEEDS[0], 1e-3)]
    rows = [{"arm": "tis", "seed": seed, "learning_rate": rate, reruns.KIND: 0.5} for seed, rate in made]
    assert reruns.rewards(rows, "tis", (10, 11)) == {10: 0.5}
