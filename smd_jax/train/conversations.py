"""Samples conversations with environments, for training and evaluations, with rewards per turn."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key

from smd_jax.config import check_choice, check_whole
from smd_jax.devices.sharding import check_rows, sequence_ways, shard_batch
from smd_jax.environments.dialogue import Dialogue
from smd_jax.environments.processes import Environments
from smd_jax.environments.respondent import Conversation, EnvironmentRespondent
from smd_jax.message.trajectory import Trajectory
from smd_jax.model.protocol import Params
from smd_jax.sampler.compaction import CompactingRespondent, CompactionConfig, converse_compacting
from smd_jax.sampler.conversation import begin_conversations, conversation_sampler, to_trajectory
from smd_jax.sampler.conversation_loop import (
    ConversationConfig,
    ConversationStats,
    Conversed,
    Respondent,
    check_decode_rows,
    check_shortest_turn,
    converse,
)
from smd_jax.sampler.keys import row_keys
from smd_jax.tasks.task import Row
from smd_jax.text.prompts import PromptBatch, pad_token_id, repeat_prompts
from smd_jax.train.rollouts import Rollouts, Sampled
from smd_jax.typed_fields import check_types

Credit = Literal["trajectory", "turn"]  # unit of an advantage
ASK = "Summarise this conversation in a few sentences: what you know, and what is left to do."


@dataclass(frozen=True, kw_only=True)
class TextCompaction:
    """Text-level compaction: the policy summarises a full context and continues in a new one, which begins with the
    prompt and the summary; see `smd_jax.sampler.compaction`. Static.

    Attributes:
      contexts: maximum per conversation.
      after_tokens: tokens after the prompt, answers included, from which a context is summarised when a turn has ended.
      ask: request for the summary; a message, if there is a chat template.
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


