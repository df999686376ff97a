"""Samples conversations with environments, for training and for evaluations."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Key

from smd_jax.config import check_choice, check_whole
from smd_jax.devices.sharding import sequence_ways, shard_batch
from smd_jax.environments.dialogue import Dialogue
from smd_jax.environments.processes import Environments
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.sampler.compaction import CompactingRespondent, CompactionConfig, converse_compacting
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.conversation import begin_conversations, conversation_sampler, to_trajectory
from smd_jax.sampler.conversation_loop import ConversationConfig, ConversationStats, Conversed, Respondent, converse
from smd_jax.sampler.environment_respondent import Conversation, EnvironmentRespondent
from smd_jax.sampler.keys import row_keys
from smd_jax.tasks.graded import Failure, Graded
from smd_jax.tasks.task import Row
from smd_jax.text.prompts import PromptBatch, Tokenizer, pad_token_id, repeat_prompts
from smd_jax.text.stop_strings import StopTable, stop_table
from smd_jax.typed_fields import check_types

Credit = Literal["trajectory", "turn"]  # what has an advantage of its own
ASK = "Summarise this conversation in a few sentences: what you know, and what is left to do."


@dataclass(frozen=True, kw_only=True)
class TextCompaction:
    """Several contexts of a conversation: the policy summarises a full one, and continues in a new one that begins with
    the prompt and the summary; see `smd_jax.sampler.compaction`. Static.

    Attributes:
      contexts: of a conversation at most.
      after_tokens: tokens after the prompt, answers included, from which a context is summarised when a turn has ended.
      ask: what the policy reads before it writes the summary; a message, if there is a chat template.
      heading: text between the prompt and the summary in the next context.

    Raises:
      ValueError: fewer than two contexts, an empty `ask`.
    """

    contexts: int = 2
    after_tokens: int
    ask: str = ASK
    heading: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        check_whole("contexts", self.contexts, 2)
        check_whole("after_tokens", self.after_tokens, 1)
        if not self.ask:
            raise ValueError("expected a text in ask, after which the summary is written; got an empty one")


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Conversations with environments in a training run or an evaluation.

    Attributes:
      environments: see `smd_jax.environments.open_environments`.
      conversation: limits. `RolloutConfig.max_new_tokens` counts all tokens after the prompt, of each context.
      compaction: several contexts for a conversation; None: one.
      credit: "trajectory" gives all turns of a conversation one advantage, from the sum of its rewards; "turn" gives
        each turn its own, from its reward and those after it, see `smd_jax.losses.advantages.turn_relative`.
      max_failed: largest share of a rollout's conversations whose environment may fail; more end the run.
      template_variables: of the chat template, such as {"enable_thinking": False}.
    """

    environments: Environments
    conversation: ConversationConfig = ConversationConfig()
    compaction: TextCompaction | None = None
    credit: Credit = "trajectory"
    max_failed: float = 0.25
    template_variables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("credit", self.credit, get_args(Credit))
        if not 0 <= self.max_failed <= 1:
            raise ValueError(f"expected max_failed from 0 to 1, because it is a share; got {self.max_failed}")
        if self.compaction is not None and self.credit == "turn":
            raise ValueError(
                "expected credit 'trajectory' with compaction, because a summary is a turn without a reward of its "
                "own; got 'turn'"
            )

    @property
    def contexts(self) -> int:
        """Contexts of a conversation, each a row of the trajectory."""
        return 1 if self.compaction is None else self.compaction.contexts


class ConversationBatch(NamedTuple):
    """Conversations that have ended.

    Attributes:
      trajectory: `[conversations * contexts, ...]`, the contexts of a conversation side by side.
      present: its rows that hold a context.
      conversations: as text.
      stats: of each context's batch of conversations.
      seconds: that sampling took, environments included.
    """

    trajectory: Trajectory
    present: Bool[np.ndarray, " rows"]
    conversations: tuple[Conversation, ...]
    stats: list[ConversationStats]
    seconds: float

    @property
    def graded(self) -> Graded:
        """The rewards of the conversations, and why some have none."""
        failures = [
            Failure(row, "environment", each.failure.kind, each.failure.message)
            for row, each in enumerate(self.conversations)
            if each.failure is not None
        ]
        return Graded(np.array([each.reward for each in self.conversations], np.float32), {}, tuple(failures))

    @property
    def utilisation(self) -> float:
        """Share of the cache's rows that sampled a token, the mean over all steps."""
        sampled = sum(each.sampled for each in self.stats)
        steps = sum(each.sampled / each.utilisation for each in self.stats if each.sampled)
        return sampled / steps if steps else 0.0


