"""What all engines of `bench/update.py` share: the model, the command line, the clock, the line of JSON.

`generation.py` beside it adds what those of `bench/rollout.py` need.

Standard library only: it runs in four environments. Linux only: it pins its process to a core and reads /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

# Qwen2 with biases on q, k and v; no dropout, no KL, no gradient checkpointing, float32.
HIDDEN = 256
LAYERS = 4
HEADS = 8
KV_HEADS = 2
HEAD_DIM = 32
FFN = 768
VOCABULARY = 1024
ROPE_THETA = 10_000.0
NORM_EPS = 1e-6
INIT_STD = 0.02
# AdamW, the same in all.
LEARNING_RATE = 1e-6
BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
WEIGHT_DECAY = 0.01
GROUP = 8  # completions of a prompt: the advantages of a group have mean 0 and deviation 1
WARMUP = 2  # updates before the clock runs: the first compiles


def layer_products() -> list[tuple[int, int]]:
    """Inputs and outputs of a layer's matrices: q, k, v, o, gate, up, down."""
    heads, kv_heads = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    attention = [(HIDDEN, heads), (HIDDEN, kv_heads), (HIDDEN, kv_heads), (heads, HIDDEN)]
    return [*attention, (HIDDEN, FFN), (HIDDEN, FFN), (FFN, HIDDEN)]


def products() -> list[tuple[int, int]]:
    """Of the whole model, in the order in which a token meets them."""
    return [*layer_products() * LAYERS, (HIDDEN, VOCABULARY)]


def layer_weights() -> int:
    """In the matrices of all layers."""
    return LAYERS * sum(inputs * outputs for inputs, outputs in layer_products())


def head_weights() -> int:
    """In the output projection."""
    return HIDDEN * VOCABULARY


def parameters(untied: bool) -> int:
    """Of the model: matrices, biases of q, k and v, and norms; untied, an output projection beside the embeddings."""
    biases = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    heads = 2 if untied else 1
    return layer_weights() + heads * head_weights() + LAYERS * (biases + 2 * HIDDEN) + HIDDEN


def parser(description: str) -> argparse.ArgumentParser:
    """The command line of an engine, with the sizes of one update; `sequences` is a multiple of `microbatch`."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--sequences", type=int, default=32)
    made.add_argument("--tokens", type=int, default=576, help="prompt and response of one sequence")
    made.add_argument("--prompt", type=int, default=64)
    made.add_argument("--microbatch", type=int, default=8)
    made.add_argument("--untied", action="store_true", help="an output projection of its own")
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--driven", action="store_true", help="every measured update waits for a line on standard input")
    return made


def advantages(sequences: int) -> list[float]:
    """Those of rewards 0 and 1 in turn: half the rows of any group are good."""
    return [1.0 if row % 2 else -1.0 for row in range(sequences)]


def one_thread() -> None:
    """Pins this process to one core, before any library looks at how many there are."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"


class Clock:
    """Times updates (or generations: turns) and reports them; the first `warmup` are not measured.

    Everything but the report goes to standard error, whatever a library prints: standard output carries JSON lines.
    """

    def __init__(self, args: argparse.Namespace, warmup: int = WARMUP) -> None:
        self.args = args
        self.warmup = warmup
        self.begun = 0
        self.seconds = []
        self.cpu_seconds = []
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    @property
    def updates(self) -> int:
        """How many updates to make, warm-up included."""
        return self.warmup + self.args.repeats

    def begin(self) -> None:
        """Before an update; waits for its turn."""
        if self.begun == self.warmup:
            self.say({"ready": True})
        if self.begun >= self.warmup and self.args.driven:
            sys.stdin.readline()
        self.begun += 1
        self.start = time.perf_counter()
        self.cpu_start = time.process_time()

    def end(self) -> None:
        """After an update whose results are there."""
        took = time.perf_counter() - self.start
        cpu_took = time.process_time() - self.cpu_start
        if self.begun > self.warmup:
            self.seconds.append(took)
            self.cpu_seconds.append(cpu_took)
            self.say({"update": took})

    def report(self, engine: str, parameters: int, packages: list[str], more: dict | None = None) -> None:
        """The result as one JSON object."""
        args = self.args
        row = {"engine": engine, "device": "cpu", "dtype": "float32", "sequences": args.sequences}
        row |= {"tokens": args.tokens, "prompt": args.prompt, "microbatch": args.microbatch}
        row |= {"budget": None, "buffer": None, "threads": len(os.sched_getaffinity(0)), **(more or {})}
        self.say(row | self.measured(parameters, packages))

    def measured(self, parameters: int, packages: list[str]) -> dict:
        """What every row says at its end: times, memory, versions."""
        row = {"seconds": statistics.median(self.seconds), "seconds_min": min(self.seconds)}
        row["cpu_seconds_min"] = min(self.cpu_seconds)  # what other programs on the machine take is not in it
        row |= {"repeats": len(self.seconds), "peak_bytes": peak_bytes(), "parameters": parameters}
        return row | {"versions": {"python": sys.version.split()[0], **{name: version(name) for name in packages}}}

    def say(self, row: dict) -> None:
        """A line of JSON; without a driver the result alone."""
        if self.args.driven or "engine" in row:
            print(json.dumps(row), file=self.out, flush=True)


def peak_bytes() -> int:
    """Most memory that the process ever held, compilation included (getrusage would count its parent's, too)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0
