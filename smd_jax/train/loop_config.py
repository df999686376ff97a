"""The configuration that all algorithms share, and its sizes on a mesh."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import Mesh

from smd_jax.config import check_seed
from smd_jax.devices.sharding import check_rows, check_sequence
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.learner.accumulation import count_parts
from smd_jax.learner.config import UpdateConfig, without_packing
from smd_jax.learner.packed import check_windows
from smd_jax.model.protocol import ModelShape
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
      update: the learner's configuration.
      decode_rows: completions that are decoded at the same time; finished ones make room for others, see
        `smd_jax.sampler.engine`; with an environment a multiple of `group_size` that divides the conversations. None
        decodes a whole rollout at once, in one program.
      prefill_rows: with decode_rows, prompts that are read at the same time; with an environment all are.
      stop_strings: texts that end a completion and stay part of it.
      minibatches: optimizer steps per pass over a rollout, each with whole groups; the first step is exactly on-policy.
      num_iterations: passes over a rollout; each further pass has another order of groups.
      update_widths: number of widths, in columns, that the learner is compiled for: an update uses the smallest
        that holds the rollout's longest response. 1: always `max_new_tokens`.
      seed: 0 to 2**32 - 1, for the order of the rows.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: if a number is out of range, sampling is greedy, or prompts do not divide into minibatches.
    """

    prompts_per_step: int
    group_size: int
    prompt_width: int
    policy: EvictionPolicy
    rollout: RolloutConfig
    update: UpdateConfig = UpdateConfig()
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
        """Rows that the learner gets of one rollout; a minibatch has an equal part of them."""
        return self.completions_per_step

    @property
    def rows_of_a_pass(self) -> int:
        """Rows of one forward pass without packing; they divide a rollout."""
        return self.unpacked_update.microbatch_size or self.learner_rows // self.minibatches

    @property
    def unpacked_update(self) -> UpdateConfig:
        """The update's configuration without packing, with `rows_of_a_pass` rows per microbatch."""
        return without_packing(self.update, self.learner_rows // self.minibatches)

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
        return self.update.learner_visibility == "shadow"

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


def check_sizes(config: LoopConfig, shape: ModelShape, mesh: Mesh) -> None:
    """Raises ValueError for rows or columns that do not divide as the update needs them, and for an eviction_coef or
    pack_columns that the eviction policy or the rollout does not support."""
    rows = config.completions_per_step // config.minibatches
    check_rows(rows, mesh, "a minibatch (prompts_per_step * group_size / minibatches)")
    check_sequence(config.columns, shape.num_heads, mesh)
    update, rollout, columns = config.update, config.rollout, config.update.pack_columns
    minibatch = config.learner_rows // config.minibatches
    if columns is None:
        count_parts(minibatch, update.microbatch_size)
    else:
        if columns < config.columns:
            raise ValueError(f"expected pack_columns of at least {config.columns}, the longest sequence; got {columns}")
        # The checks of `smd_jax.learner.packed`, before compilation.
        if rollout.quant is not None or rollout.min_new_tokens:
            raise ValueError(
                "expected rollouts without quant and min_new_tokens with pack_columns, which moves tokens; got "
                f"quant {rollout.quant} and min_new_tokens {rollout.min_new_tokens}"
            )
        if config.policy.gate is not None:
            raise ValueError(
                f"expected pack_columns None with {type(config.policy).__name__}, whose draws name columns that "
                f"packing would move; got {columns}"
            )
        check_sequence(columns, shape.num_heads, mesh)
        check_windows(shape, update)
    if update.needs.evictions and config.policy.gate is None:
        raise ValueError(
            "expected an eviction policy that records its draws, such as LearnedGate(), with an eviction_coef or "
            f"an EvictionTerm; got {config.policy}, {update.eviction_coef} and terms {update.terms}"
        )
    if config.group_size % update.rows_per_prompt:
        raise ValueError(
            f"expected rows_per_prompt that divide group_size {config.group_size}; got {update.rows_per_prompt}"
        )
    together = config.columns + (config.unpacked_update.rows_per_prompt - 1) * rollout.max_new_tokens
    check_sequence(together, shape.num_heads, mesh)
    size, rows = update.microbatch_size, config.unpacked_update.rows_together
    whole = f"prompts_per_step * {'group_size' if update.pairs is None else 2} / minibatches"
    what = f"a microbatch ({whole if size is None else 'microbatch_size'})"
    unit = "pairs" if update.pairs is not None else f"{rows} rows of one prompt (rows_per_prompt)"
    what += "" if rows == 1 else f", counted in {unit},"
    check_rows((size or minibatch) // rows, mesh, what)
