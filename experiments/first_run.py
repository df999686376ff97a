"""A first run of a real model: trained by one command, stopped by Ctrl-C, continued, exported, read by transformers.

Question   Does reward rise when SmolLM2-135M-Instruct learns sums of two digits for 20 rollouts on a CPU? Does the run
           go on where Ctrl-C stopped it? Does transformers on torch give the same greedy text from what was exported?
Command    make smollm2
           python experiments/first_run.py --torch-python PATH --out experiments/results/first_run.json
Cost       ten minutes on two cores
Result     experiments/results/first_run.json: a row a rollout, and what the end looked like. reasoning-gym's reward of
           a wrong or wordy answer is small but not 0 (0.01, or the share of the text that the answer makes up), so part
           of a gain is shorter answers: the mean length stands beside it.

The run itself is `smd-train grpo --preset sums --model runs/smollm2`, then `smd-train --config …/config.yaml --resume`.
--torch-python is an interpreter of an environment of its own, with torch and transformers.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from transformers import AutoTokenizer

import smd_jax as smd
from peer_engine import ask
from provenance import provenance
from smd_jax.message.sampling import SamplingConfig
from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.monitor.progress import summary_table
from smd_jax.tasks.reasoning_gym import ReasoningGymTask
from smd_jax.tasks.task import prompt_text
from smd_jax.text.prompts import eos_token_id, pad_token_id

TRAIN = [sys.executable, "-m", "smd_jax.train"]
NEW_TOKENS = 32
FIELDS = {
    "reward": "reward",
    "mean_length": "completions/mean_length",
    "max_abs_dlogp": "sampling/sampling_logp_difference/max",
    "mean_abs_dlogp": "sampling/sampling_logp_difference/mean",
}


@dataclass(frozen=True)
class Args:
    """Trains, stops, goes on, exports, and compares greedy text."""

    torch_python: str  # interpreter with torch and transformers
    model: Path = Path("runs/smollm2")  # Hugging Face checkpoint directory
    run: Path = Path("runs/first_run")  # of the run; must not be there yet
    stop_after: int = 8  # rollouts, after which it gets the signal of Ctrl-C
    prompts: int = 16  # of the comparison of greedy text
    out: Path | None = None  # write what came of it, with date and command, to this file


def main(args: Args) -> None:
    status = stopped_run(args)
    done = len(read_metrics(args.run / "metrics.jsonl"))
    subprocess.run([*TRAIN, "--config", str(args.run / "config.yaml"), "--resume"], check=True)
    history = read_metrics(args.run / "metrics.jsonl")
    compared = greedy_texts(args)
    end = {
        "status_of_ctrl_c": status,
        "rollouts_before_ctrl_c": done,
        "prompts_compared": args.prompts,
        "same_greedy_text": compared["same"],
        "engine": compared["engine"],
    }
    curve = [{"step": row["step"]} | {name: row[metric] for name, metric in FIELDS.items()} for row in history]
    summary_table("rollouts", ["step", *FIELDS], [[str(row["step"]), *(row[name] for name in FIELDS)] for row in curve])
    summary_table("end", ["", ""], [(name, str(value)) for name, value in end.items()])
    if args.out is not None:
        lines = ",\n".join(json.dumps(row) for row in curve)
        head = json.dumps(provenance() | end)[1:-1]
        args.out.write_text(f'{{{head}, "curve": [\n{lines}\n]}}\n', encoding="utf-8")


def stopped_run(args: Args) -> int:
    """Starts the run, sends the signal of Ctrl-C after some rollouts, and gives the exit status."""
    command = [*TRAIN, "grpo", "--preset", "sums", "--model", str(args.model), "--output-dir", str(args.run)]
    metrics = args.run / "metrics.jsonl"
    with subprocess.Popen(command) as process:
        while process.poll() is None and (not metrics.exists() or len(read_metrics(metrics)) < args.stop_after):
            time.sleep(1)
        process.send_signal(signal.SIGINT)
    return process.returncode


def greedy_texts(args: Args) -> dict[str, Any]:
    """How many prompts that were not trained on have the same greedy completion, token by token, here and on torch."""
    exported = args.run / "model"
    tokenizer = AutoTokenizer.from_pretrained(exported, trust_remote_code=False)
    config, params = smd.load_checkpoint(exported)
    parameters = (("min_terms", 2), ("max_terms", 2), ("min_digits", 1), ("max_digits", 1))
    task = ReasoningGymTask("chain_sum", 1_000_000, args.prompts, parameters)
    texts = [prompt_text(task[i], tokenizer) for i in range(args.prompts)]
    prompts = smd.encode_prompts(tokenizer, texts)
    sizes = smd.RolloutConfig(
        NEW_TOKENS,
        budget=256,
        buffer=8,
        eos_token_id=eos_token_id(tokenizer),
        pad_token_id=pad_token_id(tokenizer),
        sampling=SamplingConfig(temperature=0.0),
    )
    ours = smd.rollout(
        smd.Decoder(config), params, prompts, jax.random.key(0), policy=smd.eviction.Dense(), config=sizes
    )
    tokens, there = np.asarray(ours.response), np.asarray(ours.response_mask)
    rows = zip(np.asarray(prompts.tokens), np.asarray(prompts.valid), strict=True)
    job = {"model": str(exported), "new_tokens": NEW_TOKENS, "prompts": [row[valid].tolist() for row, valid in rows]}
    theirs = ask(args.torch_python, "hf_generate", job)
    same = sum(tokens[i][there[i]].tolist() == text for i, text in enumerate(theirs["completions"]))
    for i in range(min(3, args.prompts)):
        print(repr(tokenizer.decode(tokens[i][there[i]].tolist(), skip_special_tokens=True)))
    return {"same": same, "engine": theirs["engine"]}


if __name__ == "__main__":
    main(tyro.cli(Args))
