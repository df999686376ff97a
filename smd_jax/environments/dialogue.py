"""Writes conversations as text: the prompt, and the text after each turn of the policy.

Sampled turns are never encoded again: only the text between two turns is appended. So a chat template must extend a
conversation by a suffix:

    <|im_start|>user\\nquestion<|im_end|>\\n<|im_start|>assistant\\n        prompt
    4 + 4 = 9<|im_end|>                                                  sampled
    \\n<|im_start|>user\\nWrong.<|im_end|>\\n<|im_start|>assistant\\n        added

A template that changes earlier turns is refused, because the policy would read a past that it did not sample. Qwen3's
template removes the thinking of earlier turns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from smd_jax.environments.protocol import Message
from smd_jax.text.chat_template import TemplateError, render_messages
from smd_jax.text.prompts import Tokenizer, encode_continuation, encode_prompt, wants_special_tokens
from smd_jax.text.token_bytes import special_tokens

# Turns that test a template. Templates with thinking look for this tag.
PLAIN, THINKING = "b", "<think>\na\n</think>\n\nb"
# Text that templates with thinking may add to the generation prompt only: an empty thinking, or its beginning.
BEGUN_THINKING = re.compile(r"<think>\s*(</think>\s*)?\Z")


class Dialogue:
    """Writes conversations for one tokenizer; without a chat template, texts are concatenated.

    Args:
      variables: of the chat template, such as {"enable_thinking": False}.

    Attributes:
      special_tokens: contents of the tokenizer's special tokens by id, when the dialogue was made.

    Raises:
      TemplateError: a template that changes earlier turns, or that fails.
    """

    def __init__(self, tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None) -> None:
        self.special_tokens = special_tokens(tokenizer)
        self._tokenizer = tokenizer
        self._variables = dict(variables or {})
        self._has_template = tokenizer.chat_template is not None
        self._writes_tools = False
        self._written = set[tuple[str, str, str]]()  # roles, places and the templates that write their content there
        if self._has_template:
            # Raises TemplateError unless the template only appends text after a turn, with and without thinking.
            for text in (PLAIN, THINKING):
                first = [_user("a"), _assistant(text)]
                self._after(first, [_user("c")], self._variables)
                self._after([*first, _user("c"), _assistant(text)], [_user("d")], self._variables)

    def prompt(
        self,
        content: str | Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a prompt.

        Args:
          content: a text or chat messages.
          tools: JSON schemas of the tools.
          variables: of the chat template for this conversation, instead of those of all.

        Raises:
          TemplateError: messages or tools without a chat template; tools or a role that the template does not write.
        """
        if not self._has_template:
            if not isinstance(content, str) or tools:
                raise TemplateError("expected a text as prompt without a chat template; got messages or tools")
            return content
        messages = _messages(content)
        merged = self._merged(tools, variables)
        text = self._written_out(
            messages, merged, lambda new: render_messages(new, self._tokenizer, merged), "in a prompt"
        )
        if tools and not self._writes_tools:  # once per template, because a rendering is a call of another process
            without = render_messages(messages, self._tokenizer, self._merged((), variables))
            if text == without:
                raise TemplateError(
                    "expected a chat template that writes the tools' schemas into the prompt; got one that ignores "
                    "`tools`. Add them to the template and save it with the tokenizer, or describe the tools in a "
                    "message and give no schemas"
                )
            self._writes_tools = True
        return text

    def answer(
        self,
        content: str | Sequence[Message],
        last: str,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text between two turns of the policy.

        Args:
          content: the environment's answer, a text or chat messages.
          last: text of the last token of the previous turn; if it ends the message, it is not repeated.
          tools, variables: of the prompt: a tokenizer may have another template for conversations with tools.

        Raises:
          TemplateError: messages without a chat template; a template that leaves out the content of their role.
        """
        if not self._has_template:
            if not isinstance(content, str):
                raise TemplateError("expected a text as answer without a chat template; got messages")
            return content
        before, merged = [_user("a"), _assistant(PLAIN)], self._merged(tools, variables)
        messages = _messages(content)
        text = self._written_out(messages, merged, lambda new: self._after(before, new, merged), "after a turn")
        return text.removeprefix(last)

    def prompt_tokens(self, text: str) -> list[int]:
        """The tokens of a prompt's text."""
        return encode_prompt(self._tokenizer, text, add_special_tokens=wants_special_tokens(self._tokenizer))

    def answer_tokens(self, text: str, last: str = "") -> list[int]:
        """The tokens of a text between two turns.

        Args:
          last: text of the token before it.
        """
        return encode_continuation(self._tokenizer, text, last if last in self.special_tokens.values() else "")

    def _written_out(
        self,
        messages: list[Message],
        variables: dict[str, Any],
        write: Callable[[list[Message]], str],
        place: str,
    ) -> str:
        """The text that `write` gives for the messages; raises TemplateError if it leaves out the content of a role."""
        text, template = write(messages), self._tokenizer.get_chat_template(tools=variables.get("tools"))
        for role in dict.fromkeys(str(message["role"]) for message in messages):
            others = [_longer(message) if str(message["role"]) == role else message for message in messages]
            # Once per role, place and template, because a rendering is a call of another process.
            if (role, place, template) in self._written or others == messages:
                continue
            if write(others) == text:
                raise TemplateError(
                    f"expected a chat template that writes messages of role {role[:40]!r} {place}; got one that "
                    "leaves their content out. Edit the template and save it with the tokenizer, or use another role, "
                    "such as 'user'"
                )
            self._written.add((role, place, template))
        return text

    def _after(self, before: list[Message], new: list[Message], variables: dict[str, Any]) -> str:
        """The text that the template writes after the last message of `before` if `new` follows."""
        whole = render_messages([*before, *new], self._tokenizer, variables)
        prompt = render_messages(before[:-1], self._tokenizer, variables)
        turn = str(before[-1]["content"])
        # Only the text after a turn is added, so the turn may stand there without the thinking that its prompt began.
        for known in (prompt + turn, BEGUN_THINKING.sub("", prompt) + turn):
            if whole.startswith(known):
                return whole[len(known) :]
        pairs = enumerate(zip(prompt + turn, whole, strict=False))
        same = next((i for i, (one, other) in pairs if one != other), len(whole))
        expected, got = (prompt + turn)[same : same + 40], whole[same : same + 40]
        raise TemplateError(
            "expected a chat template that extends a conversation, so that a later message leaves the turns before it "
            f"as they were; got {expected!r} rewritten as {got!r} (Qwen3's template removes earlier thinking). Edit "
            "the template so that it writes every assistant message as its content alone, and save it with the "
            "tokenizer"
        )

    def _merged(self, tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None) -> dict[str, Any]:
        """All variables of the template for one conversation."""
        return {**self._variables, **(variables or {}), **({"tools": list(tools)} if tools else {})}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _messages(content: str | Sequence[Message]) -> list[Message]:
    return [_user(content)] if isinstance(content, str) else [dict(message) for message in content]


def _longer(message: Message) -> Message:
    """The message with more content, if it is a text or a list of parts."""
    if message.get("tool_calls"):  # some templates write these in place of the content
        return message
    match message.get("content"):
        case str(text):
            return {**message, "content": text + PLAIN}
        case list(parts):
            # Every text, because some templates write the first one only.
            longer = [{**part, "text": part["text"] + PLAIN} if "text" in part else part for part in parts]
            return {**message, "content": [*longer, {"type": "text", "text": PLAIN}]}
    return message
