"""Checks and times the kernels on one NVIDIA GPU (H100, H200) in half an hour.

Question   Are all GPU kernels right on the hardware? How fast is attention under a shadow mask at 8K and 32K compared
           with cuDNN's dense one (goal: 7 times, at 32K with a budget of 1,024)? Does decoding read its cache at the
           rate of a copy (goal: 75 %)? What do a rollout and an update of a model of 1.5B parameters take?
Command    python experiments/bench/accelerator.py --out runs/accelerator_gpu.json
           python experiments/bench/accelerator.py --stage machine correctness       (some stages)
           python experiments/bench/accelerator.py --rehearse                        (toy sizes, on a CPU)
Cost       at most 27 minutes, because every stage has a limit; --rehearse about two on quiet cores
Result     not measured; predictions are in experiments/results/kernels_predicted_h100.json

Needs      Python 3.11 with jax 0.10.2, or 3.12 with jax 0.11 or newer. Nothing of this repository needs to be
           installed: its folders are added to the path. By stage:
             machine, correctness, decode   jax, numpy, jaxtyping, and absl-py for Pallas' GPU compiler
             attention, whole               also flax, optax, safetensors, tokenizers, rich, transformers and jinja2;
                                            no weights, no tokenizer
             --rehearse                     also pytest: its patches of JAX's interpreter are those of the tests
           pip install "jax[cuda12]" absl-py jaxtyping flax optax safetensors tokenizers rich transformers jinja2

Stages     In this order, each in its own process, which prints a row per measurement; --out is rewritten with every
           row.
             machine      versions, also of CUDA; rates of a copy and of a bfloat16 product of 8,192 x 8,192 x 8,192
             correctness  `engines/kernel_checks.py`: forward, backward and decode kernels against the float32 reference
             attention    `bench/attention.py`: ours, cuDNN's dense causal attention, and XLA's, forward and backward
             decode       one step of a layer's cache, against the bytes that it has to read
             whole        rollout and update of Qwen2.5-1.5B's shape in bfloat16, random weights
           A job that crashes or exceeds its time (a deadlock of barriers) ends its process. A row records it, and the
           stage continues with the next job in a new process.
Status     1 if a check fails, a job dies or a stage runs out of time; the other rows are still written.
Fields     `limit_share`: of a decode kernel and a rollout step, the bytes that it has to move over the bytes that a
           copy moves in that time; of attention and the update, arithmetic per second over the rate of the product.
           The same process measures both rates before. Times are medians and minima after a first call that does not
           count; the clock stops when all results are ready (`jax.block_until_ready`).
           `decode_impl`: the implementation in a rollout's program. `planned_bytes`: memory of the update's program
           as compiled.

Standard library only: this process never holds the device.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the packages bench and lib

from bench.turns import Row, write

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).parent / "engines" / "smd_accelerator.py"
CPU_DEVICES = 8  # of a rehearsal: the threads of a kernel are callbacks of the interpreter that wait for each other
# Of a rehearsal, whose programs run once: fast compilation.
QUICK = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    f"--xla_force_host_platform_device_count={CPU_DEVICES}",
)


@dataclass(frozen=True)
class Limit:
    """Limits in seconds of a stage and of one job, the start of its process included."""

    stage: float
    job: float


STAGES = {
    "machine": Limit(90, 60),
    "correctness": Limit(420, 75),
    "attention": Limit(330, 180),
    "decode": Limit(210, 75),
    "whole": Limit(540, 240),
}


def command(stage: str, rehearse: bool, only: str) -> list[str]:
    """The worker's command line without `--skip`."""
    words = [sys.executable, str(WORKER), "--stage", stage, *(["--only", only] if only else [])]
    return words + (["--rehearse"] if rehearse else [])


def environment(rehearse: bool) -> dict[str, str]:
    """Environment variables with the library on the path."""
    found = dict(os.environ)
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [found.get("PYTHONPATH")])]
    found["PYTHONPATH"] = os.pathsep.join(paths)
    found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = found.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    if rehearse:
        found["JAX_PLATFORMS"] = "cpu"
        found["XLA_FLAGS"] = " ".join([found.get("XLA_FLAGS", ""), *QUICK]).strip()
    return found


def run_stage(name: str, words: Sequence[str], limit: Limit, rehearse: bool = False) -> Iterator[Row]:
    """The rows of a stage, with one for every job that died.

    Args:
      words: the worker's command line. `--skip N` skips its first N jobs.
    """
    over = time.monotonic() + limit.stage
    begun = 0
    while True:
        before = begun
        last: Row = {}
        for row in run_process([*words, "--skip", str(begun)], limit.job, over, rehearse):
            last = row
            if "begin" in row:
                begun += 1
            else:
                yield {"stage": name} | row
        # If no job began, the next process would fail in the same way.
        if "failed" not in last or time.monotonic() >= over or begun == before:
            return


def run_process(words: Sequence[str], limit: float, over: float, rehearse: bool) -> Iterator[Row]:
    """The rows of a worker; if it failed, the last one says why.

    Args:
      limit: seconds for one job. over: when the stage ends.
    """
    job = None
    stopped = threading.Event()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(rehearse)) as process,
    ):

        def stop() -> None:
            stopped.set()
            process.kill()

        def watch() -> threading.Timer:
            timer = threading.Timer(min(limit, max(over - time.monotonic(), 0)), stop)
            timer.start()
            return timer

        watchdog = watch()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if stopped.is_set():
                    break
                row = json.loads(line)
                if "begin" in row:
                    job = row["begin"]
                    watchdog.cancel()
                    watchdog = watch()
                    yield row
                else:
                    yield {"job": job} | row
            code = process.wait()
        finally:
            watchdog.cancel()
            process.kill()
            process.wait()
        said = complaint(errors)
    if stopped.is_set() and code:  # a worker that had ended is not killed
        yield {"job": job, "failed": f"stopped after {limit:g} s, or at the limit of its stage", "said": said}
    elif code:
        yield {"job": job, "failed": f"exit status {code}", "said": said}


def complaint(errors: IO[str]) -> str:
    """The last line of a standard error, whose end is printed."""
    errors.seek(0)
    said = [line for line in errors.read().splitlines() if line.strip()]
    print("\n".join(said[-30:]), file=sys.stderr, flush=True)
    return said[-1].strip()[:300] if said else "no output"


def is_good(row: Row) -> bool:
    return "failed" not in row and row.get("ok") is not False


def run(args: argparse.Namespace, stage_command: Callable[[str, bool, str], list[str]] = command) -> int:
    """Prints and writes all rows as they come; returns the exit status."""
    found: list[Row] = []
    header: Row = {}
    for name in args.stage:
        for row in run_stage(name, stage_command(name, args.rehearse, args.only), STAGES[name], args.rehearse):
            print(json.dumps(row), flush=True)
            if "versions" in row:
                header = {"device": row["device"], "versions": row["versions"]}
            found.append(row)
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                write(args.out, found, header | {"rehearsal": args.rehearse})
    bad = [row for row in found if not is_good(row)]
    print(f"{len(found)} rows, {len(bad)} of them failures", file=sys.stderr)
    return 1 if bad else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="+", choices=tuple(STAGES), default=list(STAGES), help="all by default")
    parser.add_argument("--only", default="", help="jobs whose names contain this")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on a CPU, kernels in JAX's interpreter")
    parser.add_argument("--out", type=Path, default=None, help="write the rows, with date and command, to this file")
    sys.exit(run(parser.parse_args()))


if __name__ == "__main__":
    main()
