"""The studies of the report, a short section each."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from lib.files import Row
from reporting import others, real_model, room, tools, walks
from reporting.cells import MapCell, decided, decided_table, extreme_leads, main_table, median_lead
from reporting.page import LAST_COMMIT, difference, hours, plain, table

Rows = dict[str, list[Row]]


def text(rows: Rows, showdown: MapCell, cells: Sequence[MapCell]) -> str:
    sections = (
        copied_sums(room.copy_cell(rows["room"])),
        tools.section(rows["agents"]),
        the_map(cells),
        all_arms(rows, showdown),
        longer(rows),
        real(rows),
        gates(rows),
        smaller(rows, showdown.arms),
        commands(rows),
    )
    return "\n".join(sections)


def copied_sums(cell: room.RoomCell) -> str:
    rival, full_rival = cell.best_rival("budget"), cell.best_rival("full cache")
    ours = {arm: plain(cell.contrast(room.OURS, arm, "sparse_greedy")) for arm in (rival, "naive", "untrained")}
    full = plain(cell.contrast(room.OURS, full_rival, "dense_greedy"))
    return f"""## Copied sums

The second task of the first page's study, by the same rules: eight sums, copied; TOVA of each head, 10
+ 2 keys. The result of the first page does not repeat here. Greedily under the budget {room.OURS} ends {ours[rival]}
above {rival}, the better rival of the pilot, but {ours["naive"]} relative to naive and {ours["untrained"]} relative to
its start: the reward taught little. With the full cache it ends {full} relative to {full_rival}.
[All arms](docs/report_appendix.md#copied-sums).
"""


def all_arms(rows: Rows, showdown: MapCell) -> str:
    arms = showdown.arms
    leads = {name: plain(difference(arms[name], arms["tis"], "sparse")) for name in arms if name != "tis"}
    rejected = mean(row["rollout_corr/rollout_rs_masked_fraction"] for row in arms["sparse-rl"])
    naive = plain(difference(arms["shadow"], arms["naive"], "sparse"))
    return f"""## The map's cell with all arms

{main_table(showdown)}

`sorting-12`, TOVA of each head, 11 + 2 of 26 keys, {showdown.seeds} seeds; the largest lead over TIS of the map. Shadow
masks are {naive} above naive under the budget. With the full cache nothing could be gained. The arms with a frozen
teacher ran at ten times the rate of shadow masks.

The cell has 21 arms. Minus TIS under the budget, temperature 1: IcePop {leads["icepop"]}, Sparse-RL's released
correction {leads["sparse-rl"]} (it rejects {rejected:.0%} of the tokens here, far outside its regime), response
weights {leads["tis-sequence"]}, response rejection {leads["mis-sequence"]}, `bypass` (PPO's ratio taken to the
sampler) {leads["bypass"]}, a live teacher without reward {leads["forward-alone"]}. Mixtures with a fifth and four
fifths of TIS: {leads["mixed-20"]} and {leads["mixed-80"]}. All rows: [appendix](docs/report_appendix.md#all-arms).
"""


def the_map(cells: Sequence[MapCell]) -> str:
    short = [cell for cell in cells if not cell.is_decided]
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
"""


def longer(rows: Rows) -> str:
    return f"""## Longer responses

Walks under one budget, 3 seeds, 60 rollouts. The rate of each arm and length was chosen on one pilot seed, where arms
often differ by a few thousandths. An entropy that falls raises the reward at temperature 1 without any skill: compare
the columns.

{walks.short_table(rows["horizon"])}

{walks.one_rate(rows["horizon"], rows["horizon_rates"])} All arms:
[appendix](docs/report_appendix.md#walks).
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