@dataclass(frozen=True)
class ConversationRollouts(Rollouts):
    """Samples conversations with an environment; see Rollouts.

    `prompt_width` is the width of a prompt, with compaction including its summary.

    Raises:
      ValueError: several processes, columns that devices share, `decode_rows` on several devices, and the errors of
        Rollouts and Dialogue.
    """

    environment: EnvironmentConfig = field(kw_only=True)

    def __post_init__(self) -> None:
        mesh, config = self.placement.mesh, self.config
        if jax.process_count() > 1:
            raise ValueError(f"expected one process with an environment; got {jax.process_count()}")
        if sequence_ways(mesh) > 1:
            raise ValueError(f"expected a mesh without a sequence axis with an environment; got {dict(mesh.shape)}")
        if self.decode_rows is not None and mesh.size > 1:
            raise ValueError(
                "expected decode_rows None with an environment on several devices, because conversations move between "
                f"rows; got {self.decode_rows}"
            )
        super().__post_init__()
        conversation_sampler(self.model, self.policy, config, self.prompt_width)
        check_shortest_turn(config, self.environment.conversation)
        if config.eos_token_id is None and self.stop is None:
            raise ValueError("expected an eos_token_id or stop_strings with an environment, to end a turn; got neither")
        _, compaction = self.dialogue, self.compaction
        if compaction is not None and compaction.end_token is not None and self.stop is not None:
            raise ValueError(
                "expected compaction (--contexts) without stop_strings (--stop), because the request for a summary "
                f"continues turns that end with token {compaction.end_token}; got some"
            )
        if compaction is not None and compaction.after_tokens + len(compaction.ask) >= config.max_new_tokens:
            raise ValueError(
                f"expected after_tokens and ask of the compaction below max_new_tokens {config.max_new_tokens} "
                "together, so that there is room for a summary; got "
                f"{compaction.after_tokens + len(compaction.ask)} tokens"
            )

    def check_batch(self, prompts: int) -> None:
        """Raises ValueError for a number of prompts that cannot be sampled together."""
        super().check_batch(prompts)
        of_prompt = self.group_size if self.compaction is None else 1
        if self.decode_rows is not None:
            check_decode_rows(self.decode_rows, prompts * self.group_size, of_prompt)
        if self.compaction is None:
            check_rows(prompts, self.placement.mesh, "prompts_per_step with an environment")

    @property
    def contexts(self) -> int:
        return 1 if self.environment.compaction is None else self.environment.compaction.contexts

    @cached_property
    def dialogue(self) -> Dialogue:
        """Writes prompts and answers."""
        return Dialogue(self.tokenizer, self.environment.template_variables)

    @cached_property
    def compaction(self) -> CompactionConfig | None:
        """The compaction in tokens; None: one context.

        A chat template closes the turn before an answer unless an end token has closed it. If there is such an end
        token, only turns that end with it are continued.
        """
        wanted, ends = self.environment.compaction, self.config.eos_token_id
        if wanted is None:
            return None
        ask, end_token, before = self.dialogue.answer(wanted.ask, ""), None, ""
        for end in () if ends is None else (ends,) if isinstance(ends, int) else ends:
            last = self.tokenizer.decode([end], skip_special_tokens=False)
            assert isinstance(last, str)
            after = self.dialogue.answer(wanted.ask, last)
            if after != ask:
                ask, end_token, before = after, end, last
                break
        return CompactionConfig(
            contexts=wanted.contexts,
            after_tokens=wanted.after_tokens,
            ask=tuple(self.dialogue.answer_tokens(ask, before)),
            heading=tuple(self.dialogue.answer_tokens(wanted.heading)),
            end_token=end_token,
        )

    def sample(self, params: Params, key: Key[Array, ""] | Key[Array, " completions"], rows: Sequence[Row]) -> Sampled:
        """Samples a group of conversations for each row; arguments as in Rollouts."""
        began = time.perf_counter()
        environment, compaction, mesh = self.environment, self.compaction, self.placement.mesh
        respondent = self.respondent(rows, self.group_size)
        limits = environment.conversation
        if compaction is not None:  # a context may hold all turns and a summary
            limits = replace(limits, turns=limits.turns + 1)

        def talk(prompts: PromptBatch, keys: Array, answers: Respondent, active: np.ndarray | None) -> Conversed:
            return converse(
                self.model,
                params,
                shard_batch(prompts, mesh),
                keys,
                answers,
                policy=self.policy,
                config=self.config,
                conversation=limits,
                group_size=len(rows) * self.group_size // len(prompts.tokens),
                stop=self.stop,
                active=active,
                decode_rows=self.decode_rows,
            )

        conversations = tuple(respondent.conversations)
        with jax.set_mesh(mesh):
            if compaction is None:
                one = talk(respondent.prompts, key, respondent, None)
                trajectory, present, endings, stats = one.trajectory, None, one.endings, [one.stats]
                summaries = np.zeros(len(endings), int)
            else:
                batch = repeat_prompts(respondent.prompts, self.group_size)
                padded = zip(np.asarray(batch.tokens), np.asarray(batch.valid), strict=True)
                prompts = [row[keep].tolist() for row, keep in padded]
                turns = environment.conversation.turns
                compacting = CompactingRespondent(respondent, compaction, prompts, self.prompt_width, turns)
                found = converse_compacting(talk, compacting, key, pad_token_id(self.tokenizer))
                trajectory, present, endings, stats = found
                summaries = compacting.summaries
                self._add_contexts(conversations, trajectory, present)
        for each, ending in zip(conversations, endings, strict=True):
            each.ending = ending if each.failure is None else str(each.failure)
        trajectory = shard_batch(trajectory, mesh)
        contexts = np.ones(len(endings), int) if present is None else present.reshape(len(endings), -1).sum(axis=1)
        measured = {"time/rollout": time.perf_counter() - began, **_measured(trajectory, contexts, summaries, stats)}
        return Sampled(rows, trajectory, measured, conversations, present)

    def respondent(self, rows: Sequence[Row], group_size: int) -> EnvironmentRespondent:
        """Begins `group_size` conversations about each row."""
        return EnvironmentRespondent(
            self.environment.environments,
            self.dialogue,
            self.tokenizer,
            rows,
            group_size,
            self.prompt_width,
            vocab_size=self.model.shape.vocab_size,
        )

    def _add_contexts(self, conversations: Sequence[Conversation], trajectory: Trajectory, present: np.ndarray) -> None:
        """Adds the text of each context, special tokens included."""
        tokens, valid = np.asarray(trajectory.tokens), np.asarray(trajectory.valid)
        for row in np.flatnonzero(present).tolist():
            text = self.tokenizer.decode(tokens[row, valid[row]].tolist(), skip_special_tokens=False)
            assert isinstance(text, str)
            conversations[row // self.contexts].contexts.append(text)

    def shapes(self, params: Params, prompts: int) -> Trajectory:
        """The shapes of the trajectory for this number of prompts."""
        sampler = conversation_sampler(self.model, self.policy, self.config, self.prompt_width)
        rows = prompts * self.group_size * self.contexts

        def begun(params: Params, prompts: PromptBatch) -> Trajectory:
            keys = row_keys(jax.random.key(0, impl="threefry2x32"), rows)
            state = begin_conversations(sampler, params, prompts, keys, keys, jnp.zeros((rows,), jnp.int32))
            return to_trajectory(sampler, prompts, state, state.rows.done)

        return jax.eval_shape(begun, params, self._prompt_shapes(rows))


def _measured(
    trajectory: Trajectory, contexts: np.ndarray, summaries: np.ndarray, stats: Sequence[ConversationStats]
) -> dict[str, float]:
    """Metrics of conversations from the numbers of contexts and summaries of each, and the statistics of each context's
    batch."""
    count = len(contexts)
    turns = np.asarray(jnp.max(trajectory.turns(), axis=1)).reshape(count, -1).sum(axis=1)
    sampled = sum(each.sampled for each in stats)
    steps = sum(each.sampled / each.utilisation for each in stats if each.sampled)
    measured = {
        "time/environment": sum(each.waited_seconds for each in stats),
        # Share of the cache's rows that sampled a token, the mean over all steps.
        "rollout/utilisation": sampled / steps if steps else 0.0,
        "conversations/turns": float(np.mean(turns - summaries)),
        "conversations/read_tokens": sum(each.read for each in stats) / count,
        "conversations/ended": float(np.mean(np.asarray(trajectory.terminated))),
    }
    if len(trajectory.terminated) > count:
        measured["conversations/contexts"] = float(np.mean(contexts))
    return measured


def turn_rewards(conversations: Sequence[Conversation], trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """The reward of every turn, `[batch, turns]` float32, and a mask of the existing turns. A turn that was cut off
    before its answer has reward 0."""
    counts = np.asarray(jnp.max(trajectory.turns(), axis=1))
    # A power of two, so that few programs are compiled.
    rewards = np.zeros((len(conversations), 1 << (max(int(counts.max()), 1) - 1).bit_length()), np.float32)
    for row, conversation in enumerate(conversations):
        rewards[row, : len(conversation.rewards)] = conversation.rewards
    return rewards, np.arange(rewards.shape[1])[None] < counts[:, None]


def tokens_of_turns(of_turns: Float[Array, "batch turns"], trajectory: Trajectory) -> Float[Array, "batch R"]:
    """Spreads numbers of turns over the tokens sampled in them; 0 for all other tokens."""
    turns = trajectory.turns()
    index = jnp.clip(turns - 1, 0, of_turns.shape[1] - 1)
    return jnp.where(turns > 0, jnp.take_along_axis(of_turns, index, axis=1), 0.0)


def last_tokens(trajectory: Trajectory) -> Bool[Array, "batch R"]:
    """The last token of each turn."""
    mask = trajectory.response_mask
    return mask & ~jnp.pad(mask, [(0, 0), (0, 1)])[:, 1:]
