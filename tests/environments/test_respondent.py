"""Conversations of a model with environments, from text to tokens and back."""

import os
import time
from typing import Any

import jax
import numpy as np
import pytest

from smd_jax.environments.dialogue import Dialogue
from smd_jax.environments.processes import EnvironmentsHere, open_environments
from smd_jax.environments.respondent import DONE, EnvironmentRespondent
from smd_jax.eviction.policies import SnapKV
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.conversation_loop import TURNS, ConversationConfig, Reply, converse
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config

TOKENIZER = byte_tokenizer(chat=False)
MODEL = Decoder(tiny_model_config(num_layers=1))
# One of six bytes ends a turn.
CONFIG = RolloutConfig(max_new_tokens=80, budget=12, buffer=4, eos_token_id=tuple(range(0, 256, 6)), pad_token_id=256)
KINDS = ("counts", "ends", "raises", "hangs", "another prompt", "cannot begin", "silent", "messages", "long")
ROWS = [{"prompt": kind} for kind in KINDS]


class Flaky:
    """Counts turns, or fails in the second one, depending on its row."""

    def reset(self, row: dict[str, Any]) -> str:
        self.kind, self.turn = row["prompt"], 0
        if self.kind == "cannot begin":
            raise RuntimeError("no seat")
        if self.kind == "long":
            return "x" * 17
        return f"{self.kind}?" if self.kind != "another prompt" else f"{os.getpid()}?"

    def step(self, text: str) -> tuple[Any, float, bool]:
        self.turn += 1
        if self.turn == 2 and self.kind == "raises":
            raise ValueError("lost")
        if self.turn == 2 and self.kind == "hangs":
            time.sleep(60)
        if self.turn == 2 and self.kind == "silent":
            return "", 0.5, False
        if self.turn == 2 and self.kind == "messages":
            return [{"role": "tool", "content": "4"}], 0.5, False
        return f" turn {self.turn} ", 0.5, self.kind == "ends" and self.turn == 2


@pytest.fixture(scope="module")
def sampled() -> tuple[Any, Any]:
    opened = open_environments(Flaky, 0.5)
    respondent = EnvironmentRespondent(opened, Dialogue(TOKENIZER), TOKENIZER, ROWS, group_size=2, prompt_width=16)
    conversed = converse(
        MODEL,
        random_params(MODEL.config),
        respondent.prompts,
        jax.random.key(1),
        respondent,
        policy=SnapKV(window=4),
        config=CONFIG,
        conversation=ConversationConfig(turns=3),
        group_size=2,
    )
    opened.close()
    return conversed, respondent.conversations


def of_kind(sampled: tuple[Any, Any], kind: str) -> list[tuple[int, str, Any]]:
    conversed, conversations = sampled
    first = 2 * KINDS.index(kind)
    return [(row, conversed.endings[row], conversations[row]) for row in (first, first + 1)]


def test_tokens_decode_to_the_texts(sampled: tuple[Any, Any]):
    trajectory = sampled[0].trajectory
    for row, ending, conversation in of_kind(sampled, "counts"):
        assert ending == TURNS and conversation.rewards == [0.5] * 3 and conversation.reward == 1.5
        assert conversation.prompt == "counts?" and conversation.answers == [" turn 1 ", " turn 2 ", " turn 3 "]
        valid = np.asarray(trajectory.valid[row])
        text = TOKENIZER.decode(np.asarray(trajectory.tokens[row])[valid].tolist(), skip_special_tokens=True)
        turns = conversation.turns
        assert text == conversation.prompt + "".join(turns[0] + " turn 1 " + turns[1] + " turn 2 " + turns[2])


def test_an_environment_ends_its_conversation(sampled: tuple[Any, Any]):
    for row, ending, conversation in of_kind(sampled, "ends"):
        assert ending == DONE and bool(sampled[0].trajectory.terminated[row]) and conversation.rewards == [0.5, 0.5]


