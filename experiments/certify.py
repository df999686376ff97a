"""Does `smd-certify` name the cause of a mismatch between sampler and learner?

Question   A cause is injected into a rollout of SmolLM2: is it named, and is nothing named on a healthy record?
Command    make smollm2 && make study NAME=certify          (python experiments/certify.py --model DIR)
Set-up     Four prompts of different lengths, 64 sampled tokens, SnapKV with 48 + 16 keys, temperature 1, float32. The
           "sampler" of an injected cause is our replay under the altered condition; healthy records are rollouts.
Seeds      0, 1, 2: other prompts, other draws.
Result     experiments/results/certify.json: 42 of 42 injected causes are named, and nothing on the 6 healthy records.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import smd_jax as smd
from lib.files import RESULTS
from lib.provenance import provenance
from smd_jax.certify.causes import CAUSES, Conditions, PromptFacts, prompt_facts
from smd_jax.certify.record import Record, arrays_of, check_record
from smd_jax.certify.replay import replay
from smd_jax.certify.verdict import Models, certify

ROWS = 4  # prompts of a record
QUESTIONS = (
    "Name three rivers.",
    "Explain in two sentences why the sky looks blue at noon and red in the evening.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle and decides to answer it.",
    "What is 17 times 12?",
    "List the planets from the sun outwards, with one fact about each of them that a child would enjoy hearing.",
    "Give advice to somebody who starts to learn the violin at forty.",
    "Translate 'good morning' into four languages.",
    "Describe how bread is made, from the grain on the field to the loaf on the table, step by step and in order.",
    "Why do cats purr?",
    "Summarise the rules of chess for a beginner.",
    "Which is heavier, a kilogram of iron or a kilogram of feathers, and why do people often get it wrong?",
    "Write a haiku about rain.",
)


@dataclass(frozen=True)
class Args:
    """Injects causes into rollouts, and counts how often each is named."""

    model: Path = Path("runs/smollm2")
    seeds: tuple[int, ...] = (0, 1, 2)
    max_new_tokens: int = 64
    out: Path = RESULTS / "certify.json"


@dataclass(frozen=True)
class Injected:
    """A record with an injected cause. `cause`: the name that a report should give; None on a healthy record."""

    what: str
    cause: str | None
    record: Record


def main(args: Args) -> None:
    config, params = smd.load_checkpoint(args.model)
    model = smd.Decoder(dataclasses.replace(config, dtype="float32"))
    tokenizer = smd.text.open_tokenizer(args.model)
    low = smd.Decoder(dataclasses.replace(config, dtype="bfloat16"))
    models = Models(model, params, (low, params), "bfloat16")
    facts = prompt_facts(tokenizer)
    rows = []
    for seed in args.seeds:
        for injected in records(models, tokenizer, facts, seed, args.max_new_tokens):
            verdict = certify(models, injected.record, facts)
            named = None if verdict.cause is None else verdict.cause.cause
            row = {
                "seed": seed,
                "injected": injected.what,
                "expected": injected.cause,
                "named": named,
                "said": None if verdict.cause is None else verdict.cause.detail,
                "right": named == injected.cause and verdict.is_one_policy == (injected.cause is None),
                "mean_abs": verdict.mean_abs,
                "max_abs": verdict.max_abs,
                "kind": verdict.kind,
            }
            print(json.dumps(row), flush=True)
            rows.append(row)
            save(args, rows)
    print(json.dumps(summary_of(rows)))


def save(args: Args, rows: list[dict[str, Any]]) -> None:
    """Writes the rows so far: an interrupted run leaves those that it finished."""
    settings = {"seeds": args.seeds, "max_new_tokens": args.max_new_tokens, "prompts": ROWS, "budget": 48, "buffer": 16}
    found = {**provenance(), "settings": settings, "summary": summary_of(rows), "rows": rows}
    args.out.write_text(json.dumps(found, indent=1) + "\n")


def summary_of(rows: list[dict[str, Any]]) -> dict[str, int]:
    faulty = [row for row in rows if row["expected"] is not None]
    healthy = [row for row in rows if row["expected"] is None]
    return {
        "named_right": sum(row["right"] for row in faulty),
        "injected": len(faulty),
        "healthy_without_a_name": sum(row["right"] for row in healthy),
        "healthy": len(healthy),
    }


def records(models: Models, tokenizer: Any, facts: PromptFacts, seed: int, length: int) -> Iterator[Injected]:
    """Records of one seed: three healthy ones, then one for every injected cause."""
    trajectory = sampled(models, tokenizer, seed, length, smd.SamplingConfig())
    arrays = arrays_of(trajectory)
    shape = models.model.shape
    check = lambda arrays: check_record(arrays, shape.num_layers, shape.num_kv_heads, shape.vocab_size)  # noqa: E731
    healthy = check(arrays)
    yield Injected("none", None, healthy)
    with_support = arrays_of(sampled(models, tokenizer, seed, length, smd.SamplingConfig(top_p=0.9)))
    yield Injected("none, with top_p 0.9 and its recorded support", None, check(with_support))

    stated = Conditions.of(healthy)

    def under(conditions: Conditions, params: Any = None, model: Any = None, temperature: float = 1.0) -> Record:
        """The record with the log-probabilities of a sampler under these conditions."""
        logprobs = sampler_logprobs(models, healthy, conditions, params, model, temperature)
        return check({**arrays, "logprobs": logprobs})

    for name in ("mask ignored", "positions shifted", "positions of cache slots"):
        yield Injected(name, name, under(case_of(name, healthy, facts)))
    yield Injected("padding attended", "padding attended", under(case_of("padding attended", healthy, facts, seed % 2)))
    late = np.where(arrays["evicted_at"] < healthy.lengths[:, None, None, None], arrays["evicted_at"] + 1, 2**30)
    yield Injected("evicted_at one too late", "mask off by one", check({**arrays, "evicted_at": late}))
    yield Injected("temperature 0.7", "temperature", under(stated, temperature=0.7))
    without = {name: array for name, array in with_support.items() if not name.startswith("support")}
    yield Injected("top_p 0.9 without its support", "sampling support", check(without))
    yield Injected("weights of an earlier step", "stale weights", under(stated, params=perturbed(models.params, seed)))
    yield Injected("one more BOS", "BOS token", under(case_of("BOS token", healthy, facts)))
    yield Injected("no system message", "chat template", under(case_of("chat template", healthy, facts)))
    swapped = arrays["evicted_at"].copy()
    one, other = np.random.default_rng(seed).choice(shape.num_layers, 2, replace=False)
    swapped[:, [one, other]] = swapped[:, [other, one]]
    yield Injected("two layers swapped", "layers or heads swapped", check({**arrays, "evicted_at": swapped}))
    heads = arrays["evicted_at"][:, :, ::-1]
    yield Injected("heads in reverse", "layers or heads swapped", check({**arrays, "evicted_at": heads}))
    yield Injected("bfloat16 sampler", "dtype", under(stated, model=models.other[0] if models.other else None))
    moved = np.roll(arrays["logprobs"], 1, axis=1)
    yield Injected("log-probabilities of the previous token", "tokens misaligned", check({**arrays, "logprobs": moved}))


def sampled(models: Models, tokenizer: Any, seed: int, length: int, sampling: smd.SamplingConfig) -> smd.Trajectory:
    """A rollout of four prompts."""
    questions = QUESTIONS[ROWS * seed % len(QUESTIONS) :][:ROWS]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in questions
    ]
    sizes = smd.RolloutConfig(max_new_tokens=length, budget=48, buffer=16, sampling=sampling)
    prompts = smd.encode_prompts(tokenizer, texts)
    policy = smd.eviction.SnapKV(window=8)
    return smd.rollout(models.model, models.params, prompts, jax.random.key(seed), policy=policy, config=sizes)


def case_of(name: str, record: Record, facts: PromptFacts, number: int = 0) -> Conditions:
    """The conditions of a cause's n-th case."""
    (cause,) = (cause for cause in CAUSES if cause.name == name)
    return list(cause.cases(record, facts))[number].conditions


def sampler_logprobs(
    models: Models, record: Record, conditions: Conditions, params: Any, model: Any, temperature: float
) -> np.ndarray:
    columns, inside = record.response_columns
    params = models.params if params is None else params
    replayed = replay(models.model if model is None else model, params, conditions, columns.shape[1])
    response = np.take_along_axis(record.tokens, columns, axis=1)[..., None]
    logprobs = np.asarray(replayed.logprobs(response, [temperature])[..., 0, 0])
    out = record.logprobs.copy()
    for row in range(len(out)):
        out[row, columns[row, inside[row]]] = logprobs[row, inside[row]]
    return out


def perturbed(params: Any, seed: int) -> Any:
    """Parameters as some optimizer steps would leave them: every matrix moved by 1 % of its size."""
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(100 + seed), len(leaves))
    move: Callable[[Any, Any], Any] = lambda x, key: x + 0.01 * jnp.std(x) * jax.random.normal(key, x.shape, x.dtype)  # noqa: E731
    return jax.tree.unflatten(treedef, [move(x, key) for x, key in zip(leaves, keys, strict=True)])


if __name__ == "__main__":
    main(tyro.cli(Args))
