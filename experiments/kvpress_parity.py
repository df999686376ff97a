"""Do our eviction policies keep the keys that kvpress keeps?

Question   SmolLM2-135M-Instruct reads a prompt, and each layer and KV head is cut to --budget keys: by kvpress on
           torch, and by the policy of ours that goes by the same paper. How many keys are the same?
Command    make smollm2
           python experiments/kvpress_parity.py --kvpress-python PATH --out experiments/results/kvpress_parity.json
Cost       seven minutes of CPU time, most of it to compile eleven rollouts
Result     experiments/results/kvpress_parity.json

Prompts    The first --prompt-tokens tokens of four passages (experiments/passages.py), read whole, in float32.
Fields     kept: keys of a layer and head, of ours; kvpress_kept, where it isn't the same number.
           overlap: keys that both kept, as a share of the larger of the two sets; its mean and its least over prompts,
           layers and KV heads. 1.0: the same keys everywhere.
           min_token_overlap: its least, when a key may stand for another one of the same token.
           reason: why the overlap need not be 1.0.
Policies   Those that are one definition, and those that are not, each a second time with the other side's definition:
           `ObservedAttention` and `Budgets` below are policies of a user, in this file.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from transformers import AutoTokenizer

import smd_jax as smd
from passages import PASSAGES, encoded
from peer_engine import ask
from provenance import provenance
from smd_jax.commands.compilation_cache import keep_programs
from smd_jax.eviction import CacheView, EvictionPolicy, ReceivedAttention
from smd_jax.monitor.progress import summary_table

Kept = list[list[list[list[int]]]]  # positions, [prompt][layer][kv_head][…]


@dataclass(frozen=True)
class Args:
    """Compares kept keys with kvpress's."""

    kvpress_python: str  # interpreter with torch and kvpress
    model: Path = Path("runs/smollm2")  # Hugging Face checkpoint directory
    prompt_tokens: int = 192  # of every prompt
    budget: int = 64  # keys left of a prompt, per layer and KV head
    window: int = 8  # queries that SnapKV looks at
    beta: float = 5.0  # steepness of the pyramid: with kvpress's 20, its last layers could not hold the window
    json: bool = False  # print one JSON object a line in place of a table
    out: Path | None = None  # write the rows, with date and command, to this file


@dataclass(frozen=True)
class ObservedAttention(EvictionPolicy):
    """kvpress's: attention that a key received, averaged over the queries that could see it."""

    @property
    def statistics(self) -> tuple[ReceivedAttention]:
        return (ReceivedAttention(),)

    def score(self, view: CacheView) -> jax.Array:
        queries = view.newest[:, None, None] - view.positions + 1
        return view.statistic(ReceivedAttention()) / jnp.maximum(queries, 1)


@dataclass(frozen=True)
class Budgets(EvictionPolicy):
    """Another policy's score, with the budgets of layers given."""

    inner: EvictionPolicy
    sizes: tuple[int, ...]

    @property
    def statistics(self) -> tuple[Any, ...]:
        return self.inner.statistics

    def protected(self, budget: int) -> int:
        return self.inner.protected(budget)

    def layer_budgets(self, budget: int, num_layers: int) -> tuple[int, ...]:
        return self.sizes

    def score(self, view: CacheView) -> jax.Array:
        return self.inner.score(view)


@dataclass(frozen=True)
class Case:
    """A policy of ours, a press of kvpress, and why they need not agree."""

    name: str
    policy: EvictionPolicy
    press: str
    reason: str | None = None


@dataclass(frozen=True)
class Row:
    """One policy, over all prompts."""

    policy: str
    press: str
    prompts: int
    layers: int
    kv_heads: int
    kept: int | list[int]
    kvpress_kept: int | list[int]
    mean_overlap: float
    min_overlap: float
    min_token_overlap: float
    reason: str | None


def cases(args: Args) -> list[Case]:
    """All but the one whose budgets are kvpress's, which are not known before it ran."""
    e = smd.eviction
    ties = "in the first layer, equal tokens have keys of equal norm, and rounding decides which of them stays"
    averaged = "ours sums the attention that a key received, kvpress averages it over the queries that could see it"
    return [
        Case("knorm", e.Knorm(), "knorm", ties),
        Case("snapkv", e.SnapKV(window=args.window), "snapkv"),
        Case("tova, newest protected", e.Protect(e.TOVA(), recent=1), "tova"),
        Case("tova", e.TOVA(), "tova", "kvpress always keeps the newest key; in the paper, and here, it has a score"),
        Case("streaming_llm", e.StreamingLLM(), "streaming_llm"),
        Case("keydiff", e.KeyDiff(), "keydiff"),
        Case("h2o", e.H2O(), "observed_attention", f"{averaged}; and half of our budget goes to the newest keys"),
        Case("h2o, no recent keys", e.H2O(recent=0.0), "observed_attention", averaged),
        Case("observed_attention (of this script)", ObservedAttention(), "observed_attention"),
        Case(
            "pyramid of snapkv",
            e.Pyramid(e.SnapKV(window=args.window), beta=args.beta),
            "pyramid",
            "ours divides what the budget leaves beside the window, and gives every layer the window on top; kvpress "
            "divides the whole budget, and clamps it to the prompt",
        ),
    ]


