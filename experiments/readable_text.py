"""Does text stay text when keys are evicted, and what do attention sinks have to do with it?

Question   SmolLM2-135M-Instruct reads a prompt that is longer than the budget and answers it, under the policy of
           `smd-train` with and without its sinks, and under a window of the newest keys with and without them. Is what
           it writes still text?
Command    make smollm2
           python experiments/readable_text.py --out experiments/results/readable_text.json
Cost       about a quarter of an hour on two CPU cores; rows are written as they come
Result     experiments/results/readable_text.json

Prompts    Three of four passages (experiments/passages.py), cut so that the prompt has --prompt-tokens tokens, and a
           question about them, in the chat template. The end of sequence is not drawn, so that every text has the same
           length.
Fields     temperature: 0.0 is greedy. evicted_share: of the keys that the queries of the response would see densely.
           perplexity: of the text under the dense model at temperature 1, which no sampler can lower by what it forgot.
           repeated_4grams: share of the 4-grams that stood in the same text before; a dense greedy sampler of this size
           repeats itself, too, so it has to be read beside the row "dense".
           distinct_tokens: different tokens, as a share of all. All three are over the texts of all prompts.
           text: the beginning of the first one.
Controls   "dense, shuffled": the tokens of the dense texts in random order: the perplexity of what is no text.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import smd_jax as smd
from passages import PASSAGES
from provenance import provenance
from smd_jax.commands.arguments import SamplerArgs
from smd_jax.commands.choices import eviction_policy
from smd_jax.commands.compilation_cache import keep_programs
from smd_jax.message.masks import dense_mask, positions
from smd_jax.model.teacher_forced import apply_model
from smd_jax.monitor.progress import summary_table

QUESTION = "Write a long letter to a friend about these texts: what they say, and what you think of it."
SHOWN = 240  # characters of a text


@dataclass(frozen=True)
class Args:
    """Measures texts that were written under cache budgets."""

    model: Path = Path("runs/smollm2")  # Hugging Face checkpoint directory
    prompts: int = 2  # at most four differ
    prompt_tokens: int = 600  # of every prompt: more than the largest budget
    response_tokens: int = 256  # of every text
    budget: tuple[int, ...] = (512, 64)  # keys kept per layer and KV head; the first is smd-train's default
    buffer: int | None = None  # tokens between two compressions; None: smd-train's 128, at most half of the budget
    temperature: tuple[float, ...] = (0.0,)
    seed: int = 0
    json: bool = False  # print one JSON object a line in place of a table
    out: Path | None = None  # write the rows, with date and command, to this file


@dataclass(frozen=True)
class Case:
    """How a text is written."""

    eviction: str
    sinks: int = 0
    budget: int | None = None
    buffer: int | None = None


@dataclass(frozen=True)
class Measured:
    """What tells text from garbage, over several texts."""

    perplexity: float
    repeated_4grams: float
    distinct_tokens: float


@dataclass(frozen=True)
class Row:
    """One way of writing; fields as above."""

    eviction: str
    sinks: int
    budget: int | None
    buffer: int | None
    temperature: float
    prompts: int
    response_tokens: int
    evicted_share: float
    perplexity: float
    repeated_4grams: float
    distinct_tokens: float
    text: str


def cases(args: Args) -> list[Case]:
    """Dense first. The policy of smd-train's defaults with its sinks and without, and a window of the newest keys."""
    usual = SamplerArgs()
    found = [Case("dense")]
    for budget in args.budget:
        buffer = args.buffer or min(usual.buffer, budget // 2)
        names: tuple[str, ...] = ("snapkv", "streaming_llm")
        for name in names:
            found += [Case(name, sinks, budget, buffer) for sinks in (usual.sinks, 0)]
    return found


def long_prompts(tokenizer: PreTrainedTokenizerBase, count: int, length: int) -> list[list[int]]:
    """`count` prompts of `length` tokens, in the model's chat template.

    Raises:
      ValueError: three passages have fewer tokens.
    """
    mark = "<passages>"
    message = [{"role": "user", "content": f"{mark}\n\n{QUESTION}"}]
    whole = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
    head, tail = (tokenizer.encode(part, add_special_tokens=False) for part in whole.split(mark))
    left = length - len(head) - len(tail)
    rows = []
    for first in range(count):
        order = [(first + place) % len(PASSAGES) for place in range(3)]
        text = " ".join(PASSAGES[number].replace("\n", " ") for number in order)
        body = tokenizer.encode(text, add_special_tokens=False)
        if len(body) < left:
            raise ValueError(f"expected room for at most {len(body)} tokens of the passages {order}; got {left}")
        rows.append(head + body[:left] + tail)
    return rows


def write(
    model: smd.Decoder,
    params: smd.model.Params,
    prompts: list[list[int]],
    eos: int,
    case: Case,
    temperature: float,
    args: Args,
) -> smd.Trajectory:
    """The texts of all prompts, by the sampler."""
    tokens = jnp.asarray(prompts, jnp.int32)
    config = smd.RolloutConfig(
        args.response_tokens,
        case.budget or 1,  # a policy that never evicts reads neither
        case.buffer or 1,
        eos_token_id=eos,
        min_new_tokens=args.response_tokens,
        sampling=smd.SamplingConfig(temperature),
    )
    policy = eviction_policy(SamplerArgs(eviction=case.eviction, sinks=case.sinks))
    batch = smd.PromptBatch(tokens=tokens, valid=jnp.ones(tokens.shape, bool))
    return smd.rollout(model, params, batch, jax.random.key(args.seed), policy=policy, config=config)


@partial(jax.jit, static_argnums=0)
def dense_logprobs(model: smd.Decoder, params: smd.model.Params, tokens: jax.Array) -> jax.Array:
    """log p of every token but the first, of one sequence without padding `[T]`, with nothing forgotten."""
    valid = jnp.ones((1, tokens.shape[0]), bool)
    logits = apply_model(model, params, tokens[None], positions(valid), dense_mask(valid))[0, :-1]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[1:, None], axis=1)[:, 0]


