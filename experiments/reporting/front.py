"""The first page of the report."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from lib.files import Row
from reporting import real_model
from reporting.cells import APART, MapCell, decided, holm_of, main_table, median_lead
from reporting.others import collapse_sentence
from reporting.page import difference, mean_of, plain, rate_of

FIGURE = "report.png"


def page(showdown: MapCell, cells: Sequence[MapCell], real: Sequence[Row], collapse_rows: Sequence[Row]) -> str:
    """Question, set-up, table, figure, and what holds, lost and was not measured.

    Args:
      collapse_rows: every row with naive or bypass arms, pilots included.
    """
    return f"""# Is replaying the sampler's masks worth it?

**Question.** A sampler that evicts keys from its cache is not the policy that an ordinary learner trains. The learner
can ignore this (*naive*), weight each token by p(learner) / p(sampler), cut at 2 (*TIS*), or replay which keys the
sampler could see (*shadow masks*). Which one ends with the higher reward: decoded with the small cache, and with the
full cache?

**Set-up.** *Tasks*: sort 12 digits (`sorting-12`), running sums (`sums-12`), copied digits with sums (`copy-8`),
walks through a graph of the prompt (`walk-16` to `walk-512`); the reward is the share of right steps. *Models*:
decoders of 75,000 parameters with two layers. *Start*: supervised with the full cache until 97 % of the steps are
right at temperature 1; all arms of a seed share it. *Training*: GRPO, clip 0.2, no KL, Adam with a warm-up of 10
rollouts; 60 rollouts of 256 responses with 4 optimizer steps each (walks: 128 responses, 1 step). *Cell*: a task
under one eviction policy and budget; "11 + 2 of 26 keys" is a budget of 11 keys and a buffer of 2, for sequences of
26 tokens. *Learning rates*: 3e-5, 1e-4, 3e-4, chosen per arm on pilot seeds by the mean greedy reward of both caches.
*Real model*: SmolLM2-135M-Instruct with LoRA, 12 rollouts of 32 responses, one step each. *Budget* and *full cache*
say how an evaluation decodes; at temperature 1 unless *greedy*. *Frozen teacher*: a KL to the start with its full
cache. ± is a 95 % t interval over seeds, paired by seed, without correction for several comparisons; bold: it
excludes 0.

The cell with all arms: `sorting-12`, TOVA of each head, 11 + 2 of 26 keys, {showdown.seeds} seeds.

{main_table(showdown)}

![lead by mismatch; learning curves; temperature 1 and greedy](experiments/results/{FIGURE})

{holds(showdown, cells)}

{lost(showdown, cells, real, collapse_rows)}

**Not measured.** Starts that lack skill, learning rates tuned for each column, training to a plateau, the lead by
mismatch at a fixed task, equal bytes and seconds, eight seeds of the real model: [planned](experiments/PLAN.md), not
measured yet. Not planned: PPO, online DPO, public benchmarks, a GPU. R-KV, a 4-bit full cache, GSPO and geometric
rejection have no trained row so far. No run had a full cache that did not fit.

