"""Evaluates a model on a task under several ways of decoding, once or every few rollouts of a run.

    evaluator = Evaluator(model, held_out, tokenizer, EvaluationConfig((Decode("dense"),), rollout, 512))
    for result in evaluator.run(params):
        print(result.name, result.reward, result.interval)

    train(..., evaluate=every_evaluation(loop, evaluator))                      logs eval/{name}/reward, …

All rows of the task are decoded in batches of one size, the last one padded with rows, so that each way of decoding is
compiled once. Each completion has its own PRNG key. So the batch size changes only rounding, and all evaluations of a
run use the same random numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from smd_jax.config import check_seed, check_whole
from smd_jax.devices.process_rows import Place
from smd_jax.devices.processes import all_or_none, gather_json
from smd_jax.devices.sharding import make_mesh, sampling_ways, shard_batch, shard_tree
from smd_jax.learner.state import TrainState
from smd_jax.message.trajectory import Trajectory
from smd_jax.metrics import EVALUATION_METRICS
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.sampler.config import RolloutConfig, cache_bytes, plan
from smd_jax.sampler.fixed_batch import rollout, rollout_program
from smd_jax.tasks.graded import Failure, Graded
from smd_jax.tasks.rewards import Rewards, check_failures
from smd_jax.tasks.task import Row, Task
from smd_jax.text.prompts import PromptBatch, Tokenizer, check_vocabulary, repeat_each
from smd_jax.text.stop_strings import StopTable, stop_table
from smd_jax.train.compile_ahead import rows_on
from smd_jax.train.conversation_samples import conversation_samples
from smd_jax.train.conversations import ConversationRollouts, EnvironmentConfig
from smd_jax.train.decoding import Decode, check_names
from smd_jax.train.grading import encode_rows, grade_part
from smd_jax.train.loop import Loop
from smd_jax.train.responder import sampler_copy


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Configuration of an evaluation.

    Attributes:
      decodes: the ways of decoding, with different names.
      rollout: lengths, special tokens and sampling; a way of decoding may override them.
      prompt_width: columns of the prompt, in tokens; longer prompts are refused.
      group_size: completions per prompt.
      rows: most completions that are decoded at once; each device decodes at least one prompt.
      stop_strings: texts that end a completion and stay part of it.
      seed: of the sampler, from 0 to 2**32 - 1.
    """

    decodes: tuple[Decode, ...]
    rollout: RolloutConfig
    prompt_width: int
    group_size: int = 1
    rows: int = 64
    stop_strings: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        check_names(self.decodes)
        for name in ("prompt_width", "group_size", "rows"):
            check_whole(name, getattr(self, name), 1)
        check_seed("seed", self.seed)
        if self.rows < self.group_size:
            raise ValueError(
                f"expected rows >= group_size = {self.group_size}, because the completions of a prompt are decoded "
                f"together; got {self.rows}"
            )


@dataclass(frozen=True)
class Evaluated:
    """The result of one way of decoding, with n completions of each prompt.

    Attributes:
      name: of the way of decoding.
      rewards: float32 `[prompts, n]`; NaN where a reward function failed: mean and interval leave that completion out,
        as training does.
      lengths: int `[prompts, n]`, tokens.
      clipped: bool `[prompts, n]`, whether the length limit ended the completion.
      completions: their texts, a list of n for every prompt.
      cache_bytes: size of the keys and values of one sequence.
      tokens_per_second: sampled by all rows together, without compilation and grading.
    """

    name: str
    rewards: np.ndarray
    lengths: np.ndarray
    clipped: np.ndarray
    completions: list[list[str]]
    cache_bytes: int
    tokens_per_second: float

    @property
    def reward(self) -> float:
        """Mean over prompts of the mean reward of their completions: pass@1 if rewards are 0 or 1; NaN without any."""
        means = prompt_means(self.rewards)
        return float(means.mean()) if len(means) else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of `reward`, see `mean_interval`."""
        return mean_interval(self.rewards)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that a run logs: `EVALUATION_METRICS`."""
        low, high = self.interval
        values = {
            "reward": self.reward,
            "reward_low": low,
            "reward_high": high,
            "mean_length": float(self.lengths.mean()),
            "clipped_ratio": float(self.clipped.mean()),
        }
        return {f"eval/{self.name}/{name}": values[name] for name in EVALUATION_METRICS}

    @property
    def row(self) -> dict[str, str | int | float | None]:
        """One row of a table, or JSON object; NaN, such as the interval of a single prompt, becomes None."""
        low, high = self.interval
        prompts, group_size = self.rewards.shape
        rewards = {"reward": self.reward, "reward_low": low, "reward_high": high}
        return {
            "decode": self.name,
            "prompts": prompts,
            "completions_per_prompt": group_size,
            **{name: None if math.isnan(value) else value for name, value in rewards.items()},
            "without_reward": int(np.isnan(self.rewards).sum()),
            "mean_length": float(self.lengths.mean()),
            "clipped_ratio": float(self.clipped.mean()),
            "cache_bytes_per_sequence": self.cache_bytes,
            "tokens_per_second": self.tokens_per_second,
        }


