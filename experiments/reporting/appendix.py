"""The appendix of the report: every arm of every cell."""

from __future__ import annotations

from lib.files import Row
from reporting.page import machines
from reporting.room import RoomCell, full_table, other_cells


def text(rows: dict[str, list[Row]], room: RoomCell) -> str:
    others_of_room = "\n\n".join(f"{cell.label}:\n\n{full_table(cell)}" for cell in other_cells(rows["room"]))
    made = "\n".join(f"* `{name}`: {machines(found)}." for name, found in rows.items() if found)
    return f"""# Appendix of the report

Tables behind [the report](../REPORT.md), which defines the words. `python experiments/report.py` builds this page
from the rows. ± is a 95 % t interval over seeds, paired by seed; bold: it excludes 0. No interval is corrected for
several comparisons.

## Room and time

The cell of the first page, all arms whose seeds are in. Two rates: the one chosen for the budget, and the one for the
full cache.

{full_table(room)}

## Other cells

{others_of_room}

## Machines

{made}
"""
