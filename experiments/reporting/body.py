"""The studies of the report, a short section each."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from lib.files import Row
from reporting import dose, others, real_model, room, tools, walks
from reporting.cells import MapCell, decided, decided_table, extreme_leads, median_lead
from reporting.page import LAST_COMMIT, difference, hours, plain, table

Rows = dict[str, list[Row]]


def text(rows: Rows, showdown: MapCell, cells: Sequence[MapCell]) -> str:
    sections = (
        other_cells(room.other_cells(rows["room"])),
        dose.section(rows["dose"]),
        tools.section(rows["agents"]),
        the_map(rows, showdown, cells),
        real(rows),
        gates(rows),
        smaller(rows, showdown.arms),
        commands(rows),
    )
    return "\n".join(section for section in sections if section)


def other_cells(cells: Sequence[room.RoomCell]) -> str:
    return f"""## Other cells

The first page's study on other tasks, policies and budgets, by the same rules. A task's rates were chosen in its first
cell. Differences are greedy under the budget, except in the last column.

{room.cells_table(cells)}

The intervals are not corrected for several cells. Where the mixture is not above the start, the reward taught it
nothing. Rewards of [all arms](docs/report_appendix.md#other-cells).
"""


def the_map(rows: Rows, showdown: MapCell, cells: Sequence[MapCell]) -> str:
    short = [cell for cell in cells if not cell.is_decided]
    leads = {
        name: plain(difference(of_arm, showdown.arms["tis"], "sparse"))
        for name, of_arm in showdown.arms.items()
        if name != "tis"
    }
    rejected = mean(row["rollout_corr/rollout_rs_masked_fraction"] for row in showdown.arms["sparse-rl"])
    return f"""## The map

Older than the study above: starts at 97 %, 60 rollouts, rates chosen by the mean greedy reward of both caches.
{len(cells)} cells: tasks, budgets, and policies that do (TOVA, SnapKV, H2O) or do not (StreamingLLM, Random) depend
on the parameters. The cells of a task share the starts of two to five seeds and the rates of one pilot, so they are
not independent trials. {len(short)} cells have two seeds or fewer; the appendix lists
[all](docs/report_appendix.md#the-map).

Shadow masks minus TIS, means of all cells: median {median_lead(cells, "sparse")} under the budget (from
{extreme_leads(cells, "sparse")}), {median_lead(cells, "sparse_greedy")} greedily, {median_lead(cells, "dense")} with
the full cache (from {extreme_leads(cells, "dense")}). Against naive the median under the budget is
{median_lead(cells, "sparse", "naive")}.

The {len(decided(cells))} cells with three seeds or more; shadow masks minus TIS, in brackets p after Holm's
correction over these cells. *Mismatch KL*: nats per token from the sampler to the dense learner, mean over the TIS
runs.

{decided_table(cells)}

With the full cache no gain was possible in any cell, because the starts are at 0.96 to 1.

*All arms* ran in the cell with the largest lead: `sorting-12`, 11 + 2 keys, {showdown.seeds} seeds. Minus TIS under
the budget, temperature 1: shadow {leads["shadow"]}, `{room.OURS}` {leads["mixed-50"]}, shadow masks with a frozen
teacher {leads["shadow-anchor"]}, the paper's loss {leads["shadow-published"]}, naive {leads["naive"]}, IcePop
{leads["icepop"]}, Sparse-RL's released correction {leads["sparse-rl"]} (it rejects {rejected:.0%} of the tokens here,
far outside its regime), response weights {leads["tis-sequence"]}, response rejection {leads["mis-sequence"]}, `bypass`
(PPO's ratio taken to the sampler) {leads["bypass"]}. Teachers and mixtures ran at ten times the rate of shadow masks.
[All rewards](docs/report_appendix.md#all-arms).

*Walks of 16 to 512 tokens* show no lead that grows with the length ([table](docs/report_appendix.md#walks)). An entropy
that falls raises the reward at temperature 1 without any skill.
{walks.one_rate(rows["horizon"], rows["horizon_rates"])}
"""


def real(rows: Rows) -> str:
    runs = rows["real_model"]
    return f"""## A real model

SmolLM2-135M-Instruct adds three numbers step by step: 128 + 16 keys of 227, a third of the keys evicted at the last
query. 96 questions (pilot: 48), the same for all seeds, so their error is in no interval: one difference of greedy
rewards has a standard error of about 0.07 from the questions alone. Rewards by seed; brackets: the pilot seed at the
reported rate. The third reported seed was added after two had been seen.

SnapKV:

{real_model.trained_table(runs, "snapkv")}

{real_model.leads_sentence(runs)} The best rival is naive, not TIS.

TOVA of each head:

{real_model.trained_table(runs, "tova-heads")}

Two seeds, and another rate for shadow masks: nothing is established.

Before training: {real_model.before_sentence(rows["mismatch_smollm2"])}
"""


def gates(rows: Rows) -> str:
    return f"""## Learned eviction

A gate draws which keys are evicted, and the reward trains it ([eviction](docs/eviction.md)). 14 + 2 of 26 keys, 5
seeds. {others.gate_sentence(rows["eviction_action"])} [All arms](docs/report_appendix.md#learned-eviction).
"""


def smaller(rows: Rows, usual: Rows) -> str:
    collapse_rows = [row for name in ("map", "horizon", "map_rates") for row in rows[name]]
    return f"""## Smaller studies

* *Gradients.* {others.gradients_sentence(rows["gradients"])} [Cells](docs/report_appendix.md#gradients).
* *Importance weights.* {walks.weights_sentence(rows["horizon_weights"])}
  [Lengths](docs/report_appendix.md#importance-weights).
* *Optimizer steps.* {others.choices_sentence(rows["choices"], usual)}
  [Choices](docs/report_appendix.md#choices-of-the-map).
* *Collapse of naive*, as papers report it: {others.collapse_sentence(collapse_rows)}.
"""


def commands(rows: Rows) -> str:
    gone = f"`git show {LAST_COMMIT}:experiments/"
    studies = [
        ["room and time", "`python experiments/room.py`", "room.json", hours(rows["room"])],
        *(
            [["lead by mismatch", "`python experiments/dose.py`", "dose.json", hours(rows["dose"])]]
            if rows["dose"]
            else []
        ),
        ["turns with a tool", "`python experiments/agents.py`", "agents.json", hours(rows["agents"])],
        ["the map", "`python experiments/map.py`", "map.json, map_rates.json", hours(rows["map"])],
        ["choices", f"{gone}choices.py`", "choices.json", hours(rows["choices"])],
        ["walks", "`python experiments/horizon.py`", "horizon.json, horizon_rates.json", hours(rows["horizon"])],
        ["importance weights", f"{gone}horizon.py` `--weights`", "horizon_weights.json", "minutes"],
        ["gradients", f"{gone}gradients.py`", "gradients.json", "3.3 CPU hours"],
        [
            "learned eviction",
            "`python experiments/eviction_action.py`",
            "eviction_action.json",
            hours(rows["eviction_action"]),
        ],
        [
            "real model",
            "`python experiments/real_model.py`",
            "real_model.json",
            f"{real_model.training_hours(rows['real_model']):.1f} hours of training",
        ],
        ["its mismatch", f"{gone}mismatch.py` `--policies snapkv h2o`", "mismatch_smollm2.json", "not recorded"],
    ]
    linked = [
        [name, script, ", ".join(f"[`{f}`](experiments/results/{f})" for f in files.split(", ")), cost]
        for name, script, files, cost in studies
    ]
    return f"""## Commands and rows

Every row has its command, commit, CPU and date. Starts of the first two studies are stored. Those of the others
were not and depend on the CPU, so their rows repeat on one kind of CPU only. A `+` behind a commit means that tracked
files had changed: so it is for most rows of the map and of the gradients, and half of those of the walks. A script
behind `git show` was deleted after its study; commit {LAST_COMMIT} is the last one that has it. One seed is left out,
because its arms began from two different starts: `copy-8`, `streaming`, 14 keys, seed 1.

{table(["study", "script", "rows", "cost"], linked)}
"""
