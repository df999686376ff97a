"""Sampling speed of smd_jax, transformers and kvpress on one CPU core.

Question   Tokens per second, time of a decoding step and bytes of the cache, for the same model in every library.
Command    python experiments/bench/rollout.py --hf-python PATH --kvpress-python PATH --out FILE
           python experiments/bench/rollout.py --engine ours --bits 8 4 2 --batch 64 --lengths 512
                                                                (quantised caches)
Cost       twelve minutes on a quiet machine and 8 GB of memory, because all engines stay alive
Result     experiments/results/rollout_cpu.json, rollout_quantised_cpu.json

Model      Qwen2: hidden 256, 4 layers, 8 query and 2 KV heads of 32, FFN 768, vocabulary 1,024, tied embeddings.
Sizes      32 prompts of 64 tokens without padding; 512 and 2,048 new tokens, and no token ends a response. Temperature
           1, whole vocabulary. Budget 128 and buffer 32 in smd_jax and kvpress.
Engines    ours          policy Knorm, the rule of kvpress' press
           ours-h2o      sums the attention that each key receives
           ours-dense    policy Dense
           ours-4bit     with --bits 4: a quantised cache, groups as long as the buffer
           hf            `generate` with its dynamic cache
           kvpress       DecodingPress around KnormPress, 128 keys every 32 steps
           All return log-probabilities of the sampled tokens. The header of each file in experiments/bench/engines/
           lists the settings of its library.
Fairness   Every engine is its own process, pinned to one core. All compile or warm up first, then take turns,
           generation by generation, prefill included. `tokens_per_s` is that of the median turn.
Fields     ms_per_step_early and _late: median over 160 steps around token 400, and around token 4,000 or the end of a
           shorter response.
           cache_bytes: ours, the donated state of the compiled segment program; peers, the keys and values at the end.
           expected_cache_bytes: 2 · layers · KV heads · (budget + buffer) · head_dim · bytes · rows.
           limit_share: share of the rate of bare matrix products, see experiments/bench/limits.py.
           max_abs_dlogp: learner against sampler under the recorded mask, on four rows.

Environments of the peers, separate from that of smd_jax:

    python3.11 -m venv hf      && hf/bin/pip install torch==2.13.0 numpy && hf/bin/pip install transformers==5.23.0
    python3.11 -m venv kvpress && kvpress/bin/pip install torch==2.13.0 numpy && kvpress/bin/pip install kvpress==0.5.5
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the packages bench and lib

from bench.limits import with_limits
from bench.turns import Row, engine, keep, take_turns

Engine = Literal["ours", "ours-h2o", "ours-dense", "hf", "kvpress"]
POLICY = {"ours": "knorm", "ours-h2o": "h2o", "ours-dense": "dense"}


@dataclass(frozen=True)
class Args:
    """Times sampling of several libraries, in turns."""

    engine: tuple[Engine, ...] = ("ours", "ours-h2o", "ours-dense", "hf", "kvpress")
    hf_python: str | None = None  # interpreter with torch and transformers; without one hf is left out
    kvpress_python: str | None = None  # interpreter with kvpress; without one kvpress is left out
    lengths: tuple[int, ...] = (512, 2048)  # new tokens of a row
    bits: tuple[Literal[8, 4, 2], ...] = ()  # add ours with quantised caches
    batch: int = 32  # rows decoded at the same time
    prompt: int = 64  # tokens of a prompt
    budget: int = 128  # keys kept per layer and KV head
    buffer: int = 32  # steps between two compressions
    repeats: int = 3  # measured turns of each
    quick: bool = False  # tiny sizes, as a smoke test
    out: Path | None = None  # write the rows, with date and command, to this file


def commands(args: Args, new_tokens: int) -> Iterator[list[str]]:
    """Command lines of the selected engines that have an interpreter."""
    sizes: Row = {"batch": args.batch, "prompt": args.prompt, "new_tokens": new_tokens, "budget": args.budget}
    sizes |= {"buffer": args.buffer, "repeats": args.repeats}
    peers = {"hf": args.hf_python, "kvpress": args.kvpress_python}
    for name in args.engine:
        if name in POLICY:
            for bits in (None, *args.bits):
                yield engine("smd_rollout", sizes | {"policy": POLICY[name], "bits": bits})
        elif (python := peers[name]) is not None:
            yield engine("hf_rollout", sizes | {"kvpress": name == "kvpress"}, python)


def main(args: Args) -> None:
    if args.quick:
        args = replace(args, lengths=(48,), batch=4, prompt=8, budget=16, buffer=8, repeats=1)
    found = []
    for new_tokens in args.lengths:
        product = engine("product", {"rows": args.batch, "repeats": args.repeats, "backward": False})
        found += with_limits(take_turns(args.repeats, [*commands(args, new_tokens), product]))
    keep(found, args.out)


if __name__ == "__main__":
    main(tyro.cli(Args))
