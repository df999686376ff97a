"""Writes corrections.json: weights, kept tokens and statistics as TRL, verl and slime define them, in torch.

    pip install torch==2.13.0 trl==1.16.0
    python tests/golden/make_corrections.py

Where TRL has a function that can be called by itself, `GRPOTrainer.get_off_policy_mask`, it is called. The rest of its
definitions stand in the middle of `_generate_and_score_completions`, and verl and slime need their whole stack to be
imported: those are written out below, one response at a time over its own tokens alone, in float64.

    inputs     float lists [6, 8], log-probabilities (natural) of sampler, old and present policy; mask; advantages [6]
    cases      name -> {"weights": [6, 8], "keep": [6, 8]}; outside the mask 0 and false.
               weights multiply a token's loss; keep false takes it out of the denominators too
    gradients  name -> [6, 8], derivative of the summed loss by the present log-probabilities
    metrics    name -> number

Arrays are drawn so that every rule catches something and spares something; the script checks that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from trl import GRPOTrainer

OUT = Path(__file__).with_name("corrections.json")
LENGTHS = [8, 5, 1, 6, 7, 4]
Rows = list[torch.Tensor]


def draw() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    shape = (len(LENGTHS), max(LENGTHS))

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    mask = torch.arange(shape[1])[None, :] < torch.tensor(LENGTHS)[:, None]
    sampler = -torch.rand(shape, generator=generator, dtype=torch.float64) * 2.5
    old = torch.minimum(sampler + normal(0.6), torch.tensor(-0.01))
    old[0] = sampler[0]  # no mismatch
    old[3, 2] = sampler[3, 2] - 11.0  # xi = 1.7e-5: vetoed
    old[4, 1] = sampler[4, 1] - 6.0  # xi = 2.5e-3: not vetoed
    sampler[4, 3], old[4, 3] = -2.2, -0.4  # xi = 6: above every bound
    sampler[1, 1:], old[1, 1:] = -1.2, -0.8  # a product above 3 together with the token below
    # A response whose tokens mismatch but whose geometric mean is 1.0005.
    sampler[5, :4], old[5, :4] = -1.0, torch.tensor([-0.5, -1.5, -0.9, -1.1]) + 0.0005
    now = torch.minimum(old + normal(0.3), torch.tensor(-0.005))
    now[1, 0], sampler[1, 0], old[1, 0] = -0.05, -4.0, -3.9  # ratio 52: truncated by DPPO where it is not masked
    advantages = torch.tensor([1.0, -0.5, 0.7, -1.2, 0.4, 0.0], dtype=torch.float64)
    arrays = {"sampler_logprobs": sampler, "old_logprobs": old, "logprobs": now}
    junk = {"sampler_logprobs": -77.0, "old_logprobs": 5.0, "logprobs": 300.0}
    rounded = {name: torch.where(mask, x, junk[name]).float().double() for name, x in arrays.items()}
    return {**rounded, "mask": mask, "advantages": advantages}


def tokens_of(x: torch.Tensor, data: dict[str, torch.Tensor]) -> Rows:
    """The response of every row, without padding."""
    return [row[inside] for row, inside in zip(x, data["mask"], strict=True)]


def padded(rows: Rows, data: dict[str, torch.Tensor]) -> torch.Tensor:
    out = torch.zeros(data["mask"].shape, dtype=rows[0].dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def log_xi(data: dict[str, torch.Tensor]) -> Rows:
    old, sampler = tokens_of(data["old_logprobs"], data), tokens_of(data["sampler_logprobs"], data)
    return [a - b for a, b in zip(old, sampler, strict=True)]


def total(row: torch.Tensor) -> torch.Tensor:
    return row.sum().expand_as(row)


def mean(row: torch.Tensor) -> torch.Tensor:
    return row.mean().expand_as(row)


def ones(data: dict[str, torch.Tensor]) -> Rows:
    return [torch.ones_like(row) for row in log_xi(data)]


# --- TRL 1.16, trl/trainer/grpo_trainer.py: one ratio a token or a response; clamp, or 0 outside the closed interval


def trl(data: dict[str, torch.Tensor], mode: str, low: float | None, high: float | None) -> tuple[Rows, Rows]:
    level, action = mode.split("_")
    ratios = [torch.exp(total(row) if level == "sequence" else row) for row in log_xi(data)]
    if action == "truncate":
        weights = [torch.clamp(row, min=low, max=high) for row in ratios]
    else:
        floor, ceiling = -math.inf if low is None else low, math.inf if high is None else high
        weights = [torch.where((row < floor) | (row > ceiling), 0.0, row) for row in ratios]
    return weights, [row == row for row in weights]


def trl_off_policy_mask(data: dict[str, torch.Tensor], threshold: float) -> tuple[Rows, Rows]:
    keep = GRPOTrainer.get_off_policy_mask(
        advantages=data["advantages"][:, None],
        per_token_logps=data["logprobs"],
        sampling_per_token_logps=data["sampler_logprobs"],
        mask=data["mask"].double(),
        off_policy_threshold=threshold,
    )
    return [keep[i].expand(length) for i, length in enumerate(LENGTHS)], [row == row for row in log_xi(data)]


# --- verl, verl/trainer/ppo/rollout_corr_helper.py


def verl_is(
    data: dict[str, torch.Tensor], level: str, low: float | None, high: float, normalize: bool = False
) -> tuple[Rows, Rows]:
    """rollout_is: truncation with one bound, IcePop with two; batch normalisation over tokens or responses."""
    ratios = [torch.exp((total(row) if level == "sequence" else row).clamp(-20, 20)) for row in log_xi(data)]
    if low is None:
        weights = [row.clamp(max=high) for row in ratios]
    else:
        weights = [row * ((row >= low) & (row <= high)) for row in ratios]
    if normalize:
        factor = torch.cat(weights) if level == "token" else torch.stack([row.mean() for row in weights])
        weights = [row / factor.mean() for row in weights]
    return weights, [row == row for row in weights]


def verl_rs(data: dict[str, torch.Tensor], option: str, low: float, high: float) -> Rows:
    """rollout_rs with k1: the statistic is -log xi, the bounds are the logarithms of low and high."""
    reduce: dict[str, Callable[[torch.Tensor], torch.Tensor]]
    reduce = {"token_k1": lambda row: row, "seq_sum_k1": total, "seq_mean_k1": mean}
    statistics = [reduce[option](-row.clamp(-20, 20)) for row in log_xi(data)]
    return [(row >= math.log(low)) & (row <= math.log(high)) for row in statistics]


def verl_dppo_tv(data: dict[str, torch.Tensor], low: float, high: float, cap: float) -> torch.Tensor:
    """verl/trainer/ppo/core_algos.py: gradient of the sum of -A sg(min(ratio, cap)) log pi over valid tokens."""
    gradients = []
    now, sampler = tokens_of(data["logprobs"], data), tokens_of(data["sampler_logprobs"], data)
    for new, before, advantage in zip(now, sampler, data["advantages"], strict=True):
        new = new.clone().requires_grad_()
        moved = (new.exp() - before.exp()).detach()
        valid = moved <= high if advantage > 0 else moved >= -low
        ratio = torch.exp((new - before).clamp(-20, 20)).clamp(max=cap).detach()
        (-advantage * ratio * new * valid).sum().backward()
        assert new.grad is not None
        gradients.append(new.grad)
    return padded(gradients, data)


def verl_metrics(data: dict[str, torch.Tensor]) -> dict[str, float]:
    """chi2_token, chi2_seq, and the statistics rollout_is_* of the weights min(xi, 2)."""
    rows = log_xi(data)
    weights = torch.cat(rows).exp().clamp(max=2.0)
    return {
        "chi2_token": float(torch.cat(rows).exp().square().mean() - 1),
        "chi2_seq": float(torch.stack([row.sum() for row in rows]).exp().square().mean() - 1),
        "rollout_is_mean": float(weights.mean()),
        "rollout_is_min": float(weights.min()),
        "rollout_is_max": float(weights.max()),
        "rollout_is_eff_sample_size": float(1 / (weights / weights.mean()).square().mean()),
    }


# --- slime in Sparse-RL's repository, slime/examples/train_infer_mismatch_helper/mis.py with its mis.yaml


def slime_sparse_rl(data: dict[str, torch.Tensor]) -> tuple[Rows, Rows]:
    low, high, veto = 0.5, 1.5, 1.0e-4
    ratios = [torch.exp(row.clamp(-20, 20)) for row in log_xi(data)]
    weights = [row.clamp(0, high) for row in ratios]
    weights = [row / torch.cat(weights).mean() for row in weights]
    inside = [(row >= low) & (row <= high) for row in ratios]
    vetoed = [bool((row < math.log(veto)).any()) for row in log_xi(data)]
    return weights, [row & (not drop) for row, drop in zip(inside, vetoed, strict=True)]


def main() -> None:
    data = draw()
    cases = {
        "trl token_truncate None 3": trl(data, "token_truncate", None, 3.0),
        "trl token_truncate 0.5 2": trl(data, "token_truncate", 0.5, 2.0),
        "trl sequence_truncate None 3": trl(data, "sequence_truncate", None, 3.0),
        "trl token_mask 0.5 2": trl(data, "token_mask", 0.5, 2.0),
        "trl sequence_mask None 3": trl(data, "sequence_mask", None, 3.0),
        "trl sequence_mask 0.2 3": trl(data, "sequence_mask", 0.2, 3.0),
        "trl off_policy_mask 0.5": trl_off_policy_mask(data, 0.5),
        "verl token 2": verl_is(data, "token", None, 2.0),
        "verl sequence 2": verl_is(data, "sequence", None, 2.0),
        "verl token 2 normalised": verl_is(data, "token", None, 2.0, normalize=True),
        "verl sequence 2 normalised": verl_is(data, "sequence", None, 2.0, normalize=True),
        "verl icepop 0.5 5": verl_is(data, "token", 0.5, 5.0),
        "verl token_k1 0.5 2": (ones(data), verl_rs(data, "token_k1", 0.5, 2.0)),
        "verl seq_sum_k1 0.5 2": (ones(data), verl_rs(data, "seq_sum_k1", 0.5, 2.0)),
        "verl seq_mean_k1 0.999 1.001": (ones(data), verl_rs(data, "seq_mean_k1", 0.999, 1.001)),
        "verl decoupled_seq_is_rs": (
            verl_is(data, "sequence", None, 2.0)[0],
            verl_rs(data, "seq_sum_k1", 0.5, 2.0),
        ),
        "slime sparse-rl": slime_sparse_rl(data),
    }
    for name, (weights, keep) in cases.items():
        changed = (torch.cat(weights) != torch.cat([row.exp() for row in log_xi(data)])) | ~torch.cat(keep)
        assert changed.any() and torch.cat(keep).any() and (torch.cat(weights) > 0).any(), name
    for name in ("mask", "k1", "icepop", "decoupled", "slime"):
        for case, (weights, keep) in cases.items():
            gone = ~torch.cat(keep) | (torch.cat(weights) == 0)
            assert name not in case or (gone.any() and not gone.all()), f"{case} rejects {int(gone.sum())} tokens"
    gradient = verl_dppo_tv(data, 0.15, 0.15, 20.0)
    content = {
        "inputs": {name: x.tolist() for name, x in data.items()},
        "cases": {
            name: {"weights": padded(weights, data).tolist(), "keep": padded(keep, data).tolist()}
            for name, (weights, keep) in cases.items()
        },
        "gradients": {
            "verl dppo_tv 0.15 0.15 20": gradient.tolist(),
        },
        "metrics": verl_metrics(data),
    }
    # A line for every array.
    groups = (
        f"{json.dumps(group)}: {{\n"
        + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in items.items())
        + "\n}"
        for group, items in content.items()
    )
    text = "{\n" + ",\n".join(groups) + "\n}"
    OUT.write_text(text + "\n", encoding="utf-8")
    print(f"{OUT.name}: {len(cases)} cases, {len(text) / 1000:.0f} kB, {int((gradient == 0).sum())} zero gradients")


if __name__ == "__main__":
    main()
