"""Which keys presses of kvpress keep of a prompt, per layer and KV head.

Reads a job from standard input, as JSON:

    {"model": directory, "prompts": [[id, …], …], "budget": keys, "window": queries that SnapKV looks at,
     "beta": steepness of the pyramid, "presses": [name, …]}

and writes `{"versions": {…}, "kept": {name: [kept of each prompt]}}`, `kept[layer][kv_head]` positions of keys, to
standard output. float32; attention weights are those of transformers' eager implementation for the press that needs
them, and made again by the press for the others.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from typing import Any

import torch
from kvpress import (
    BasePress,
    KeyDiffPress,
    KnormPress,
    ObservedAttentionPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from kvpress_recorder import Kept, Recorder
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

EAGER = ("observed_attention",)  # presses that read the model's attention weights


def press_of(name: str, tokens: int, job: dict[str, Any]) -> BasePress:
    # kvpress keeps `int(tokens * (1 - ratio))` keys: half a key more, and rounding can't take one away.
    ratio = 1 - (job["budget"] + 0.5) / tokens
    window = job["window"]
    return {
        "knorm": lambda: KnormPress(ratio),
        "snapkv": lambda: SnapKVPress(ratio, window_size=window),
        "tova": lambda: TOVAPress(ratio),
        "streaming_llm": lambda: StreamingLLMPress(ratio),
        "keydiff": lambda: KeyDiffPress(ratio),
        "observed_attention": lambda: ObservedAttentionPress(ratio),
        # The pyramid rounds a share of the tokens; half a key more would be a key more there.
        "pyramid": lambda: PyramidKVPress(1 - job["budget"] / tokens, window_size=window, beta=job["beta"]),
    }[name]()


@torch.no_grad()
def kept(model: PreTrainedModel, prompt: list[int], press: BasePress) -> Kept:
    recorder = Recorder(model)
    positions = torch.arange(len(prompt))
    with recorder.following(press, model):
        model(
            torch.tensor([prompt]),
            past_key_values=DynamicCache(config=model.config),
            position_ids=positions[None],
            cache_position=positions,
            logits_to_keep=1,
        )
    [(_, found)] = recorder.compressions
    return found


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints: standard output carries the answer alone
    job = json.load(sys.stdin)
    torch.set_num_threads(1)
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    answer = {}
    for name in job["presses"]:
        model.set_attn_implementation("eager" if name in EAGER else "sdpa")
        answer[name] = [kept(model, prompt, press_of(name, len(prompt), job)) for prompt in job["prompts"]]
    versions = {name: version(name) for name in ("kvpress", "torch", "transformers")}
    json.dump({"versions": versions, "kept": answer}, out)
    out.close()


if __name__ == "__main__":
    main()
