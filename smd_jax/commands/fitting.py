"""How a run fits into the memory of its devices: what is chosen, and what is said about it.

--memory names the bytes of a device. Without it a run takes what the device has, of a CPU a share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from smd_jax.byte_sizes import parse_bytes, show_bytes
from smd_jax.commands.arguments import Common
from smd_jax.commands.errors import UserError
from smd_jax.memory.fit import fit_loop, usable_memory
from smd_jax.memory.plan import MemoryPlan
from smd_jax.model.protocol import Params
from smd_jax.runs.checkpoint.reading import saved_config
from smd_jax.runs.checkpoint.steps import latest_step
from smd_jax.runs.resume_settings import rounding_only
from smd_jax.runs.run_folder import CHECKPOINTS
from smd_jax.train.evaluation import Evaluator
from smd_jax.train.loop import Loop
from smd_jax.train.policy_loop import PolicyLoop

L = TypeVar("L", bound=PolicyLoop)


def memory_of_device(args: Common, loop: Loop) -> int | None:
    """Bytes of one device that the run may take; None: it has no plan, or what there is is not known.

    Raises:
      UserError, ValueError: an algorithm without a plan, or no number of bytes.
    """
    given = args.device.memory
    if not isinstance(loop, PolicyLoop):
        if given is not None:
            raise UserError("expected no --memory with online-dpo, which has no plan; set --microbatch yourself")
        return None
    return usable_memory(loop.mesh.local_mesh.size) if given is None else parse_bytes(given)


def fitted(args: Common, loop: L, params: Params, memory_bytes: int | None) -> tuple[L, MemoryPlan]:
    """The loop as it fits, and its plan.

    Where the microbatch is part of the mathematics, a run that goes on keeps the one that was chosen at its begin, on
    whatever machine that was.
    """
    update = loop.config.update
    checkpoints = args.run.output_dir / CHECKPOINTS
    begun = args.run.resume and latest_step(checkpoints) is not None
    if not begun or update.microbatch_size is not None or "update.microbatch_size" in rounding_only(loop.config):
        return fit_loop(loop, params, memory_bytes)
    saved: Any = saved_config(checkpoints)
    # Settings of another algorithm or loss may lack it; that run is refused when all are compared.
    size = saved["loop"]["update"].get("microbatch_size")
    minibatch = loop.config.completions_per_step // loop.config.minibatches
    found, plan = fit_loop(_with_microbatch(loop, size or minibatch), params, memory_bytes)
    return _with_microbatch(found, size), plan


def _with_microbatch(loop: L, size: int | None) -> L:
    return replace(loop, config=replace(loop.config, update=replace(loop.config.update, microbatch_size=size)))


def choices(
    before: PolicyLoop, after: PolicyLoop, wanted: Evaluator | None, evaluator: Evaluator | None, memory_bytes: int
) -> str:
    """One plain line on what was made smaller, so that all fits.

    Args:
      before, after: the loop as it was asked for, and as it fits.
      wanted, evaluator: the same of what evaluates; None: nothing is evaluated.
    """
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
