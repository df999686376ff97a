"""A memory plan: the bytes of sampler and learner on one device, before anything is compiled.

Both take turns on the same devices, so the larger phase counts; with rollouts ahead they run at the same time.

    both      weights, their copy in the compute dtype, those behind (rollouts ahead), optimizer, reference, trajectory
    rollout   + cache + rollout work                     grows with the rows decoded at once (`decode_rows`)
    update    + gradients + activations + logits         grows with the rows of a microbatch

    work = Workload(model, policy, config, prompt_width=512, rows=128, optimizer=optimizer)
    print(plan_memory(work, params))                           all rows at once, in one program
    check_memory(plan_memory(work, params), available)         raises if that is too much

`smd_jax.memory.fit` chooses sizes by a plan; `smd_jax.memory.compiled` has the compiler's own figures.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from smd_jax.byte_sizes import UNITS
from smd_jax.byte_sizes import parse_bytes as parse_bytes
from smd_jax.byte_sizes import show_bytes as show_bytes
from smd_jax.config import check_choice
from smd_jax.devices.sharding import row_ways, sampling_ways, sequence_ways
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.learner.storage import widened
from smd_jax.learner.trained import followed_params, trained_params
from smd_jax.losses.distillation import DistillConfig
from smd_jax.memory.learner import LearnerPass
from smd_jax.memory.sampler import (
    Platform,
    SamplerPass,
    cast_bytes,
    gathered_bytes,
    largest_part,
    local_shape,
    recorded_bytes,
    trajectory_bytes,
    tree_bytes,
)
from smd_jax.message.masks import dense_mask
from smd_jax.model.decoder import Decoder
from smd_jax.model.lora import has_lora
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.sampler.config import RolloutConfig
from smd_jax.sampler.records import segments_of
from smd_jax.train.policy_learner import PolicyConfig
from smd_jax.train.policy_loop import PolicyLoop

# More than any device has: such a number is a slip of the unit.
MOST_BYTES = 64 * UNITS["TiB"]

# Options that make a part smaller.
MESH = "spread it over more devices (fsdp or tensor of make_mesh)"
ROWS_OR_SEQUENCE = (
    "lower microbatch_size of the update, or spread columns over more devices (the sequence axis of make_mesh)"
)
LOWERED_BY = {
    "weights": MESH,
    "sampler_weights": MESH,
    "weights_behind": f"{MESH}, or draw no rollouts ahead",
    "optimizer": MESH,
    "reference": f"{MESH}, or train without a reference (no KL term, no distillation from an anchor)",
    "trajectory": "lower prompts_per_step or group_size, or the rollout's max_new_tokens",
    "cache": "lower budget or buffer of the rollout, or decode_rows",
    "rollout_work": "lower prefill_chunk of the rollout, or decode_rows",
    "gradients": MESH,
    "activations": ROWS_OR_SEQUENCE,
    "logits": ROWS_OR_SEQUENCE,
}
RECORD_COPIES = 3  # of the compressions' records, alive while they become the shadow mask

BOTH = ("weights", "sampler_weights", "weights_behind", "optimizer", "reference", "trajectory")
ROLLOUT = (*BOTH, "cache", "rollout_work")
UPDATE = (*BOTH, "gradients", "activations", "logits")


@dataclass(frozen=True)
class Workload:
    """The parts of a step that decide its memory.

    Attributes:
      policy, config: eviction policy and sizes of the sampler.
      prompt_width: columns of the prompt.
      rows: rows of a rollout, on all devices together.
      optimizer: the learner's optimizer; None: nothing is learnt.
      reference: whether a reference policy is kept. With adapters their base is the reference, see `init_state`.
      reference_follows: whether the reference follows the policy. With adapters it is then a second set of them.
      prefill_rows: prompts read at once; None: as many as are decoded at once.
      minibatches: optimizer steps that share the rows.
      microbatch_size: rows of one forward and backward pass.
      distill: distillation.
      second_pass: whether a term needs the policy under another mask: a dense learner, or a term of your own.
      rollouts_ahead: whether the next rollout runs during the update.
      learns: False for an evaluation: the optimizer's state is held, but nothing is updated.
      mesh: how all is split; None: one device.
      platform: the platform that it will run on; None: that of JAX.
    """

    model: Decoder
    policy: EvictionPolicy
    config: RolloutConfig
    prompt_width: int
    rows: int
    optimizer: optax.GradientTransformation | None = None
    reference: bool = False
    reference_follows: bool = False
    prefill_rows: int | None = None
    minibatches: int = 1
    microbatch_size: int | None = None
    distill: DistillConfig | None = None
    second_pass: bool = False
    rollouts_ahead: bool = False
    learns: bool = True
    mesh: Mesh | AbstractMesh | None = None
    platform: Platform | None = None

    def __post_init__(self) -> None:
        if self.platform is not None:
            check_choice("platform", self.platform, get_args(Platform))

    @property
    def updates(self) -> bool:
        """Whether anything is learnt."""
        return self.learns and self.optimizer is not None

    @property
    def where(self) -> Platform:
        """The platform that was named, or JAX's; other than GPU and TPU it counts as a CPU."""
        name = jax.default_backend() if self.platform is None else self.platform
        return "gpu" if name == "gpu" else "tpu" if name == "tpu" else "cpu"


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device, by what they are for.

    Attributes:
      weights: parameters, as stored.
      sampler_weights: the copy in the compute dtype, 0 if weights are stored in it; and weights gathered from the fsdp
        axis.
      weights_behind: parameters before the last update, for rollouts ahead.
      optimizer: state of the optimizer.
      reference: parameters of the reference or teacher.
      trajectory: all rows of a rollout, with the shadow mask; of two with rollouts ahead.
      cache: keys, values, columns and statistics of the rows that are decoded at once.
      rollout_work: temporary arrays of prefill, a decode step and a compression; prompts that wait.
      gradients: at the peak; with microbatches their sum and one layer's new ones.
      activations: of the backward pass of a microbatch.
      logits: logits of a microbatch and their cotangents.
      decode_rows: rows decoded at once, on all devices together.
      microbatch: rows of a forward and backward pass, on all devices together; 0 if nothing is learnt.
      side_by_side: whether rollout and update run at the same time.
    """

    weights: int
    sampler_weights: int
    weights_behind: int
    optimizer: int
    reference: int
    trajectory: int
    cache: int
    rollout_work: int
    gradients: int
    activations: int
    logits: int
    decode_rows: int
    microbatch: int
    side_by_side: bool = False

    @property
    def phases(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The parts of the rollout, and of the update."""
        everything = tuple(LOWERED_BY)
        return (everything, everything) if self.side_by_side else (ROLLOUT, UPDATE)

    @property
    def rollout(self) -> int:
        """Bytes while sampling."""
        return sum(self.part(name) for name in self.phases[0])

    @property
    def update(self) -> int:
        """Bytes while learning."""
        return sum(self.part(name) for name in self.phases[1])

    @property
    def total(self) -> int:
        """Bytes of the larger phase."""
        return max(self.rollout, self.update)

    @property
    def largest(self) -> str:
        """The largest part of the larger phase."""
        return max(self.phases[0 if self.rollout >= self.update else 1], key=self.part)

    def part(self, name: str) -> int:
        """Bytes of a part, by its name above."""
        return vars(self)[name]

    @property
    def title(self) -> str:
        """Title of a table of `rows()`."""
        learns = f", {self.microbatch} rows in a microbatch" if self.microbatch else ""
        return f"memory of a device: {self.decode_rows} rows decoded at once{learns}"

    def rows(self) -> list[tuple[str, str, str]]:
        """(part, in the rollout, in the update), for `smd_jax.monitor.progress.summary_table`."""
        names = [name.replace("_", " ") for name in LOWERED_BY]
        phases = [
            [show_bytes(self.part(name)) if name in phase else "-" for name in LOWERED_BY] for phase in self.phases
        ]
        return [*zip(names, *phases, strict=True), ("sum", show_bytes(self.rollout), show_bytes(self.update))]

    def __str__(self) -> str:
        rows = [("", "rollout", "update"), *self.rows()]
        return "\n".join([self.title, *(f"{name:<20}{rollout:>12}{update:>12}" for name, rollout, update in rows)])


