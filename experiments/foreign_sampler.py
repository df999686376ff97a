"""Replays in JAX what an engine on torch sampled with its own eviction.

Question   kvpress's DecodingPress evicts keys of SmolLM2-135M-Instruct while transformers samples on torch. Given a
           record of the evictions, how far is log p of a token in our learner from log p in the sampler? And in a dense
           learner?
Command    make smollm2
           python experiments/foreign_sampler.py --kvpress-python PATH --out experiments/results/foreign_sampler.json
Cost       a few minutes of CPU time
Result     experiments/results/foreign_sampler.json

Sampler    Four passages (experiments/lib/passages.py), cut to prompts of unequal length; one row at a time, float32,
           from the whole vocabulary. `DecodingPress` around KnormPress and SnapKVPress: the prompt is kept whole, then
           every --interval tokens each layer and KV head is cut to --budget keys.
Record     Two hooks around the press (bench/engines/kvpress_recorder.py) see which keys remain. The learner gets
           tokens, log-probabilities and these keys through `Trajectory.from_records`. The engine passes positions, as
           transformers' `generate` does: after a compression models of transformers would count fewer keys.
Fields     max_abs_dlogp, mean_abs_dlogp: |log p in the learner - log p in the sampler| over all response tokens, nats.
           dense_: of a learner that sees every key. press "none": the difference of the two frameworks.
           evicted_share: of the keys that the response's queries would see without eviction.

The environment of kvpress, separate from that of smd_jax:

    python3.11 -m venv kvpress && kvpress/bin/pip install torch==2.13.0 kvpress==0.5.5
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from transformers import AutoTokenizer

import smd_jax as smd
from bench.turns import environment
from lib.passages import encoded
from lib.provenance import provenance
from smd_jax.commands.compilation_cache import keep_programs
from smd_jax.monitor.progress import summary_table
from smd_jax.text.prompts import eos_token_id

Press = Literal["knorm", "snapkv", "none"]
LENGTHS = [96, 72, 48, 84]  # tokens of the prompts
ENGINES = Path(__file__).parent / "bench" / "engines"


@dataclass(frozen=True)
class Args:
    """Samples with kvpress on torch, and replays it in JAX."""

    kvpress_python: str  # interpreter with torch and kvpress
    model: Path = Path("runs/smollm2")  # Hugging Face checkpoint directory
    press: tuple[Press, ...] = ("none", "knorm", "snapkv")  # presses; "none" evicts nothing
    budget: tuple[int, ...] = (32, 64)  # keys left by a compression, per layer and KV head
    interval: int = 16  # response tokens between two compressions
    response_tokens: int = 64  # longest response
    temperature: float = 0.8  # of the sampler
    seed: int = 0  # of the draws
    json: bool = False  # print one JSON object a line in place of a table
    out: Path | None = None  # write the rows, with date and command, to this file


@dataclass(frozen=True)
class Row:
    """One press at one budget; differences are in nats."""

    press: str
    budget: int | None
    interval: int | None
    prompts: int
    response_tokens: int
    compressions: int
    evicted_share: float
    max_abs_dlogp: float
    mean_abs_dlogp: float
    dense_max_abs_dlogp: float
    dense_mean_abs_dlogp: float


def runs(args: Args) -> list[dict[str, Any]]:
    """Every press at every budget; "none" has no budget."""
    evicting = [{"press": name, "budget": budget} for name in args.press if name != "none" for budget in args.budget]
    return [{"press": "none", "budget": 0}] * ("none" in args.press) + evicting


def to_trajectory(
    prompts: list[list[int]], rows: list[dict[str, Any]], shape: smd.ModelConfig, end: int | None, args: Args
) -> smd.Trajectory:
    """Turns one run of the engine into a trajectory for our learner.

    Args:
      rows: of the engine, see bench/engines/kvpress_sampler.py.
    """
    responses = [row["tokens"] for row in rows]
    return smd.Trajectory.from_records(
        prompts,
        responses,
        [row["logprobs"] for row in rows],
        terminated=[response[-1] == end for response in responses],
        layers=shape.num_layers,
        kv_heads=shape.num_kv_heads,
        kept=[[(query, kept) for query, kept in row["compressions"]] for row in rows],
        temperature=args.temperature,
        vocab_size=shape.vocab_size,
        response_width=args.response_tokens,  # of all runs, so that the replay compiles once
    )


def evicted_share(trajectory: smd.Trajectory) -> float:
    """The share of hidden keys among those that the response's queries would see without eviction."""
    assert isinstance(trajectory.mask, smd.ShadowMask)
    asking = np.asarray(trajectory.response_mask)[:, None, None]  # [rows, 1, 1, R]

    def seen(mask: smd.ShadowMask) -> np.ndarray:
        """`[rows, layers, kv_heads]` keys that queries of the response saw."""
        visible = np.asarray(mask.to_boolean())[..., trajectory.prompt_width :, :]
        return (visible.sum(-1) * asking).sum(-1)

    return float(1 - seen(trajectory.mask).mean() / seen(trajectory.dense_mask()).mean())


