"""Runs TRL's own PPO arithmetic on given arrays: the yardstick of losses/test_gae.py and model/test_value.py.

    pip install torch==2.13.0 trl==1.12.0      # the last release with PPO
    python tests/golden/make_ppo.py

makes ppo.json. Advantages and losses stand in the middle of `PPOTrainer.train`; their statements are cut out of the
installed source and run in float64, so that nothing of TRL is written down here.

    inputs    rewards, old_values, values, logprobs, old_logprobs, returns [4][6]; lengths [4]. Outside the response 0,
              as TRL has them there; its state after the last token, where it pays the reward, is taken as padding
    gae       cases: gamma, lam, advantages and returns [4][6]
    whitened  [4][6], the advantages of the first case
    losses    cases: cliprange_value, value loss, its gradient [4][6], share of clipped values; policy loss (clip range
              0.2, the whitened advantages), its gradient by the log-probabilities, total (vf_coef 0.1)
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl.experimental.ppo import ppo_trainer

HERE = Path(__file__).parent
COLUMNS = 6
LENGTHS = torch.tensor([6, 3, 1, 5])
PADDING = torch.arange(COLUMNS) >= LENGTHS[:, None]
EVERYTHING = slice(None)


def statements(first: str, last: str) -> Any:
    """The code of `PPOTrainer.train` from the statement that assigns `first` to the next one that assigns `last`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(ppo_trainer.PPOTrainer.train)))
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.For | ast.With | ast.FunctionDef)]
    found = [body for body in bodies if all(any(assigns(node, name) for node in body) for name in (first, last))]
    assert len(found) == 1, f"expected one block that assigns {first} and {last}; got {len(found)}"
    start = next(i for i, node in enumerate(found[0]) if assigns(node, first))
    stop = next(i for i, node in enumerate(found[0]) if i >= start and assigns(node, last))
    return compile(ast.Module(body=found[0][start : stop + 1], type_ignores=[]), "ppo_trainer.py", "exec")


def assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)


def run(first: str, last: str, names: dict[str, Any]) -> dict[str, Any]:
    names = {**vars(ppo_trainer), **names}
    exec(statements(first, last), names)
    return names


def make_inputs() -> dict[str, torch.Tensor]:
    """Rounded to four decimals, so that the JSON file holds them exactly."""
    rng = np.random.default_rng(11)
    shape = (len(LENGTHS), COLUMNS)
    old_values = rng.normal(0.4, 0.3, shape)
    old_logprobs = -rng.exponential(1.0, shape) - 0.05
    arrays = {
        "rewards": rng.normal(0, 0.2, shape),
        "old_values": old_values,
        "values": old_values + rng.normal(0, 0.3, shape),
        "old_logprobs": old_logprobs,
        "logprobs": old_logprobs + rng.uniform(-0.5, 0.5, shape),
        "returns": old_values + rng.normal(0, 0.5, shape),
    }
    return {name: torch.tensor(np.round(x, 4)).masked_fill(PADDING, 0.0) for name, x in arrays.items()}


def advantages(inputs: dict[str, torch.Tensor], gamma: float, lam: float) -> dict[str, Any]:
    names = {
        "args": SimpleNamespace(gamma=gamma, lam=lam),
        "values": inputs["old_values"],
        "rewards": inputs["rewards"],
        "responses": inputs["rewards"],
        "padding_mask": PADDING,
    }
    plain = run("lastgaelam", "returns", names)
    return {
        "gamma": gamma,
        "lam": lam,
        **{name: plain[name].masked_fill(PADDING, 0.0).tolist() for name in ("advantages", "returns")},
    }


def whitened(advantages: list[list[float]]) -> torch.Tensor:
    return ppo_trainer.masked_whiten(torch.tensor(advantages, dtype=torch.float64), ~PADDING).masked_fill(PADDING, 0.0)


def losses(inputs: dict[str, torch.Tensor], advantages: torch.Tensor, clip: float) -> dict[str, Any]:
    vpred, new = (inputs[name].clone().requires_grad_() for name in ("values", "logprobs"))
    names = {
        "args": SimpleNamespace(cliprange_value=clip, cliprange=0.2, vf_coef=0.1),
        "padding_mask": PADDING,
        "padding_mask_p1": PADDING,
        "micro_batch_inds": EVERYTHING,
        "vpred": vpred,
        "mb_values": inputs["old_values"],
        "mb_return": inputs["returns"],
        "new_logprobs": new,
        "mb_logprobs": inputs["old_logprobs"],
        "mb_advantage": advantages,
    }
    after = run("vpredclipped", "loss", names)
    value, policy = after["vf_loss"], after["pg_loss"]
    return {
        "cliprange_value": clip,
        "value": value.item(),
        "value_grad": torch.autograd.grad(value, vpred, retain_graph=True)[0].tolist(),
        "clipfrac": after["vf_clipfrac"].item(),
        "policy": policy.item(),
        "policy_grad": torch.autograd.grad(policy, new, retain_graph=True)[0].tolist(),
        "total": after["loss"].item(),
    }


def check_that_everything_bites(cases: list[dict[str, Any]]) -> None:
    assert all(0 < case["clipfrac"] < 1 for case in cases[:2]), [case["clipfrac"] for case in cases]
    assert cases[2]["clipfrac"] == 0 and len({case["value"] for case in cases}) == 3
    zeros = [(torch.tensor(case["value_grad"])[~PADDING] == 0).sum() for case in cases[:2]]
    assert all(0 < count < LENGTHS.sum() for count in zeros), zeros


def rounded(value: Any) -> Any:
    """Ten significant digits, in a tree of lists and dicts."""
    if isinstance(value, dict):
        return {name: rounded(x) for name, x in value.items()}
    if isinstance(value, list):
        return [rounded(x) for x in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


def golden() -> dict[str, Any]:
    inputs = make_inputs()
    gaes = [advantages(inputs, gamma, lam) for gamma, lam in ((1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0))]
    white = whitened(gaes[0]["advantages"])
    cases = [losses(inputs, white, clip) for clip in (0.2, 0.05, 1e9)]
    check_that_everything_bites(cases)
    return {
        "inputs": {name: x.tolist() for name, x in inputs.items()} | {"lengths": LENGTHS.tolist()},
        "gae": gaes,
        "whitened": white.tolist(),
        "losses": cases,
    }


def to_json(data: dict[str, Any]) -> str:
    """One case a line."""
    lines = []
    for name, value in data.items():
        rows = [json.dumps(row) for row in value] if name in ("gae", "losses") else []
        text = "[\n  " + ",\n  ".join(rows) + "\n ]" if rows else json.dumps(value)
        lines.append(f' "{name}": {text}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    text = to_json(rounded(golden()))
    (HERE / "ppo.json").write_text(text)
    print(f"ppo.json: {len(text) / 1000:.0f} kB")
