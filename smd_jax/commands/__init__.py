"""The commands: smd-train, smd-eval, smd-export and smd-plot. They need the extra `train`, and nothing needs them.

smd-train grpo --model DIR --dataset NAME      arguments ─► prepare ─► smd_jax.train.run.train
"""

import os
import sys
from importlib.util import find_spec

# Without it transformers says in front of everything, --help included, that there is no PyTorch, which nothing here
# needs. It says so when it is imported: so this stands before every import that brings it.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

# What the commands import at once. Whoever comes here typed the name of a command: a line says more than a traceback.
_missing = [name for name in ("tyro", "rich", "yaml", "datasets", "pyarrow", "matplotlib") if find_spec(name) is None]
if _missing:
    needed = ", ".join(_missing)
    print(f"the commands of smd_jax need {needed}, not installed here: pip install -e '.[train]'", file=sys.stderr)
    raise SystemExit(2)
