"""Does TriAttention keep the keys that its formula says on a real model, and is a record in TensorRT-LLM's form exact?

Question   On SmolLM2: are the kept keys those of a second computation in numpy, and does the learner replay the rounds
           of an engine that compacts its cache in place?
Command    make smollm2 && python experiments/engine_records.py --model runs/smollm2
Set-up     One prompt, pinned as in the engine, 96 sampled tokens, 32 kept keys a layer and KV head, a round every 16
           tokens, float32. Query centers of four other texts. The rounds hold ordinals of the compacted cache.
Result     experiments/results/engine_records.json: 270 of 270 kept sets, the same mask, replay off by 2.7e-5 nats at
           most; a dense learner by 1.1.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

import smd_jax as smd
from lib.provenance import provenance
from smd_jax.message.masks import positions
from smd_jax.model.attention import AttentionConfig
from smd_jax.model.teacher_forced import layer_masks
from smd_jax.text.hugging_face import AutoTokenizer

RESULTS = Path(__file__).resolve().parent / "results"
KEEP, BETA, TOKENS = 32, 16, 96
QUESTION = "Explain in three sentences why the sky looks blue at noon and red in the evening."
TEXTS = (
    "Write a short story about a lighthouse keeper who finds a letter in a bottle and decides to answer it.",
    "List the planets from the sun outwards, with one fact about each of them that a child would enjoy hearing.",
    "Describe how bread is made, from the grain on the field to the loaf on the table, step by step and in order.",
    "Give advice to somebody who starts to learn the violin at forty, and a plan for the first six months.",
)


@dataclass(frozen=True)
class Args:
    """Compares TriAttention's kept keys with numpy, and replays a record in TensorRT-LLM's form."""

    model: Path = Path("runs/smollm2")
    out: Path = RESULTS / "engine_records.json"


@dataclass(frozen=True)
class Keys:
    """Attention that hands out the keys as they are cached."""

    attention: AttentionConfig

    def __call__(self, q: Any, k: Any, v: Any, layer: Any, /, sinks: Any = None) -> tuple[Any, Any]:
        return self.attention.attend(q, k, v, layer, sinks), k


def main(args: Args) -> None:
    config, params = smd.load_checkpoint(args.model)
    model = smd.Decoder(dataclasses.replace(config, dtype="float32"))
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    prompts = prompt_batch(tokenizer, (QUESTION,))
    width = prompts.tokens.shape[1]
    texts = prompt_batch(tokenizer, TEXTS)
    centers = smd.model.measure_query_centers(model, params, texts.tokens, texts.valid)
    policy = smd.eviction.TriAttention(centers, sinks=width)
    config_of_rollout = smd.RolloutConfig(max_new_tokens=TOKENS, budget=width + KEEP, buffer=BETA)
    ours = smd.rollout(model, params, prompts, jax.random.key(0), policy=policy, config=config_of_rollout)
    evicted_at = np.asarray(ours.mask.evicted_at)[0]
    agreement = compare(keys_of(model, params, ours), evicted_at, centers, width)
    rounds = rounds_of(evicted_at, width)
    tokens = np.asarray(ours.tokens)
    texts_of_row = [tokens[0, :width]], [tokens[0, width:]]
    sizes: Any = {"layers": config.num_layers, "kv_heads": config.num_kv_heads}
    theirs = smd.Trajectory.from_records(
        *texts_of_row,
        list(np.asarray(ours.logprobs)),
        terminated=[False],
        evicted_at=smd.message.tensorrt_llm_evictions(*texts_of_row, [rounds], mode="per_layer_perhead", **sizes),
        **sizes,
    )
    row = {
        **agreement,
        "rounds": len(rounds),
        "same_mask": bool((np.asarray(theirs.mask.evicted_at)[0] == evicted_at).all()),
        "replay_max_abs": gap(model, params, theirs),
        "dense_max_abs": gap(model, params, theirs.replace(mask=theirs.dense_mask())),
    }
    print(json.dumps(row))
    args.out.write_text(json.dumps({**provenance(), **row}, indent=1) + "\n")


def prompt_batch(tokenizer: Any, texts: tuple[str, ...]) -> smd.PromptBatch:
    rows = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in texts
    ]
    return smd.encode_prompts(tokenizer, rows)


def keys_of(model: smd.Decoder, params: Any, trajectory: smd.Trajectory) -> np.ndarray:
    """`[layers, kv_heads, T, head_dim]` of one row, replayed under its mask."""
    masks = layer_masks(model.shape, trajectory.tokens, trajectory.mask)
    places = model.encode_positions(positions(trajectory.valid))
    _, keys = model.hidden(params, trajectory.tokens, places, Keys(model.shape.attention), masks)
    return np.stack([np.asarray(k[0], np.float64) for k in keys])


def scores(keys: np.ndarray, places: np.ndarray, now: int, centers: Any, layer: int, heads: range) -> np.ndarray:
    """TriAttention's scores of one KV head, from keys before RoPE and every distance by itself."""
    half, frequencies = keys.shape[-1] // 2, centers.frequencies[layer]
    plain = (keys[:, :half] + 1j * keys[:, half:]) * np.exp(-1j * places[:, None] * frequencies)
    offsets = 2.0 ** np.arange(17)
    angles = (now - places)[:, None, None] + offsets[None, :, None]
    turn = np.exp(1j * angles * frequencies).mean(axis=1)
    of_heads = []
    for head in heads:
        mean, length = centers.mean[layer, head].astype(complex), centers.length[layer, head]
        found = (mean * plain.conj() * turn).real.sum(axis=1) + ((length - abs(mean)) * abs(plain)).sum(axis=1)
        of_heads.append((found - found.mean()) / found.std())
    return np.max(of_heads, axis=0)


