"""The appendix of the report: every arm, every cell, every choice."""

from __future__ import annotations

from collections.abc import Sequence

from lib.files import Row
from reporting import others, real_model, walks
from reporting.cells import MapCell, all_arms, every_table, teacher_at_one_rate
from reporting.page import LAST_COMMIT, machines
from reporting.room import RoomCell, full_table, other_cells


def text(rows: dict[str, list[Row]], room: RoomCell, showdown: MapCell, cells: Sequence[MapCell]) -> str:
    usual = showdown.arms
    by_sampler = "\n\n".join(
        f"{sampler}:\n\n{walks.gains_table(lengths)}" for sampler, lengths in walks.by_sampler(rows["horizon"]).items()
    )
    gates = "\n\n".join(
        f"{task}:\n\n{others.gate_table(rows['eviction_action'], task)}" for task in ("sorting-12", "sums-12")
    )
    others_of_room = "\n\n".join(f"{cell.label}:\n\n{full_table(cell)}" for cell in other_cells(rows["room"]))
    made = "\n".join(f"* `{name}.json`: {machines(found)}." for name, found in rows.items() if found)
    return f"""# Appendix of the report

Tables behind [the report](../REPORT.md), which defines the words. `python experiments/report.py` builds this page
from the rows. ± is a 95 % t interval over seeds, paired by seed; bold: it excludes 0, with three seeds or more. No
interval is corrected for several comparisons. With two seeds the difference of each seed is given.

## Room and time

The cell of the first page, all arms whose seeds are in. Two rates: the one chosen for the budget, and the one for the
full cache.

{full_table(room)}

## Other cells

{others_of_room}

## All arms

The map's cell: `sorting-12`, TOVA of each head, 11 + 2 of 26 keys, {showdown.seeds} seeds. *Largest Δ log p*: of any
token of a rollout between sampler and learner, nats, mean over rollouts and seeds.

{all_arms(showdown)}

What the frozen teacher adds to shadow masks at one learning rate:

{teacher_at_one_rate(rows["map"], rows["map_rates"])}

The teacher allows larger steps. At a small rate it adds little.

## The map

{every_table(cells)}

## Choices of the map

The same cell, starts and seeds. Rates from the same grid, chosen again for every line.

{others.choices_table(rows["choices"], usual)}

## Learning rates

Gains over each run's own start: the rates of the grid as chosen, and one beyond either end (another machine, other
starts).

{others.rates_table(rows["map_rates"], usual)}

## Walks

Shadow masks against TIS and naive, 3 seeds, 60 rollouts. The rate of each arm and length was chosen on one pilot seed,
where arms often differ by a few thousandths.

{walks.short_table(rows["horizon"])}

All arms. The first line is the start; the others are gains over it.

{by_sampler}

## Importance weights

Walks at the start, mean over 3 seeds: effective sample size (ESS) as a share of all responses, and of all tokens. A
single response of 256 is 0.004.

{walks.weights_table(rows["horizon_weights"])}

## Gradients

Alignment of one rollout's gradient with the exact gradient of the reward under the budget, masks frozen. `anchor` is
the frozen teacher without reward. One start per cell; ± is a 95 % jackknife over its rollouts. Package `study` of
commit {LAST_COMMIT} has the code, the variance reductions and the small steps of the rows.

{others.gradients_table(rows["gradients"])}

## SmolLM2 before training

GSM8K questions, 32 responses per line, one seed: a single response is 0.031 of them.

{real_model.before_table(rows["mismatch_smollm2"])}

## Learned eviction

14 + 2 of 26 keys. *shadow* trains tokens under a rule, *untrained* does not. Gates are linear in key, value, position
and age; `gate-alone` trains the gate only, `gate-frozen` the tokens only.

{gates}

## Machines

{made}
"""
