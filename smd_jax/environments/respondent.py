"""Conversations with environments: turns become texts, and answers become tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smd_jax.environments.dialogue import Dialogue
from smd_jax.environments.processes import Environments
from smd_jax.environments.protocol import Answer, Failure
from smd_jax.sampler.conversation_loop import Reply
from smd_jax.tasks.task import Row, template_kwargs_of
from smd_jax.text.chat_template import TemplateError
from smd_jax.text.prompts import PromptBatch, Tokenizer, pad_left, pad_token_id

DONE = "done"  # ending of a conversation that its environment ended without a reason
NO_TEXT = ("bos_token", "eos_token", "pad_token", "unk_token")  # special tokens that a turn's text leaves out


@dataclass
class Conversation:
    """One conversation as text.

    Attributes:
      prompt: as the policy reads it.
      turns: texts of the policy, without the end token, BOS, padding and unknown tokens. Other special tokens stay,
        because they may be tags that the environment reads, such as `<tool_call>`.
      answers: the environment's answers. The last one is not read if the conversation ends there.
      rewards: of every turn that was answered.
      failure: why the environment failed; None if it did not.
      ending: why the conversation ended, see `Conversed.endings`.
      contexts: all text of each context, of conversations whose contexts are compacted; empty for others.
    """

    prompt: str
    turns: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    failure: Failure | None = None
    ending: str = ""
    contexts: list[str] = field(default_factory=list)

    @property
    def reward(self) -> float:
        """The sum over the turns; NaN if the environment failed."""
        return math.nan if self.failure is not None else math.fsum(self.rewards)


class EnvironmentRespondent:
    """A Respondent whose answers come from environments.

    An environment that fails ends its own conversation. So does one whose `reset` gives another prompt than that of the
    same row's first conversation, because a group shares its prompt.

    Args:
      rows: of a task, one for each prompt; `group_size` conversations begin from each.
      prompt_width: maximum tokens of a prompt.
      vocab_size: of the model; None: ids are not checked. A tokenizer can have tokens that its model lacks, and a text
        with one of them is a failure.

    Attributes:
      conversations: so far, the `group_size` of a row adjacent.
      prompts: of the rows. That of a row without a prompt is one token of padding.
    """

    def __init__(
        self,
        environments: Environments,
        dialogue: Dialogue,
        tokenizer: Tokenizer,
        rows: Sequence[Row],
        group_size: int,
        prompt_width: int,
        *,
        vocab_size: int | None = None,
    ) -> None:
        self._environments = environments
        self._dialogue = dialogue
        self._tokenizer = tokenizer
        self._vocab_size = math.inf if vocab_size is None else vocab_size
        self._special = dialogue.special_tokens
        left_out = {tokenizer.special_tokens_map.get(name) for name in NO_TEXT}
        self._no_text = {token_id for token_id, token in self._special.items() if token in left_out}
        self._last_token: dict[int, str] = {}
        self._failed_before: list[int] = []
        self._tools: dict[int, Sequence[Mapping[str, Any]]] = {}
        # Variables of the chat template that the row of each conversation sets.
        self._variables = [template_kwargs_of(row, "an environment's row") for row in rows for _ in range(group_size)]
        answers = environments.reset([row for row in rows for _ in range(group_size)])
        self.conversations = [self._opened(number, answer, prompt_width) for number, answer in enumerate(answers)]
        prompts = []
        for first in range(0, len(answers), group_size):
            group = self.conversations[first : first + group_size]
            prompt = next((each.prompt for each in group if each.failure is None), None)
            prompts.append([] if prompt is None else dialogue.prompt_tokens(prompt))
            for each in group:
                if each.failure is None and each.prompt != prompt:
                    each.failure = Failure("reset", "expected the same prompt for each conversation about a row")
        pad = pad_token_id(tokenizer)
        self.prompts: PromptBatch = pad_left([tokens or [pad] for tokens in prompts], prompt_width, pad)

    def send(self, row: int, tokens: list[int]) -> None:
        conversation = self.conversations[row]
        if conversation.failure is not None:  # of its reset
            self._failed_before.append(row)
            return
        # If the last token of a turn is special, it is an end token. There may be several.
        said = tokens[:-1] if tokens[-1] in self._special else tokens
        conversation.turns.append(self._text([token for token in said if token not in self._no_text]))
        self._last_token[row] = self._text(tokens[-1:])
        self._environments.step(row, conversation.turns[-1])

    def receive(self, wait: bool) -> list[tuple[int, Reply]]:
        failed, self._failed_before = self._failed_before, []
        replies = [(row, Reply([], str(self.conversations[row].failure))) for row in failed]
        answers = self._environments.receive(wait and not replies)
        return replies + [(row, self._reply(row, answer)) for row, answer in answers]

    def _opened(self, number: int, answer: Answer, width: int) -> Conversation:
        if answer.failure is not None:
            return Conversation("", failure=answer.failure)
        content, tools = answer.content, ()
        if isinstance(content, dict):
            content, tools = content["messages"], content["tools"]
        self._tools[number] = tools
        try:
            text = self._dialogue.prompt(content, tools, self._variables[number])
        except TemplateError as error:
            return Conversation("", failure=Failure("template", str(error)[:300]))
        tokens = self._dialogue.prompt_tokens(text)
        if not 0 < len(tokens) <= width:
            message = f"expected a prompt of 1 to {width} tokens; got {len(tokens)}"
            return Conversation(text, failure=Failure("prompt", message))
        return Conversation(text, failure=self._outside(tokens))

    def _reply(self, row: int, answer: Answer) -> Reply:
        conversation = self.conversations[row]
        if answer.failure is not None:
            return self._failed(row, answer.failure)
        conversation.rewards.append(answer.reward)
        if answer.done:
            return Reply([], answer.reason or DONE)
        try:
            text = self._dialogue.answer(answer.content, self._last_token[row], self._tools[row], self._variables[row])
        except TemplateError as error:
            return self._failed(row, Failure("template", str(error)[:300]))
        tokens = self._dialogue.answer_tokens(text, self._last_token[row])
        if not tokens:  # without any, two turns would look like one
            return self._failed(row, Failure("no answer", "expected a text of at least one token; got an empty one"))
        failure = self._outside(tokens)
        if failure is not None:
            return self._failed(row, failure)
        conversation.answers.append(text)
        return Reply(tokens)

    def _outside(self, tokens: list[int]) -> Failure | None:
        """The failure of a text with a token that the model does not have."""
        outside = [token for token in tokens if token >= self._vocab_size]
        if not outside:
            return None
        text = self._text(outside[:1])
        message = f"expected tokens below {self._vocab_size}, the model's; got {outside[0]}, {text!r}"
        return Failure("vocabulary", message)

    def _failed(self, row: int, failure: Failure) -> Reply:
        self.conversations[row].failure = failure
        return Reply([], str(failure))

    def _text(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        assert isinstance(text, str)
        return text
