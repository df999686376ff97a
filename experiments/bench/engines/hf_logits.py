"""The side of experiments/parity.py that has torch: logits of checkpoints, and the checkpoints written once more.

    python hf_logits.py FOLDER …

Every folder holds `checkpoint/` and inputs.npz (tokens, valid, positions). It gets logits.npz, with `logits` in the
dtype of the checkpoint and `float32_logits`, and `again/`. The last line of the output names the libraries.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers


@torch.no_grad()
def logits(folder: Path, dtype: torch.dtype, again: bool) -> np.ndarray:
    """Of the folder's checkpoint, which is saved anew if `again`."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "checkpoint", dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    problems = {key: info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    if problems:
        raise ValueError(f"expected a checkpoint that fits its configuration; got {problems} in {folder}")
    given = {name: torch.from_numpy(array) for name, array in np.load(folder / "inputs.npz").items()}
    output = model.eval()(
        input_ids=given["tokens"].long(),
        attention_mask=given["valid"].long(),
        position_ids=given["positions"].long(),
        use_cache=False,
    )
    if again:
        model.save_pretrained(folder / "again")
    return output.logits.float().numpy()


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        stored = json.loads((folder / "checkpoint" / "config.json").read_text())["dtype"]
        np.savez(
            folder / "logits.npz",
            logits=logits(folder, getattr(torch, stored), again=True),
            float32_logits=logits(folder, torch.float32, again=False),
        )
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, eager attention")


if __name__ == "__main__":
    main()
