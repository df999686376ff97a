"""The study of the memory wall: equal bytes of KV cache, equal computing time."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from statistics import mean

from lib.files import Row
from lib.intervals import Estimate, paired
from reporting import page
from reporting.contrasts import Contrast, paired_contrast
from reporting.page import check_complete, difference, mean_of, rate_words, signed, table

SEEDS = tuple(range(10, 16))
LENGTHS = (512, 1024)
PRIMARY = 1024  # steps of the walks of the primary contrast
OURS = "mixed-50"
FULL = ("full-turns", "full-updates", "full-4-bit")
MEANING = {
    "full-turns": "32 completions with the full cache, in turns",
    "full-updates": "rollouts of 4 completions with the full cache",
    "full-4-bit": "32 completions with a full cache of 4 bits, in turns",
    "tis": "32 completions under the budget, TIS",
    "shadow": "32 completions under the budget, shadow masks",
    OURS: "32 completions under the budget, shadow masks and TIS",
}
BOTH = ("", "_greedy")  # temperature 1 and greedy
Ways = dict[str, list[Row]]  # way -> reported rows


def complete(rows: Sequence[Row], length: int) -> Ways:
    """The ways of this length with all seeds."""
    found = page.grouped((row for row in page.reported(rows) if row["length"] == length), itemgetter("way"))
    return {way: found[way] for way in MEANING if way in page.with_seeds(found, SEEDS)}


def best_full(rows: Sequence[Row], length: int) -> str:
    """The full-cache way with the highest reward of a pilot."""
    pilots = [row for row in page.of_pilot(rows) if row["length"] == length and row["way"] in FULL]
    return max(pilots, key=lambda row: row["own"])["way"]


def rewards(rows: Sequence[Row], place: int, samplings: Sequence[str] = BOTH) -> dict[int, float]:
    """Seed -> reward with the way's own cache at a point of its curve, mean over `samplings` ("" is temperature 1)."""
    cache = "dense" if rows[0]["way"] in FULL else "sparse"
    return {row["seed"]: mean(row["curve"][place][cache + sampling] for sampling in samplings) for row in rows}


def gained(rows: Sequence[Row], *samplings: str) -> Estimate:
    """Reward gained in training, mean over `samplings`."""
    return paired(rewards(rows, -1, samplings), rewards(rows, 0, samplings))


def halfway(ours: Sequence[Row], theirs: Sequence[Row]) -> Estimate:
    """The difference after half the time."""
    return paired(rewards(ours, 1), rewards(theirs, 1))


def primary(rows: Sequence[Row], length: int = PRIMARY) -> Contrast:
    """Raises ValueError until the ways of the contrast are complete."""
    ways = complete(rows, length)
    check_complete(ways, (OURS, *FULL), "wall.json")
    rival = best_full(rows, length)
    what = f"{OURS} minus {rival}, the best full-cache way of the pilot; {length:,} steps, own cache"
    return paired_contrast("[the memory wall](#the-memory-wall)", what, ways[OURS], ways[rival], "own")


def bullet(rows: Sequence[Row]) -> str:
    """The first page's bullet on the memory wall."""
    found = [gained(of_way, "_greedy") for length in LENGTHS for of_way in complete(rows, length).values()]
    established = [gain.mean for gain in found if gain.established]
    below, higher = (sum(sign * gain > 0 for gain in established) for sign in (-1, 1))
    short = LENGTHS[0]
    return f"""*Equal bytes and equal time.* On a CPU no gain of the budget over the pilot's full-cache way is
  established: in walks of {PRIMARY:,} steps {OURS} ends {primary(rows).found} relative to
  {best_full(rows, PRIMARY)}; in walks of {short} steps {primary(rows, short).found} relative to
  {best_full(rows, short)}. Greedily, in {below} of {len(found)} cases (six ways, two lengths) a way is established
  below its start, and in {higher or "none"} above. [The memory wall](#the-memory-wall)"""


def above(rows: Sequence[Row], length: int) -> str:
    """The ways of this length that end above their starts."""
    gains = {way: gained(found, *BOTH) for way, found in complete(rows, length).items()}
    found = ", ".join(way for way, gain in gains.items() if gain.established and gain.mean > 0)
    return f"Established above their starts in walks of {length:,} steps: {found or 'none'}."


def section(rows: Sequence[Row]) -> str:
    contrast, ways = primary(rows), complete(rows, PRIMARY)
    seconds = ways[OURS][0]["seconds"]
    return f"""## The memory wall

Which way earns the most reward from given bytes of KV cache and given time? Walks on a graph, bytes of four rows
with a full cache in bfloat16, {seconds:.0f} seconds of CPU time on one core for rollouts, rewards and updates,
{len(SEEDS)} seeds. The budget is H2O with 120 + 8 keys. *Own* is the reward with the cache of training,
the mean of temperature 1 and greedy; it chose the rate of each way on one pilot seed. Walks of {PRIMARY:,} steps (those
of 512: [appendix](docs/report_appendix.md#the-memory-wall)):

{ways_table(ways)}

*Primary contrast*: {contrast.what}: {contrast.found}. {" ".join(above(rows, length) for length in LENGTHS)}
These gains are at temperature 1: greedily no way is established above its start. No accelerator was measured. The
[first rows](docs/older_studies.md#the-memory-wall) had two rates a way, both at the edge of the grid, on a slower CPU:
there the same contrast was established above 0. The plan was changed after them.
"""


def ways_table(ways: Ways) -> str:
    lines = []
    for way, rows in ways.items():
        minus = ["", ""]
        if way != OURS:
            minus = [signed(halfway(ways[OURS], rows)), signed(difference(ways[OURS], rows, "own"))]
        rollouts, tokens = (mean(row[name] for row in rows) for name in ("rollouts", "tokens"))
        rewards = [f"{mean_of(rows, 'own').mean:.2f}", signed(gained(rows, *BOTH)), signed(gained(rows, "_greedy"))]
        lines.append(
            [f"{way}: {MEANING[way]}", rate_words(rows[0]["learning_rate"]), rows[0]["rows_at_once"]]
            + [f"{rollouts:.0f}", f"{tokens / 1e3:,.0f}", *rewards, *minus]
        )
    columns = ["way", "rate", "rows at once", "rollouts", "thousand tokens", "own", "own minus its start"]
    return table([*columns, "greedy minus its start", f"{OURS} minus it, own, at half time", "at the end"], lines)
