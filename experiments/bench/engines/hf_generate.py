"""The side of experiments/first_run.py that has torch: greedy completions of a checkpoint by transformers.

Takes a JSON object on standard input: model (directory), prompts (token ids of each), new_tokens. Answers one with
completions (token ids of each) and engine. One row at a time, float32, eager attention.
"""

from __future__ import annotations

import json
import sys

import torch
import transformers


@torch.no_grad()
def main() -> None:
    job = json.load(sys.stdin)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.float32, attn_implementation="eager"
    ).eval()
    completions = []
    for prompt in job["prompts"]:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=job["new_tokens"], do_sample=False
        )
        completions.append(output[0, len(prompt) :].tolist())
    engine = f"transformers {transformers.__version__}, torch {torch.__version__}"
    print(json.dumps({"completions": completions, "engine": engine}))


if __name__ == "__main__":
    main()
