"""One HTML page about one or more runs: their main curves, and a viewer of the shadow masks of saved completions.

    write_page([Path("runs/quickstart")], Path("page.html"))

The page needs no network and no other file. Its curves are one SVG picture of `smd_jax.monitor.run_plots`; its script
draws the shadow masks. All text of a model or a task is escaped, and the page's content security policy runs only its
own script. Needs `matplotlib`.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from smd_jax.disk import replaced
from smd_jax.monitor.completions import SavedMask, load_masks
from smd_jax.monitor.run_plots import Run, load_runs, main_metrics, runs_figure, save_figure
from smd_jax.text.visible_text import visible

MASK_NUMBERS = 4_000_000  # maximum of eviction times in a page, of 5.3 characters each: about 20 MB
SECURITY = "default-src 'none'; img-src data:; style-src '{style}'; script-src '{script}'"


def write_page(paths: Sequence[str | Path], out: str | Path, title: str = "smd_jax") -> list[Path]:
    """Writes the page of the runs that `load_runs` finds, atomically, and returns their folders.

    Raises:
      FileNotFoundError, ValueError: as `load_runs` and `runs_figure`.
    """
    runs = load_runs(paths)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    style, script, viewer = map(asset, ("page.css", "page.js", "viewer.html"))
    security = SECURITY.format(style=digest(style), script=digest(script))
    picture = io.BytesIO()
    save_figure(runs_figure(runs), picture, "svg")
    source = f"data:image/svg+xml;base64,{base64.b64encode(picture.getvalue()).decode()}"
    drawn = f"{', '.join(main_metrics(runs))} of {', '.join(run.name for run in runs)}"
    masks, left_out = collect_masks(runs)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{security}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{text(title)}</title><style>{style}</style></head><body>",
        f"<h1>{text(title)}</h1><main>",
        # An image cannot run a script.
        f'<figure><img alt="{text(drawn)}" src="{source}"></figure>',
        viewer if masks else "",
        f"<p>{left_out} saved masks are not shown: a page holds {MASK_NUMBERS:,} numbers.</p>" if left_out else "",
        f'</main><script type="application/json" id="masks">{embedded(masks)}</script>',
        f"<script>{script}</script></body></html>\n",
    ]
    with replaced(out) as temporary:
        temporary.write_text("\n".join(parts), encoding="utf-8")
    return [run.path for run in runs]


def collect_masks(runs: Sequence[Run]) -> tuple[list[dict[str, Any]], int]:
    """The saved masks of every run's last and first logged step as data of the viewer, as many as a page can hold, and
    how many it cannot."""
    found = []
    numbers = left_out = 0
    for run in runs:
        # By their numbers, which have five digits or more.
        kept = sorted((run.path / "completions").glob("masks_*.npz"), key=lambda path: (len(path.name), path.name))
        for path in dict.fromkeys([*kept[-1:], *kept[:1]]):
            for mask in load_masks(path):
                if numbers + mask.evicted_at.size <= MASK_NUMBERS:
                    numbers += mask.evicted_at.size
                    found.append(mask_data(mask, run.name))
                else:
                    left_out += 1
    return found, left_out


def mask_data(mask: SavedMask, run: str) -> dict[str, Any]:
    """One completion: `evicted` holds uint32 numbers, little-endian, in the order layer, head, token."""
    layers, heads, tokens = mask.evicted_at.shape
    context = f", context {mask.context}" if mask.context else ""
    return {
        "title": visible(f"{run}, rollout {mask.step}, completion {mask.row}{context}, reward {mask.reward:.3g}"),
        "prompt": mask.prompt_length,
        "layers": layers,
        "heads": heads,
        "tokens": tokens,
        "pieces": [visible(piece) for piece in mask.pieces],
        "turns": mask.turns,
        "evicted": base64.b64encode(mask.evicted_at.astype("<u4").tobytes()).decode("ascii"),
    }


def embedded(data: Any) -> str:
    """JSON for a `<script type="application/json">`; without any `<` it cannot hold a tag or a comment."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def text(content: str) -> str:
    """Escapes text for the page."""
    return escape(visible(content))


def asset(name: str) -> str:
    """The text of a file in this package."""
    return files("smd_jax.monitor").joinpath(name).read_text("utf-8")


def digest(content: str) -> str:
    """The hash by which a security policy allows a style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
