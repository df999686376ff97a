"""Shared by all engines of the benchmarks: model, settings, clock, JSON output.

Standard library only, because it runs in several environments. Linux only: it pins its process and reads /proc.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

# Qwen2 with biases on q, k and v; no dropout, no KL, no gradient checkpointing, float32.
VOCABULARY = 1024
ROPE_THETA = 10_000.0
NORM_EPS = 1e-6
INIT_STD = 0.02
# AdamW, the same for all engines.
LEARNING_RATE = 1e-6
BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
WEIGHT_DECAY = 0.01
MAX_GRADIENT_NORM = 1.0  # of whole steps; TRL's default
GROUP = 8  # completions of a prompt: the advantages of a group have mean 0 and deviation 1
WARMUP = 2  # updates before the clock runs: the first compiles


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama or Qwen2, named as in `smd_jax.ModelConfig`. The defaults are the model of the benchmarks."""

    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    vocab_size: int = VOCABULARY
    qkv_bias: bool = True
    tie_embeddings: bool = True

    def layer_products(self) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's matrices: q, k, v, o, gate, up, down."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = [(hidden, heads), (hidden, kv_heads), (hidden, kv_heads), (heads, hidden)]
        return [*attention, (hidden, ffn), (hidden, ffn), (ffn, hidden)]

    def layer_weights(self) -> int:
        """Parameters in the matrices of all layers."""
        return self.num_layers * sum(inputs * outputs for inputs, outputs in self.layer_products())

    def head_weights(self) -> int:
        """Parameters in the output projection."""
        return self.hidden_size * self.vocab_size

    def parameters(self) -> int:
        """Parameters of the model: matrices, biases and norms."""
        biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.qkv_bias else 0
        heads = 1 if self.tie_embeddings else 2
        norms = self.num_layers * 2 * self.hidden_size + self.hidden_size
        return self.layer_weights() + heads * self.head_weights() + self.num_layers * biases + norms


MODEL = Sizes()


def settings() -> SimpleNamespace:
    """Reads the settings of an engine, a JSON object in the first command-line argument; see the driver for them."""
    return SimpleNamespace(**json.loads(sys.argv[1]))


def advantages(sequences: int) -> list[float]:
    """Advantages of alternating rewards 0 and 1."""
    return [1.0 if row % 2 else -1.0 for row in range(sequences)]


def one_thread() -> None:
    """Pins this process to one core, before any library counts the cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"


class Clock:
    """Times updates or generations and reports them; the first `warmup` are not measured.

    Redirects the output of libraries to standard error: standard output carries JSON lines.
    """

    def __init__(self, args: SimpleNamespace, warmup: int = WARMUP) -> None:
        self.args = args
        self.warmup = warmup
        self.begun = 0
        self.seconds = []
        self.cpu_seconds = []
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    @property
    def updates(self) -> int:
        """Number of updates, warm-up included."""
        return self.warmup + self.args.repeats

    def begin(self) -> None:
        """Waits for this engine's turn, a line on standard input, then starts the clock of an update."""
        if self.begun == self.warmup:
            self.say({"ready": True})
        if self.begun >= self.warmup:
            sys.stdin.readline()
        self.begun += 1
        self.start = time.perf_counter()
        self.cpu_start = time.process_time()

    def end(self) -> None:
        """Stops the clock, after the results are ready."""
        self.took = time.perf_counter() - self.start
        cpu_took = time.process_time() - self.cpu_start
        if self.begun > self.warmup:
            self.seconds.append(self.took)
            self.cpu_seconds.append(cpu_took)
            self.say({"update": self.took})

    def report(self, engine: str, parameters: int, packages: list[str], more: dict | None = None) -> None:
        """Prints the result as one JSON object."""
        args = self.args
        row = {"engine": engine, "device": "cpu", "dtype": "float32", "sequences": args.sequences}
        row |= {"tokens": args.tokens, "prompt": args.prompt, "microbatch": args.microbatch}
        row |= {"budget": None, "buffer": None, "threads": len(os.sched_getaffinity(0)), **(more or {})}
        self.say(row | self.measured(parameters, packages))

    def measured(self, parameters: int, packages: list[str]) -> dict:
        """Times, memory and versions, the last fields of every row."""
        row = {"seconds": statistics.median(self.seconds), "seconds_min": min(self.seconds)}
        row["cpu_seconds_min"] = min(self.cpu_seconds)  # excludes other programs on the machine
        row |= {"repeats": len(self.seconds), "peak_bytes": peak_bytes(), "parameters": parameters}
        return row | {"versions": {"python": sys.version.split()[0], **{name: version(name) for name in packages}}}

    def say(self, row: dict) -> None:
        """Prints one JSON line."""
        print(json.dumps(row), file=self.out, flush=True)


def peak_bytes() -> int:
    """Peak memory of the process, compilation included (getrusage would include its parent's)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0
