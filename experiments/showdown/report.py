"""What `main.py` says about its runs: rows, curves, tables, and what happened where a reward fell.

Nothing here trains. `python experiments/showdown/main.py --tables` makes tables and picture again from the rows in
experiments/results.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t as student_t

from smd_jax.metrics import CORRECTION_METRICS, MISMATCH_METRICS
from smd_jax.monitor.plots import EVAL_DENSE, EVAL_SPARSE, MISMATCH_MAX, curve
from smd_jax.monitor.progress import Cell, summary_table

History = Sequence[Mapping[str, Any]]

IDENTITY = ("arm", "seed", "cpu")  # in a row of showdown_curves.json, beside the values

OF_STEPS = ("entropy", "grad_norm", "clip_ratio/region_mean")
MEASURED = ("mismatch_kl", MISMATCH_MAX, *MISMATCH_METRICS, *CORRECTION_METRICS, *OF_STEPS)
BINS = 30  # points of a curve that is kept
FALL = 0.03  # a reward that ends further below its start than this has fallen: more than noise of 512 prompts

DECODINGS = {"sparse": EVAL_SPARSE, "dense": EVAL_DENSE}
BASELINES = ("naive", "tis")  # the arms that the others are compared with, seed by seed


class Run(NamedTuple):
    """A finished run: one flat row for the tables, and its thinned metrics, name -> values."""

    row: dict[str, Any]
    curve: dict[str, list[float | None]]


class Table(NamedTuple):
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]


# --- from the metrics of a run to its row and its curve


def summary(history: History) -> dict[str, Any]:
    """Rewards before the run, after its first rollout and at its end, and what the rollouts measured.

    `name` is the mean over all rollouts, `name/end` that over their last tenth, `name/max` the maximum.
    """
    rewards = {}
    for kind, metric in DECODINGS.items():
        _, (before, first, *_, last) = curve(history, metric)
        rewards |= {kind: last, f"{kind}_before": before, f"{kind}_first": first}
    measured = {}
    for name in MEASURED:
        values = np.array([row[name] for row in history if name in row])
        end = values[-max(len(values) // 10, 1) :]
        measured |= {name: values.mean(), f"{name}/end": end.mean(), f"{name}/max": values.max()}
    return {name: number(value) for name, value in (rewards | measured).items()}


def thin_curve(history: History) -> dict[str, list[float | None]]:
    """The rewards of the evaluations, and means of the other metrics over up to `BINS` parts of the run.

    "step" are the rollouts at the ends of the parts, "eval/step" those of the evaluations.
    """
    rollouts = [row for row in history if "reward" in row]
    parts = np.array_split(np.arange(len(rollouts)), min(BINS, len(rollouts)))
    thin = {"step": [float(part[-1] + 1) for part in parts]}
    for name in ("reward", *MEASURED):
        thin[name] = [float(np.mean([rollouts[i][name] for i in part])) for part in parts]
    thin["eval/step"] = [float(step) for step in curve(history, EVAL_SPARSE)[0]]
    for metric in DECODINGS.values():
        thin[metric] = [float(value) for value in curve(history, metric)[1]]
    return {name: [number(value) for value in values] for name, values in thin.items()}


def number(value: float) -> float | None:
    """With six significant digits; None for what JSON does not have."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


