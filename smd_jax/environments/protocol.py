"""The protocol of environments, and the results of their calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypedDict, runtime_checkable

from smd_jax.tasks.task import Row

Message = dict[str, Any]  # {"role": ..., "content": ...}


class Opening(TypedDict):
    """A prompt with tools. `tools` are JSON schemas, which a chat template writes into the prompt."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]]


@runtime_checkable
class Environment(Protocol):
    """The other side of one conversation. Both methods may be `async`; each call has a time limit.

    An object serves one conversation in its own process. Python's and NumPy's global random numbers start the same in
    every conversation, so a resumed run samples the same conversations.

    A class may also have a method `prepare()`. It is called once, on another object, before the processes of the
    conversations are forked, or here without a time limit: for slow imports and data that all conversations share. It
    must not be async, nor start threads.
    """

    def reset(self, row: Row) -> Any:
        """The prompt of a conversation about a task's row: a text, chat messages, or an Opening."""

    def step(self, text: str) -> Any:
        """The answer to a turn of the policy, `(text, reward, done)`.

        The first is a text or chat messages. `done` is a boolean, or a text which says why the conversation ends.
        """


class Failure(NamedTuple):
    """A call that gave no answer.

    Attributes:
      kind: such as the name of an exception; each kind is reported once. message: of this failure.
    """

    kind: str
    message: str

    def __str__(self) -> str:
        return self.message if self.message.startswith(self.kind) else f"{self.kind}: {self.message}"


class Answer(NamedTuple):
    """The result of a call.

    Attributes:
      content: a text or messages, of `reset` also an Opening; None if the call failed.
      reward: of the turn. done: whether the conversation is over. reason: why it is over, if the environment gave a
        reason.
      failure: why there is no answer; None if there is one.
    """

    content: Any
    reward: float = 0.0
    done: bool = False
    reason: str | None = None
    failure: Failure | None = None