**Related methods, not trained here.** Memento (arXiv:2604.09852) evicts a block of text when its summary is written,
and trains under that mask, one for all layers and heads. Here each layer and KV head has its own record, and
`OnTokens` gives such blocks. Neural Garbage Collection (arXiv:2604.18002) draws evictions from the model's own
attention scores and trains them by the outcome; [the gate here](#learned-eviction) has scores of its own. KV-CAT
(arXiv:2605.05971) masks keys during continued pretraining, so that caches compress better; it records no rollout.
Sparrow (arXiv:2606.08446) samples with the top keys of each query and trains the dense policy; its threshold is part
of the planned study of collapse.
"""


def holds(showdown: MapCell, cells: Sequence[MapCell]) -> str:
    arms = showdown.arms
    established = {kind: sum(p < 0.05 for p in holm_of(cells, kind)) for kind in ("sparse", "sparse_greedy")}
    naive = difference(arms["shadow"], arms["naive"], "sparse")
    return f"""**What holds.**

* Shadow masks make sampler and learner one policy. The largest difference of a token in a rollout is
  {apart(arms["shadow"])} nats (mean over rollouts); with a naive learner it is {apart(arms["naive"])}.
* In this cell shadow masks end above TIS ({plain(difference(arms["shadow"], arms["tis"], "sparse"))} at temperature
  1, {plain(difference(arms["shadow"], arms["tis"], "sparse_greedy"))} greedily) and above naive ({plain(naive)}),
  decoded under the budget. It has the largest lead over TIS of all {len(cells)} cells. The median lead is
  {median_lead(cells, "sparse")} at temperature 1 and {median_lead(cells, "sparse_greedy")} greedily.
* {len(decided(cells))} cells have three seeds or more. With Holm's correction the lead over TIS is established in
  {established["sparse"]} of them at temperature 1 and in {established["sparse_greedy"]} greedily."""


def lost(showdown: MapCell, cells: Sequence[MapCell], real: Sequence[Row], collapse_rows: Sequence[Row]) -> str:
    arms = showdown.arms
    paid = difference(arms["shadow"], arms["untrained"], "dense")
    against_tis = difference(arms["shadow"], arms["tis"], "dense")
    teacher = difference(arms["anchor-alone"], arms["shadow"], "sparse_greedy")
    adds = difference(arms["shadow-anchor"], arms["anchor-alone"], "sparse_greedy")
    mixed = difference(arms["mixed-50"], arms["tis"], "dense")
    published = difference(arms["shadow-published"], arms["shadow"], "dense")
    seeds = [real_model.by_seed(real_model.runs_of(real, "snapkv")[arm], "sparse_greedy") for arm in ("shadow", "tis")]
    each = ", ".join(f"{seeds[0][seed] - seeds[1][seed]:+.2f}".replace("-", "−") for seed in (0, 1, 2, 100))
    kl = {policy: real_model.mismatch_kl(real, policy) for policy in ("snapkv", "tova-heads")}
    return f"""**What lost, or is open.**

* *Full cache.* Shadow masks end at {plain(paid)} relative to the start and {plain(against_tis)} relative to TIS.
  Nothing could be gained here: the starts are at {mean_of(arms["untrained"], "dense").mean:.2f}. Half and half with
  TIS the difference to TIS is {plain(mixed)} (a loss is not excluded); the paper's loss keeps {plain(published)} more
  than shadow masks.
* *Imitation.* The frozen teacher without any reward ends at {plain(teacher)} relative to shadow masks greedily.
  Reward on top adds {plain(adds)}. This cell does not show that RL helps greedily.
* *Rates.* The arms with a teacher ran at {rate_of(arms["shadow-anchor"])}, shadow masks at {rate_of(arms["shadow"])}.
  At one rate the teacher adds far less: [all arms](#all-arms). The criterion of the rates is no column of the table.
* *Walks.* Leads at temperature 1 in three of six cells, in two of them at unequal rates; none is established
  greedily. Part of a lead can be a lower entropy. At 256 and 512 tokens no difference to TIS is established, and the
  arms still improve.
* *Running sums.* No method gained 0.02. `recent` and `oldest`, which keep what the task needs, solve it untrained.
* *Real model.* Under SnapKV the greedy leads over TIS by seed are {each} (the last is the pilot seed): not
  established. Under TOVA, which costs little, naive is ahead of shadow masks in the mean of two seeds.
* *Collapse of naive*, as papers report it: {collapse_sentence(collapse_rows)}.
* *External validity.* All small cells but one have a mismatch of 0.4 nats per token or more; SmolLM2 has
  {kl["snapkv"]:.2f} under SnapKV and {kl["tova-heads"]:.2f} under TOVA."""


def apart(rows: Sequence[Row]) -> str:
    """The largest difference of a token's log-probability in a rollout, mean over rollouts and seeds."""
    return f"{mean(row[APART] for row in rows):.2g}"
