"""What does correcting a dense learner cost when responses get longer, and what replaying the sampler's masks?

Question   Weights of whole responses spread with the length; weights of single tokens do not, but leave the states
           uncorrected; a learner that replays the masks needs neither. Does it matter for the reward?
Task       Walks along the edges of a graph that stands in the prompt (`study.problems.Walk`): 16 to 512 tokens, every
           step as hard as any other, and drawn, because a policy that is sure of its next token hides the mismatch.
Start      Supervised with the full cache until 97 % of 512 steps are right at temperature 1; the same for all arms and
           lengths of a seed. The budget is the same for all lengths. Two eviction policies: under H2O long walks stay
           possible.
Weights    Without training (--weights): how far a dense learner is from the sampler at the start; chi-square and
           effective sample size of token weights and of the weights of whole responses, against the length, beside the
           sampler's reward so far ("sparse").
Rewards    On held-out rows, under the budget and with the full cache, at temperature 1 and greedy.
Rates      Of 3e-5, 1e-4 and 3e-4, for every arm of every length, the best mean of sparse and dense greedy reward on a
           pilot seed, which is not reported and judged on rows of its own. Where that made shadow masks' rate ten times
           TIS's, and they ended ahead, TIS ran with theirs, too (horizon_rates.json): --tasks walk-64 --samplers
           h2o:12+4 --arms tis --learning-rates 3e-4 --results experiments/results/horizon_rates.json
Found      Effective sample sizes die with the length, of whole responses sooner than of tokens; corrections with
           weights of whole responses gain nothing at 64 tokens and more, where TIS and IcePop do. Under H2O
           shadow masks are ahead of TIS at 64 tokens, and level with it at 256 and 512, where a frozen teacher beside
           them costs what they gain. REPORT.md has the numbers.
Command    python experiments/horizon.py --weights
           python experiments/horizon.py [--tasks walk-64] [--arms …] [--seeds …] [--minutes …] [--workers 1]
           Runs that have ended are kept, and not made again when the study goes on. --collect prints the table.
Cost       0.6 CPU hours for the 114 runs of 16 and 64 tokens under TOVA, on one core of an Intel Xeon (family 6, model
           207); 3 for the 171 of 16, 64 and 256 tokens under H2O, on one of an AMD EPYC (family 25, model 1), which
           takes about 15, 40 and 130 seconds for a run, and 4 to 6 minutes for one of 512 tokens. A start
           is about 4 CPU minutes
Result     experiments/results/horizon_weights.json, a row per sampler, seed and length;
           experiments/results/horizon.json, a row a run, the pilot's included
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
import tyro

import smd_jax as smd
from provenance import provenance
from smd_jax.commands.compilation_cache import keep_programs
from smd_jax.learner.config import Visibility
from smd_jax.text.prompts import eos_token_id, pad_token_id
from smd_jax.train.grading import encode_rows
from study.arms import arms_of
from study.command import StudyArgs, as_written, grid_of, run, stopping
from study.files import RESULTS, ROOT, Row, number, write_rows
from study.grid import Cell, Grid
from study.intervals import estimate, paired
from study.problems import Walk, tokenizer
from study.runs import DECODINGS, Sizes
from study.samplers import Sampler, sampler_of
from study.starts import StartLevel, start
from study.weights import log_ratios, response_weights, token_weights

ARMS = arms_of(
    (
        *("untrained", "full-cache", "naive", "tis", "tis-sequence", "mis-sequence", "icepop", "sparse-rl"),
        *("shadow", "shadow-anchor"),
    )
)
# Walks of 16 tokens begin at 0.8 to 0.9 under either. Under TOVA those of 256 begin at 0.2, less than who has forgotten
# the graph can guess; under H2O at 0.8.
LENGTHS = {"tova-heads:12+4": (16, 64), "h2o:12+4": (16, 64, 256, 512)}
RATES = (3e-5, 1e-4, 3e-4)
SEEDS = (0, 1, 2)
SIZES = Sizes(rollouts=60, prompts=16, group=8, evaluate_every=30, evaluation_rows=256, start=StartLevel(rows=256))
CELLS = tuple(
    Cell(Walk(length), sampler_of(sampler), ARMS, SEEDS) for sampler, lengths in LENGTHS.items() for length in lengths
)

# Without training.
WEIGHT_SAMPLERS = tuple(
    sampler_of(f"{policy}:{budget}") for budget in ("20+4", "12+4") for policy in ("tova-heads", "h2o", "snapkv")
)
WEIGHT_LENGTHS = (16, 32, 64, 128, 256, 512)
WEIGHT_ROWS = 256
AT_ONCE = 32  # responses that the learner reads together
VISIBILITIES: tuple[Visibility, ...] = ("dense", "shadow")


@dataclass(frozen=True)
class Args(StudyArgs):
    """Runs the study, or the part of it that is asked for. Rows that are kept under --runs are not made again."""

    weights: bool = False  # train nothing: measure importance weights at the starts


def weight_rows(
    problem: Walk, sampler: Sampler, seed: int, level: StartLevel, starts: Path, lengths: Sequence[int], rows: int
) -> list[Row]:
    """A row for each of the lengths: those of one rollout's first tokens, since a longer walk begins as a short one.

    Args:
      rows: responses, of a prompt each.
    """
    params = start(problem, seed, level, starts)
    model = smd.Decoder(problem.model_config())
    tokens = tokenizer()
    # Rows of training: evaluation rows are looked at by evaluations alone.
    questions = [problem.rows("train")[i] for i in range(rows)]
    trajectory = smd.rollout(
        model,
        params,
        encode_rows(model, tokens, questions, problem.prompt_width),
        jax.random.key(seed),
        policy=sampler.eviction,
        config=sampler.config(problem.response_width, eos_token_id(tokens), pad_token_id(tokens)),
    )
    mask = np.asarray(trajectory.response_mask)
    drawn = [ids[kept] for ids, kept in zip(np.asarray(trajectory.response), mask, strict=True)]
    completions = tokens.batch_decode(drawn, skip_special_tokens=True)
    prompts, answers = ([row[name] for row in questions] for name in ("prompt", "answer"))
    rewards = {
        length: Walk(length).rows("train").reward(prompts, completions, answer=answers)
        for length in lengths  # a walk's grade looks at its first steps alone
    }
    dense, shadow = (
        log_ratios(model, params, trajectory, visibility, min(rows, AT_ONCE)) for visibility in VISIBILITIES
    )
    whole = {
        "task": problem.label,
        "policy": sampler.policy,
        "budget": sampler.budget,
        "buffer": sampler.buffer,
        "seed": seed,
        "responses": rows,
        "entropy": number(float(np.asarray(trajectory.entropy)[mask].mean())),
        "shadow_max_abs_dlogp": number(float(np.abs(shadow[mask]).max())),
    }
    tokenwise = token_weights(dense, mask)
    whole |= {name: tokenwise[name] for name in ("mean_abs_dlogp", "p999_abs_dlogp", "outside")}
    return [
        whole | {"sparse": number(float(np.mean(rewards[row["tokens"]])))} | row
        for row in response_weights(dense, mask, lengths)
    ]


def weights(args: Args) -> list[Row]:
    """The rows of all samplers and seeds, written again after every sampler."""
    runs = ROOT / "runs" if args.runs is None else args.runs
    out = args.results or RESULTS / "horizon_weights.json"
    made: list[Row] = []
    origin = provenance()
    for seed in args.seeds or SEEDS:
        for sampler in WEIGHT_SAMPLERS if args.samplers is None else map(sampler_of, args.samplers):
            rows = weight_rows(
                Walk(WEIGHT_LENGTHS[-1]), sampler, seed, SIZES.start, runs / "starts", WEIGHT_LENGTHS, WEIGHT_ROWS
            )
            made += [row | origin for row in rows]
            write_rows(out, made)
            for row in rows:
                shown = ", ".join(f"{name} {row[name]:.3f}" for name in ("sparse", "response_ess", "token_ess"))
                print(f"{sampler.label}, seed {seed}, {row['tokens']} tokens: {shown}", flush=True)
    return made


def table(rows: Sequence[Row], over: str = "untrained") -> list[str]:
    """Of every task and arm that is reported: mean gains over another arm, within a seed, with 95 % t intervals."""
    lines = [f"{'task':10} {'arm':14} {'rate':>6} n  " + "  ".join(f"{kind:>14}" for kind in DECODINGS)]
    reported = [row for row in rows if not row["pilot"]]
    for task in dict.fromkeys(row["task"] for row in reported):
        of_task = [row for row in reported if row["task"] == task]
        base = [row for row in of_task if row["arm"] == over]
        for arm in dict.fromkeys(row["arm"] for row in of_task):
            ours = [row for row in of_task if row["arm"] == arm]
            cells = []
            for kind in DECODINGS:
                mine, theirs = ({row["seed"]: row[kind] for row in some} for some in (ours, base))
                level = arm == over or not mine.keys() & theirs.keys()
                cells.append(f"{str(estimate(list(mine.values())) if level else paired(mine, theirs)):>14}")
            rates = "/".join(sorted({f"{row['learning_rate']:g}" for row in ours}))
            lines.append(f"{task:10} {arm:14} {rates:>6} {len(ours)}  " + "  ".join(cells))
    return lines


def study(args: Args) -> Grid:
    """One pilot seed: long walks are most of the cost, and two would double it."""
    return replace(grid_of(args, "horizon", CELLS, RATES, SIZES), pilot_seeds=(100,))


def main(args: Args) -> None:
    keep_programs()
    with stopping():
        if args.weights:
            weights(args)
        else:
            print("\n".join(table(run(study(args), args))))


if __name__ == "__main__":
    main(tyro.cli(Args, description=as_written(__doc__)))
