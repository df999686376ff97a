"""Fits a run into `--memory` bytes of each device; without the flag, sizes stay as they are."""

from __future__ import annotations

from typing import NamedTuple

from smd_jax.byte_sizes import parse_bytes, show_bytes
from smd_jax.commands.arguments import Common
from smd_jax.commands.errors import UserError
from smd_jax.learner.state import TrainState
from smd_jax.memory.compiled import LoopMemory
from smd_jax.memory.fit import fit_evaluator, fit_loop
from smd_jax.train.evaluation import Evaluator
from smd_jax.train.loop import Loop
from smd_jax.train.ppo import PolicyLoop


class Fitted(NamedTuple):
    """A run whose sizes fit.

    Attributes:
      memory: of a device; None without `--memory`.
      chosen: what was made smaller, in one line; empty without `--memory`.
    """

    loop: Loop
    evaluator: Evaluator | None
    memory: LoopMemory | None = None
    chosen: str = ""


def fitted(args: Common, loop: Loop, evaluator: Evaluator | None, state: TrainState) -> Fitted:
    """The run with sizes that fit into `--memory`.

    Args:
      state: shapes of the run's state.

    Raises:
      UserError, ValueError: `--memory` with online-dpo; no number of bytes; sizes that cannot fit.
    """
    if args.device.memory is None:
        return Fitted(loop, evaluator)
    if not isinstance(loop, PolicyLoop):
        raise UserError("expected no --memory with online-dpo; set --microbatch yourself")
    memory_bytes = parse_bytes(args.device.memory)
    fits, memory = fit_loop(loop, state, memory_bytes)
    fits_too = None if evaluator is None else fit_evaluator(evaluator, state, memory_bytes)
    return Fitted(fits, fits_too, memory, _choices(loop, fits, evaluator, fits_too, memory_bytes))


def _choices(
    before: PolicyLoop, after: PolicyLoop, wanted: Evaluator | None, evaluator: Evaluator | None, memory_bytes: int
) -> str:
    """One line that lists the sizes that were made smaller."""
    config = after.config
    made = list[str]()
    if config.update.microbatch_size != before.config.update.microbatch_size:
        rows = config.completions_per_step // config.minibatches
        made.append(f"microbatch {config.update.microbatch_size} of {rows} rows, so that an update fits")
    if config.decode_rows != before.config.decode_rows:
        made.append(f"{config.decode_rows} of {config.completions_per_step} decode rows, so that a rollout fits")
    if wanted is not None and evaluator is not None and evaluator.config.rows != wanted.config.rows:
        made.append(f"{evaluator.config.rows} of {wanted.config.rows} rows of an evaluation at once, so that it fits")
    return f"{'; '.join(made) or 'everything fits as it is'} into {show_bytes(memory_bytes)}"
