"""The configuration that all algorithms share."""

from __future__ import annotations

from dataclasses import dataclass

from smd_jax.config import check_seed
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.sampler.config import RolloutConfig
from smd_jax.typed_fields import check_types


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Configuration of a training run that all algorithms share.

    Attributes:
      prompts_per_step: prompts of one rollout.
      group_size: completions per prompt.
      prompt_width: columns of the prompt, in tokens; longer prompts are refused.
      policy: eviction policy of the sampler.
      rollout: budget, lengths and sampling of the rollout.
      decode_rows: completions that are decoded at the same time; finished ones make room for others, see
        `smd_jax.sampler.engine`; with an environment a number that divides the conversations into whole groups. None
        decodes a whole rollout at once, in one program.
      prefill_rows: with decode_rows, prompts that are read at the same time; with an environment all are.
      stop_strings: texts that end a completion and stay part of it.
      minibatches: optimizer steps per pass over a rollout, each with whole groups; the first step is exactly on-policy.
      num_iterations: passes over a rollout; each further pass has another order of groups.
      update_widths: number of widths, in columns, that the learner is compiled for: it runs over the smallest that
        holds the longest response of a rollout. 1: always over `max_new_tokens`.
      seed: order of the task's rows, from 0 to 2**32 - 1.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: if a number is out of range, sampling is greedy, or prompts do not divide into minibatches.
    """

    prompts_per_step: int
    group_size: int
    prompt_width: int
    policy: EvictionPolicy
    rollout: RolloutConfig
    decode_rows: int | None = None
    prefill_rows: int = 8
    stop_strings: tuple[str, ...] = ()
    minibatches: int = 1
    num_iterations: int = 1
    update_widths: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        sizes = ("prompts_per_step", "group_size", "prompt_width", "prefill_rows")
        for name in (*sizes, "minibatches", "num_iterations", "update_widths"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1; got {getattr(self, name)}")
        check_seed("seed", self.seed)
        if not self.rollout.sampling.trainable:
            raise ValueError(
                "expected sampling at a temperature > 0, because greedy decoding draws from no distribution that a "
                f"learner could share; got {self.rollout.sampling}"
            )
        if self.prompts_per_step % self.minibatches:
            raise ValueError(
                f"expected prompts_per_step that divide into {self.minibatches} minibatches, because a group is never "
                f"split; got {self.prompts_per_step}"
            )

    @property
    def columns(self) -> int:
        """Columns of a row with the longest response."""
        return self.prompt_width + self.rollout.max_new_tokens

    @property
    def completions_per_step(self) -> int:
        """Completions of one rollout."""
        return self.prompts_per_step * self.group_size

    @property
    def learner_rows(self) -> int:
        """Rows that the learner gets of one rollout of completions; a minibatch has an equal part of them."""
        return self.completions_per_step

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps on one rollout."""
        return self.minibatches * self.num_iterations

    @property
    def first_pass_sees_all(self) -> bool:
        """Whether the first forward pass sees the whole rollout, at the parameters that sampled it."""
        return self.steps_per_rollout == 1 and not self.samples_ahead

    @property
    def is_exact(self) -> bool:
        """Whether sampler and learner must be the same policy."""
        return False

    @property
    def extra_rollouts(self) -> int | None:
        """Further rollouts that a step may sample to fill its batch with groups that have signal (dynamic sampling).

        None: a step samples one rollout and keeps all of it.
        """
        return None

    @property
    def samples_ahead(self) -> bool:
        """Whether the next rollout is sampled during the update, see `smd_jax.train.async_rollout`."""
        return False
