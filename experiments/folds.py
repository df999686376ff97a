"""Are conversations of SmolLM2 exact that are folded twice, in the cache and in the text, and what do they cost?

Question   Three turns about three reports. In the cache: the keys of a report go when the turn about it has ended. In
           the text: after each turn the policy writes a summary, and goes on in a new context. Does the learner replay
           every token, without a budget and with one, and how long do sampling and replay take?
Command    make smollm2 && python experiments/folds.py --model runs/smollm2
Set-up     Four conversations, float32, temperature 0.5, a buffer of 16; a budget of 128 keys under SnapKV, or none.
           Times are those of a second call, without compilation; CPU seconds are those of all threads.
Wrong      `wrong_max_abs`: the replay with every key of a row, as if nothing had been folded or evicted. It is right
           where nothing was: in the text without a budget.
Result     experiments/results/folds.json, a row for each way: replay off by 5.7e-5 nats at most; with every key by 2.0
           to 5.3, where keys were folded or evicted.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

import smd_jax as smd
from lib.files import RESULTS
from lib.provenance import provenance
from smd_jax.commands.compilation_cache import cache_programs
from smd_jax.devices.sharding import make_mesh
from smd_jax.environments.processes import EnvironmentsHere
from smd_jax.eviction.policies import Dense, SnapKV
from smd_jax.eviction.wrappers import OnTokens
from smd_jax.message.sampling import SamplingConfig
from smd_jax.message.spans import TokenSpans
from smd_jax.message.trajectory import Trajectory
from smd_jax.metrics import evicted_share
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.conversation_loop import ConversationConfig
from smd_jax.text.hugging_face import AutoTokenizer
from smd_jax.train.conversations import ConversationRollouts, EnvironmentConfig, TextCompaction
from smd_jax.train.rollouts import Sampled

TURNS, GROUP, BUDGET, ROOM = 3, 2, 128, 320
# <issue_start> and <issue_closed> are around a report; a turn is between <|im_start|> and <|im_end|>.
SPANS = TokenSpans(open=8, close=10, summary=(1, 2))
REPORTS = {
    "harbour": (
        "The crane at quay four stood still from six to nine, because a cable had worn through. "
        "Two ships waited outside.",
        "At noon the wind turned north and rose to seven. The pilots stopped, and the ferry came in an hour late.",
        "By evening the cable was replaced. The harbour master asked for a spare one, and for a check every month.",
    ),
    "bakery": (
        "The oven on the left reached only two hundred degrees. "
        "Rye loaves stayed pale, and forty of them were not sold.",
        "A new flour arrived from the mill. It takes more water, and the dough has to rest for twenty minutes longer.",
        "The oven was repaired in the afternoon. The baker wants to keep the new flour, but only for the white bread.",
    ),
}


@dataclass(frozen=True)
class Args:
    """Samples folded conversations of SmolLM2 and replays them."""

    model: Path = Path("runs/smollm2")
    out: Path = RESULTS / "folds.json"


class Reports:
    """Hands out a report at a time, and asks for one sentence about it."""

    def reset(self, row: dict[str, Any]) -> str:
        self._reports, self._turn = REPORTS[row["prompt"]], 0
        return self._ask()

    def step(self, text: str) -> tuple[str, float, bool]:
        self._turn += 1
        return ("", 0.0, True) if self._turn == TURNS else (self._ask(), 0.0, False)

    def _ask(self) -> str:
        report = f"<issue_start>{self._reports[self._turn]}<issue_closed>"
        return f"A report:\n{report}\nSay in one short sentence what happened."


def main(args: Args) -> None:
    cache_programs()
    config, params = smd.load_checkpoint(args.model)
    model = smd.Decoder(dataclasses.replace(config, dtype="float32"))
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    compaction = TextCompaction(contexts=TURNS, after_tokens=1, heading="Summary so far: ")
    rows = list[dict[str, Any]]()
    for name, policy, contexts in (
        ("kept in the cache", OnTokens(SPANS), None),
        ("kept in the cache, under a budget", OnTokens(SPANS, inner=SnapKV()), None),
        ("kept in the text", Dense(), compaction),
        ("kept in the text, under a budget", SnapKV(), compaction),
    ):
        environment = EnvironmentConfig(
            environments=EnvironmentsHere(Reports),
            conversation=ConversationConfig(turns=TURNS),
            compaction=contexts,
        )
        width = 128 if contexts is None else 320
        sizes = RolloutConfig(
            max_new_tokens=ROOM,
            budget=BUDGET,
            buffer=16,
            eos_token_id=2,
            pad_token_id=2,
            sampling=SamplingConfig(temperature=0.5),
        )
        rollouts = ConversationRollouts(model, tokenizer, make_mesh(1, 1, 1), width, environment=environment)
        rows.append({"way": name, **measured(rollouts, params, policy, sizes)})
        print(json.dumps(rows[-1]), flush=True)
        args.out.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


def measured(rollouts: ConversationRollouts, params: Any, policy: Any, sizes: RolloutConfig) -> dict[str, Any]:
    """One row of the result."""
    key, questions = jax.random.key(0), [{"prompt": name} for name in REPORTS]

    def sample() -> Sampled:
        return rollouts.sample(params, key, questions, policy, sizes, GROUP)

    sample()
    before = time.process_time()
    batch = sample()
    sampling = time.process_time() - before
    trajectory = batch.trajectory
    difference, seconds, replaying = gap(rollouts.model, params, trajectory)
    wrong, *_ = gap(rollouts.model, params, trajectory.replace(mask=trajectory.dense_mask()))
    return {
        "turns": [len(each.turns) for each in batch.conversations],
        "contexts": [max(len(each.contexts), 1) for each in batch.conversations],
        "endings": [each.ending for each in batch.conversations],
        "tokens_sampled": int(trajectory.lengths().sum()),
        "tokens_of_all_contexts": int(trajectory.valid.sum()),
        "evicted_share": float(evicted_share(trajectory.mask.evicted_at, trajectory.valid)),
        "max_abs": difference,
        "wrong_max_abs": wrong,
        "seconds_sampling": round(batch.measured["time/rollout"], 2),
        "cpu_seconds_sampling": round(sampling, 2),
        "seconds_replay": round(seconds, 2),
        "cpu_seconds_replay": round(replaying, 2),
    }


_replay = jax.jit(smd.replay, static_argnums=0)


def gap(model: Any, params: Any, trajectory: Trajectory) -> tuple[float, float, float]:
    """The largest |log p_learner - log p_sampler| of a sampled token; seconds and CPU seconds of the replay."""
    jax.block_until_ready(_replay(model, params, trajectory))
    began, before = time.perf_counter(), time.process_time()
    replayed = jax.block_until_ready(_replay(model, params, trajectory))
    seconds, cpu = time.perf_counter() - began, time.process_time() - before
    apart = np.abs(np.asarray(replayed.logprobs) - np.asarray(trajectory.logprobs))
    return float(apart[np.asarray(trajectory.response_mask)].max()), seconds, cpu


if __name__ == "__main__":
    main(tyro.cli(Args))
