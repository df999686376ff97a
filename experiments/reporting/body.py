"""The studies of the report, a short section each, and its appendix: every arm of every cell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lib.files import Row
from reporting import collapse, contrasts, dose, learned_eviction, real_model, reruns, room, tools, wall
from reporting.contrasts import Contrast
from reporting.page import hours, machines, table

Rows = dict[str, list[Row]]


def text(rows: Rows, planned: Rows, first: Contrast) -> str:
    """The sections of all rows.

    Args:
      planned: the rows without the reruns.
      first: the contrast of the first page.
    """
    sections = (
        contrasts.section(
            [
                first,
                dose.primary(planned["dose"]),
                wall.primary(rows["wall.json"]),
                collapse.primary(rows["collapse.json"]),
                tools.primary(rows["agents.json"]),
                learned_eviction.primary(rows["learned_eviction.json"]),
                real_model.primary(rows["smollm2.json"]),
            ]
        ),
        other_cells(room.other_cells(planned["room"])),
        dose.section(planned["dose"]),
        reruns.section(rows),
        wall.section(rows["wall.json"]),
        collapse.section(rows["collapse.json"]),
        tools.section(rows["agents.json"]),
        learned_eviction.section(rows["learned_eviction.json"]),
        real_model.section(rows["smollm2.json"]),
        OLDER_STUDIES,
    )
    return "\n".join(sections)


def appendix(rows: Rows, planned: Rows, first: room.RoomCell) -> str:
    others_of_room = "\n\n".join(
        f"{cell.label}:\n\n{room.arms_table(cell, cell.complete)}" for cell in room.other_cells(planned["room"])
    )
    made = "\n".join(f"* `{name}`: {machines(found)}." for name, found in rows.items())
    return f"""# Appendix of the report

Tables behind [the report](../REPORT.md), which defines the words. `python experiments/report.py` builds this page
from the rows. ± is a 95 % t interval over seeds, paired by seed; bold: it excludes 0. No interval is corrected for
several comparisons.

## Room and time

The cell of the first page, all arms whose seeds are in. Two rates: the one chosen for the budget, and the one for the
full cache.

{room.arms_table(first, first.complete)}

## Other cells

{others_of_room}

## Lead by mismatch

Greedy, under the budget.

{dose.leads_table(dose.cells_of(planned["dose"]))}

## The memory wall

Walks of {wall.LENGTHS[0]} steps.

{wall.ways_table(wall.complete(rows["wall.json"], wall.LENGTHS[0]))}

## Collapse

*Low at the end*: the mean of the last three evaluations is below half of the start's. The last columns are this mean
minus the start, greedily.

{collapse.cells_table(collapse.cells_of(rows["collapse.json"]))}

## A real model

Leads of SmolLM2; by seed under the budget at temperature 1.

{real_model.by_seeds(rows["smollm2.json"])}

{commands(rows)}
## Machines

{made}
"""


def other_cells(cells: Sequence[room.RoomCell]) -> str:
    return f"""## Other cells

The first page's study on other tasks, policies and budgets, by the same rules; the dense learners are naive and TIS
truncated at 2 alone (no other cap), and the pilot's better one is the *rival*. Greedy rewards of the starts with the
full cache:
{room.spread_of_starts(cells)}. *copy-8*: eight digits, each copied and followed by the running sum modulo 10.
*walk-64*: 64 steps along the edges of a graph in the prompt, 78 tokens in all. *tova-heads*: TOVA with a choice of each
KV head, in commands `--eviction 'tova(shared=False)' --sinks 0`. *snapkv*: the four newest queries, without pooling:
`'snapkv(window=4,kernel=1)'`. A task's rates were chosen in its first cell. Differences are greedy under the budget,
except in the last column.

{room.cells_table(cells)}

{room.after_holm(cells)} {room.at_other_rate(cells)}
In walk-64 under H2O with 20 keys full-cache at its rate for the full cache ends below its other rate. Rewards of [all
arms](docs/report_appendix.md#other-cells).
"""


OLDER_STUDIES = """## Older studies

[Their page](docs/older_studies.md) has the map of 28 cells with 21 arms, walks of 16 to 512 steps, importance weights,
SmolLM2, learned eviction, gradients and the collapse of naive: starts at 97 %, 60 rollouts, few seeds. Commands, rows,
costs and machines of the studies above are [in the appendix](docs/report_appendix.md#commands-and-rows).
"""


def commands(rows: Rows) -> str:
    names = {"room": "room and time", "dose": "lead by mismatch", "wall.json": "the memory wall"}
    names |= {"collapse.json": "collapse", "agents.json": "turns with a tool"}
    names |= {"learned_eviction.json": "learned eviction", "smollm2.json": "real model"}
    scripts = {"smollm2.json": "real_model"}  # others have the name of their script
    lines = [
        [names[file], f"`python experiments/{scripts.get(file, Path(file).stem)}.py`", links(file, found), hours(found)]
        for file, found in rows.items()
    ]
    return f"""## Commands and rows

Every row has its command, commit, CPU and date, and the hash of its start (SmolLM2's is the published model). The
starts of sorting, copied sums, walks of 1,024 steps, the tool, and the last cells of the dose in walks are stored; the
others were trained where the study ran, and another kind of CPU gives others. Runs of collapse and walk-64 found most
programs compiled, so their cost lacks the compilation. Those of older studies are
[on their page](older_studies.md#rows).

{table(["study", "script", "rows", "cost"], lines)}
"""


def links(file: str, rows: Sequence[Row]) -> str:
    """Links to the files of the rows; a name without an ending is a folder with a file per task."""
    files = (
        [file] if file.endswith(".json") else [f"{file}/{task}.json" for task in sorted({row["task"] for row in rows})]
    )
    return ", ".join(f"[`{name}`](../experiments/results/{name})" for name in files)
