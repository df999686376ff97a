"""One HTML page about one run or many: curves with intervals, and what the samplers had forgotten.

    write_page([Path("runs/quickstart")], Path("page.html"))

The page needs nothing else: no network, no other file. Charts are SVG and stand there without its script, which shows
numbers under the pointer and draws the shadow masks. Whatever a model or a task wrote is escaped, and a policy in the
page lets no script run but its own.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path

from smd_jax.monitor.curves import (
    Arm,
    Curve,
    at_the_end,
    last_step,
    load_arms,
    mean_curve,
    metric_names,
    part_length,
    seed_curves,
)
from smd_jax.monitor.metrics_log import evaluated, meaning
from smd_jax.monitor.page_data import chart_data, embedded, mask_data
from smd_jax.monitor.saved_masks import SavedMask, load_masks
from smd_jax.monitor.svg_chart import COLOURS, Series, draw_chart
from smd_jax.text.visible_text import visible

# Shown at once, with every evaluation and the mean of every reward function; all other metrics are folded away.
MAIN = (
    *("sampling/sampling_logp_difference/mean", "completions/mean_length", "completions/clipped_ratio", "entropy"),
    *("frac_reward_zero_std", "kl", "grad_norm", "rollout/tokens_per_second"),
)
LOGARITHMIC = ("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max", "mismatch_kl")
# Of each arm, in the table behind its rewards: metric and heading.
TABLE = {
    "sampling/sampling_logp_difference/max": "max |Δ log p|",
    "completions/mean_length": "tokens",
    "completions/clipped_ratio": "truncated",
    "rollout/tokens_per_second": "rollout tokens/s",
    "step_time": "step, s",
}
MASK_NUMBERS = 4_000_000  # of all masks in a page; at 5.3 characters each, about 20 MB
SECURITY = "default-src 'none'; img-src data:; style-src '{style}'; script-src '{script}'"


def write_page(paths: Sequence[str | Path], out: str | Path, title: str = "smd_jax") -> list[Path]:
    """Writes the page, in one move.

    Args:
      paths: runs, or folders with runs somewhere inside. Seeds of one arm are put together: `ARM/seed-0`, `ARM-seed-1`.
      out: the file.
      title: of the page.

    Returns:
      The folders of the runs that are in it.

    Raises:
      FileNotFoundError: a path without any run.
      ValueError: a file of a run that cannot be read, or no metrics at all.
    """
    arms = load_arms(paths)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    temporary.write_text(page_text(arms, collect_masks(arms), title), encoding="utf-8")
    os.replace(temporary, out)
    return [run.path for arm in arms for run in arm.runs]


def page_text(arms: Sequence[Arm], masks: Sequence[tuple[str, SavedMask]], title: str = "smd_jax") -> str:
    """The page of these arms, and of these masks with their titles."""
    style, script, viewer = map(asset, ("page.css", "page.js", "viewer.html"))
    names = metric_names(arms)
    charts = {name: series_of(arms, name) for name in names}
    main = main_metrics(names)
    order = [*main, *(name for name in names if name not in main)]
    figures = [figure(number, name, charts[name], last_step(arms)) for number, name in enumerate(order)]
    shown = len(main)
    data = {"arms": [visible(arm.name) for arm in arms], "charts": [chart_data(charts[name]) for name in order]}
    security = SECURITY.format(style=digest(style), script=digest(script))
    runs = sum(len(arm.runs) for arm in arms)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{security}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{text(title)}</title><style>{style}</style></head><body>",
        f"<header><h1>{text(title)}</h1><p>{count(runs, 'run')} of {count(len(arms), 'arm')}</p></header>",
        "<main><section><h2>At the end</h2>",
        "<p>Means over the last tenth of each run. ± is the 95 % t interval of the mean over seeds.</p>",
        f'<div class="scroll">{table(arms)}</div></section>',
        f"<section><h2>Curves</h2><p>{curves_note(arms)}</p>{legend(arms)}",
        f'<div class="charts">{"".join(figures[:shown])}</div>',
    ]
    if figures[shown:]:
        all_others = f'<div class="charts">{"".join(figures[shown:])}</div>'
        parts.append(f"<details><summary>{count(len(figures) - shown, 'more metric')}</summary>{all_others}</details>")
    parts.append("</section>")
    if masks:
        parts.append(viewer)
    described = [mask_data(mask, visible(name)) for name, mask in masks]
    parts += [
        f'</main><script type="application/json" id="charts">{embedded(data)}</script>',
        f'<script type="application/json" id="masks">{embedded(described)}</script>',
        f"<script>{script}</script></body></html>\n",
    ]
    return "\n".join(parts)


def main_metrics(names: Sequence[str]) -> list[str]:
    """Those of these metrics that are shown first, in their order."""
    of_functions = [name for name in names if name.startswith("rewards/") and name.endswith("/mean")]
    evaluations = [name for name in names if evaluated(name)]
    rest = [name for name in MAIN if name in names]
    return [name for name in names if name == "reward"] + of_functions + evaluations + rest


def collect_masks(arms: Sequence[Arm]) -> list[tuple[str, SavedMask]]:
    """The saved masks of every run's first and last logged step, with their titles, as many as a page can hold; newest
    first."""
    found: list[tuple[str, SavedMask]] = []
    numbers = 0
    for arm in arms:
        for run in arm.runs:
            kept = sorted((run.path / "completions").glob("masks_*.npz"))
            for path in dict.fromkeys([*kept[-1:], *kept[:1]]):
                for mask in load_masks(path):
                    numbers += mask.evicted_at.size
                    if numbers <= MASK_NUMBERS:
                        found.append((mask_title(arm, run.path.name, mask), mask))
    return found


def mask_title(arm: Arm, folder: str, mask: SavedMask) -> str:
    of_run = f"{arm.name}, {folder}" if len(arm.runs) > 1 else arm.name
    return f"{of_run}, rollout {mask.step}, completion {mask.row}, reward {mask.reward:.3g}"


def series_of(arms: Sequence[Arm], name: str) -> list[Series]:
    """The curves of one metric, of the arms that have it."""
    part = part_length(arms)
    found = []
    for index, arm in enumerate(arms):
        seeds = seed_curves(arm, name, part)
        if not seeds:
            continue
        mean = mean_curve(seeds)
        if len(seeds) == 1:
            found.append(Series(index, [], with_interval(arm, name, mean, part)))
        else:
            # Seeds without a step in common have no mean: the first of them stands for it.
            found.append(Series(index, seeds, mean if len(mean.steps) else seeds[0]))
    return found


def with_interval(arm: Arm, name: str, curve: Curve, part: int) -> Curve:
    """A curve of a single run with the interval that the run itself has logged, as evaluations do."""
    low, high = (seed_curves(arm, f"{name}_{end}", part) for end in ("low", "high"))
    if len(low) != 1 or len(high) != 1 or not len(low[0].steps) == len(high[0].steps) == len(curve.steps):
        return curve
    return replace(curve, low=low[0].mean, high=high[0].mean)


def figure(number: int, name: str, series: Sequence[Series], last: int) -> str:
    caption = meaning(name)
    # One axis of steps for all charts.
    chart = draw_chart(series, visible(name), name in LOGARITHMIC, (0, last))
    return (
        f'<figure data-chart="{number}"><h3>{text(name)}</h3>{chart}<figcaption>{text(caption)}</figcaption></figure>'
    )


def curves_note(arms: Sequence[Arm]) -> str:
    part = part_length(arms)
    notes = ["Over the number of the rollout, from 0."]
    if part > 1:
        notes.append(f"Every point is a mean over {part} steps.")
    if any(len(arm.runs) > 1 for arm in arms):
        notes.append("Thick: mean over seeds, its 95 % t interval as a band; thin: single seeds.")
    if any(name.endswith("_low") for name in metric_names(arms)):
        notes.append("An evaluation of a single run has its own 95 % interval, over prompts.")
    return " ".join(notes)


def legend(arms: Sequence[Arm]) -> str:
    buttons = (
        f'<button type="button" data-arm="{index}" aria-pressed="true">{swatch(index)}{text(arm.name)}</button>'
        for index, arm in enumerate(arms)
    )
    return f'<div class="legend">{"".join(buttons)}</div>'


def swatch(index: int) -> str:
    return f'<span class="swatch c{index % COLOURS}{" dashed" if index >= COLOURS else ""}"></span>'


def table(arms: Sequence[Arm]) -> str:
    names = metric_names(arms)
    columns = {name: name for name in names if name == "reward"}
    columns |= {name: f"eval, {what}" for name in names if (what := evaluated(name))}
    columns |= {name: head for name, head in TABLE.items() if name in names}
    heads = "".join(f"<th>{text(head)}</th>" for head in ("arm", "seeds", "steps", *columns.values()))
    lines = []
    for index, arm in enumerate(arms):
        steps = last_step([arm]) + 1
        cells = "".join(f"<td>{cell(at_the_end(arm, name))}</td>" for name in columns)
        named = f"<td>{swatch(index)}{text(arm.name)}</td>"
        lines.append(f"<tr>{named}<td>{len(arm.runs)}</td><td>{steps:,}</td>{cells}</tr>")
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def cell(value: tuple[float, float | None] | None) -> str:
    if value is None:
        return "–"
    mean, half = value
    shown = f"{mean:,.0f}" if abs(mean) >= 1000 else f"{mean:.3g}"
    if half is None:
        return shown
    spread = f"{half:,.0f}" if half >= 100 else f"{half:.2g}"
    return f"{shown} <small>± {spread}</small>"


def text(content: str) -> str:
    """Somebody's text inside of the page."""
    return escape(visible(content))


def count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def asset(name: str) -> str:
    return files("smd_jax.monitor").joinpath(name).read_text("utf-8")


def digest(content: str) -> str:
    """How a security policy names a style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
