"""Fits a run into `--memory` bytes of each device; without the flag, sizes stay as they are."""

from __future__ import annotations

from typing import Any, NamedTuple

from smd_jax.byte_sizes import parse_bytes, show_bytes
from smd_jax.commands.arguments import Common
from smd_jax.commands.errors import UserError
from smd_jax.learner.state import TrainState
from smd_jax.memory.compiled import LoopMemory
from smd_jax.memory.fit import fit_evaluator, fit_loop, with_microbatch
from smd_jax.runs.checkpoint.reading import saved_config
from smd_jax.runs.checkpoint.steps import latest_step
from smd_jax.runs.resume_settings import rounding_only
from smd_jax.runs.run_folder import CHECKPOINTS
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
    fits, memory = _fitted_loop(args, loop, state, memory_bytes)
    fits_too = None if evaluator is None else fit_evaluator(evaluator, state, memory_bytes)
    return Fitted(fits, fits_too, memory, _choices(loop, fits, evaluator, fits_too, memory_bytes))


def _fitted_loop(args: Common, loop: Any, state: TrainState, memory_bytes: int) -> tuple[Any, LoopMemory]:
    """The loop as it fits, and its memory.

    A resumed run keeps the microbatch that was chosen at its start where that decides which rows a teacher reads.
    """
    update = loop.config.update
    checkpoints = args.run.output_dir / CHECKPOINTS
    begun = args.run.resume and latest_step(checkpoints) is not None
    if not begun or update.microbatch_size is not None or "update.microbatch_size" in rounding_only(loop.config):
        return fit_loop(loop, state, memory_bytes)
    saved: Any = saved_config(checkpoints)
    # Settings of another algorithm or loss may lack it; that run is refused when all settings are compared.
    size = saved["loop"]["update"].get("microbatch_size")
    minibatch = loop.config.completions_per_step // loop.config.minibatches
    found, memory = fit_loop(with_microbatch(loop, size or minibatch), state, memory_bytes)
    return with_microbatch(found, size), memory


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