def our_kept(
    model: smd.Decoder, params: smd.model.Params, prompts: list[list[int]], policy: EvictionPolicy, budget: int
) -> Kept:
    """Keys of the prompts that the first query of the response saw, from the shadow mask."""
    tokens = jnp.asarray(prompts, jnp.int32)
    batch = smd.PromptBatch(tokens=tokens, valid=jnp.ones(tokens.shape, bool))
    # Two tokens: behind the last one nothing is recorded.
    sizes = smd.RolloutConfig(2, budget, 2)
    trajectory = smd.rollout(model, params, batch, jax.random.key(0), policy=policy, config=sizes)
    width = trajectory.prompt_width
    assert isinstance(trajectory.mask, smd.ShadowMask)
    stayed = np.asarray(trajectory.mask.evicted_at)[..., :width] > width
    return [[[np.flatnonzero(head).tolist() for head in layer] for layer in row] for row in stayed]


def overlaps(ours: Kept, theirs: Kept) -> list[float]:
    """What both kept, as a share of the larger set: of every prompt, layer and KV head."""
    found = []
    for prompt in zip(ours, theirs, strict=True):
        for layer in zip(*prompt, strict=True):
            for mine, other in zip(*layer, strict=True):
                # Counters, because what is compared may also be tokens, of which one may come several times.
                found.append((Counter(mine) & Counter(other)).total() / max(len(mine), len(other)))
    return found


def tokens_of(kept: Kept, prompts: list[list[int]]) -> Kept:
    """The tokens of the keys, in the place of their positions."""
    return [
        [[[tokens[position] for position in head] for head in layer] for layer in row]
        for row, tokens in zip(kept, prompts, strict=True)
    ]


def counts(kept: Kept) -> list[int]:
    """Keys kept in each layer, by every head of every prompt.

    Raises:
      ValueError: heads or prompts kept different numbers.
    """
    found = []
    for layer in range(len(kept[0])):
        sizes = sorted({len(head) for prompt in kept for head in prompt[layer]})
        if len(sizes) > 1:
            raise ValueError(f"expected one number of keys in all heads and prompts; got {sizes} in layer {layer}")
        found.append(sizes[0])
    return found


def shortest(numbers: list[int]) -> int | list[int]:
    """One number for all layers, if it is one."""
    return numbers[0] if len(set(numbers)) == 1 else numbers


def compare(case: Case, ours: Kept, theirs: Kept, prompts: list[list[int]]) -> Row:
    shares = overlaps(ours, theirs)
    return Row(
        policy=case.name,
        press=case.press,
        prompts=len(ours),
        layers=len(ours[0]),
        kv_heads=len(ours[0][0]),
        kept=shortest(counts(ours)),
        kvpress_kept=shortest(counts(theirs)),
        mean_overlap=sum(shares) / len(shares),
        min_overlap=min(shares),
        min_token_overlap=min(overlaps(tokens_of(ours, prompts), tokens_of(theirs, prompts))),
        reason=case.reason,
    )


def main(args: Args) -> None:
    keep_programs()
    jax.config.update("jax_default_matmul_precision", "highest")
    prompts = encoded(AutoTokenizer.from_pretrained(args.model), [args.prompt_tokens] * len(PASSAGES))
    wanted = cases(args)
    job = {"model": str(args.model.resolve()), "prompts": prompts, "budget": args.budget, "window": args.window}
    job |= {"beta": args.beta, "presses": sorted({case.press for case in wanted})}
    answer = ask(args.kvpress_python, "kvpress_prefill", job)
    theirs = answer["kept"]
    sizes = tuple(counts(theirs["pyramid"]))
    snapkv = smd.eviction.SnapKV(window=args.window)
    wanted.append(Case("snapkv, kvpress's pyramid of budgets", Budgets(snapkv, sizes), "pyramid"))

    shape, params = smd.load_checkpoint(args.model)
    model = smd.Decoder(shape)
    rows = []
    for case in wanted:
        ours = our_kept(model, params, prompts, case.policy, args.budget)
        rows.append(compare(case, ours, theirs[case.press], prompts))
        if args.json:
            print(json.dumps(asdict(rows[-1])), flush=True)
    if not args.json:
        cells = [(row.policy, row.press, row.mean_overlap, row.min_overlap) for row in rows]
        summary_table("Keys kept of a prompt", ("ours", "kvpress", "mean overlap", "least overlap"), cells)
    if args.out is not None:
        more = {"prompt_tokens": args.prompt_tokens, "budget": args.budget, "window": args.window, "beta": args.beta}
        more |= {"peer_versions": answer["versions"], "rows": [asdict(row) for row in rows]}
        args.out.write_text(json.dumps(provenance() | more, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Args))
