"""The first page of the report."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from lib.files import Row
from reporting import real_model
from reporting.page import plain
from reporting.room import FRONT, OURS, RoomCell, against_all, arms_table, leads_sentence, level, seconds

FIGURE = "report.png"
APART = "sampling/sampling_logp_difference/max"


def page(cell: RoomCell, others: Sequence[RoomCell], smollm2: Sequence[Row]) -> str:
    """Question, set-up, table, figure, and what holds, lost and was not measured.

    Args:
      others: further cells of the study.
      smollm2: rows of the study of the real model.
    """
    more = real_model.missing(smollm2)
    missing = f", {more}" if more else ""
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
KL(start with its full cache ‖ policy under the mask), without reward. Eight fresh seeds; ± is a 95 % t interval of
differences paired by seed; bold: it excludes 0. [The plan](experiments/PLAN.md) was committed before these seeds ran.

{arms_table(cell, FRONT)}

![learning curves with both caches; leads over every dense learner](experiments/results/{FIGURE})

{holds(cell)}

{lost(cell, others)}
{real_model.bullet(smollm2)}

**Not measured yet**, all [planned](experiments/PLAN.md): walks and larger budgets in this study, the paper's loss and
mixtures with a fifth and four fifths TIS, the lead by mismatch in walks, the memory wall at 512 steps, the collapse
of shadow masks and TIS at other rates and of all under Random{missing}. Not planned: public benchmarks, a GPU. No run
had a full cache that did not fit.

**Related methods.** Memento (arXiv:2604.09852) evicts a block of text when its summary is written,
and trains under that mask, one for all layers and heads. Here each layer and KV head has its own record, and
`OnTokens` gives such blocks. Neural Garbage Collection (arXiv:2604.18002) draws evictions from the model's own
attention scores and trains them by the outcome; [a study](#learned-eviction-beside-the-models-own-attention) compares
it with a gate. KV-CAT (arXiv:2605.05971) masks keys during continued pretraining, so that caches compress
better; it records no rollout.
Sparrow (arXiv:2606.08446) samples with the top keys of each query and trains the dense policy; its threshold is part
of the planned study of collapse. Memento, KV-CAT and Sparrow were not trained here.
"""


def holds(cell: RoomCell) -> str:
    rival, full_rival = cell.best_rival("budget"), cell.best_rival("full cache")
    primary = cell.contrast(OURS, rival, "sparse_greedy")
    p = cell.p(OURS, rival, "sparse_greedy")
    full = cell.contrast(OURS, full_rival, "dense_greedy")
    shadow = cell.contrast("shadow", rival, "sparse_greedy")
    reward = cell.contrast("anchor-then-shadow", "anchor-alone", "sparse_greedy")
    return f"""**What holds.**

* *Primary contrast.* Shadow masks and TIS, half and half on the same weights (`{OURS}`), end {plain(primary)} above
  {rival}, greedily under the budget (p = {p:.1g}; with Holm's correction over all seven planned studies at most
  {min(1, 7 * p):.1g}, whatever their results). The pilot chose {rival} as the best dense learner. Over all eight dense
  learners ([all arms](docs/report_appendix.md#room-and-time)) the lead is {against_all(cell, "sparse_greedy")}.
* *Full cache.* The same weights end {plain(full)} above {full_rival}, the pilot's choice for that column. Over all
  eight dense learners the lead is {against_all(cell, "dense_greedy")}.
* *Shadow masks alone* end {plain(shadow)} above {rival} under the budget.
* *Reward teaches more than imitation.* After a quarter of the rollouts of imitation, reward under shadow masks adds
  {plain(reward)} to imitation alone.
* *One policy.* The largest difference of a token's log-probability in a rollout is {apart(cell, "shadow")} nats with
  shadow masks and {apart(cell, "naive")} with naive (mean over rollouts)."""


def lost(cell: RoomCell, others: Sequence[RoomCell]) -> str:
    full = cell.contrast(OURS, "full-cache", "dense_greedy")
    shadow = cell.contrast("shadow", cell.best_rival("full cache"), "dense_greedy")
    mixture = cell.contrast(OURS, "shadow", "sparse_greedy")
    teacher = cell.contrast("shadow-anchor", OURS, "sparse_greedy")
    sharp = cell.contrast("shadow-anchor", OURS, "sparse")
    naive = [cell.contrast("naive", "untrained", kind) for kind in ("dense", "dense_greedy")]
    mismatch = mean(row["mismatch_kl"] for row in cell.rows(cell.best_rival("budget"), "budget"))
    return f"""**What lost or is open.**

* *A sampler that evicts nothing* is better if you decode with the full cache: {OURS} ends {plain(full)} relative to
  it. Decoded under the budget, its model reaches {level(cell, "full-cache", "sparse_greedy")}.
* *Shadow masks alone* show no lead with the full cache: {plain(shadow)} relative to {cell.best_rival("full cache")}.
  Under the budget they and the mixture are level, within 0.03: {plain(mixture)}.
* *Imitation and reward together* (shadow-anchor: shadow masks with the frozen start as teacher) end {plain(teacher)}
  relative to {OURS} greedily under the budget, and {plain(sharp)} at temperature 1.
* *Naive does not destroy the dense policy here*: {plain(naive[0])} relative to the start at
  temperature 1, {plain(naive[1])} greedily.
* *The rival.* The pilot chose {cell.best_rival("budget")}. In the reported seeds another dense learner is better; the
  smallest lead above is over that one.
* *No plateau.* Most arms still improve after 240 rollouts.
* *Equal rollouts are not equal time.* CPU seconds of a run: {seconds(cell)}. The mixture has a second forward and
  backward pass.
* *External validity.* A dense learner is {mismatch:.2g} nats per token away from the sampler here (KL, mean over the
  {cell.best_rival("budget")} runs; the [lead by mismatch](#lead-by-mismatch) takes the runs of TIS cut at 2); on
  SmolLM2 0.14 under SnapKV and 0.04 under TOVA.
* *Other cells* of this study ([table](#other-cells), {len(others)} so far), greedily under the budget:
  {leads_sentence(others)}. In the
  [older map](docs/older_studies.md#the-map) of 28 cells, with starts at 97 %, 60 rollouts and two to five seeds, the
  median lead of shadow masks over TIS under the budget is +0.022."""


def apart(cell: RoomCell, arm: str) -> str:
    return f"{mean(row[APART] for row in cell.rows(arm, 'budget')):.2g}"
