"""Runs TRL's own GRPO loss on given log-probabilities: the yardstick of tests/losses/test_losses.py.

    pip install torch==2.13.0 trl==1.16.0
    python tests/golden/make_losses.py

makes losses.json: the inputs below, and what TRL makes of them in float64. `GRPOTrainer._compute_loss` runs as it is on
a stub of a trainer whose forward pass gives the log-probabilities of the inputs. The correction for vLLM, the mask of
truncated completions and the advantages stand in the middle of two long methods; their statements are cut out of the
installed source and run, so that nothing of TRL is written down here.

    inputs        logprobs, old_logprobs, reference_logprobs, sampler_logprobs [4][6]; lengths, advantages [4]
    clip          the lowest and highest vLLM importance ratio
    corrections   {mode: vLLM importance ratios [4][6]}; sequence modes are repeated over the columns
    losses        cases: `config` (TRL's names; `correction`: a mode or null; `old`: false if there are no old
                  log-probabilities), `loss`, `grad` [4][6], TRL's clip metrics
    accumulation  two microbatches of two rows, one optimizer step: {loss_type: losses [2], grad}
    minibatches   two optimizer steps of two rows each: {loss_type: losses [2], grad}
    truncated     {loss_type: loss, grad}, rows 0 and 3 cut off at the length limit
    entropy       entropies [4][6]; cases of a bonus and of the tokens with the highest entropies: `config`, `loss`,
                  `grad` with respect to the log-probabilities, `entropy_grad` to the entropies
    advantages    rewards [6], groups of 3: {scale_rewards: advantages}, and RLOO's
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import math
import textwrap
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.utils import nanstd

HERE = Path(__file__).parent
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo"]
MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
CLIP_MIN, CLIP_MAX = 0.6, 1.6
DEFAULTS = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "delta": None,
    "beta": 0.1,
    "correction": None,
    "old": True,
}
COLUMNS = 6
LENGTHS = torch.tensor([6, 3, 0, 5])  # an empty response, as of a row that is masked out, among them
REWARDS = torch.tensor([1.0, 0.0, 0.5, 2.0, 2.0, 3.5], dtype=torch.float64)


def statements(trainer: type, method: str, test: str, assigns: str) -> Any:
    """The code of the `if` statement in a method of TRL with that test whose body assigns that name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(trainer, method))))
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == test and f"{assigns} = " in ast.unparse(node)
    ]
    assert len(found) == 1, f"expected one `if {test}` that assigns {assigns}; got {len(found)}"
    return compile(ast.Module(body=[found[0]], type_ignores=[]), inspect.getfile(trainer), "exec")


def run(code: Any, names: dict[str, Any], wanted: str) -> torch.Tensor:
    names = {"torch": torch, "math": math, "nanstd": nanstd, **names}
    exec(code, names)
    return names[wanted]


def make_inputs() -> dict[str, torch.Tensor]:
    """Rounded to four decimals, so that the JSON file holds them exactly. Outside the response stands junk."""
    rng = np.random.default_rng(7)
    old = -rng.exponential(1.0, (4, COLUMNS)) - 0.05
    arrays = {
        "logprobs": old + rng.uniform(-0.6, 0.6, old.shape),
        "old_logprobs": old,
        "reference_logprobs": old + rng.normal(0, 0.5, old.shape),
        "sampler_logprobs": old + rng.normal(0, 0.4, old.shape) * np.array([[1], [0.3], [1], [1]]),
        "advantages": np.array([1.25, -0.75, 0.4, -1.5]),
    }
    return {name: torch.tensor(np.round(x, 4)) for name, x in arrays.items()}


def mask_of(rows: slice) -> torch.Tensor:
    return (torch.arange(COLUMNS) < LENGTHS[rows, None]).int()


