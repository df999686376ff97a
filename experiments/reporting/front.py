"""The first page of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median

from lib.files import Row
from lib.intervals import paired
from reporting import collapse, dose, real_model, room, wall
from reporting.contrasts import Contrast, paired_contrast
from reporting.page import LAST, mean_of, number, plain, rate_words, stopped_at
from reporting.room import OURS, RIVALS, RoomCell

FIGURE = "report.png"
GREEDY = ("sparse_greedy", "dense_greedy")  # under the budget and with the full cache
STAGES = (60, 120, 180, 240)  # rollouts
APART = "sampling/sampling_logp_difference/max"


def page(cell: RoomCell, others: Sequence[RoomCell], rows: Mapping[str, Sequence[Row]]) -> str:
    """Question, set-up, table, figure, and what holds, lost and was not measured.

    Args:
      others: further cells of the study.
      rows: those of all studies, by file.
    """
    smollm2 = rows["smollm2.json"]
    return f"""# Is replaying the sampler's masks worth it?

**Question.** A sampler that evicts keys from its cache is not the policy that an ordinary learner trains. The learner
can ignore this (*naive*), weight each token by p(learner) / p(sampler) up to a cap (*TIS*), or replay which keys the
sampler could see (*shadow masks*). Which one ends with the highest reward, decoded with the small cache and with the
full cache?

**Set-up.** *Task*: sort 12 digits; the reward is the share of right digits. *Model*: a decoder of 75,000 parameters
with two layers. *Sampler*: TOVA of each head keeps 11 keys and a buffer of 2, for sequences of 26 tokens. *Start*:
supervised training until half of the digits are right (greedy, full cache), so that there is room to learn under any
cache; all arms of a seed share it. *Training*: GRPO's advantages, a mean over all tokens, clip 0.2, no KL (the arm
sparse-rl-paper of the appendix: means of responses and a KL of 1e-4); 240 rollouts of 128 responses, 4 optimizer steps
each.
*Metric*: the mean of the last three evaluations on 256 rows, decoded under the *budget* and with the *full cache*, at
temperature 1 and greedily. *Learning rates*: 1e-4, 3e-4 and 1e-3, extended while the best rate is the smallest or
largest tried. Two pilot seeds chose one rate for the budget and one for the full cache. *Imitation*: the loss is
KL(start with its full cache ‖ policy under the mask), without reward; *frozen teacher*: this KL beside the reward.
Eight fresh seeds; ± is a 95 % t interval of differences paired by seed; bold: it excludes 0.
[The plan](experiments/PLAN.md) was committed before these seeds ran.

{room.arms_table(cell, room.FRONT)}

![learning curves with both caches; leads over every dense learner](experiments/results/{FIGURE})

{holds(cell, others)}

{lost(cell, others, rows)}
{real_model.bullet(smollm2)}

**Not measured**: public benchmarks, a GPU. No run had a full cache that did not fit.