def plan_memory(work: Workload, params: Params, decode_rows: int | None = None) -> MemoryPlan:
    """The plan of a step.

    Args:
      params: parameters, or their shapes (`jax.ShapeDtypeStruct`); with adapters, where adapters are trained.
      decode_rows: rows decoded at once, refilled as they finish; None: all in one program.
    """
    config = work.config
    mesh = work.mesh
    model = work.model.config
    shape = local_shape(model, mesh)
    ways = sampling_ways(mesh)
    devices = 1 if mesh is None else mesh.size
    sampler = SamplerPass(shape, work.policy, config, work.prompt_width, work.where, devices, params)
    decoded = decode_rows or work.rows
    # Rounded up: the device with the most rows decides. Devices that share columns each have the whole trajectory.
    here = -(-work.rows // row_ways(mesh))
    live = -(-decoded // ways)
    prefilled = -(-(work.prefill_rows or decoded) // ways)
    gathered, kept = gathered_bytes(params, model, work.where, mesh)
    gradients, activations, logits = _update_work(work, sampler, params)
    trajectory = trajectory_bytes(model, config, work.prompt_width, here, work.policy.gate is not None)
    return MemoryPlan(
        weights=tree_bytes(params, mesh),
        sampler_weights=cast_bytes(params, model, work.where, mesh) + gathered,
        weights_behind=tree_bytes(params, mesh) if work.rollouts_ahead else 0,
        optimizer=_optimizer_bytes(work, params),
        reference=_reference_bytes(work, params),
        trajectory=2 * trajectory if work.rollouts_ahead else trajectory,
        cache=sampler.cache(live),
        rollout_work=_rollout_work(sampler, -(-work.rows // ways), live, prefilled, one_program=decode_rows is None)
        + kept,
        gradients=gradients,
        activations=activations,
        logits=logits,
        decode_rows=decoded,
        microbatch=_microbatch(work) if work.updates else 0,
        side_by_side=work.rollouts_ahead and work.updates,
    )


def _reference_bytes(work: Workload, params: Params) -> int:
    """Bytes of the reference's own parameters; a frozen one of adapters is their base, which the weights count."""
    if not work.reference or (has_lora(params) and not work.reference_follows):
        return 0
    return tree_bytes(followed_params(params), work.mesh)


def _optimizer_bytes(work: Workload, params: Params) -> int:
    """Bytes of the optimizer's state; with adapters it is theirs alone."""
    if work.optimizer is None:
        return 0
    # An optimizer sees float32 or wider.
    wide = jax.eval_shape(widened, trained_params(params))
    return tree_bytes(jax.eval_shape(work.optimizer.init, wide), work.mesh)


def _rollout_work(sampler: SamplerPass, rows: int, live: int, prefill_rows: int, one_program: bool) -> int:
    """Temporary arrays of prefill or a step, and the records of the shadow mask. One program holds those all the time;
    the engine keeps them on the host, but holds prefilled prompts that wait."""
    work = max(sampler.decode(live), sampler.prefill(prefill_rows))
    draws = sampler.policy.gate is not None
    records = rows * recorded_bytes(sampler.shape, sampler.config, sampler.prompt_width, draws)
    if one_program:
        return work + RECORD_COPIES * records
    # Prompts that wait for decode rows have caches.
    return sampler.cache(prefill_rows) + work


def _update_work(work: Workload, sampler: SamplerPass, params: Params) -> tuple[int, int, int]:
    """Gradients, activations and logits at the peak: at the begin of the backward pass, with all activations and few
    gradients, or at its end. The sum over microbatches always exists."""
    if not work.updates:
        return 0, 0, 0
    learner = _learner(work, sampler)
    activations = learner.activations()
    logits = learner.logits()
    if work.distill is not None:
        more = learner.teacher(work.distill)
        activations = activations + more[0]
        logits = logits + more[1]
    if work.policy.gate is not None:
        activations = activations + learner.draws(work.config.buffer)
    if work.second_pass:
        # Another forward and backward pass, of all rows.
        activations = activations + learner.activations()
        logits = logits + learner.logits()
    trained = trained_params(params)
    # Gradients of parameters in 16 bits are widened.
    gradients = tree_bytes(jax.eval_shape(widened, trained), work.mesh)
    new = largest_part(trained, work.mesh)
    if work.microbatch_size is not None and work.microbatch_size < work.rows // work.minibatches:
        return gradients + new, activations, logits
    # The plan adds gradients to activations. At the end few activations are left, so that much is subtracted here.
    return max(new, learner.last_layer() + gradients - activations), activations, logits


def _microbatch(work: Workload) -> int:
    """Rows of a forward and backward pass."""
    return work.microbatch_size or work.rows // work.minibatches


def _learner(work: Workload, sampler: SamplerPass) -> LearnerPass:
    config = work.config
    width = work.prompt_width
    shape = sampler.shape
    rows = -(-_microbatch(work) // row_ways(work.mesh))
    found = segments_of(work.policy, config, shape.num_layers, width)
    # Layers may differ in their budgets: the largest counts.
    segments = max(found, key=lambda segments: segments.budget) if found else None
    boolean = config.mask_storage == "boolean"
    return LearnerPass(
        work.model,
        shape,
        work.where,
        rows,
        width,
        config.max_new_tokens,
        segments,
        boolean,
        sequence_ways(work.mesh),
    )


def workload_of(loop: PolicyLoop) -> Workload:
    """The workload of a step of this loop. A rollout in one program reads every prompt once.

    Raises:
      ValueError: for a model that is no Decoder.
    """
    config = loop.config
    update = loop.config.update
    return Workload(
        planned_model(loop.model, "`decode_rows` and `microbatch_size`"),
        config.policy,
        config.rollout,
        config.prompt_width,
        config.completions_per_step,
        optimizer=loop.optimizer,
        reference=update.needs_reference,
        reference_follows=update.reference_sync is not None,
        prefill_rows=config.prompts_per_step if config.decode_rows is None else config.prefill_rows,
        minibatches=config.minibatches,
        microbatch_size=_planned_rows(config),
        distill=update.distill,
        second_pass=len(update.needs.logprobs | {update.visibility}) > 1,
        rollouts_ahead=loop.config.samples_ahead,
        mesh=loop.mesh,
    )


def planned_model(model: LanguageModel, sizes: str) -> Decoder:
    """Raises ValueError for a model other than Decoder, whose layers the plan does not know; `sizes` to set instead."""
    if not isinstance(model, Decoder):
        raise ValueError(
            f"expected a Decoder, because the plan counts the equations of its layers; got {type(model).__name__}: set "
            f"{sizes} yourself"
        )
    return model


def _planned_rows(config: PolicyConfig) -> int | None:
    """Rows of a microbatch; rows that sequences share count by their columns."""
    update = config.update
    if update.pack_columns is None or update.microbatch_size is None:
        return update.microbatch_size
    columns = config.prompt_width + config.rollout.max_new_tokens
    rows = -(-update.microbatch_size * update.pack_columns // columns)
    return min(rows, config.completions_per_step // config.minibatches)


def param_shapes(model: Decoder) -> Params:
    """Shapes of fresh parameters, in float32; nothing is computed."""

    def init() -> Params:
        one = jnp.zeros((1, 1), jnp.int32)
        return model.init(jax.random.key(0), one, one, dense_mask(jnp.ones((1, 1), bool)))["params"]

    return jax.eval_shape(init)


def check_bytes(memory_bytes: int) -> None:
    """Raises ValueError for a number of bytes that no device has."""
    if not 0 < memory_bytes <= MOST_BYTES:
        raise ValueError(
            f"expected the memory of one device, more than 0 and at most {show_bytes(MOST_BYTES)}; "
            f"got {show_bytes(memory_bytes)}"
        )


def check_memory(plan: MemoryPlan, available: int) -> None:
    """Raises ValueError if the plan needs more than `available` bytes on a device: how much, and what lowers it."""
    if plan.total <= available:
        return
    phase = "rollout" if plan.rollout >= plan.update else "update"
    largest = plan.largest
    raise ValueError(
        f"expected a plan of at most {show_bytes(available)} on each device; got one of {show_bytes(plan.total)} in "
        f"the {phase} ({plan.decode_rows} decode rows), {show_bytes(plan.total - available)} more than there is. "
        f"Largest part: {largest.replace('_', ' ')}, {show_bytes(plan.part(largest))}: {LOWERED_BY[largest]}"
    )


def device_memory() -> int | None:
    """Bytes that one device can hand out: of an accelerator what its allocator may take, of a CPU the machine's
    memory; None where it is not known."""
    device = jax.local_devices()[0]
    # None on a CPU.
    stats = device.memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if device.platform != "cpu" or not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= os.sysconf_names.keys():
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
