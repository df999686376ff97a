"""Builds REPORT.md, its appendix and its figures from the committed rows of the studies.

python experiments/report.py            writes them
python experiments/report.py --check    writes nothing; exit status 1 if a page or a figure is out of date
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro
from PIL import Image

from lib.files import RESULTS, ROOT, Row, read_rows, write_text
from lib.provenance import is_clean
from lib.starts import check_one_start
from reporting import body, collapse, dose, figure, front, real_model, reruns
from reporting.page import reflow
from reporting.room import first_cell, other_cells

PAGE = ROOT / "REPORT.md"
APPENDIX = ROOT / "docs" / "report_appendix.md"
FILES = ("room", "dose", "wall.json", "collapse.json", "agents.json")
FILES += ("learned_eviction.json", "smollm2.json")


@dataclass(frozen=True)
class Args:
    """Builds REPORT.md and docs/report_appendix.md from the committed rows."""

    check: bool = False  # compare only


def all_rows() -> dict[str, list[Row]]:
    """File -> rows."""
    return {name: read_rows(RESULTS / name) for name in FILES}


def check_rows() -> None:
    """Raises ValueError unless rows with the hash of a start have one start per cell and seed, and these and all rows
    of the report a clean commit."""
    reported = {RESULTS / name for name in FILES}
    for path in sorted(RESULTS.rglob("*.json")):
        content = read_rows(path)
        rows = [row for row in content if "start" in row] if isinstance(content, list) else []
        check_one_start(rows)
        rows = content if path in reported else rows
        if bad := sorted({row["commit"] for row in rows if not is_clean(row["commit"])}):
            raise ValueError(f"expected rows of clean commits in {path.name}; got {bad[:3]}")


def pages(rows: dict[str, list[Row]]) -> dict[Path, str]:
    """Path -> text of both pages."""
    planned = reruns.without(rows)
    room = first_cell(planned["room"])
    first = front.page(room, other_cells(planned["room"]), rows)
    report = first + "\n" + body.text(rows, planned, front.primary(room))
    return {PAGE: reflow(report), APPENDIX: reflow(body.appendix(rows, planned, room))}


def figures(rows: dict[str, list[Row]]) -> dict[Path, tuple[Callable[[Path, str], None], str]]:
    """Path -> what draws the figure there, and the digest of its rows."""
    planned = reruns.without(rows)
    room, doses = first_cell(planned["room"]), dose.cells_of(planned["dose"])
    collapses = collapse.cells_of(rows["collapse.json"])
    smollm2 = {rule: nats.mean for rule, nats in real_model.mismatches(rows["smollm2.json"]).items()}
    return {
        RESULTS / front.FIGURE: (partial(figure.draw_first, room), digest(room)),
        RESULTS / dose.FIGURE: (partial(figure.draw_doses, doses, smollm2), digest((doses, smollm2))),
        RESULTS / collapse.FIGURE: (partial(figure.draw_survival, collapses), digest(collapses)),
    }


def digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()


def stale(rows: dict[str, list[Row]]) -> list[Path]:
    """Pages and figures that are not those of the rows."""
    old = [path for path, text in pages(rows).items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    return old + [path for path, (_, rows_of) in figures(rows).items() if made_of(path) != rows_of]


def made_of(picture: Path) -> str | None:
    """The digest stored in a figure."""
    if not picture.exists():
        return None
    with Image.open(picture) as image:
        return image.info.get("Description")


def main(args: Args) -> None:
    check_rows()
    rows = all_rows()
    if args.check:
        if old := stale(rows):
            names = ", ".join(str(path.relative_to(ROOT)) for path in old)
            print(f"expected the pages of the committed rows; got others in {names}. Run python experiments/report.py")
            sys.exit(1)
        return
    for path, (draw, rows_of) in figures(rows).items():
        draw(path, rows_of)
    for path, text in pages(rows).items():
        write_text(path, text)
        print(f"{path.relative_to(ROOT)}: {len(text.encode())} bytes")


if __name__ == "__main__":
    main(tyro.cli(Args))