**Related methods.** Memento (arXiv:2604.09852) evicts a block of text when its summary is written,
and trains under that mask, one for all layers and heads. Here each layer and KV head has its own record, and
`OnTokens` gives such blocks. Neural Garbage Collection (arXiv:2604.18002) samples evictions by the model's own
attention scores and trains them with rewards; [a study](#learned-eviction-beside-the-models-own-attention) compares
it with a gate. KV-CAT (arXiv:2605.05971) masks keys during continued pretraining, so that caches compress
better; it records no rollout.
Sparrow (arXiv:2606.08446) samples with the top keys of each query and trains the dense policy; its threshold is tested
in [collapse](#collapse). Memento, KV-CAT and Sparrow were not trained here.
"""


def primary(cell: RoomCell) -> Contrast:
    rival = cell.best_rival("budget")
    what = f"{OURS} minus {rival}, the pilot's best dense learner, greedy under the budget"
    ours, theirs = (cell.rows(arm, "budget") for arm in (OURS, rival))
    return paired_contrast("room and time, this page's first table", what, ours, theirs, "sparse_greedy")


def holds(cell: RoomCell, others: Sequence[RoomCell]) -> str:
    rival, full_rival = cell.best_rival("budget"), cell.best_rival("full cache")
    ours = plain(cell.contrast(OURS, rival, "sparse_greedy"))
    full = cell.contrast(OURS, full_rival, "dense_greedy")
    shadow = cell.contrast("shadow", rival, "sparse_greedy")
    established = sum(cell.contrast(OURS, arm, "dense_greedy").established for arm in RIVALS)
    return f"""**What holds.**

* *Primary contrast.* Shadow masks and TIS, half and half on the same weights (`{OURS}`), end {ours} above {rival},
  greedily under the budget ([p, corrected for all studies](#planned-contrasts)). The pilot chose {rival} as
  the best dense learner. Over all eight dense learners ([all arms](docs/report_appendix.md#room-and-time)) the lead is
  {room.against_all(cell, "sparse_greedy")}.
* *Full cache, at equal rollouts.* The same weights end {plain(full)} above {full_rival}, the pilot's choice for that
  column. Over all eight dense learners the lead is {room.against_all(cell, "dense_greedy")}; {established} of the
  eight are established.
* *Shadow masks alone* end {plain(shadow)} above {rival} under the budget.
* *One policy.* The largest difference of a token's log-probability in a rollout is {apart(cell, "shadow")} nats with
  shadow masks and {apart(cell, "naive")} with naive (mean over rollouts)."""


def lost(cell: RoomCell, others: Sequence[RoomCell], rows: Mapping[str, Sequence[Row]]) -> str:
    def in_cells(ours: str, theirs: str, kind: str) -> str:
        with_both = [one for one in (cell, *others) if {ours, theirs} <= set(one.complete)]
        return "; ".join(f"{one.label.split(',')[0]} {plain(one.contrast(ours, theirs, kind))}" for one in with_both)

    full = cell.contrast(OURS, "full-cache", "dense_greedy")
    shadow = cell.contrast("shadow", cell.best_rival("full cache"), "dense_greedy")
    mixture = cell.contrast(OURS, "shadow", "sparse_greedy")
    naive = [cell.contrast("naive", "untrained", kind) for kind in ("dense", "dense_greedy")]
    of_naive = " and ".join(
        f"{mean_of(cell.rows('naive', column), 'mismatch_kl').mean:.2g} at {rate_words(cell.rate('naive', column))}"
        for column in ("full cache", "budget")
    )
    on_smollm2 = " and ".join(
        f"{nats.mean:.2g} under {rule}" for rule, nats in real_model.mismatches(rows["smollm2.json"]).items()
    )
    doses = dose.cells_of(rows["dose"])
    (here,) = (one.nats for one in doses if one.label == cell.label)
    leads = [one.contrast(OURS, one.best_rival("budget"), "sparse_greedy").mean for one in (cell, *others)]
    learners = [arm for arm in cell.complete if arm != "untrained"]
    rising = [arm for arm in learners if any(still_rises(cell, arm, kind) for kind in GREEDY)]
    return f"""**What lost or is open.**

* *A sampler that evicts nothing* is better if you decode with the full cache: {OURS} ends {plain(full)} relative to
  it. Decoded under the budget, its model reaches {room.level(cell, "full-cache", "sparse_greedy")}.
* *Shadow masks alone* show no lead with the full cache: {plain(shadow)} relative to {cell.best_rival("full cache")}.
  Under the budget they and the mixture are level, within 0.03: {plain(mixture)}.
* *Reward after imitation.* Imitation for a quarter of the rollouts, then rewards under shadow masks; minus imitation
  throughout, greedily under the budget: {in_cells("anchor-then-shadow", "anchor-alone", "sparse_greedy")}. In copied
  sums the upper limit is below 0.03: by the plan, reward adds nothing there to imitation. At temperature 1 it does:
  {in_cells("anchor-then-shadow", "anchor-alone", "sparse")}. The plan predicted that it passes the start's greedy
  reward with the full cache: {in_cells("anchor-then-shadow", "untrained", "dense_greedy")}.
* *The frozen teacher* (shadow-anchor) minus {OURS}, under the
  budget, greedily: {in_cells("shadow-anchor", OURS, "sparse_greedy")}; at temperature 1:
  {in_cells("shadow-anchor", OURS, "sparse")}. Imitation without reward (anchor-alone), greedily:
  {in_cells("anchor-alone", OURS, "sparse_greedy")}.
* *Naive and the dense policy.* At its best rate for the full cache naive ends {plain(naive[0])} relative to the start
  at temperature 1, {plain(naive[1])} greedily.{naive_elsewhere(rows["collapse.json"])}
{other_shares(cell)}
* *The rival.* The pilot chose {cell.best_rival("budget")}, and for the full cache {cell.best_rival("full cache")}.
  In the reported seeds another dense learner is better in each; the smallest leads above are over those.
* *No plateau.* Of {len(learners)} learners {len(rising)} still rise: in at least one greedy column their last three
  evaluations are established above the three before. {growing(cell)}
{equal_time(cell, others)}
* {wall.bullet(rows["wall.json"])}
* *External validity.* The [mismatch](#lead-by-mismatch), mean over the runs of TIS (truncated at 2, rate 3e-4),
  is {here:.2g} nats per token here (six seeds), and on SmolLM2
  {on_smollm2}. It grows with the rate: naive has {of_naive}. Over budgets of two policies, established leads of {OURS}
  over the better of naive and TIS, greedily: {dose.established(doses)}.
* *This cell* had the largest lead of the older map of 28 cells, and trial runs that are not stored had shown one from
  such starts, before the plan chose it. The lead over the pilot's rival is {number(leads[0])} here and
  {number(median(leads))} in the median of {len(leads)} [cells](#other-cells). {room.against_full_cache(others)}
* *Older cells.* In the [older map](docs/older_studies.md#the-map) of 28 cells, with starts at 97 %, 60 rollouts and two
  to five seeds, the median lead of shadow masks over TIS under the budget is +0.022."""


def growing(cell: RoomCell) -> str:
    """The leads of the mixture along training, over the pilot's rival under the budget and TIS with the full cache."""

    def leads(rival: str, kind: str) -> str:
        arms = [cell.rows(arm, room.column_of(kind)) for arm in (OURS, rival)]
        found = [paired(*(stopped_at(rows, rollouts, kind) for rows in arms)) for rollouts in STAGES]
        return f"{rival}: {', '.join(number(lead.mean, 2) for lead in found)}"

    return f"""After {", ".join(map(str, STAGES))} rollouts, greedily, {OURS} leads under the budget
  {leads(cell.best_rival("budget"), "sparse_greedy")}; with the full cache {leads("tis", "dense_greedy")}."""


def equal_time(cell: RoomCell, others: Sequence[RoomCell]) -> str:
    rivals = cell.best_rival("budget"), cell.best_rival("full cache")
    (rollouts, budget), (_, full) = (
        room.in_equal_time(cell, rival, kind) for rival, kind in zip(rivals, GREEDY, strict=True)
    )
    of_all = [room.all_in_equal_time((cell, *others), kind) for kind in (*GREEDY, "dense")]
    return f"""* *Equal rollouts are not equal time.* CPU seconds of a run: {room.seconds(cell)} (two kinds of CPU).
  The mixture has a second forward and backward pass. Stopped when it has cost what the rival's whole run costs (here
  after {rollouts} rollouts), it ends {plain(budget)} above {rivals[0]} under the budget, but {plain(full)} relative to
  {rivals[1]} with the full cache, greedily. Minus TIS truncated at 2, in all {1 + len(others)} cells: under the
  budget, greedily, {of_all[0]}; with the full cache, greedily, {of_all[1]}; at temperature 1, {of_all[2]}."""


def other_shares(cell: RoomCell) -> str:
    def leads(arm: str) -> str:
        return " and ".join(plain(cell.contrast(OURS, arm, kind)) for kind in GREEDY)

    fifth, most, paper = map(leads, room.SHARES)
    return f"""* *Other shares of TIS, and the paper's loss.* Greedily under the budget and with the full cache,
  {OURS} minus mixed-20 (one fifth TIS) is {fifth}, minus mixed-80 {most}, minus shadow-published
  (the paper's loss) {paper}."""


def still_rises(cell: RoomCell, arm: str, kind: str) -> bool:
    """Whether the last three evaluations are above the three before, with an interval above 0."""
    rows = cell.rows(arm, "budget" if kind.startswith("sparse") else "full cache")
    steps = [point["step"] for point in rows[0]["curve"]]
    gain = paired(stopped_at(rows, steps[-1], kind), stopped_at(rows, steps[-1 - LAST], kind))
    return gain.established and gain.mean > 0


def naive_elsewhere(rows: Sequence[Row]) -> str:
    """The full-cache reward that naive loses in the study of collapse, at the rate where it loses most."""
    losses = {
        (cell.rate, cell.policy): collapse.gained(cell.rows, "dense_greedy")
        for cell in collapse.cells_of(rows)
        if cell.arm == "naive"
    }
    (rate, policy), loss = min(losses.items(), key=lambda found: found[1].mean)
    where = f"{rate_words(rate)} under {policy}, the worst of {len(losses)} pairs of rate and policy,"
    return f" After 500 rollouts at {where} it ends {plain(loss)} ([collapse](#collapse))."


def apart(cell: RoomCell, arm: str) -> str:
    return f"{mean(row[APART] for row in cell.rows(arm, 'budget')):.2g}"