def correction(inputs: dict[str, torch.Tensor], mode: str) -> torch.Tensor:
    test = "self.use_vllm and self.vllm_importance_sampling_correction"
    code = statements(GRPOTrainer, "_generate_and_score_completions", test, "sequence_level_is")
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=CLIP_MIN,
        vllm_importance_sampling_clip_max=CLIP_MAX,
    )
    names = {
        "self": trainer,
        "completion_mask": mask_of(slice(None)),
        "tool_mask": None,
        "old_per_token_logps": inputs["old_logprobs"],
        "sampling_per_token_logps": inputs["sampler_logprobs"],
    }
    return run(code, names, "vllm_importance_sampling_ratio")


def stub(config: dict[str, Any], accumulation: int, steps_per_generation: int) -> SimpleNamespace:
    """As much of a GRPOTrainer as `_compute_loss` looks at, in training, on one process."""
    return SimpleNamespace(
        **{name: config[name] for name in ("loss_type", "importance_sampling_level", "beta", "epsilon_high")},
        epsilon_low=config["epsilon"],
        args=SimpleNamespace(
            delta=config["delta"],
            use_bias_correction_kl=config.get("use_bias_correction_kl", False),
            steps_per_generation=steps_per_generation,
            **{name: x for name, x in config.items() if name.startswith("sapo_temperature")},
        ),
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, dim, pad_index: x,
        ),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=accumulation,
        max_completion_length=COLUMNS,
        use_vllm=config["correction"] is not None,
        vllm_importance_sampling_correction=config["correction"] is not None,
        off_policy_mask_threshold=None,
        top_entropy_quantile=config.get("top_entropy_quantile", 1.0),
        entropy_coef=config.get("entropy_coef", 0.0),
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=config.get("entropy_coef", 0.0) != 0,
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
    )


def compute(
    inputs: dict[str, torch.Tensor],
    options: dict[str, Any],
    rows: slice = slice(None),
    accumulation: int = 1,
    steps_per_generation: int = 1,
    mask: torch.Tensor | None = None,
    entropies: torch.Tensor | None = None,
) -> tuple[float, list[list[float]], dict[str, float]]:
    """Loss of some rows and its gradient with respect to their log-probabilities; and TRL's metrics. The gradient with
    respect to `entropies` stays in them."""
    config = DEFAULTS | options
    mask = mask_of(slice(None)) if mask is None else mask
    logprobs = inputs["logprobs"][rows].clone().requires_grad_()
    count = logprobs.shape[0]
    given = {
        "prompt_ids": torch.zeros(count, 1, dtype=torch.long),
        "prompt_mask": torch.ones(count, 1, dtype=torch.int),
        "completion_ids": torch.zeros(count, COLUMNS, dtype=torch.long),
        "completion_mask": mask[rows],
        "advantages": inputs["advantages"][rows],
        "ref_per_token_logps": inputs["reference_logprobs"][rows],
        "num_items_in_batch": mask.sum(),
    }
    if config["old"]:
        given["old_per_token_logps"] = inputs["old_logprobs"][rows]
    if config["correction"] is not None:
        given["importance_sampling_ratio"] = correction(inputs, config["correction"])[rows]
    trainer = stub(config, accumulation, steps_per_generation)
    forward = (logprobs, torch.zeros(count, COLUMNS) if entropies is None else entropies, None)
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: forward
    trainer.get_high_entropy_mask = partial(GRPOTrainer.get_high_entropy_mask, trainer)
    loss = GRPOTrainer._compute_loss(trainer, None, given)
    loss.backward()
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    return loss.item(), logprobs.grad.tolist(), metrics