def measure(model: smd.Decoder, params: smd.model.Params, prompts: list[list[int]], texts: list[list[int]]) -> Measured:
    """What tells text from garbage, of texts of one length, each behind its prompt."""
    surprise = []
    repeated = []
    distinct = []
    for prompt, text in zip(prompts, texts, strict=True):
        # One sequence at a time: logits of all of them would be gigabytes.
        logprobs = dense_logprobs(model, params, jnp.asarray(prompt + text, jnp.int32))
        surprise.append(-float(logprobs[-len(text) :].mean()))
        grams = [tuple(text[start : start + 4]) for start in range(len(text) - 3)]
        repeated.append(1 - len(set(grams)) / len(grams))
        distinct.append(len(set(text)) / len(text))
    return Measured(math.exp(np.mean(surprise)), float(np.mean(repeated)), float(np.mean(distinct)))


def evicted_share(trajectory: smd.Trajectory) -> float:
    """Of the keys that the queries of the response would see densely, those that they did not."""
    assert isinstance(trajectory.mask, smd.ShadowMask)
    width = trajectory.prompt_width
    # A key is seen by the queries from its own place up to that of its eviction; those of the response come from
    # `width` on, and the last token of a response asks nothing.
    places = np.arange(trajectory.tokens.shape[1] - 1)
    first = np.maximum(places, width)
    dense = places[-1] + 1 - first
    last = np.minimum(np.asarray(trajectory.mask.evicted_at)[..., :-1], places[-1] + 1)
    return float(1 - np.maximum(last - first, 0).sum(-1).mean() / dense.sum())


def main(args: Args) -> None:
    keep_programs()
    origin = provenance()
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    prompts = long_prompts(tokenizer, args.prompts, args.prompt_tokens)
    shape, params = smd.load_checkpoint(args.model)
    model = smd.Decoder(shape)
    rows = []

    def note(name: str, case: Case, temperature: float, share: float, texts: list[list[int]]) -> None:
        found = measure(model, params, prompts, texts)
        rows.append(
            Row(
                name,
                case.sinks,
                case.budget,
                case.buffer,
                temperature,
                len(prompts),
                args.response_tokens,
                share,
                **asdict(found),
                text=tokenizer.decode(texts[0])[:SHOWN],
            )
        )
        if args.json:
            print(json.dumps(asdict(rows[-1])), flush=True)
        if args.out is not None:  # after every row: what is done is not lost when the rest is stopped
            more = {"prompt_tokens": args.prompt_tokens, "seed": args.seed, "rows": [asdict(row) for row in rows]}
            args.out.write_text(json.dumps(origin | more, indent=1) + "\n", encoding="utf-8")

    for temperature in args.temperature:
        for case in cases(args):
            trajectory = write(model, params, prompts, tokenizer.eos_token_id, case, temperature, args)
            texts = np.asarray(trajectory.response).tolist()
            note(case.eviction, case, temperature, evicted_share(trajectory), texts)
            if case.eviction == "dense":
                shuffled = [np.random.default_rng(args.seed).permutation(text).tolist() for text in texts]
                note("dense, shuffled", case, temperature, 0.0, shuffled)
    if not args.json:
        columns = ("eviction", "sinks", "budget", "temperature", "evicted", "perplexity", "repeated", "distinct")
        cells = [
            (
                row.eviction,
                row.sinks,
                row.budget,
                row.temperature,
                row.evicted_share,
                row.perplexity,
                row.repeated_4grams,
                row.distinct_tokens,
            )
            for row in rows
        ]
        summary_table(f"{args.response_tokens} tokens behind {args.prompt_tokens}", columns, cells)


if __name__ == "__main__":
    main(tyro.cli(Args))
