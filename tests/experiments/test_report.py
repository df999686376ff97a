"""The report: sections from rows, and that the page which is committed is that of the committed rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import report
from reporting import cells, choices, evictions, gradients, horizon, map_picture, price, rates, real_model, showdown
from reporting.page import difference, signed, table
from study.files import read_rows, write_rows
from study.intervals import Estimate

pytestmark = pytest.mark.study

REWARDS = {  # sparse and dense of seed 0; seed 1 has a point more
    "untrained": (0.50, 0.97),
    "naive": (0.40, 0.90),
    "tis": (0.52, 0.95),
    "shadow": (0.70, 0.80),
    "tis-anchor": (0.55, 0.96),
    "shadow-anchor": (0.80, 0.75),
    "mixed-50": (0.65, 0.90),
    "anchor-alone": (0.75, 0.60),
}


def rows_of(policy: str = "tova-heads", arms: tuple[str, ...] = tuple(REWARDS)) -> list[dict[str, Any]]:
    made = []
    for seed in (0, 1):
        for arm in arms:
            sparse, dense = (reward + 0.01 * seed for reward in REWARDS[arm])
            row = {"arm": arm, "seed": seed, "task": "sorting-12", "policy": policy, "budget": 11, "pilot": False}
            row |= {
                "buffer": 2,
                "length": 26,
                "sparse": sparse,
                "dense": dense,
                "sparse_greedy": sparse,
                "dense_greedy": dense,
            }
            row |= {"learning_rate": 1e-4, "cpu_seconds": 1800.0, "cpu": "a CPU", "date": "2026-11-23"}
            row |= {showdown.APART: 1e-5 * (1 + 2 * seed)}
            made.append(row)
    return made


def test_the_committed_page_is_that_of_the_rows():
    assert not report.stale(), "python experiments/report.py makes page and pictures again"


def test_a_page_of_other_rows_is_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    write_rows(tmp_path / "map.json", rows_of())
    for name, place in (("RESULTS", tmp_path), ("ROOT", tmp_path), ("PAGE", tmp_path / "REPORT.md")):
        monkeypatch.setattr(report, name, place)
    with pytest.raises(SystemExit) as ended:
        report.main(report.Args(check=True))
    assert ended.value.code == 1 and "REPORT.md, map.png" in capsys.readouterr().out
    report.main(report.Args())
    assert report.stale() == []
    changed = read_rows(tmp_path / "map.json")
    changed[0]["sparse"] += 0.1
    write_rows(tmp_path / "map.json", changed)
    assert report.stale() == [tmp_path / "REPORT.md", tmp_path / "map.png"]


def test_a_seed_of_two_starts_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    rows = [row | {"sparse_before": 0.5 + 0.1 * (row["arm"] == "tis" and row["seed"] == 1)} for row in rows_of()]
    write_rows(tmp_path / "map.json", rows)
    assert {row["seed"] for row in report.usable_rows("map.json")} == {0}


@pytest.mark.parametrize(("commit", "start"), [("abcdef1+", "a"), ("abcdef1", "b")])
def test_rows_that_cannot_be_reported(commit: str, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    first, second, *_ = (row | {"commit": "abcdef1", "start": "a"} for row in rows_of())
    write_rows(tmp_path / "room.json", [first, second])
    report.check_rows()
    write_rows(tmp_path / "room.json", [first, second | {"commit": commit, "start": start}])
    with pytest.raises(ValueError, match="expected"):
        report.check_rows()


def test_all_arms_on_one_task():
    part = showdown.section(rows_of(), "sorting-12", "tova-heads", 11)
    assert part.answer.startswith(
        "Under the budget `shadow-anchor` ends highest (0.805); shadow masks end 0.180 ± 0.000 "
        "above TIS with the budget, and 0.150 ± 0.000 below it with the full cache; the frozen teacher adds "
        "+0.100 ± 0.000 to shadow masks with the budget (not established), and"
    )
    (line,) = [line for line in part.body.splitlines() if line.startswith("| `shadow`")]
    assert "| 0.0001 | 0.705 | 0.805 | 0.705 | 0.805 | 2.0e-05 | +0.180 ± 0.000 | −0.150 ± 0.000 |" in line
    assert part.cost == "8.0 CPU hours for 16 rows, a CPU, 2026-11-23"


def test_cells_of_the_map(tmp_path: Path):
    rows = rows_of() + rows_of("random") + rows_of("h2o", ("untrained", "shadow"))
    found = cells.cells_of(rows)
    assert [cell.policy for cell in found] == ["tova-heads", "random"], "a cell without all methods waits"
    assert (found[0].best("sparse"), found[0].best("dense")) == ("shadow-anchor", "tis-anchor")
    assert "shadow masks end above TIS in 2 of 2 cells" in cells.section(rows).answer
    assert (
        "of the 0 with three seeds or more the interval is above 0 in 0 and below in 0)" in cells.section(rows).answer
    )
    assert "and with the full cache shadow masks end above TIS in 0 of 2" in cells.section(rows).answer
    map_picture.draw(found, tmp_path / "map.png", "made of these")
    assert (tmp_path / "map.png").stat().st_size > 10_000


def test_what_a_budget_costs():
    rows = rows_of() + rows_of("random")
    for row in rows:
        row["sparse"] -= 0.1 * (row["policy"] == "random")
    gates = [row | {"policy": "gate", "arm": "gate-joint", "sparse": 0.96} for row in rows if row["arm"] == "naive"]
    gates += [row for row in rows if (row["policy"], row["arm"]) == ("random", "untrained")]
    real = [row | {"finished": True} for row in rows if row["policy"] == "tova-heads"]
    part = price.section(rows, gates, [row for row in real if row["arm"] != "untrained"])
    assert part is not None
    # 0.805 of the best learner less 0.975 of the start; 0.96 in both seeds less 0.97 and 0.98, t(0.975, 1) = 12.706.
    assert (
        "| sorting-12 | tova-heads, `shadow-anchor` | 50% | 0.975 | 0.505 | 0.805 | 2 | −0.170 ± 0.000 |" in part.body
    )
    assert "| sorting-12 | a gate, `gate-joint` | 50% | 0.975 | 0.405 | 0.960 | 2 | −0.015 ± 0.064 |" in part.body
    assert "SmolLM2" not in part.body, "waits for the untrained model and the full cache"
    one_start = [row for row in real if row["arm"] != "untrained" or row["seed"] == 0]
    full = [row | {"arm": "full-cache", "dense": 0.9} for row in real if row["arm"] == "naive"]
    with_real = price.section(rows, gates, one_start + full)
    assert with_real is not None
    # 0.80 and 0.81 less 0.9: the start counts for all seeds.
    assert "`shadow-anchor` | 50% | 0.900 | 0.500 | 0.805 | 2 | −0.095 ± 0.064 |" in with_real.body
    assert price.section([], gates, []) is None


def test_choices():
    usual = rows_of()
    made = []
    for name, other in (("tis", "tis-1-step"), ("shadow", "shadow-1-step"), ("shadow-anchor", "shadow-anchor-1")):
        made += [row | {"arm": other, "sparse": row["sparse"] - 0.05} for row in usual if row["arm"] == name]
    part = choices.section(made, usual)
    assert "shadow masks less TIS: +0.180 ± 0.000 with 1 step, +0.180 ± 0.000 with 4 steps a rollout." in part.answer
    assert "under the budget: a weight of 0.1 on all rows (0.805); none of the 1 other" in part.answer
    assert "| 1 step a rollout in place of 4 | 2 | 0.0001 | 0.655 | 0.805 | −0.050 ± 0.000 |" in part.body


def test_learning_rates_beyond_the_grid():
    usual = [row | {"sparse_before": 0.5 + 0.01 * row["seed"], "dense_before": 0.97} for row in rows_of()]
    less = [row | {"learning_rate": 1e-5, "sparse": row["sparse_before"]} for row in usual if row["arm"] != "tis"]
    less += [row | {"learning_rate": 1e-5, "sparse": row["sparse"] + 0.1} for row in usual if row["arm"] == "tis"]
    pilot = [row | {"pilot": True, "learning_rate": rate} for row in usual for rate in (3e-5, 1e-4, 3e-4)]
    part = rates.section(less, [*usual, *pilot], usual)
    # TIS ends at 0.62 with the smaller rate, shadow masks at their start.
    assert "with the budget: +0.180 ± 0.000 at the rates of the map, −0.120 ± 0.000 at 1e-05; with" in part.answer
    assert "the full cache: −0.150 ± 0.000 at the rates of the map, −0.150 ± 0.000 at 1e-05." in part.answer
    assert "| `tis` | 1e-05, beyond | 2 | +0.120 ± 0.000 |" in part.body
    assert "| `tis` | 0.0001 | 2 | +0.020 ± 0.000 |" in part.body
    assert "Of the 8 choices of the map (a task and an arm each) 0 are 3e-05, 8 0.0001, 0 0.0003." in part.body


def test_differences_are_paired_by_seed():
    rows = rows_of()
    ours, theirs = ([row for row in rows if row["arm"] == arm] for arm in ("shadow", "tis"))
    theirs[1]["sparse"] += 0.02
    found = difference(ours, theirs[::-1], "sparse")
    # Differences 0.18 and 0.16: mean 0.17, s = 0.0141, t(0.975, 1) = 12.706, half = 12.706 * 0.01.
    assert found.mean == pytest.approx(0.17) and found.half == pytest.approx(0.12706, rel=1e-3)
    assert signed(found) == "+0.170 ± 0.127", "two seeds establish nothing"
    assert signed(Estimate(0.1, 0.05, 3)) == "**+0.100 ± 0.050**"
    assert signed(Estimate(0.1, 0.2, 3)) == "+0.100 ± 0.200", "not established: not bold"


def test_tables():
    assert table(["a", "b"], [["x|y", 1]]) == "| a | b |\n| --- | --: |\n| x\\|y | 1 |"


def test_gradients():
    made = []
    for policy, learns in (("tova-heads", True), ("random", False)):
        place = {"task": "sorting-12", "policy": policy, "budget": 11, "seed": 0, "choice_learns": learns}
        place |= {
            "cpu": "a CPU",
            "date": "2026-11-23",
            "cpu_seconds": 3600.0,
            "sparse": 0.5,
            "dense": 0.97,
            "buffer": 2,
        }
        for rank, arm in enumerate((*gradients.ARMS, *gradients.HELPS)):
            row = {"kind": "gradient", "arm": arm}
            for field in ("snr", "cosine_sparse", "cosine_dense", "alignment_reward"):
                row |= {field: 0.01 * rank, f"{field}_half": 0.002}
            made.append(place | row)
        for length, ratio in ((0.03, 0.5 if learns else 1.0), (0.1, 0.4)):
            row = {"kind": "step", "arm": "exact", "direction": "gradient", "step": length}
            row |= {"predicted": 0.1, "predicted_half": 0.01, "realised": 0.1 * ratio, "realised_half": 0.01}
            made.append(place | row | {"ratio": ratio, "ratio_half": 0.1})
    part = gradients.section(made, ("sorting-12", "tova-heads", 11))
    assert part.cost == "4.0 CPU hours, a CPU, 2026-11-23", "rows of a cell and kind share their seconds"
    shadow = gradients.ARMS.index("shadow")
    assert f"by {0.01 * shadow:.3f} with shadow masks, and by 0.010 with TIS" in part.answer
    assert part.answer.endswith(
        "should give 0.01: tova-heads 0.500 ± 0.100 where the choice of keys depends on the parameters; "
        "random 1.000 ± 0.100 where the choice of keys does not depend on the parameters."
    )
    assert "steadiest of the nine, `to-go`, is ahead of the masks alone in 2 of 2" in part.answer
    assert "| sorting-12, random, 11 + 2 keys | 0.00 ± 0.00 | 0.00 ± 0.00 | 0.01 ± 0.00 |" in part.body, "biases"
    assert "| sorting-12, random, 11 + 2 keys | 0.03 | 0.100 ± 0.010 | 0.100 ± 0.010 | 1.000 ± 0.100 |" in part.body


def rewards(sparse: float, dense: float) -> dict[str, float]:
    return {"sparse": sparse, "dense": dense, "sparse_greedy": sparse, "dense_greedy": dense}


WALKER = {"policy": "tova-heads", "budget": 12, "buffer": 4}
ORIGIN = {
    "cpu": "a CPU",
    "date": "2026-11-23",
    "cpu_seconds": 36.0,
    "pilot": False,
    "budget": 14,
    "buffer": 2,
    "learning_rate": 1e-4,
}


def test_evictions_as_actions():
    arms = (
        *(("h2o", "untrained", 0.7), ("h2o", "shadow", 0.8), ("random", "shadow", 0.6), ("oldest", "untrained", 0.85)),
        *(("gate", "gate-alone", 0.75), ("gate", "gate-joint", 0.9)),
    )
    made = []
    for seed in (0, 1):
        for policy, arm, sparse in arms:
            row = ORIGIN | rewards(sparse + 0.01 * seed, 0.9)
            made.append(row | {"task": "sorting-12", "policy": policy, "arm": arm, "seed": seed, "length": 26})
    part = evictions.section(made)
    assert "0.100 ± 0.000 above the best of 2 rules under which tokens alone were trained (h2o)" in part.answer
    assert "and gates alone, on a model that stays as it is, 0.050 ± 0.000 below it and 0.145 ± 0.064" in part.answer
    assert part.answer.endswith("together they reach 0.905, and without any training the rule `oldest` 0.855.")
    assert "| `gate-joint` | 2 | 0.905 | 0.900 | 0.905 | 0.900 | +0.100 ± 0.000 |" in part.body
    assert "| `h2o, shadow` | 2 | 0.805 | 0.900 | 0.805 | 0.900 |  |" in part.body


def test_the_horizon():
    made = []
    for task, lead in (("walk-64", 0.2), ("walk-16", 0.1)):
        for seed in (0, 1, 2):
            arms = (("untrained", 0.5), ("tis", 0.6), ("shadow", 0.6 + lead), ("shadow-anchor", 0.7))
            for arm, sparse in (*arms, ("naive", 0.4)) if task == "walk-16" else arms:
                made.append(ORIGIN | WALKER | rewards(sparse, 0.9) | {"task": task, "arm": arm, "seed": seed})
    unfinished = [ORIGIN | WALKER | rewards(0.1, 0.9) | {"task": "walk-256", "arm": "tis", "seed": 0}]
    part = horizon.section([*made, *unfinished])
    assert (
        "under tova-heads: +0.100 ± 0.000 at 16 tokens, +0.200 ± 0.000 at 64 tokens (a frozen teacher beside the masks "
        "changes their reward by +0.000 ± 0.000 at 16, −0.100 ± 0.000 at 64 tokens; with the full cache" in part.answer
    )
    assert "| `shadow` | **+0.200 ± 0.000** | +0.000 ± 0.000 | **+0.300 ± 0.000** | +0.000 ± 0.000 |" in part.body
    assert "| `naive` | **−0.100 ± 0.000** | +0.000 ± 0.000 | – | – |" in part.body, "what one length has is shown"
    assert "256 tokens" not in part.body, "a length whose arms are not there yet"
    other = [row | {"sparse": 0.65} for row in made if (row["task"], row["arm"]) == ("walk-16", "tis")]
    said = "With one rate for both, 0.0001, under tova-heads at 16 tokens: +0.050 ± 0.000 with the budget."
    assert said in horizon.section(made, other).body and "With one rate" not in part.body
    both = horizon.section([*made, *({**row, "policy": "h2o"} for row in made)])
    assert both.body.count("| `shadow` | **+0.2") == 2 and "; under h2o: +0.100" in both.answer
    assert "| `naive` | 0.0001 | – |" in part.body, "learning rates"


def test_walks_stand_on_the_map_with_the_arms_they_have():
    walks = [
        ORIGIN | WALKER | rewards(sparse, 0.9) | {"task": "walk-16", "arm": arm, "seed": seed}
        for seed in (0, 1, 2)
        for arm, sparse in (("untrained", 0.5), ("naive", 0.4), ("tis", 0.6), ("shadow", 0.8), ("shadow-anchor", 0.7))
    ]
    assert [cell.task for cell in cells.all_cells(rows_of(), walks)] == ["sorting-12", "walk-16"]
    assert cells.cells_of(walks) == [], "not all methods of the map"
    assert "of the 1 with three seeds or more the interval is above 0 in 1" in cells.section(rows_of(), walks).answer


def test_importance_weights_against_the_length():
    made = []
    for tokens, share in ((16, 0.5), (512, 0.004)):
        row = {"policy": "h2o", "budget": 12, "tokens": tokens, "response_ess": share, "token_ess": 0.8}
        made.append(ORIGIN | row | {"responses": 256, "shadow_max_abs_dlogp": 2e-5, "budget": 12, "seed": 0})
    part = horizon.weights_section(made)
    assert (
        "fall from 0.50 … 0.50 at 16 tokens to 0.00 … 0.00 at 512" in part.answer and "at most 2.0e-05" in part.answer
    )
    assert "| h2o, 12 keys: responses | 0.500 | 0.004 |" in part.body


def test_a_real_model():
    made = []
    for arm, sparse in (("untrained", 0.1), ("tis", 0.2), ("shadow", 0.4)):
        for seed in (0,) if arm == "untrained" else (0, 1):
            row = ORIGIN | rewards(sparse, 0.5) | {"task": "digit-sums-3", "arm": arm, "seed": seed, "finished": True}
            row |= {"learning_rate": None if arm == "untrained" else 1e-4}
            made.append(row | {"policy": "snapkv", "evicted_share": 0.35, "length": 225, "evaluation_rows": 96})
    part = real_model.section(made)
    assert part is not None and real_model.section([row | {"pilot": True} for row in made]) is None
    said = "Under snapkv (2 seeds) shadow masks end 0.200 ± 0.000 above `tis` with the budget (0.200 ± 0.000 above it "
    said += "greedy), and 0.000 ± 0.000 above it with the full cache (0.000 ± 0.000 above it greedy)."
    assert part.answer == said
    both = real_model.section(made + [row | {"policy": "tova-heads", "sparse": 0.5} for row in made])
    assert both is not None and both.answer.startswith(said) and both.body.count("| `shadow` |") == 2
    assert "Under tova-heads (2 seeds) shadow masks end 0.000" in both.answer
    assert "| `untrained` | 1 |  | 0.100 | 0.500 | 0.100 | 0.500 |  |  |" in part.body
    assert "| `shadow` | 2 | 0.0001 | 0.400 (0.400, 0.400) | 0.500 (0.500, 0.500) |" in part.body
    assert "0.35 of the keys are gone" in part.body
