"""One question to an engine of experiments/bench/engines that runs in another environment, and its answer."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from bench.turns import environment

ENGINES = Path(__file__).parent / "bench" / "engines"


def ask(python: str, engine: str, job: dict[str, Any]) -> dict[str, Any]:
    """The JSON that the engine answers to a job.

    Args:
      python: interpreter of its environment. engine: name of its script, without `.py`.

    Raises:
      SystemExit: it failed, and has said why on standard error.
    """
    command = [python, str(ENGINES / f"{engine}.py")]
    done = subprocess.run(command, input=json.dumps(job), stdout=subprocess.PIPE, text=True, env=environment())
    if done.returncode:
        raise SystemExit(f"expected {engine}.py to end well; got exit status {done.returncode}")
    return json.loads(done.stdout)
