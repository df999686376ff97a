"""How far is a dense learner from a sampler with a small cache, on a pretrained model, and what is left of the weights?

Question   SmolLM2-135M-Instruct answers GSM8K's questions under a cache budget. A dense learner that trains on these
           answers is off by how much a token? How many responses are left, in effect, when the weights of whole
           responses correct that, after 16, 32, … tokens? And how far off is a learner that replays the sampler's mask?
           What does the eviction cost in right answers, of GSM8K, and of a task that the model half knows?
Found      With half of the keys gone a dense learner is off by a tenth of a nat a token, and a tenth of the weights of
           256 tokens is left; a learner that replays the masks is off by rounding alone. Of GSM8K this model solves
           too little for a budget to cost anything.
Command    make smollm2
           python experiments/mismatch.py --gsm8k FOLDER/test.jsonl          (openai/gsm8k, one JSON object a line)
           A row that is in the file of results is not made again: the same command goes on after a stop.
Cost       three minutes a row of the kind "mismatch" on one core of an AMD EPYC (family 26, model 2) beside other work
Result     experiments/results/mismatch_smollm2.json

Rows       "mismatch": 32 responses of up to 256 tokens at temperature 1, float32, buffer 16. A prompt is a question in
           the chat template, 71 to 155 tokens, so that a budget of 512 would evict nothing: the rows of that budget
           have 3 solved questions of the same file in front (`examples`), and so has one of 256 beside them.
           "accuracy": reasoning-gym's chain_sum with two or three single digits, decoded at temperature 1 and greedy
           under the budget and with the full cache. Right is what ends in the right number.
           "gsm8k": the same of GSM8K's questions, 3 solved ones in front, at 64 … 512 keys. The model solves few.
Fields     evicted_share: of the keys that the queries of the responses would see densely. mean, p999 and max of
           |log p_learner - log p_sampler| of the dense learner, nats; outside: share of tokens with a ratio beyond
           [0.5, 2]; token_ess, by_length: see experiments/study/weights.py. shadow_max_abs_dlogp: of the learner that
           replays the mask.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from transformers import AutoTokenizer

import smd_jax as smd
from provenance import provenance
from smd_jax.commands.compilation_cache import keep_programs
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import H2O, RKV, Dense, SnapKV, StreamingLLM
from smd_jax.learner.config import Visibility
from smd_jax.message.sampling import SamplingConfig
from smd_jax.tasks.dataset_task import DatasetTask
from smd_jax.tasks.gsm8k import Gsm8kTask, final_answer, load_gsm8k, same_answer
from smd_jax.tasks.reasoning_gym import ReasoningGymTask
from smd_jax.tasks.task import Row, Task
from smd_jax.text.prompts import eos_token_id, pad_token_id
from smd_jax.train.decoding import Decode
from smd_jax.train.evaluation import EvaluationConfig, Evaluator
from smd_jax.train.grading import encode_rows
from study.files import RESULTS, number, read_rows, write_rows
from study.weights import log_ratios, response_weights, token_weights

# Windows fit the smallest budget.
POLICIES: dict[str, EvictionPolicy] = {
    "snapkv": SnapKV(window=16),
    "h2o": H2O(),
    "rkv": RKV(),
    "streaming": StreamingLLM(),
}
# Budget, and solved questions in front of the prompt.
MISMATCH_CELLS = ((64, 0), (128, 0), (256, 0), (256, 3), (512, 3))
EXAMPLES = 32  # the first solved question of a prompt that has some: behind those of a row "mismatch"
PROMPT_WIDTHS = {0: 160, 3: 528}
ACCURACY_BUDGETS = (16, 32, 48)
GSM8K_BUDGETS = (64, 128, 256, 512)
GSM8K_POLICIES = ("snapkv", "h2o")
GSM8K_EXAMPLES = 3
GSM8K_WIDTH = 576
LENGTHS = (16, 32, 64, 128, 256)
VISIBILITIES: tuple[Visibility, ...] = ("dense", "shadow")
FULL = "dense"  # the row of an accuracy without eviction


@dataclass(frozen=True)
class Args:
    """Measures the mismatch of a pretrained model under cache budgets, policy by policy."""

    gsm8k: Path  # rows, one JSON object a line
    model: Path = Path("runs/smollm2")  # Hugging Face checkpoint directory
    policies: tuple[str, ...] = tuple(POLICIES)  # names; all by default
    out: Path = RESULTS / "mismatch_smollm2.json"
    prompts: int = 32  # of a row "mismatch"
    response_tokens: int = 256  # of a response, at most
    buffer: int = 16  # queries between two compressions
    accuracy_prompts: int = 128  # of a row "accuracy"
    accuracy_tokens: int = 48
    gsm8k_prompts: int = 64  # of a row "gsm8k"
    microbatch: int = 8  # sequences that the learner reads at once
    seed: int = 0

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.policies) - set(POLICIES)):
            raise ValueError(f"expected policies from {list(POLICIES)}; got {unknown}")


@dataclass(frozen=True)
class Cell:
    """A row to be made.

    Attributes:
      prompts, tokens, buffer, seed: what a kept row must have been made with.
    """

    kind: str
    policy: str
    budget: int | None
    examples: int
    prompts: int
    tokens: int
    buffer: int
    seed: int

    @property
    def key(self) -> tuple[object, ...]:
        return self.kind, self.policy, self.budget, self.examples


@dataclass(frozen=True)
class Right:
    """chain_sum, graded as GSM8K is: by the number that a completion ends in, whatever stands before it."""

    task: ReasoningGymTask

    def __len__(self) -> int:
        return len(self.task)

    def __getitem__(self, index: int) -> Row:
        return self.task[index]

    def reward(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        pairs = zip(columns["answer"], completions, strict=True)
        return [float(same_answer(answer, final_answer(completion))) for answer, completion in pairs]


@dataclass(frozen=True)
class Measurer:
    """A model, its tokenizer and GSM8K's rows."""

    args: Args
    model: smd.Decoder
    params: Any
    tokenizer: Any
    gsm8k: Gsm8kTask

    def row(self, cell: Cell) -> dict[str, Any]:
        if cell.kind == "mismatch":
            return self.mismatch(cell)
        if cell.kind == "gsm8k":
            rows = prompts_of(self.gsm8k, cell.prompts, cell.examples)
            return self.accuracy(cell, DatasetTask(rows, self.solved), GSM8K_WIDTH)
        sums = (("min_digits", 1), ("max_digits", 1), ("min_terms", 2), ("max_terms", 3))
        return self.accuracy(cell, Right(ReasoningGymTask("chain_sum", cell.seed, cell.prompts, sums)), 80)

    def solved(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> list[float]:
        """Completions of chats are messages."""
        return self.gsm8k.reward(prompts, [message["content"] for (message,) in completions], **columns)

    def config(self, cell: Cell) -> smd.RolloutConfig:
        special = eos_token_id(self.tokenizer), pad_token_id(self.tokenizer)
        return smd.RolloutConfig(cell.tokens, cell.budget or 1, cell.buffer, *special)

    def mismatch(self, cell: Cell) -> dict[str, Any]:
        rows = prompts_of(self.gsm8k, cell.prompts, cell.examples)
        width = PROMPT_WIDTHS[cell.examples]
        trajectory = smd.rollout(
            self.model,
            self.params,
            encode_rows(self.model, self.tokenizer, rows, width),
            jax.random.key(cell.seed),
            policy=POLICIES[cell.policy],
            config=self.config(cell),
        )
        mask = np.asarray(trajectory.response_mask)
        at_once = min(self.args.microbatch, cell.prompts)
        dense, shadow = (
            log_ratios(self.model, self.params, trajectory, visibility, at_once) for visibility in VISIBILITIES
        )
        found = {
            "prompt_tokens": number(float(np.asarray(trajectory.valid)[:, :width].sum(axis=1).mean())),
            "response_tokens": number(float(mask.sum(axis=1).mean())),
            "evicted_share": number(evicted_share(trajectory)),
            **token_weights(dense, mask),
            "shadow_max_abs_dlogp": number(float(np.abs(shadow[mask]).max())),
        }
        lengths = [length for length in LENGTHS if length <= cell.tokens]
        return found | {"by_length": response_weights(dense, mask, lengths)}

    def accuracy(self, cell: Cell, task: Task, prompt_width: int) -> dict[str, Any]:
        """Share of right answers in both ways of decoding, with Wilson's intervals."""
        policy = Dense() if cell.policy == FULL else POLICIES[cell.policy]
        greedy = SamplingConfig(temperature=0.0)
        decodes = Decode("sampled", policy), Decode("greedy", policy, sampling=greedy)
        config = EvaluationConfig(decodes, self.config(cell), prompt_width=prompt_width, rows=64, seed=cell.seed)
        results = {
            result.name: result for result in Evaluator(self.model, task, self.tokenizer, config).run(self.params)
        }
        found: dict[str, Any] = {"response_tokens": number(float(results["sampled"].lengths.mean()))}
        for name, result in results.items():
            low, high = result.interval
            found |= {name: number(result.reward), f"{name}_low": number(low), f"{name}_high": number(high)}
        return found


def prompts_of(task: Gsm8kTask, count: int, examples: int) -> list[Row]:
    """The first `count` questions, but those that stand solved in front of each: EXAMPLES, as many as asked for."""
    solved = range(EXAMPLES, EXAMPLES + examples)
    front = [
        turn
        for row in (task.rows[index] for index in solved)
        for turn in (
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        )
    ]
    asked = [task[index] for index in range(count + examples) if index not in solved][:count]
    return [row | {"prompt": [*front, {"role": "user", "content": row["prompt"]}]} for row in asked]


def evicted_share(trajectory: smd.Trajectory) -> float:
    """Of the keys that the queries of the responses would see densely, the share that they do not."""
    assert isinstance(trajectory.mask, smd.ShadowMask)
    evicted_at = np.asarray(trajectory.mask.evicted_at)  # [rows, layers, kv_heads, T]
    valid = np.asarray(trajectory.valid)
    width = trajectory.prompt_width
    seen = total = 0
    # The state of column t predicts column t + 1: the last prompt column to the last but one ask for the response.
    for query in range(width - 1, valid.shape[1] - 1):
        asks = valid[:, query + 1, None] & valid[:, : query + 1]
        total += asks.sum() * evicted_at.shape[1] * evicted_at.shape[2]
        seen += (asks[:, None, None] & (evicted_at[..., : query + 1] > query)).sum()
    return float(1 - seen / total)


def cells(args: Args) -> list[Cell]:
    """The mismatch policy by policy, then right answers, with the full cache first."""
    made = partial(Cell, buffer=args.buffer, seed=args.seed)
    found = [
        made("mismatch", policy, budget, examples, args.prompts, args.response_tokens)
        for policy in args.policies
        for budget, examples in MISMATCH_CELLS
    ]
    accuracy = partial(made, "accuracy", examples=0, prompts=args.accuracy_prompts, tokens=args.accuracy_tokens)
    found.append(accuracy(policy=FULL, budget=None))
    found += [accuracy(policy=policy, budget=budget) for policy in args.policies for budget in ACCURACY_BUDGETS]
    gsm8k = partial(made, "gsm8k", examples=GSM8K_EXAMPLES, prompts=args.gsm8k_prompts, tokens=args.response_tokens)
    found.append(gsm8k(policy=FULL, budget=None))
    solving = [policy for policy in GSM8K_POLICIES if policy in args.policies]
    return found + [gsm8k(policy=policy, budget=budget) for policy in solving for budget in GSM8K_BUDGETS]


def is_kept(cell: Cell, rows: Sequence[dict[str, Any]]) -> bool:
    """Whether the row is there.

    Raises:
      ValueError: if it was made with other settings.
    """
    for row in rows:
        if all(
            row[name] == value for name, value in zip(("kind", "policy", "budget", "examples"), cell.key, strict=True)
        ):
            wanted = asdict(cell)
            if (there := {name: row[name] for name in wanted}) != wanted:
                raise ValueError(f"expected a kept row of {wanted}; got {there}. Name another file with --out")
            return True
    return False


def main(args: Args) -> None:
    kept = read_rows(args.out)
    missing = [cell for cell in cells(args) if not is_kept(cell, kept)]
    if not missing:
        return
    config, params = smd.load_checkpoint(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    measurer = Measurer(args, smd.Decoder(config), params, tokenizer, load_gsm8k(args.gsm8k))
    for cell in missing:
        row = {"model": args.model.name} | asdict(cell) | measurer.row(cell) | provenance()
        kept = [*read_rows(args.out), row]
        write_rows(args.out, kept)
        print({name: row[name] for name in row if name not in ("versions", "cpu", "command", "by_length")}, flush=True)


if __name__ == "__main__":
    keep_programs()
    try:
        arguments = tyro.cli(Args)
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    main(arguments)