# --- tables


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % t interval of the mean, of two values or more: mean ± t(0.975, n - 1) · s / √n.

    Over five seeds a percentile bootstrap is about half as wide, because it takes the spread of the five for that of
    all seeds. For differences of two arms, give the differences within each seed: what a seed does to both cancels.
    The ends may lie outside of what a reward can be.
    """
    count = len(values)
    if count < 2:
        raise ValueError(f"expected two values or more; got {count}")
    half = student_t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count)
    middle = float(np.mean(values))
    return middle - float(half), middle + float(half)


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """In the order of the runs."""
    return {name: [run for run in runs if run.row["arm"] == name] for name in dict.fromkeys(r.row["arm"] for r in runs)}


def values_of(runs: Sequence[Run], name: str) -> list[float]:
    """One number a run, NaN where it was not finite."""
    return [math.nan if run.row[name] is None else run.row[name] for run in runs]


def tables(pilot: Sequence[Run], reported: Sequence[Run]) -> list[Table]:
    made = [reward_table(reported), gain_table(reported)]
    made += [lead_table(reported, baseline) for baseline in BASELINES if baseline in by_arm(reported)]
    made.append(mismatch_table(reported))
    return [*made, *([pilot_table(pilot, reported)] if pilot else []), fall_table(pilot, reported)]


def reward_table(reported: Sequence[Run]) -> Table:
    seeds = sorted({run.row["seed"] for run in reported})
    start = ", ".join(f"{kind} {np.mean(values_of(reported, f'{kind}_before')):.3f}" for kind in DECODINGS)
    rows: list[tuple[Cell, ...]] = []
    for name, runs in by_arm(reported).items():
        cells = [cell for kind in DECODINGS for cell in mean_cells(values_of(runs, kind))]
        rows.append((name, runs[0].row["learning_rate"], *cells))
    title = f"Final reward: mean over seeds {seeds} and 95 % t interval; before training: {start}"
    return Table(title, ("arm", "learning rate", "sparse", "interval", "dense", "interval"), rows)


def mean_cells(values: Sequence[float], form: str = ".3f") -> tuple[str, str]:
    """Mean and interval; one value has no interval, and no value has neither."""
    if not values:
        return "-", "-"
    ends = "-" if len(values) == 1 else " … ".join(format(end, form) for end in interval(values))
    return format(np.mean(values), form), ends


def gain_table(reported: Sequence[Run]) -> Table:
    """Final rewards minus those of the same policy before training."""
    rows: list[tuple[Cell, ...]] = []
    for name, runs in by_arm(reported).items():
        cells = [cell for kind in DECODINGS for cell in mean_cells(gains(runs, kind), "+.3f")]
        rows.append((name, *cells))
    title = (
        "Gain over the start: final reward minus that of the same seed before training; mean over seeds and 95 % "
        "paired t interval"
    )
    return Table(title, ("arm", "sparse gain", "interval", "dense gain", "interval"), rows)


def lead_table(reported: Sequence[Run], baseline: str) -> Table:
    """Arms of a seed share their start: differences within a seed are free of how far apart the starts are."""
    arms = by_arm(reported)
    rows: list[tuple[Cell, ...]] = []
    for name, runs in arms.items():
        if name != baseline:
            cells = [cell for kind in DECODINGS for cell in mean_cells(leads(runs, arms[baseline], kind), "+.3f")]
            rows.append((name, *cells))
    title = (
        f"Difference to {baseline}: final reward minus the one of {baseline} from the same seed; mean over seeds and "
        "95 % paired t interval, each for one comparison: of twenty that are made, one misses by chance. A difference "
        "whose interval holds 0 is not established"
    )
    return Table(title, ("arm", f"sparse − {baseline}", "interval", f"dense − {baseline}", "interval"), rows)


def gains(runs: Sequence[Run], kind: str) -> list[float]:
    """One number a run: its final reward minus the one that it began with."""
    pairs = zip(values_of(runs, kind), values_of(runs, f"{kind}_before"), strict=True)
    return [final - before for final, before in pairs]


def leads(runs: Sequence[Run], baseline: Sequence[Run], kind: str) -> list[float]:
    """One number a seed that both have: the final reward of `runs` minus that of `baseline`."""
    ours, theirs = ({r.row["seed"]: v for r, v in zip(of, values_of(of, kind), strict=True)} for of in (runs, baseline))
    return [value - theirs[seed] for seed, value in ours.items() if seed in theirs]


def mismatch_table(reported: Sequence[Run]) -> Table:
    columns = {
        "mismatch_kl": "mismatch_kl",
        "its end": "mismatch_kl/end",
        "χ² token": "rollout_corr/chi2_token",
        "ESS": "rollout_corr/eff_sample_size",
        "agreement p5": "rollout_corr/agreement_p5",
        "rejected": "rollout_corr/rollout_rs_masked_fraction",
        "rejected, end": "rollout_corr/rollout_rs_masked_fraction/end",
    }
    rows: list[tuple[Cell, ...]] = []
    for name, runs in by_arm(reported).items():
        largest = max(values_of(runs, f"{MISMATCH_MAX}/max"))
        means = (f"{np.mean(values_of(runs, metric)):.2g}" for metric in columns.values())
        rows.append((name, *means, f"{largest:.2g}"))
    title = "Mismatch of sampler and learner before the updates of a rollout: means over rollouts and seeds"
    return Table(title, ("arm", *columns, "max |Δ log p|"), rows)


def pilot_table(pilot: Sequence[Run], reported: Sequence[Run]) -> Table:
    rates = sorted({run.row["learning_rate"] for run in pilot})
    rows: list[tuple[Cell, ...]] = []
    for name, runs in by_arm(pilot).items():
        chosen = by_arm(reported)[name][0].row["learning_rate"]
        edge = " edge" if chosen in (rates[0], rates[-1]) else ""
        cells = []
        for rate in rates:
            of_rate = [run for run in runs if run.row["learning_rate"] == rate]
            sparse, dense = (float(np.mean(values_of(of_rate, kind))) for kind in DECODINGS)
            cell = f"{(sparse + dense) / 2:.3f} ({sparse:.3f}, {dense:.3f})"
            cells.append(f"→ {cell}{edge}" if rate == chosen else cell)
        rows.append((name, *cells))
    seeds = sorted({run.row["seed"] for run in pilot})
    title = (
        f"Choice of the learning rate on seeds {seeds}: mean (sparse, dense) of the final rewards, → chosen, "
        "edge: chosen at an end of the grid, and a better one may lie beyond it"
    )
    return Table(title, ("arm", *(f"{rate:g}" for rate in rates)), rows)


# --- what fell, and what the metrics were there


def fall_table(pilot: Sequence[Run], reported: Sequence[Run]) -> Table:
    """Runs whose reward ended more than `FALL` below its start: the steepest part, and the metrics there.

    The reported ones come first.
    """
    rows = [cells for kind, runs in (("", reported), ("pilot", pilot)) for run in runs for cells in falls(run, kind)]
    names = ("entropy", "grad norm", "clipped", "rejected")
    title = (
        f"Rewards that ended more than {FALL} below their start: where they fell most between two evaluations, and "
        "metrics at the start of the run → there"
    )
    return Table(title, ("arm", "rate", "seed", "decoding", "start → end", "rollouts", "fall", *names), rows)


def falls(run: Run, kind: str) -> list[tuple[Cell, ...]]:
    """A row for each way of decoding that fell. Rows of the pilot, whose curves are not committed, bring theirs."""
    if "falls" in run.row:
        return [tuple(cells) for cells in run.row["falls"]]
    found = []
    for decoding, metric in DECODINGS.items():
        rewards = np.array(run.curve[metric])
        steps = run.curve["eval/step"]
        if rewards[-1] >= rewards[0] - FALL:
            continue
        steepest = int(np.argmin(np.diff(rewards)))
        low = steps[steepest]
        high = steps[steepest + 1]
        assert low is not None and high is not None
        change = f"{rewards[steepest]:.3f} → {rewards[steepest + 1]:.3f}"
        identity = (run.row["arm"], run.row["learning_rate"], f"{run.row['seed']} {kind}".strip(), decoding)
        ends = f"{rewards[0]:.3f} → {rewards[-1]:.3f}"
        found.append((*identity, ends, f"{low:.0f} to {high:.0f}", change, *metrics_between(run, low, high)))
    return found


def metrics_between(run: Run, low: float, high: float) -> list[str]:
    """Each metric in the first part of the run, and its mean over the parts that end after `low` and up to `high`."""
    steps = [step for step in run.curve["step"] if step is not None]
    inside = [i for i, step in enumerate(steps) if low < step <= high] or [int(np.searchsorted(steps, high))]
    names = ("entropy", "grad_norm", "clip_ratio/region_mean", "rollout_corr/rollout_rs_masked_fraction")
    series = [np.array(run.curve[name], dtype=float) for name in names]
    return [f"{values[0]:.3g} → {values[inside].mean():.3g}" for values in series]


# --- output


def show(pilot: Sequence[Run], reported: Sequence[Run]) -> None:
    width = None if sys.stdout.isatty() else 160
    for table in tables(pilot, reported):
        summary_table(*table, width=width)


def write(folder: Path, pilot: Sequence[Run], reported: Sequence[Run]) -> None:
    """showdown.json, showdown_grid.json, showdown_curves.json, showdown.md."""
    chosen = {run.row["arm"]: run.row["learning_rate"] for run in reported}
    grid = []
    for run in pilot:
        is_chosen = run.row["learning_rate"] == chosen[run.row["arm"]]
        grid.append(run.row | {"chosen": is_chosen, "falls": falls(run, "pilot")})
    curves = []
    for run in reported:
        identity = {name: run.row[name] for name in IDENTITY}
        curves.append(identity | compact(run.curve))
    write_text(folder / "showdown.json", json_lines([run.row for run in reported]))
    write_text(folder / "showdown_grid.json", json_lines(grid))
    write_text(folder / "showdown_curves.json", json_lines(curves))
    write_tables(folder, pilot, reported)


def write_tables(folder: Path, pilot: Sequence[Run], reported: Sequence[Run]) -> None:
    """showdown.md."""
    parts = [*(markdown(table) for table in tables(pilot, reported)), origin([*pilot, *reported])]
    write_text(folder / "showdown.md", "\n".join(parts))


def read(folder: Path) -> tuple[list[Run], list[Run]]:
    """The runs of the pilot and the reported ones, as `write` wrote them."""
    rows, grid, curves = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("showdown.json", "showdown_grid.json", "showdown_curves.json")
    )
    reported = []
    for row, stored in zip(rows, curves, strict=True):
        assert (row["arm"], row["seed"]) == (stored["arm"], stored["seed"])
        reported.append(Run(row, {name: values for name, values in stored.items() if name not in IDENTITY}))
    return [Run(row, {}) for row in grid], reported


def origin(runs: Sequence[Run]) -> str:
    """Which code and which machine the runs are of."""
    machines = {(run.row["commit"], run.row["date"], run.row["cpu"]) for run in runs}
    lines = [f"Runs of commit {commit}, {date}, CPU: {cpu}." for commit, date, cpu in sorted(machines)]
    return "\n".join([*lines, ""])


def compact(thin: Mapping[str, list[float | None]]) -> dict[str, list[float | None]]:
    """With four significant digits."""
    return {name: [None if x is None else float(f"{x:.4g}") for x in values] for name, values in thin.items()}


def json_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """A JSON list, one row a line."""
    return "[\n" + ",\n".join(json.dumps(row, allow_nan=False) for row in rows) + "\n]\n"


def markdown(table: Table) -> str:
    lines = [f"**{table.title}**", "", row_of(table.columns), row_of(["---"] * len(table.columns))]
    cells = ([f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in row] for row in table.rows)
    return "\n".join([*lines, *map(row_of, cells), *([] if table.rows else ["", "None."]), ""])


def row_of(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write_text(path: Path, text: str) -> None:
    """In one move: what is there is whole, whenever the study is stopped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