@dataclass(frozen=True)
class ConversationRollouts:
    """Samples conversations with one environment.

    Attributes:
      prompt_width: tokens of a prompt at most, and with compaction of a prompt with its summary.
      config: lengths and special tokens; `sample` may change the budget. decode_rows: as in `converse`.
      stop_strings: texts that end a turn.

    Raises:
      ValueError: several processes, `decode_rows` on several devices, nothing that ends a turn, contexts without room
        for a summary, and what `conversation_sampler` and Dialogue raise.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    mesh: Mesh
    environment: EnvironmentConfig
    prompt_width: int
    config: RolloutConfig
    stop_strings: tuple[str, ...] = ()
    decode_rows: int | None = None

    def __post_init__(self) -> None:
        if jax.process_count() > 1:
            raise ValueError(f"expected one process with an environment; got {jax.process_count()}")
        if sequence_ways(self.mesh) > 1:
            raise ValueError(
                f"expected a mesh without a sequence axis with an environment; got {dict(self.mesh.shape)}"
            )
        if self.decode_rows is not None and self.mesh.size > 1:
            raise ValueError(
                "expected decode_rows None with an environment on several devices, because conversations move between "
                f"rows; got {self.decode_rows}"
            )
        if self.config.eos_token_id is None and not self.stop_strings:
            raise ValueError("expected an eos_token_id or stop_strings with an environment, to end a turn; got neither")
        _ = self.dialogue
        compaction = self.compaction
        if compaction is None:
            return
        longest = compaction.after_tokens + len(compaction.ask)
        if longest >= self.config.max_new_tokens:
            raise ValueError(
                f"expected after_tokens and ask of the compaction below max_new_tokens {self.config.max_new_tokens} "
                f"together, so that there is room for a summary; got {longest} tokens"
            )

    def check_policy(self, policy: EvictionPolicy, config: RolloutConfig) -> None:
        """Raises ValueError for a way of decoding that conversations do not have."""
        conversation_sampler(self.model, policy, config, self.prompt_width)

    @cached_property
    def dialogue(self) -> Dialogue:
        """Writes prompts and answers."""
        return Dialogue(self.tokenizer, self.environment.template_variables)

    @cached_property
    def stop_table(self) -> StopTable | None:
        """The stop strings as a table over the tokenizer's tokens."""
        return stop_table(self.tokenizer, self.stop_strings, self.model.shape.vocab_size)

    @cached_property
    def compaction(self) -> CompactionConfig | None:
        """The compaction in tokens, for turns that end with the first end token; None: one context."""
        wanted = self.environment.compaction
        if wanted is None:
            return None
        ends = self.config.eos_token_id
        first = [] if ends is None else [ends] if isinstance(ends, int) else [ends[0]]
        last = self.tokenizer.decode(first, skip_special_tokens=False)
        assert isinstance(last, str)
        ask = self.dialogue.answer_tokens(self.dialogue.answer(wanted.ask, last))
        return CompactionConfig(
            contexts=wanted.contexts,
            after_tokens=wanted.after_tokens,
            ask=tuple(ask),
            heading=tuple(self.dialogue.answer_tokens(wanted.heading)),
        )

    def sample(
        self,
        params: Params,
        key: Key[Array, ""] | Key[Array, " rows"],
        rows: Sequence[Row],
        policy: EvictionPolicy,
        group_size: int,
        config: RolloutConfig | None = None,
    ) -> ConversationBatch:
        """Samples `group_size` conversations for each row of a task.

        Args:
          key: consumed; one, or one for each conversation.
          config: in place of the own one.
        """
        config = self.config if config is None else config
        began = time.perf_counter()
        respondent = EnvironmentRespondent(
            self.environment.environments, self.dialogue, self.tokenizer, rows, group_size, self.prompt_width
        )
        conversation = self.environment.conversation

        def talk(prompts: PromptBatch, keys: Array, answers: Respondent, active: np.ndarray | None) -> Conversed:
            return converse(
                self.model,
                params,
                shard_batch(prompts, self.mesh),
                keys,
                answers,
                policy=policy,
                config=config,
                conversation=conversation,
                group_size=len(rows) * group_size // len(prompts.tokens),
                stop=self.stop_table,
                active=active,
                decode_rows=self.decode_rows,
            )

        with jax.set_mesh(self.mesh):
            if self.compaction is None:
                one = talk(respondent.prompts, key, respondent, None)
                trajectory, endings, stats = one.trajectory, one.endings, [one.stats]
                present = np.ones(len(endings), bool)
            else:
                # A context may hold all turns and a summary.
                turns, conversation = conversation.turns, replace(conversation, turns=conversation.turns + 1)
                prompts = _unpadded(repeat_prompts(respondent.prompts, group_size))
                compacting = CompactingRespondent(respondent, self.compaction, prompts, self.prompt_width, turns)
                found = converse_compacting(talk, compacting, key, pad_token_id(self.tokenizer))
                trajectory, present, endings, stats = found
                self._add_contexts(respondent.conversations, trajectory, present)
        for each, ending in zip(respondent.conversations, endings, strict=True):
            each.ending = ending
        seconds = time.perf_counter() - began
        conversations = tuple(respondent.conversations)
        return ConversationBatch(shard_batch(trajectory, self.mesh), present, conversations, stats, seconds)

    def _add_contexts(self, conversations: list[Conversation], trajectory: Trajectory, present: np.ndarray) -> None:
        """Adds the text of each context, special tokens included."""
        tokens, valid = np.asarray(trajectory.tokens), np.asarray(trajectory.valid)
        for row in np.flatnonzero(present).tolist():
            text = self.tokenizer.decode(tokens[row, valid[row]].tolist(), skip_special_tokens=False)
            assert isinstance(text, str)
            conversations[row // self.environment.contexts].contexts.append(text)

    def shapes(self, params: Params, policy: EvictionPolicy, conversations: int) -> Trajectory:
        """The shapes of the trajectory of so many conversations."""
        sampler = conversation_sampler(self.model, policy, self.config, self.prompt_width)
        rows = conversations * self.environment.contexts

        def begun(params: Params) -> Trajectory:
            shape = (rows, self.prompt_width)
            prompts = PromptBatch(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool))
            keys = row_keys(jax.random.key(0, impl="threefry2x32"), rows)
            state = begin_conversations(sampler, params, prompts, keys, keys, jnp.zeros((rows,), jnp.int32))
            return to_trajectory(sampler, prompts, state, state.rows.done)

        return jax.eval_shape(begun, params)


def _unpadded(prompts: PromptBatch) -> list[list[int]]:
    tokens, valid = np.asarray(prompts.tokens), np.asarray(prompts.valid)
    return [row[keep].tolist() for row, keep in zip(tokens, valid, strict=True)]
