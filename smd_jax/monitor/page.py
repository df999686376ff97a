"""One HTML page about one or more runs: curves with intervals, and the shadow masks of saved completions.

    write_page([Path("runs/quickstart")], Path("page.html"))

The page needs no network and no other file. Its curves are SVG pictures of `smd_jax.monitor.run_plots`; its script
draws the shadow masks. All text of a model or a task is escaped, and the page's content security policy runs only its
own script. Needs `matplotlib`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from smd_jax.monitor.curves import (
    POINTS,
    Arm,
    at_the_end,
    at_the_start,
    load_arms,
    main_metrics,
    metric_names,
    part_length,
)
from smd_jax.monitor.metrics_log import evaluated, meaning
from smd_jax.monitor.run_plots import COLOURS, metric_svg
from smd_jax.monitor.saved_masks import SavedMask, load_masks
from smd_jax.text.visible_text import visible

# Metrics and headings of the table, after the rewards.
TABLE = {
    "sampling/sampling_logp_difference/max": "max |Δ log p|",
    "completions/mean_length": "tokens",
    "completions/clipped_ratio": "truncated",
    "rollout/tokens_per_second": "rollout tokens/s",
    "step_time": "step, s",
}
MASK_NUMBERS = 4_000_000  # most eviction times in a page, of 5.3 characters each: about 20 MB
SECURITY = "default-src 'none'; img-src data:; style-src '{style}'; script-src '{script}'"


def write_page(paths: Sequence[str | Path], out: str | Path, title: str = "smd_jax") -> list[Path]:
    """Writes the page atomically.

    Args:
      paths: runs, or folders that contain runs. Seeds of one arm share a curve: `ARM/seed-0`, `ARM-seed-1`.
      out: the file.
      title: of the page.

    Returns:
      The folders of its runs.

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
    """The page of these arms and these masks, each with its title."""
    style, script, viewer = map(asset, ("page.css", "page.js", "viewer.html"))
    names = metric_names(arms)
    main = main_metrics(names)
    order = [*main, *(name for name in names if name not in main)]
    figures = [figure(arms, name) for name in order]
    shown = len(main)
    security = SECURITY.format(style=digest(style), script=digest(script))
    runs = sum(len(arm.runs) for arm in arms)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{security}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{text(title)}</title><style>{style}</style></head><body>",
        f"<header><h1>{text(title)}</h1><p>{count(runs, 'run')} of {count(len(arms), 'arm')}</p></header>",
        "<main><section><h2>At the end</h2>",
        "<p>Means over the last tenth of each run. An evaluation also has its first value, before the arrow. ± is the "
        "95 % t interval of the mean over seeds.</p>",
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
        f'</main><script type="application/json" id="masks">{embedded(described)}</script>',
        f"<script>{script}</script></body></html>\n",
    ]
    return "\n".join(parts)


def collect_masks(arms: Sequence[Arm]) -> list[tuple[str, SavedMask]]:
    """The saved masks of every run's last and first logged step, with their titles, as many as a page can hold."""
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


def embedded(data: Any) -> str:
    """JSON for a `<script type="application/json">`; without any `<` it cannot hold a tag or a comment."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def mask_data(mask: SavedMask, title: str) -> dict[str, Any]:
    """One completion: `evicted` holds uint32 numbers, little-endian, in the order layer, head, token."""
    layers, heads, tokens = mask.evicted_at.shape
    return {
        "title": title,
        "prompt": mask.prompt_length,
        "layers": layers,
        "heads": heads,
        "tokens": tokens,
        "pieces": [visible(piece) for piece in mask.pieces],
        "evicted": base64.b64encode(mask.evicted_at.astype("<u4").tobytes()).decode("ascii"),
    }


def figure(arms: Sequence[Arm], name: str) -> str:
    """The picture of one metric, with its name and meaning; an image cannot run a script."""
    picture = base64.b64encode(metric_svg(arms, name)).decode()
    image = f'<img alt="{text(name)}" src="data:image/svg+xml;base64,{picture}">'
    return f"<figure><h3>{text(name)}</h3>{image}<figcaption>{text(meaning(name))}</figcaption></figure>"


def curves_note(arms: Sequence[Arm]) -> str:
    notes = ["Over the number of rollouts that the policy has learned from. Evaluations begin before training, at 0."]
    parts = {part_length(arms, name) for name in metric_names(arms)} - {1}
    if parts:
        notes.append(f"Curves of more than {POINTS} points are drawn by means over {max(parts)} steps.")
    if any(len(arm.runs) > 1 for arm in arms):
        notes.append("Thick: mean over seeds, its 95 % t interval as a band; thin: single seeds.")
    if any(name.endswith("_low") for name in metric_names(arms)):
        notes.append("An evaluation of a single run has its own 95 % interval, over prompts.")
    return " ".join(notes)


def legend(arms: Sequence[Arm]) -> str:
    names = (f"<span>{swatch(index)}{text(arm.name)}</span>" for index, arm in enumerate(arms))
    return f'<div class="legend">{"".join(names)}</div>'


def swatch(index: int) -> str:
    return f'<span class="swatch c{index % len(COLOURS)}{" dashed" if index >= len(COLOURS) else ""}"></span>'


def table(arms: Sequence[Arm]) -> str:
    names = metric_names(arms)
    columns = {name: name for name in names if name == "reward"}
    columns |= {name: f"eval, {what}" for name in names if (what := evaluated(name))}
    columns |= {name: head for name, head in TABLE.items() if name in names}
    heads = "".join(f"<th>{text(head)}</th>" for head in ("arm", "seeds", "rollouts", *columns.values()))
    lines = []
    for index, arm in enumerate(arms):
        steps = max(run.rollouts for run in arm.runs)
        cells = "".join(f"<td>{start(arm, name)}{cell(at_the_end(arm, name))}</td>" for name in columns)
        named = f"<td>{swatch(index)}{text(arm.name)}</td>"
        lines.append(f"<tr>{named}<td>{len(arm.runs)}</td><td>{steps:,}</td>{cells}</tr>")
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def start(arm: Arm, name: str) -> str:
    """The first value of an evaluation, for the place before its last one."""
    value = at_the_start(arm, name) if evaluated(name) else None
    return "" if value is None else f"{value:.3g} → "


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
    """Escapes text for the page."""
    return escape(visible(content))


def count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def asset(name: str) -> str:
    return files("smd_jax.monitor").joinpath(name).read_text("utf-8")


def digest(content: str) -> str:
    """The name of a style or script in a security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
