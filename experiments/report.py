"""Builds REPORT.md, and its pictures, from the committed rows of the studies.

    python experiments/report.py            writes them
    python experiments/report.py --check    writes nothing: exit status 1 when page or pictures are of other rows

A study without rows has no section: nothing stands here that was not measured.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro
from PIL import Image

from provenance import is_clean
from reporting import (
    cells,
    choices,
    evictions,
    gradients,
    horizon,
    map_picture,
    memory_wall,
    price,
    rates,
    real_model,
    showdown,
)
from reporting.page import Section
from study.files import RESULTS, ROOT, Row, read_rows, write_text
from study.starts import cells_of_two_starts, check_one_start

PAGE = ROOT / "REPORT.md"
INTRODUCTION = """# What was measured

Where replaying the sampler's masks pays, where correcting a dense learner does, and where neither: every study with its
question, its answer, its rows and its command. What lost stands here in the same size as what won.

*Sparse* rewards are decoded under the budget, as the sampler does, *dense* ones with the full cache, both at
temperature 1 where it does not say *greedy*. A *cell* is a task under one eviction policy and budget; the *showdown* is
the cell of *All arms on one task*. Small models sort 12 digits (`sorting-12`), give 12 running sums modulo 10
(`sums-12`), repeat 8 digits, each with the sum so far (`copy-8`), or walk 64 steps along the edges of a graph that
stands in the prompt (`walk-64`); their reward is the share of steps that are right. `tova` chooses keys for all heads
of a layer together, `tova-heads` for each head.

One seed is left out, because its arms began from two different starts: `copy-8`, `streaming`, 14 keys, seed 1.

± is half a 95 % t interval over seeds, of differences paired by seed. *Not established*: the interval contains 0, or
there are two seeds. This page is made by `python experiments/report.py` from the rows, and a test compares the two.
"""


SHOWDOWN = ("sorting-12", "tova-heads", 11)  # the cell of the map with all arms: task, policy, budget


@dataclass(frozen=True)
class Args:
    """Builds REPORT.md from the committed rows."""

    check: bool = False  # compare only


def sections() -> list[Section]:
    """Of the studies that have rows, in the order in which one would ask."""
    makers: list[tuple[str, Callable[[list[Row]], Section | None]]] = [
        ("map.json", lambda rows: showdown.section(rows, *SHOWDOWN)),
        ("map.json", lambda rows: cells.section(rows, usable_rows("horizon.json"))),
        ("choices.json", lambda rows: choices.section(rows, decisive())),
        ("map_rates.json", lambda rows: rates.section(rows, usable_rows("map.json"), decisive())),
        ("gradients.json", lambda rows: gradients.section(rows, SHOWDOWN)),
        ("horizon_weights.json", horizon.weights_section),
        ("horizon.json", lambda rows: horizon.section(rows, read_rows(RESULTS / "horizon_rates.json"))),
        ("mismatch_smollm2.json", real_model.mismatch_section),
        ("real_model.json", real_model.section),
        ("eviction_action.json", evictions.section),
        ("memory_wall.json", memory_wall.section),
    ]
    made = [make(rows) for name, make in makers if (rows := usable_rows(name))]
    made.append(price.section(*(usable_rows(name) for name in price.FILES)))
    return [section for section in made if section is not None]


def usable_rows(name: str) -> list[Row]:
    """The rows of a file, without the cells and seeds of the map whose arms began from two different starts."""
    rows = read_rows(RESULTS / name)
    if name != "map.json":
        return rows
    two = set(cells_of_two_starts(rows))
    return [row for row in rows if (row["task"], row["policy"], row["budget"], row["seed"]) not in two]


def check_rows() -> None:
    """Raises ValueError unless rows with the hash of a start have one start per cell and seed, and a clean commit."""
    for path in sorted(RESULTS.glob("*.json")):
        content = read_rows(path)
        rows = [row for row in content if "start" in row] if isinstance(content, list) else []
        check_one_start(rows)
        if bad := sorted({row["commit"] for row in rows if not is_clean(row["commit"])}):
            raise ValueError(f"expected rows of clean commits in {path.name}; got {bad[:3]}")


def decisive() -> list[Row]:
    """Reported rows of the cell with all arms."""
    rows = usable_rows("map.json")
    return [row for row in rows if not row["pilot"] and (row["task"], row["policy"], row["budget"]) == SHOWDOWN]


def page() -> str:
    parts = sections()
    short = "\n".join(f"* **{part.title}.** {part.answer}" for part in parts)
    return "\n".join([INTRODUCTION, f"## In short\n\n{short}\n", *(part.markdown() for part in parts)])


def map_digest() -> str:
    """Of what the map's picture shows."""
    return hashlib.sha256(repr(map_cells()).encode()).hexdigest()


def map_cells() -> list[cells.MapCell]:
    return cells.all_cells(*(usable_rows(name) for name in ("map.json", "horizon.json")))


def stale() -> list[Path]:
    """What is not as the rows say."""
    old = [] if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page() else [PAGE]
    picture = RESULTS / cells.PICTURE
    return old + ([picture] if map_cells() and made_of(picture) != map_digest() else [])


def made_of(picture: Path) -> str | None:
    """The digest of the rows that a picture is of."""
    if not picture.exists():
        return None
    with Image.open(picture) as image:
        return image.info.get("Description")


def main(args: Args) -> None:
    check_rows()
    if args.check:
        if old := stale():
            names = ", ".join(str(path.relative_to(ROOT)) for path in old)
            print(f"expected what the rows say; got something else in {names}: python experiments/report.py makes it")
            sys.exit(1)
        return
    if found := map_cells():
        map_picture.draw(found, RESULTS / cells.PICTURE, map_digest())
    write_text(PAGE, page())
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main(tyro.cli(Args))
