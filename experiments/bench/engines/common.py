"""What all engines of `bench/update.py` share: the model, the command line, the clock, the line of JSON.

`generation.py` beside it adds what those of `bench/rollout.py` need, `whole_step.py` what those of `bench/step.py` do.

Standard library only: it runs in four environments. Linux only: it pins its process to cores and reads /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Sizes:
    """A decoder of Llama's or Qwen2's family, as far as its arithmetic goes.

    Attributes:
      qkv_bias: whether q, k and v have biases.
      tied: whether the output projection is the embeddings.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    qkv_bias: bool
    tied: bool

    def layer_products(self) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's matrices: q, k, v, o, gate, up, down."""
        heads, kv_heads = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = [(self.hidden, heads), (self.hidden, kv_heads), (self.hidden, kv_heads), (heads, self.hidden)]
        return [*attention, (self.hidden, self.ffn), (self.hidden, self.ffn), (self.ffn, self.hidden)]

    def head_product(self) -> tuple[int, int]:
        """Inputs and outputs of the output projection."""
        return self.hidden, self.vocabulary

    def layer_weights(self) -> int:
        """In the matrices of all layers."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.layer_products())

    def head_weights(self) -> int:
        """In the output projection."""
        return self.hidden * self.vocabulary

    def parameters(self) -> int:
        """Of the model: matrices, biases and norms; untied, an output projection beside the embeddings."""
        biases = (self.heads + 2 * self.kv_heads) * self.head_dim if self.qkv_bias else 0
        heads = 1 if self.tied else 2
        norms = self.layers * 2 * self.hidden + self.hidden
        return self.layer_weights() + heads * self.head_weights() + self.layers * biases + norms


def model_sizes(untied: bool = False) -> Sizes:
    """Those of the constants above."""
    return Sizes(HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCABULARY, qkv_bias=True, tied=not untied)


def read_sizes(directory: str | Path) -> Sizes:
    """Those of a Hugging Face checkpoint of family Llama or Qwen2.

    Raises:
      ValueError: another family.
    """
    config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    family = config["model_type"]
    if family not in ("llama", "qwen2"):
        raise ValueError(f"expected a checkpoint of model_type llama or qwen2; got {family!r}")
    heads = config["num_attention_heads"]
    return Sizes(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        qkv_bias=family == "qwen2",
        tied=config["tie_word_embeddings"],
    )


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
    use_threads(1)


def asked_threads() -> int:
    """What the command line says after `--threads`, 1 without it: it must be known before a library is imported."""
    found = argparse.ArgumentParser(add_help=False)
    found.add_argument("--threads", type=int, default=1)
    return found.parse_known_args()[0].threads


def use_threads(count: int) -> None:
    """Pins this process to `count` cores, before any library looks at how many there are.

    Raises:
      ValueError: there are fewer.
    """
    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= count <= len(cores):
        raise ValueError(f"expected a number of threads from 1 to the {len(cores)} cores of this process; got {count}")
    os.sched_setaffinity(0, cores[-count:])
    os.environ |= {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count), "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    if count == 1:
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
        self.took = time.perf_counter() - self.start
        cpu_took = time.process_time() - self.cpu_start
        if self.begun > self.warmup:
            self.seconds.append(self.took)
            self.cpu_seconds.append(cpu_took)
            self.say({"update": self.took})

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
