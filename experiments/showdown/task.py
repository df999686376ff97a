"""The task of `main.py`, its tokenizer and its model: small enough for a hundred runs, and nothing to download."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import smd_jax as smd
from smd_jax.tasks.task import Row

DIGITS = 12
PROMPT = DIGITS + 1  # "=" ends the prompt
RESPONSE = DIGITS + 1  # the end of sequence ends the response
TRAINING_ROWS = 50_000
EVALUATION_ROWS = 512
Split = Literal["train", "validation", "evaluation"]


def model_config() -> smd.ModelConfig:
    """A Qwen3-style decoder with two layers and 75,000 parameters."""
    return smd.ModelConfig(
        vocab_size=len(tokenizer()),
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=32,
        qk_norm=True,
        tie_embeddings=True,
    )


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character: the digits and "="."""
    vocabulary = {character: index for index, character in enumerate(["<pad>", "<end>", "=", *"0123456789"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<end>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


@functools.cache
def digits(split: Split) -> np.ndarray:
    """`[rows, DIGITS]`; no row of one split is in another, nor twice in its own."""
    drawn = np.random.default_rng(0).integers(0, 10, (TRAINING_ROWS + 2 * EVALUATION_ROWS, DIGITS))
    _, first = np.unique(drawn, axis=0, return_index=True)
    evaluation, validation, train = np.split(drawn[np.sort(first)], [EVALUATION_ROWS, 2 * EVALUATION_ROWS])
    return {"train": train, "validation": validation, "evaluation": evaluation}[split]


@dataclass(frozen=True)
class RunningSums:
    """The task: a row's prompt is "382…=", its answer the last digits of 3, 3 + 8, 3 + 8 + 2, …: "313…"."""

    split: Split
    size: int | None = None  # None: all rows

    def __len__(self) -> int:
        return self.size or len(digits(self.split))

    def __getitem__(self, index: int) -> Row:
        row = digits(self.split)[index]
        return {"prompt": as_text(row) + "=", "answer": as_text(np.cumsum(row) % 10)}

    def reward(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        """The share of sums that stand right at their place; what follows the last one is ignored."""
        pairs = zip(completions, columns["answer"], strict=True)
        return [sum(a == b for a, b in zip(text, answer, strict=False)) / DIGITS for text, answer in pairs]


def as_text(row: np.ndarray) -> str:
    return "".join(map(str, row))