def compare(keys: np.ndarray, evicted_at: np.ndarray, centers: Any, width: int) -> dict[str, Any]:
    """How many kept sets are those of numpy; for the others, by how much the scores of exchanged keys differ."""
    layers, kv_heads, total = evicted_at.shape
    group = centers.mean.shape[1] // kv_heads
    sets, same, closest = 0, 0, 0.0
    for layer, head in np.ndindex(layers, kv_heads):
        for now in range(width + BETA, total, BETA):
            places = np.flatnonzero(evicted_at[layer, head, :now] >= now)
            places = places[places >= width]
            if len(places) <= KEEP:
                continue
            heads = range(head * group, (head + 1) * group)
            found = scores(keys[layer, head, places], places, now, centers, layer, heads)
            expected = set(places[np.argsort(-found, kind="stable")[:KEEP]])
            kept = set(places[evicted_at[layer, head, places] > now])
            sets += 1
            same += expected == kept
            for one, other in zip(sorted(expected - kept), sorted(kept - expected), strict=True):
                closest = max(closest, *(abs(found[places == x][0] - np.sort(found)[-KEEP]) for x in (one, other)))
    return {"kept_sets": sets, "kept_sets_as_numpy": same, "largest_score_gap_of_exchanged_keys": closest}


def rounds_of(evicted_at: np.ndarray, width: int) -> list[smd.message.Round]:
    """What the engine would report: ordinals in caches that were compacted before."""
    flat = evicted_at.reshape(-1, evicted_at.shape[-1])
    cache = np.tile(np.arange(width), (len(flat), 1))
    rounds = []
    for end in range(width + BETA, flat.shape[1], BETA):
        cache = np.concatenate([cache, np.tile(np.arange(end - BETA, end), (len(flat), 1))], axis=1)
        stays = np.take_along_axis(flat, cache, axis=1) > end
        if not stays.all():
            rounds.append(smd.message.Round(cache.shape[1], np.stack([np.flatnonzero(x)[width:] for x in stays])))
            cache = cache[stays].reshape(len(cache), -1)
    return rounds


def gap(model: smd.Decoder, params: Any, trajectory: smd.Trajectory) -> float:
    replayed = jax.jit(smd.replay, static_argnums=0)(model, params, trajectory)
    return float(np.abs(replayed.logprobs - trajectory.logprobs).max())


if __name__ == "__main__":
    main(tyro.cli(Args))
