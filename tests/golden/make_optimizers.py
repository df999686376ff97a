"""Runs torch's and transformers' optimizers on given gradients: the yardstick of tests/train/test_optimizers.py.

    pip install torch==2.13.0 transformers==5.23.0
    python tests/golden/make_optimizers.py

makes optimizers.json, in float64: `kernel` [4][3] and `bias` [3], their gradients of six steps, and cases with

    config        fields of our OptimizerConfig
    rates         the learning rate of each step
    kernel, bias  after each step

The gradients are clipped as transformers' Trainer does, and the weights decay by its rule. AdamW with its momentum in
bfloat16 has no counterpart in torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Trainer
from transformers.optimization import (
    Adafactor,
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

HERE = Path(__file__).parent
STEPS = 6
CASES = [
    {"optim": "adamw", "lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": None},
    {"optim": "adamw", "lr_scheduler_type": "linear", "warmup_steps": 2, "weight_decay": 0.1, "adam_beta2": 0.95},
    {"optim": "adamw", "lr_scheduler_type": "cosine", "warmup_steps": 1, "min_lr_rate": 0.1, "adam_epsilon": 1e-3},
    {"optim": "adafactor", "lr_scheduler_type": "constant", "warmup_steps": 3, "weight_decay": 0.1},
]


class Layer(torch.nn.Module):
    """A matrix and a bias, whose names decide what decays."""

    def __init__(self, kernel: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.kernel, self.bias = torch.nn.Parameter(kernel.clone()), torch.nn.Parameter(bias.clone())


def optimizer_of(case: dict[str, Any], layer: Layer) -> torch.optim.Optimizer:
    # The rule reads the model alone: nothing of a trainer has to be made.
    names = Trainer.get_decay_parameter_names(None, layer)
    named = dict(layer.named_parameters())
    groups = [
        {"params": [x for name, x in named.items() if name in names], "weight_decay": case.get("weight_decay", 0.0)},
        {"params": [x for name, x in named.items() if name not in names], "weight_decay": 0.0},
    ]
    if case["optim"] == "adafactor":
        return Adafactor(groups, lr=1e-2, scale_parameter=False, relative_step=False)
    betas = (0.9, case.get("adam_beta2", 0.999))
    return torch.optim.AdamW(groups, lr=1e-2, betas=betas, eps=case.get("adam_epsilon", 1e-8))


def scheduler_of(case: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    warmup = case["warmup_steps"]
    if case["lr_scheduler_type"] == "linear":
        return get_linear_schedule_with_warmup(optimizer, warmup, STEPS)
    if case["lr_scheduler_type"] == "cosine":
        return get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, STEPS, min_lr_rate=case["min_lr_rate"])
    return get_constant_schedule_with_warmup(optimizer, warmup)


def run(case: dict[str, Any], start: dict[str, torch.Tensor], grads: dict[str, torch.Tensor]) -> dict[str, Any]:
    layer = Layer(start["kernel"], start["bias"])
    optimizer = optimizer_of(case, layer)
    scheduler = scheduler_of(case, optimizer)
    found: dict[str, Any] = {"config": {"learning_rate": 1e-2, **case}, "rates": [], "kernel": [], "bias": []}
    for step in range(STEPS):
        layer.kernel.grad, layer.bias.grad = grads["kernel"][step].clone(), grads["bias"][step].clone()
        if case.get("max_grad_norm", 1.0) is not None:
            norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            assert norm > 1.0 or step == 2, norm
        found["rates"].append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        found["kernel"].append(layer.kernel.tolist())
        found["bias"].append(layer.bias.tolist())
    return found


def golden() -> dict[str, Any]:
    rng = np.random.default_rng(11)
    start = {
        "kernel": torch.tensor(rng.normal(size=(4, 3)).round(4)),
        "bias": torch.tensor(rng.normal(size=3).round(4)),
    }
    # The third step's gradients are small: its norm is not clipped.
    scale = np.array([1.0, 2.0, 0.1, 1.0, 3.0, 1.0])
    grads = {
        "kernel": torch.tensor((scale[:, None, None] * rng.normal(size=(STEPS, 4, 3))).round(4)),
        "bias": torch.tensor((scale[:, None] * rng.normal(size=(STEPS, 3))).round(4)),
    }
    return {
        **{name: x.tolist() for name, x in start.items()},
        "grads": {name: x.tolist() for name, x in grads.items()},
        "cases": [run(case, start, grads) for case in CASES],
    }


def rounded(value: Any) -> Any:
    """Ten significant digits, in a tree of lists and dicts."""
    if isinstance(value, dict):
        return {name: rounded(x) for name, x in value.items()}
    if isinstance(value, list):
        return [rounded(x) for x in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


if __name__ == "__main__":
    text = json.dumps(rounded(golden())) + "\n"
    (HERE / "optimizers.json").write_text(text)
    print(f"optimizers.json: {len(text) / 1000:.0f} kB, {len(CASES)} cases")
