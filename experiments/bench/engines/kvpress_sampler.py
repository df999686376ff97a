"""Samples with transformers on torch under kvpress's DecodingPress, and reports what a learner needs to replay it.

Reads a job from standard input, as JSON:

    {"model": directory, "prompts": [[id, …], …], "new_tokens": n, "temperature": t, "seed": s, "end": id,
     "interval": steps between two compressions, "runs": [{"press": "knorm" | "snapkv" | "none", "budget": keys}, …]}

and writes one object to standard output, with a list of rows for every run:

    {"versions": {…}, "runs": [[{"tokens": […], "logprobs": […], "compressions": [[query, kept], …]}, …], …]}

`tokens` are those of the response, `kept[layer][kv_head]` positions of keys. One row at a time, because presses score
padding like any other key. float32, attention by `scaled_dot_product_attention`; the positions of tokens are given to
the model, because those that it would find by itself count the keys of the cache, which a press has made fewer.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from typing import Any

import torch
from kvpress import BasePress, DecodingPress, KnormPress, SnapKVPress
from kvpress_recorder import Recorder
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

WINDOW = 8  # queries that SnapKV looks at


def press_of(name: str, budget: int, interval: int) -> BasePress | None:
    if name == "none":
        return None
    base = {"knorm": KnormPress(), "snapkv": SnapKVPress(window_size=WINDOW)}[name]
    # SnapKV scores by the newest queries, made again from hidden states that the press keeps.
    return DecodingPress(
        base_press=base, compression_interval=interval, target_size=budget, hidden_states_buffer_size=interval
    )


@torch.no_grad()
def sample(model: PreTrainedModel, prompt: list[int], press: BasePress | None, job: dict[str, Any]) -> dict[str, Any]:
    """One row."""
    recorder = Recorder(model)
    cache = DynamicCache(config=model.config)
    tokens, logprobs = [], []
    ids, first = prompt, 0
    with recorder.following(press, model):
        while len(tokens) < job["new_tokens"]:
            positions = torch.arange(first, first + len(ids))
            out = model(
                torch.tensor([ids]), past_key_values=cache, position_ids=positions[None], cache_position=positions
            )
            known = torch.log_softmax(out.logits[0, -1] / job["temperature"], dim=-1)
            token = int(torch.multinomial(known.exp(), 1))
            tokens.append(token)
            logprobs.append(known[token].item())
            if token == job["end"]:
                break
            ids, first = [token], first + len(ids)
    return {"tokens": tokens, "logprobs": logprobs, "compressions": recorder.compressions}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard error: standard output carries only the answer
    job = json.load(sys.stdin)
    torch.set_num_threads(1)
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="sdpa").eval()
    runs = []
    for run in job["runs"]:
        torch.manual_seed(job["seed"])  # every run draws from the same numbers
        rows = []
        for prompt in job["prompts"]:
            rows.append(sample(model, prompt, press_of(run["press"], run["budget"], job["interval"]), job))
            print(run, len(rows[-1]["tokens"]), "tokens", file=sys.stderr)
        runs.append(rows)
    versions = {name: version(name) for name in ("kvpress", "torch", "transformers")}
    json.dump({"versions": versions, "runs": runs}, out)
    out.close()


if __name__ == "__main__":
    main()
