"""Evaluates a model on a task under several ways of decoding, once or every few rollouts of a run.

    decodes = (Decode("dense"), Decode("short", SnapKV(), budget=256))
    config = EvaluationConfig(decodes=decodes, rollout=rollout, prompt_width=512)
    evaluator = Evaluator(model, held_out, tokenizer, config)
    for result in evaluator.run(params):
        print(result.name, result.reward, result.interval)

    train(..., evaluate=every_evaluation(loop, evaluator))                      logs eval/{name}/reward, …

All rows of the task are decoded in batches of one size, the last one padded with rows, so that each way of decoding is
compiled once. Each completion has its own PRNG key. So the batch size changes only rounding, and all evaluations of a
run use the same random numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Int

from smd_jax.config import check_seed, check_whole
from smd_jax.devices.process_rows import SamplerPlacement
from smd_jax.devices.processes import all_or_none, on_host
from smd_jax.devices.sharding import make_mesh, sampling_ways, shard_tree
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import Dense
from smd_jax.learner.state import TrainState
from smd_jax.message.quantization import QuantConfig
from smd_jax.message.sampling import SamplingConfig
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.sampler.config import RolloutConfig, cache_bytes, statistics_bytes
from smd_jax.tasks.dataset_task import own_reward
from smd_jax.tasks.rewards import Graded, Rewards, check_failures
from smd_jax.tasks.task import Task
from smd_jax.text.prompts import Tokenizer, check_vocabulary
from smd_jax.text.stop_strings import stop_table
from smd_jax.train.conversations import ConversationRollouts, EnvironmentConfig
from smd_jax.train.grading import GradedBatch, grade, reward_columns
from smd_jax.train.loop import Loop
from smd_jax.train.rollouts import Rollouts, sampler_copy
from smd_jax.typed_fields import check_types


@dataclass(frozen=True)
class Decode:
    """One way of decoding; None takes the value of the evaluation's rollout configuration.

    Attributes:
      name: part of its metrics' names, `eval/{name}/reward`: letters, digits, "_", "-" and ".".
      policy: eviction policy.
      budget: keys kept per layer and KV head. buffer: queries between two compressions.
      sampling: temperature and filters; `SamplingConfig(temperature=0.0)` is greedy, which training refuses.
      quant: bits of the cache; None is full precision.
    """

    name: str
    policy: EvictionPolicy = Dense()
    budget: int | None = None
    buffer: int | None = None
    sampling: SamplingConfig | None = None
    quant: QuantConfig | None = None

    def __post_init__(self) -> None:
        check_types(self)
        # A name becomes part of metric names, in which loggers allow no other characters.
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"expected a name of letters, digits, '_', '-' and '.'; got {self.name!r}")
        for name in ("budget", "buffer"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)

    def rollout(self, base: RolloutConfig) -> RolloutConfig:
        """`base` with this way of decoding.

        Raises:
          ValueError: an invalid combination, such as a quantisation group that does not divide the buffer.
        """
        return replace(
            base,
            budget=base.budget if self.budget is None else self.budget,
            buffer=base.buffer if self.buffer is None else self.buffer,
            sampling=base.sampling if self.sampling is None else self.sampling,
            quant=self.quant,
            # Chunks save memory if keys are evicted between them; a quantised prompt is read in one piece.
            prefill_chunk=base.prefill_chunk if self.policy.evicts and self.quant is None else None,
        )


def as_trained(policy: EvictionPolicy, config: RolloutConfig) -> Decode:
    """The way in which a run decodes its rollouts."""
    return Decode("sampler", policy, config.budget, config.buffer, config.sampling, config.quant)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Configuration of an evaluation.

    Attributes:
      decodes: the ways of decoding, with different names.
      rollout: lengths, special tokens and sampling; a way of decoding may override them.
      prompt_width: columns of the prompt, in tokens; longer prompts are refused.
      group_size: completions per prompt.
      rows: maximum number of completions decoded at once; each device decodes at least one prompt.
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
        names = [decode.name for decode in self.decodes]
        if not names:
            raise ValueError("expected at least one way of decoding; got none")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"expected ways of decoding with different names; got {', '.join(twice)} more than once")
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
      cache_bytes: size of the keys, values and statistics of one sequence.
      tokens_per_second: tokens of these completions per second of sampling, without compilation and grading.
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
        return float(self._means.mean()) if len(self._means) else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of `reward`; NaN for fewer than two prompts, and for equal means other than 0 or 1.

        The prompts are the sample, because completions of one prompt are correlated. Student's t over the prompts' mean
        rewards; Wilson's interval if every prompt's completions are all right (1) or all wrong (0), as with one
        completion each, where t would give 0 of 16 an interval of width 0. With several completions and a mean near 0
        or 1, t is too narrow: 85 to 90 % in simulations.
        """
        from scipy.stats import binomtest, t  # slow to import

        means = self._means
        count = len(means)
        if count < 2:
            return math.nan, math.nan
        if np.isin(means, (0.0, 1.0)).all():
            wilson = binomtest(int(means.sum()), count).proportion_ci(0.95, method="wilson")
            return float(wilson.low), float(wilson.high)
        if not np.ptp(means):
            return math.nan, math.nan
        half = float(t.ppf(0.975, count - 1) * means.std(ddof=1) / math.sqrt(count))
        return float(means.mean()) - half, float(means.mean()) + half

    @property
    def _means(self) -> np.ndarray:
        """float64 mean reward of every prompt with any reward."""
        return np.asarray(np.nanmean(self.rewards[~np.isnan(self.rewards).all(axis=1)], axis=1, dtype=np.float64))

    @property
    def _numbers(self) -> dict[str, float]:
        """`metrics` without their prefix."""
        low, high = self.interval
        return {
            "reward": self.reward,
            "reward_low": low,
            "reward_high": high,
            "mean_length": float(self.lengths.mean()),
            "clipped_ratio": float(self.clipped.mean()),
        }

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that a run logs, as `eval/{name}/{metric}`."""
        return {f"eval/{self.name}/{name}": value for name, value in self._numbers.items()}

    @property
    def row(self) -> dict[str, str | int | float | None]:
        """One row of a table, or JSON object; NaN, such as the interval of a single prompt, becomes None."""
        prompts, group_size = self.rewards.shape
        return {
            "decode": self.name,
            "prompts": prompts,
            "completions_per_prompt": group_size,
            **{name: None if math.isnan(value) else value for name, value in self._numbers.items()},
            "without_reward": int(np.isnan(self.rewards).sum()),
            "cache_bytes_per_sequence": self.cache_bytes,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True)
class Evaluator:
    """Evaluates models on a task; each way of decoding is compiled once.

    Attributes:
      task: all of its rows are evaluated.
      mesh: devices of parameters and batches; one device by default.
      rewards: grades the completions; None: the task's own `reward`, in this process and without a time limit.
      environment: samples and grades conversations instead of single completions. `Evaluated.tokens_per_second` then
        includes the compilation in the first batch of each way of decoding.

    Raises:
      ValueError: no rows, a way of decoding that fits neither model nor conversations, `rewards` with an environment,
        `rewards` that ask for a column which the rows lack, and the errors of ConversationRollouts.
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
        if self.environment is not None and self.rewards is not None:
            raise ValueError("expected no rewards with an environment, which gives them; got some")
        _ = self.rollouts  # built here so that an invalid way of decoding fails before the weights are loaded
        if self.rewards is not None:
            columns = reward_columns(self.rewards, self.task, self.config.seed)
            # The functions may be those of the training rows, which have other columns.
            if missing := self.rewards.lacks(columns):
                raise ValueError(f"expected evaluation rows with {missing}, for their rewards; got columns {columns}")
            self.rewards.prepare(columns)

    def run(self, params: Params, report: Callable[[str, int, int], None] | None = None) -> list[Evaluated]:
        """The results of all ways of decoding, in their order; arguments as `each`."""
        return list(self.each(params, report))

    def each(self, params: Params, report: Callable[[str, int, int], None] | None = None) -> Iterator[Evaluated]:
        """Yields the result of each way of decoding when it is done.

        Args:
          params: of the model only, see `Loop.policy_params`.
          report: called after every batch with the name of the way of decoding, finished prompts, and all prompts.
        """
        params = sampler_copy(self.model, self.placement, shard_tree(params, self.mesh))
        for decode in self.config.decodes:
            yield self._run_one(params, decode, report)

    @property
    def prompts_at_once(self) -> int:
        """Prompts of one batch: as many as `config.rows` allows, divided over the mesh, at most all."""
        ways = sampling_ways(self.mesh)
        allowed = self.config.rows // self.config.group_size // ways
        return ways * max(min(allowed, -(-len(self.task) // ways)), 1)

    @cached_property
    def placement(self) -> SamplerPlacement:
        """Where this process samples its rows."""
        return SamplerPlacement(self.mesh)

    @cached_property
    def rollouts(self) -> dict[Decode, Rollouts]:
        """Samples completions, or conversations with an environment, under each way of decoding."""
        config, parts = self.config, (self.model, self.tokenizer, self.placement)
        stop = stop_table(self.tokenizer, config.stop_strings, self.model.shape.vocab_size)
        sizes = (config.group_size, config.prompt_width, stop)
        make = Rollouts if self.environment is None else partial(ConversationRollouts, environment=self.environment)
        return {each: make(*parts, each.policy, each.rollout(config.rollout), *sizes) for each in config.decodes}

    @cached_property
    def _grader(self) -> Rewards | EnvironmentConfig:
        # One object for all batches, because it reports every kind of failure once.
        return self.environment or self.rewards or Rewards((own_reward(self.task),), names=("reward",), seconds=None)

    def _run_one(self, params: Params, decode: Decode, report: Callable[[str, int, int], None] | None) -> Evaluated:
        rollouts, count = self.rollouts[decode], len(self.task)
        if self.environment is None:
            self.lower(params, decode).compile()  # outside of the measured time
        batches, lengths, clipped = list[GradedBatch](), list[np.ndarray](), list[np.ndarray]()
        for first in range(0, count, self.prompts_at_once):
            batch, lengths_of_batch, terminated = self._run_batch(params, rollouts, first)
            batches.append(batch)
            lengths.append(lengths_of_batch)
            clipped.append(~terminated)
            if report is not None:
                report(decode.name, min(first + self.prompts_at_once, count), count)
        rewards = np.concatenate([batch.graded.rewards for batch in batches])
        failures = tuple(failure for batch in batches for failure in batch.graded.failures)
        # Checked over all batches together, because the last one may be short.
        check_failures(Graded(rewards, {}, failures), self._grader.max_failed)
        texts = [text for batch in batches for text in batch.completions]
        sizes = self.model.shape, decode.policy, rollouts.config, self.config.prompt_width
        shape, seconds = (count, self.config.group_size), sum(batch.measured["time/rollout"] for batch in batches)
        return Evaluated(
            decode.name,
            rewards.reshape(shape),
            np.concatenate(lengths).reshape(shape),
            np.concatenate(clipped).reshape(shape),
            completions=np.array(texts, object).reshape(shape).tolist(),
            cache_bytes=cache_bytes(*sizes, rows=1) + statistics_bytes(*sizes, rows=1),
            tokens_per_second=float(sum(map(np.sum, lengths))) / seconds,
        )

    def _run_batch(
        self, params: Params, rollouts: Rollouts, first: int
    ) -> tuple[GradedBatch, Int[np.ndarray, " completions"], Bool[np.ndarray, " completions"]]:
        """The batch that begins with prompt `first`: its grades, the lengths, and whether each completion ended."""
        # The last batch is padded with the first prompts, because another size would need another program.
        numbers = np.arange(first, first + self.prompts_at_once)
        with all_or_none():  # rows may be read from a network
            rows = [self.task[int(number) % len(self.task)] for number in numbers]
        size, shards = self.config.group_size, self.placement.data_shards
        sampled = rollouts.sample(params, self._keys(numbers), rows)
        count = min(len(rows), len(self.task) - first) * size
        graded = grade(sampled, self._grader, self.tokenizer, shards, size, count)
        of_rows = (np.asarray(sampled.trajectory.lengths()), np.asarray(sampled.trajectory.terminated))
        # `[completions, contexts]`
        lengths, terminated = (on_host(x).reshape(len(rows) * size, -1)[:count] for x in self.placement.whole(of_rows))
        return graded, lengths.sum(axis=1), terminated[:, 0]

    def lower(self, params: Params, decode: Decode) -> jax.stages.Lowered:
        """The rollout of this process's part of a batch, ready to be compiled; computes nothing.

        Args:
          params: arrays where the sampler reads them, or their shapes with shardings.
        """
        prompts = self.prompts_at_once
        # Keys are made outside the mesh, as for a batch: inside, their type differs.
        keys = self._keys(np.arange(prompts)[self.placement.data_shards.part(prompts)])
        return self.rollouts[decode].lower(params, keys, prompts)

    def _keys(self, numbers: np.ndarray) -> jax.Array:
        """A key for every completion, by the number of its prompt and its place in the group."""
        group_size = self.config.group_size
        rows = (numbers[:, None] * group_size + np.arange(group_size)).reshape(-1)
        key = jax.random.key(self.config.seed)
        return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.asarray(rows))


def every_evaluation(loop: Loop, evaluator: Evaluator) -> Callable[[TrainState], dict[str, float]]:
    """For `train(evaluate=...)`: the metrics of every way of decoding, at the parameters of a state."""

    def evaluate(state: TrainState) -> dict[str, float]:
        results = evaluator.run(loop.policy_params(state.params))
        return {name: value for result in results for name, value in result.metrics.items()}

    return evaluate