def cases() -> list[dict[str, Any]]:
    grid = itertools.product(LOSS_TYPES, ["token", "sequence"], [None, *MODES])
    full = [{"loss_type": t, "importance_sampling_level": i, "correction": c} for t, i, c in grid]
    plain = [
        {"loss_type": t, "beta": beta, "old": old} for t in LOSS_TYPES for beta, old in ((0.0, True), (0.1, False))
    ]
    dual = [{"delta": 1.4, "importance_sampling_level": level} for level in ("token", "sequence")]
    unbiased = [{"use_bias_correction_kl": True, "importance_sampling_level": level} for level in ("token", "sequence")]
    others = [{"delta": 1.4, "correction": "token_truncate"}, {"epsilon": 0.4, "epsilon_high": 0.1}]
    return full + plain + dual + others + unbiased


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    """For cispo a bound that cuts some weights: TRL's epsilon_high is the bound itself there. For sapo two temperatures
    that are far apart."""
    bound = {"epsilon_high": 1.28} if case.get("loss_type") == "cispo" else {}
    if case.get("loss_type") == "sapo":
        bound = {"sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.5}
    narrow = {"epsilon": 0.02, "epsilon_high": 0.03} if case.get("importance_sampling_level") == "sequence" else {}
    return narrow | bound | case


def check_that_everything_bites(inputs: dict[str, torch.Tensor]) -> None:
    """Each bound takes hold of some tokens and leaves others, and none lies where rounding could decide."""
    mask = mask_of(slice(None)).bool()
    log_ratio = torch.where(mask, inputs["logprobs"] - inputs["old_logprobs"], 0.0)
    ratio, sequence = log_ratio.exp()[mask], (log_ratio.sum(1) / LENGTHS.clamp(min=1)).exp()
    for values, bounds in ((ratio, (0.6, 0.8, 1.1, 1.28, 1.4)), (sequence[[0, 1, 3]], (0.98, 1.03))):
        for bound in bounds:
            assert (values < bound).any() and (values > bound).any(), (bound, values)
            assert (values - bound).abs().min() > 1e-3, (bound, values)
    for level in ("token", "sequence"):
        ratios = {mode: correction(inputs, f"{level}_{mode}") for mode in ("truncate", "mask")}
        assert (ratios["mask"] == 0).any() and (ratios["mask"] > 0).any(), ratios
        assert (ratios["truncate"] == CLIP_MIN).any() or (ratios["truncate"] == CLIP_MAX).any(), ratios
    _, _, metrics = compute(inputs, {})
    assert metrics["clip_ratio/low_mean"] > 0 and metrics["clip_ratio/high_mean"] > 0, metrics
    plain, dual = compute(inputs, {}), compute(inputs, {"delta": 1.4})
    assert plain[0] != dual[0], "delta changes nothing"


def in_parts(inputs: dict[str, torch.Tensor], loss_type: str, accumulation: int) -> dict[str, Any]:
    """Rows 0, 1 and rows 2, 3: as microbatches of one step if `accumulation` is 2, as two steps if it is 1."""
    options = options_of({"loss_type": loss_type})
    parts = [compute(inputs, options, rows, accumulation, 2) for rows in (slice(0, 2), slice(2, 4))]
    return {"losses": [loss for loss, _, _ in parts], "grad": parts[0][1] + parts[1][1]}


def without_truncated(inputs: dict[str, torch.Tensor], loss_type: str) -> dict[str, Any]:
    """Rows 0 and 3 end without an end-of-sequence token, which is 1."""
    code = statements(GRPOTrainer, "_generate_and_score_completions", "self.mask_truncated_completions", "is_truncated")
    trainer = SimpleNamespace(
        mask_truncated_completions=True, eos_token_ids=[1], _tokenizer=SimpleNamespace(pad_token_id=0)
    )
    names = {
        "self": trainer,
        "completion_ids_list": [[5, 5], [5, 1], [1], [5]],
        "completion_mask": mask_of(slice(None)),
        "tool_mask": None,
        "device": "cpu",
    }
    mask = run(code, names, "completion_mask")
    loss, grad, _ = compute(inputs, options_of({"loss_type": loss_type}), mask=mask)
    return {"loss": loss, "grad": grad}


def entropy_cases(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Entropies of their own; outside the response stands what would be the highest."""
    values = torch.tensor(np.round(np.random.default_rng(8).uniform(0.1, 3.0, (4, COLUMNS)), 4))
    values = torch.where(mask_of(slice(None)).bool(), values, 50.0)
    cases = []
    for loss_type, quantile, coef in itertools.product(("grpo", "dapo", "cispo"), (1.0, 0.5, 0.2, 0.0), (0.0, 0.3)):
        if quantile == 1.0 and coef == 0.0:
            continue
        options = {"top_entropy_quantile": quantile, "entropy_coef": coef}
        entropies = values.clone().requires_grad_()
        case = options_of({"loss_type": loss_type})
        loss, grad, _ = compute(inputs, case | options, entropies=entropies)
        slopes = torch.zeros_like(values) if entropies.grad is None else entropies.grad
        cases.append({"config": DEFAULTS | case | options, "loss": loss, "grad": grad, "entropy_grad": slopes.tolist()})
    return {"entropies": values.tolist(), "cases": cases}


def group_advantages(scale: str) -> list[float]:
    test = "self.multi_objective_aggregation == 'sum_then_normalize'"
    code = statements(GRPOTrainer, "_generate_and_score_completions", test, "advantages")
    names = {
        "self": SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize", scale_rewards=scale, reward_weights=torch.ones(1)
        ),
        "rewards_per_func": REWARDS[:, None],
        "unscorable_mask": torch.zeros(6, dtype=torch.bool),
        "num_generations": 3,
        "device": "cpu",
    }
    return run(code, names, "advantages").tolist()


def rloo_advantages() -> list[float]:
    grouped = REWARDS.view(-1, 3)
    code = statements(RLOOTrainer, "_generate_and_score_completions", "num_generations > 1", "baselines")
    names = {
        "num_generations": 3,
        "rewards": REWARDS,
        "grouped_rewards": grouped,
        "grouped_sum": grouped.nansum(1, keepdim=True),
        "scorable_counts": torch.full((2, 1), 3),
    }
    return run(code, names, "advantages").tolist()


def rounded(value: Any) -> Any:
    """Ten significant digits, in a tree of lists and dicts."""
    if isinstance(value, dict):
        return {name: rounded(x) for name, x in value.items()}
    if isinstance(value, list):
        return [rounded(x) for x in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


def golden() -> dict[str, Any]:
    inputs = make_inputs()
    check_that_everything_bites(inputs)
    losses = []
    for case in cases():
        loss, grad, metrics = compute(inputs, options_of(case))
        clipped = {name: x for name, x in metrics.items() if name in ("clip_ratio/low_mean", "clip_ratio/high_mean")}
        losses.append({"config": DEFAULTS | options_of(case), "loss": loss, "grad": grad, "metrics": clipped})
    corrections = {mode: correction(inputs, mode).expand(4, COLUMNS).tolist() for mode in MODES}
    return {
        "inputs": {name: x.tolist() for name, x in inputs.items()} | {"lengths": LENGTHS.tolist()},
        "clip": [CLIP_MIN, CLIP_MAX],
        "corrections": corrections,
        "losses": losses,
        "accumulation": {name: in_parts(inputs, name, 2) for name in LOSS_TYPES},
        "minibatches": {name: in_parts(inputs, name, 1) for name in LOSS_TYPES},
        "truncated": {name: without_truncated(inputs, name) for name in LOSS_TYPES},
        "entropy": entropy_cases(inputs),
        "rewards": REWARDS.tolist(),
        "advantages": {scale: group_advantages(scale) for scale in ("group", "batch", "none")}
        | {"rloo": rloo_advantages()},
    }


def to_json(data: dict[str, Any]) -> str:
    """One case a line."""
    lines = []
    for name, value in data.items():
        rows = [json.dumps(row) for row in value] if name == "losses" else []
        text = "[\n  " + ",\n  ".join(rows) + "\n ]" if rows else json.dumps(value)
        lines.append(f' "{name}": {text}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    text = to_json(rounded(golden()))
    (HERE / "losses.json").write_text(text)
    print(f"losses.json: {len(text) / 1000:.0f} kB, {len(cases())} losses")