def compare(run: dict[str, Any], trajectory: smd.Trajectory, compressions: int, learner: Any, args: Args) -> Row:
    """Compares our learner's log-probabilities with the record, under the record's mask and with every key.

    Args:
      learner: `(trajectory, mask) -> logprobs [rows, R]`.
    """
    response = np.asarray(trajectory.response_mask)

    def difference(mask: smd.ShadowMask) -> np.ndarray:
        return np.abs(np.asarray(learner(trajectory, mask)) - np.asarray(trajectory.logprobs))[response]

    assert isinstance(trajectory.mask, smd.ShadowMask)
    shadow, dense = difference(trajectory.mask), difference(trajectory.dense_mask())
    evicts = run["press"] != "none"
    return Row(
        press=run["press"],
        budget=run["budget"] if evicts else None,
        interval=args.interval if evicts else None,
        prompts=len(response),
        response_tokens=int(response.sum()),
        compressions=compressions,
        evicted_share=evicted_share(trajectory),
        max_abs_dlogp=float(shadow.max()),
        mean_abs_dlogp=float(shadow.mean()),
        dense_max_abs_dlogp=float(dense.max()),
        dense_mean_abs_dlogp=float(dense.mean()),
    )


def ask(python: str, engine: str, job: dict[str, Any]) -> dict[str, Any]:
    """The JSON that the engine answers to a job.

    Args:
      python: interpreter of its environment. engine: name of its script, without `.py`.

    Raises:
      SystemExit: if the engine fails; its error is on standard error.
    """
    command = [python, str(ENGINES / f"{engine}.py")]
    done = subprocess.run(command, input=json.dumps(job), stdout=subprocess.PIPE, text=True, env=environment())
    if done.returncode:
        raise SystemExit(f"expected {engine}.py to end well; got exit status {done.returncode}")
    return json.loads(done.stdout)


def main(args: Args) -> None:
    keep_programs()
    # On a GPU, float32 products would otherwise be TensorFloat-32.
    jax.config.update("jax_default_matmul_precision", "highest")
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    end = eos_token_id(tokenizer)
    prompts = encoded(tokenizer, LENGTHS)
    job = {"model": str(args.model.resolve()), "prompts": prompts, "new_tokens": args.response_tokens, "end": end}
    job |= {"temperature": args.temperature, "seed": args.seed, "interval": args.interval, "runs": runs(args)}
    answer = ask(args.kvpress_python, "kvpress_sampler", job)

    shape, params = smd.load_checkpoint(args.model)
    model = smd.Decoder(shape)
    replay = jax.jit(smd.replay, static_argnums=0)

    def learner(trajectory: smd.Trajectory, mask: smd.ShadowMask) -> jax.Array:
        return replay(model, params, trajectory, mask).logprobs

    rows = []
    for run, sampled in zip(job["runs"], answer["runs"], strict=True):
        trajectory = to_trajectory(prompts, sampled, shape, end, args)
        compressions = sum(len(row["compressions"]) for row in sampled)
        rows.append(compare(run, trajectory, compressions, learner, args))
        if args.json:
            print(json.dumps(asdict(rows[-1])), flush=True)
    if not args.json:
        columns = ("press", "budget", "tokens", "evicted", "max |Δ log p|", "mean |Δ log p|", "dense learner, mean")
        cells = [
            (r.press, r.budget, r.response_tokens, r.evicted_share)
            + (r.max_abs_dlogp, r.mean_abs_dlogp, r.dense_mean_abs_dlogp)
            for r in rows
        ]
        summary_table("A sampler on torch against our learner", columns, cells)
    if args.out is not None:
        more = {"temperature": args.temperature, "peer_versions": answer["versions"], "rows": [asdict(r) for r in rows]}
        args.out.write_text(json.dumps(provenance() | more, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Args))