@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        ("raises", "ValueError: lost"),
        ("hangs", "time: took longer than 0.5 s"),
        ("cannot begin", "RuntimeError: no seat"),
        ("silent", "no answer: expected a text of at least one token; got an empty one"),
        ("messages", "template: expected a text as answer without a chat template; got messages"),
        ("long", "prompt: expected a prompt of 1 to 16 tokens; got 17"),
    ],
)
def test_a_failure_ends_only_its_conversation(sampled: tuple[Any, Any], kind: str, ending: str):
    for _, got, conversation in of_kind(sampled, kind):
        assert got.startswith(ending) and np.isnan(conversation.reward) and conversation.failure is not None
        assert len(conversation.turns) == (0 if kind in ("cannot begin", "long") else 2)


def test_conversations_of_a_row_need_the_same_prompt(sampled: tuple[Any, Any]):
    (_, _, first), (_, ending, second) = of_kind(sampled, "another prompt")
    assert first.failure is None and first.prompt != second.prompt
    assert ending.startswith("reset: expected the same prompt") and np.isnan(second.reward)


class Echo:
    """Begins with the row's prompt, and answers with the turn between two z's."""

    def reset(self, row: dict[str, Any]) -> str:
        return row["prompt"]

    def step(self, text: str) -> tuple[str, float, bool]:
        return f"z{text}z", 0.0, False


def test_a_token_outside_the_vocabulary_fails_its_conversation():
    """As with a tokenizer's image tokens that the embedding lacks."""
    arguments: Any = EnvironmentsHere(Echo), Dialogue(TOKENIZER), TOKENIZER, [{"prompt": "abc"}, {"prompt": "xyz"}]
    respondent = EnvironmentRespondent(*arguments, group_size=1, prompt_width=16, vocab_size=122)
    failure = "vocabulary: expected tokens below 122, the model's; got 122, 'z'"
    assert str(respondent.conversations[1].failure) == failure and np.asarray(respondent.prompts.valid)[1].sum() == 1
    for row in (0, 1):
        respondent.send(row, [97])
    assert dict(respondent.receive(wait=True)) | dict(respondent.receive(wait=False)) == {
        row: Reply([], failure) for row in (0, 1)
    }
    assert np.isnan([each.reward for each in respondent.conversations]).all()


def test_a_row_sets_variables_of_the_chat_template():
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ 'bot' if m.role == 'assistant' else style }}]{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[bot]{% endif %}"
    )
    rows = [{"prompt": "counts", "chat_template_kwargs": {"style": style}} for style in ("short", "long")]
    dialogue = Dialogue(tokenizer, {"style": "plain"})
    respondent = EnvironmentRespondent(
        EnvironmentsHere(Flaky), dialogue, tokenizer, rows, group_size=1, prompt_width=64
    )
    prompts = [each.prompt for each in respondent.conversations]
    assert prompts == ["[short]counts?<|im_end|>[bot]", "[long]counts?<|im_end|>[bot]"]
    respondent.send(1, tokenizer.encode("a<|im_end|>"))
    ((row, _),) = respondent.receive(wait=True)
    assert (row, respondent.conversations[1].answers) == (1, ["[long] turn 1 <|im_end|>[bot]"])


def test_a_turn_keeps_special_tokens_but_not_its_end():
    tokenizer: Any = byte_tokenizer(chat=False)
    tokenizer.add_special_tokens({"bos_token": "<s>", "unk_token": "<unk>"})
    tokenizer.add_special_tokens({"extra_special_tokens": ["<tool_call>", "</tool_call>", "<|eom|>"]})
    arguments: Any = EnvironmentsHere(Echo), Dialogue(tokenizer), tokenizer, [{"prompt": "a"}]
    respondent = EnvironmentRespondent(*arguments, group_size=1, prompt_width=8)
    call = "<tool_call>{}</tool_call>"
    for text in (f"<s>a<unk> <|endoftext|>{call}<|im_end|>", f"a {call}<|eom|>", f"a {call}b"):
        respondent.send(0, tokenizer.encode(text, add_special_tokens=False))
        respondent.receive(wait=True)
    conversation = respondent.conversations[0]
    assert conversation.turns == [f"a {call}", f"a {call}", f"a {call}b"]
    assert conversation.answers == [f"z{turn}z" for turn in conversation.turns]