def mean_interval(rewards: np.ndarray) -> tuple[float, float]:
    """95 % interval of the mean over prompts, of rewards `[prompts, n]`; NaN for fewer than two prompts.

    The prompts are the sample, because completions of one prompt are correlated. Student's t over the prompts' mean
    rewards; Wilson's interval if every prompt's completions are all right (1) or all wrong (0), as with one completion
    each, where t would give 0 of 16 an interval of width 0.
    """
    from scipy.stats import binomtest, t  # slow to import

    means = prompt_means(rewards)
    count = len(means)
    if count < 2:
        return math.nan, math.nan
    if np.isin(means, (0.0, 1.0)).all():
        wilson = binomtest(int(means.sum()), count).proportion_ci(0.95, method="wilson")
        return float(wilson.low), float(wilson.high)
    half = float(t.ppf(0.975, count - 1) * means.std(ddof=1) / math.sqrt(count))
    return float(means.mean()) - half, float(means.mean()) + half


def prompt_means(rewards: np.ndarray) -> np.ndarray:
    """float64 mean reward of every prompt with any reward, from `[prompts, n]`, NaN for a missing one."""
    return np.asarray(np.nanmean(rewards[~np.isnan(rewards).all(axis=1)], axis=1, dtype=np.float64))


@dataclass(frozen=True)
class Evaluator:
    """Evaluates models on a task; each way of decoding is compiled once.

    Attributes:
      task: its rows all count.
      mesh: devices of parameters and batches; one device by default.
      rewards: grades the completions; None: the task's own `reward`, in this process and without a time limit.
      environment: samples and grades conversations in place of single completions. The first batch of each way of
        decoding compiles its programs within `Evaluated.tokens_per_second`.

    Raises:
      ValueError: no rows, a way of decoding that fits neither model nor conversations, `rewards` with an environment,
        and what ConversationRollouts raises.
    """

    model: LanguageModel
    task: Task
    tokenizer: Tokenizer
    config: EvaluationConfig
    mesh: Mesh = field(default_factory=make_mesh)
    rewards: Rewards | None = field(default=None, kw_only=True)
    environment: EnvironmentConfig | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_vocabulary(self.tokenizer, self.model.shape.vocab_size)
        if len(self.task) < 1:
            raise ValueError("expected a task with at least one row; got none")
        for decode in self.config.decodes:
            # Raises for a budget smaller than what the policy protects.
            config = decode.rollout(self.config.rollout)
            plan(decode.policy, config, self.model.shape.num_layers, self.config.prompt_width)
            if self.conversations is not None:
                self.conversations.check_policy(decode.policy, config)
        if self.environment is not None and self.rewards is not None:
            raise ValueError("expected no rewards with an environment, which gives them; got some")

    def run(self, params: Params, report: Callable[[str, int, int], None] | None = None) -> list[Evaluated]:
        """The results of all ways of decoding, in their order; arguments as `each`."""
        return list(self.each(params, report))

    def each(self, params: Params, report: Callable[[str, int, int], None] | None = None) -> Iterator[Evaluated]:
        """Yields the result of each way of decoding when it is done.

        Args:
          params: of the model only, see `Loop.policy_params`.
          report: called after every batch with the name of the way of decoding, finished prompts, and all prompts.
        """
        params = sampler_copy(self.model, shard_tree(params, self.mesh), self.place)
        for decode in self.config.decodes:
            yield self._run_one(params, decode, report)

    @property
    def prompts_at_once(self) -> int:
        """Prompts of one batch: as many as `config.rows` allows, divided over the mesh, at most all."""
        ways = sampling_ways(self.mesh)
        allowed = self.config.rows // self.config.group_size // ways
        return ways * max(min(allowed, -(-len(self.task) // ways)), 1)

    @cached_property
    def place(self) -> Place:
        """Where this process samples its prompts of a batch."""
        return Place(self.mesh)

    @cached_property
    def conversations(self) -> ConversationRollouts | None:
        """Samples conversations; None without an environment."""
        if self.environment is None:
            return None
        sizes = (self.config.prompt_width, self.config.rollout, self.config.stop_strings)
        return ConversationRollouts(self.model, self.tokenizer, self.mesh, self.environment, *sizes)

    @cached_property
    def stop_table(self) -> StopTable | None:
        """The stop strings as a table over the tokenizer's tokens."""
        return stop_table(self.tokenizer, self.config.stop_strings, self.model.shape.vocab_size)

    @cached_property
    def _grader(self) -> Rewards:
        """One object for all batches, because it reports every kind of failure once."""
        return self.rewards or Rewards((self.task.reward,), seconds=None)

    def _row(self, number: np.int64) -> Row:
        """A row of a batch; the last batch is padded with the first rows."""
        return self.task[int(number) % len(self.task)]

    def _run_one(self, params: Params, decode: Decode, report: Callable[[str, int, int], None] | None) -> Evaluated:
        batches = list[_Batch]()
        count = len(self.task)
        done = 0
        while done < count:
            # Padded with the first rows: another size would need another program.
            numbers = np.arange(done, done + self.prompts_at_once)
            batch = self._run_batch(params, decode, numbers, kept=min(len(numbers), count - done))
            batches.append(batch)
            done += len(batch.rewards)
            if report is not None:
                report(decode.name, done, count)
        config = decode.rollout(self.config.rollout)
        return Evaluated(
            decode.name,
            rewards=np.concatenate([batch.rewards for batch in batches]),
            lengths=np.concatenate([batch.lengths for batch in batches]),
            clipped=np.concatenate([batch.clipped for batch in batches]),
            completions=[texts for batch in batches for texts in batch.completions],
            cache_bytes=cache_bytes(self.model.shape, decode.policy, config, self.config.prompt_width, rows=1),
            tokens_per_second=sum(batch.drawn for batch in batches) / sum(batch.seconds for batch in batches),
        )

    def _run_batch(self, params: Params, decode: Decode, numbers: np.ndarray, kept: int) -> _Batch:
        first = bool(numbers[0] == 0)
        part = self.place.feeders.part(len(numbers))
        own_kept = min(max(kept - part.start, 0), part.stop - part.start)
        if jax.process_count() == 1:
            batch = self._run_own(params, decode, numbers, kept, first)
        else:
            with all_or_none():
                own = self._run_own(params, decode, numbers[part], own_kept, first)
            batch = _Batch.of_all(self.place.feeders.of_teams(gather_json(own.as_json())))

        limits = self._grader if self.environment is None else self.environment
        check_failures(Graded(batch.rewards.reshape(-1), {}, batch.failures), limits.max_failed)
        return batch

    def _run_own(self, params: Params, decode: Decode, numbers: np.ndarray, kept: int, first: bool) -> _Batch:
        """This process's prompts of a batch, of which the first `kept` count.

        Args:
          first: whether this is the first batch, which compiles the program.
        """
        group_size = self.config.group_size
        mesh = self.place.own_mesh
        rows = [self._row(number) for number in numbers]
        if self.conversations is not None:
            return self._run_conversations(self.conversations, params, decode, numbers, kept)
        prompts = shard_batch(encode_rows(self.model, self.tokenizer, rows, self.config.prompt_width), mesh)
        keys = self._keys(numbers)
        if first:
            # Before the timer starts; this and all later batches find the program.
            self.lower(params, decode).compile()
        with jax.set_mesh(mesh):
            began = time.perf_counter()
            trajectory = jax.block_until_ready(self._rollout(rollout, params, prompts, keys, decode))
            seconds = time.perf_counter() - began
        drawn = int(trajectory.lengths().sum())
        trajectory = self.place.own(trajectory)
        return self._graded(rows[:kept], jax.tree.map(lambda x: x[: kept * group_size], trajectory), drawn, seconds)

    def _run_conversations(
        self, conversations: ConversationRollouts, params: Params, decode: Decode, numbers: np.ndarray, kept: int
    ) -> _Batch:
        """The conversations of a batch, of which those of the first `kept` prompts count."""
        rows = [self._row(number) for number in numbers]
        config, group_size = decode.rollout(self.config.rollout), self.config.group_size
        batch = conversations.sample(params, self._keys(numbers), rows, decode.policy, group_size, config)
        samples = conversation_samples(batch, self.tokenizer, rows, group_size, max_failed=1.0)
        lengths = np.asarray(batch.trajectory.lengths()).reshape(len(samples.rewards), -1).sum(axis=1)
        clipped = ~np.asarray(batch.trajectory.terminated)[:: samples.contexts]
        texts = np.array(samples.completions, object)
        rewards, lengths, clipped, texts = (
            x.reshape(-1, group_size)[:kept] for x in (samples.rewards, lengths, clipped, texts)
        )
        failures = tuple(each for each in batch.graded.failures if each.row < kept * group_size)
        drawn = sum(each.sampled for each in batch.stats)
        return _Batch(rewards, lengths, clipped, texts.tolist(), failures, drawn, batch.seconds)

    def lower(self, params: Params, decode: Decode) -> jax.stages.Lowered:
        """The rollout of this process's part of a batch, ready to be compiled; computes nothing.

        Args:
          params: arrays where the sampler reads them, or their shapes with shardings.
        """
        mesh = self.place.own_mesh
        numbers = np.arange(self.prompts_at_once)[self.place.feeders.part(self.prompts_at_once)]
        shape = (len(numbers), self.config.prompt_width)
        prompts = jax.eval_shape(lambda: PromptBatch(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool)))
        keys = self._keys(numbers)  # outside the mesh, as in a batch: within it they have another type
        with jax.set_mesh(mesh):
            return self._rollout(rollout_program.lower, params, rows_on(prompts, mesh), keys, decode)

    def _rollout(
        self, run: Callable[..., Any], params: Params, prompts: PromptBatch, keys: jax.Array, decode: Decode
    ) -> Any:
        """Calls `run` with the arguments of a rollout; other keywords would give another program."""
        return run(
            self.model,
            params,
            prompts,
            keys,
            policy=decode.policy,
            config=decode.rollout(self.config.rollout),
            group_size=self.config.group_size,
            stop=self.stop_table,
            limits=None,
            prompt_copies=1,
        )

    def _graded(self, rows: list[Row], trajectory: Trajectory, drawn: int, seconds: float) -> _Batch:
        shape = (len(rows), self.config.group_size)
        if not rows:  # all prompts of this process are padding
            nothing = np.zeros(shape, np.float32), np.zeros(shape, int), np.zeros(shape, bool)
            return _Batch(*nothing, [], (), drawn, seconds)
        completions, graded = grade_part(self._grader, self.tokenizer, repeat_each(rows, shape[1]), trajectory)
        return _Batch(
            rewards=graded.rewards.reshape(shape),
            lengths=np.asarray(trajectory.lengths()).reshape(shape),
            clipped=~np.asarray(trajectory.terminated).reshape(shape),
            completions=np.array(completions, object).reshape(shape).tolist(),
            failures=graded.failures,
            drawn=drawn,
            seconds=seconds,
        )

    def _keys(self, numbers: np.ndarray) -> jax.Array:
        """A key for every completion, by the number of its prompt and its place in the group."""
        group_size = self.config.group_size
        rows = (numbers[:, None] * group_size + np.arange(group_size)).reshape(-1)
        key = jax.random.key(self.config.seed)
        return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.asarray(rows))


@dataclass(frozen=True)
class _Batch:
    """One batch, with fields as in `Evaluated` and `Graded`; `drawn` tokens in `seconds` include padding rows."""

    rewards: np.ndarray
    lengths: np.ndarray
    clipped: np.ndarray
    completions: list[list[str]]
    failures: tuple[Failure, ...]
    drawn: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {
            "rewards": self.rewards.tolist(),
            "lengths": self.lengths.tolist(),
            "clipped": self.clipped.tolist(),
            "completions": self.completions,
            "failures": [list(failure) for failure in self.failures],
            "drawn": self.drawn,
            "seconds": self.seconds,
        }

    @classmethod
    def of_all(cls, parts: list[dict[str, Any]]) -> _Batch:
        """The whole batch, from `as_json` of every process that sampled a part."""
        shape = (-1, len(next(part for part in parts if part["rewards"])["rewards"][0]))

        def whole(name: str, dtype: Any) -> np.ndarray:
            return np.array([row for part in parts for row in part[name]], dtype).reshape(shape)

        failures = list[Failure]()
        before = 0  # completions of earlier parts
        for part in parts:
            failures += [Failure(before + row, *rest) for row, *rest in part["failures"]]
            before += len(part["rewards"]) * shape[1]
        return cls(
            whole("rewards", np.float32),
            whole("lengths", int),
            whole("clipped", bool),
            completions=[texts for part in parts for texts in part["completions"]],
            failures=tuple(failures),
            drawn=sum(part["drawn"] for part in parts),
            # They sample at the same time, so the slowest counts.
            seconds=max(part["seconds"] for part in parts),
        )


def every_evaluation(loop: Loop, evaluator: Evaluator) -> Callable[[TrainState], dict[str, float]]:
    """For `train(evaluate=...)`: the metrics of every way of decoding, at the parameters of a state."""

    def evaluate(state: TrainState) -> dict[str, float]:
        results = evaluator.run(loop.policy_params(state.params))
        return {name: value for result in results for name, value in result.metrics.items()}

    return evaluate
