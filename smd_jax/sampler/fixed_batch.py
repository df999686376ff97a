"""The rollout of a fixed batch in one jitted program: prefill, then segments until every row is done.

    prompts ─► prefill ─► segment ─► segment ─► … ─► Trajectory          steps and segments: `smd_jax.sampler.static`

For more rows than fit into a cache, or rows that end at very different times, see `smd_jax.sampler.engine`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int, Key

from smd_jax.config import check_whole
from smd_jax.devices.sharding import constrain_tree
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.message.trajectory import Trajectory, check_finite
from smd_jax.model.protocol import LanguageModel, Params
from smd_jax.sampler.config import RolloutConfig as RolloutConfig
from smd_jax.sampler.config import check_limits, check_sampler
from smd_jax.sampler.keys import prompt_keys, row_keys
from smd_jax.sampler.prefill import prefill
from smd_jax.sampler.records import no_records, segment_count, to_trajectory
from smd_jax.sampler.seats import SamplerState, begin
from smd_jax.sampler.segment import SegmentRecord, run_segment
from smd_jax.sampler.static import Sampler, sampler_params
from smd_jax.text.prompts import PromptBatch, check_prompt_batch, check_prompts
from smd_jax.text.stop_strings import StopTable, check_stop_table


def rollout(
    model: LanguageModel,
    params: Params,
    prompts: PromptBatch,
    key: Key[Array, ""] | Key[Array, " rows"],
    *,
    policy: EvictionPolicy,
    config: RolloutConfig,
    group_size: int = 1,
    stop: StopTable | None = None,
    limits: Int[Array, " rows"] | Int[np.ndarray, " rows"] | None = None,
    prompt_copies: int = 1,
) -> Trajectory:
    """Samples `group_size` responses per prompt with a fixed-size KV cache.

    Args:
      model, policy, config, group_size: static; equal ones compile once.
      params: parameters of `model`.
      prompts: left-padded, `[prompts, P]`. Each is read once; its responses are contiguous rows of the trajectory.
      key: PRNG key, consumed: one per row, or one for all, from which row i gets `fold_in(key, i)`. A row samples from
        its own key, so its tokens are the same in any batch up to rounding. Rounding depends on the batch size and may
        decide between nearly tied tokens or evictions. Evictions sampled while a prompt is read are shared by its group
        and use the key of its first row.
      stop: strings that end a response, see `smd_jax.text.stop_strings`.
      limits: longest length of each response, at most `config.max_new_tokens`.
      prompt_copies: number of consecutive copies of each prompt, to divide prompts over a mesh. Their responses are one
        group: random policies evict the same keys of each copy. Static.

    Raises:
      TypeError: for a model that is no LanguageModel, or a config of another class; for a policy that is no
        EvictionPolicy, cannot be hashed or has attributes that are no fields; for prompts that are no PromptBatch of
        whole numbers and booleans.
      ValueError: if the budget cannot hold what the policy protects, or prompt and response exceed the model's context;
        for prompts that are empty, not left-padded or hold ids outside of the vocabulary, and limits outside
        1 … max_new_tokens; for a group_size below 1, stop strings of another vocabulary, and keys that are not
        threefry's.
      NonFiniteLogitsError: if the model's logits were NaN or infinite, see `smd_jax.message.trajectory.check_finite`.
        The call waits for the result.

    Inside a jitted function the values of prompts, limits and logits are not checked.
    """
    # Before jit, which hashes them.
    check_sampler(model, policy, config)
    check_prompt_batch(prompts)
    check_whole("group_size", group_size, 1)
    check_whole("prompt_copies", prompt_copies, 1)
    if prompts.tokens.shape[0] % prompt_copies:
        raise ValueError(f"expected prompt_copies that divide {prompts.tokens.shape[0]} prompts; got {prompt_copies}")
    # Inside a jitted function values cannot be checked.
    if not isinstance(prompts.valid, Tracer):
        check_prompts(prompts, model.shape.vocab_size)
    if limits is not None and not isinstance(limits, Tracer):
        limits = check_limits(limits, prompts.tokens.shape[0] * group_size, config)
    if stop is not None:
        check_stop_table(stop, model.shape.vocab_size)
    trajectory = rollout_program(
        model,
        params,
        prompts,
        key,
        policy=policy,
        config=config,
        group_size=group_size,
        stop=stop,
        limits=limits,
        prompt_copies=prompt_copies,
    )
    if not isinstance(trajectory.logprobs, Tracer):
        check_finite(trajectory.logprobs)
    return trajectory


@partial(jax.jit, static_argnames=("model", "policy", "config", "group_size", "prompt_copies"))
def rollout_program(
    model: LanguageModel,
    params: Params,
    prompts: PromptBatch,
    key: Key[Array, ""] | Key[Array, " rows"],
    *,
    policy: EvictionPolicy,
    config: RolloutConfig,
    group_size: int = 1,
    stop: StopTable | None = None,
    limits: Int[Array, " rows"] | Int[np.ndarray, " rows"] | None = None,
    prompt_copies: int = 1,
) -> Trajectory:
    """`rollout` without the check of its prompts, for lowering, compiling, or calls from jitted functions.

    Its arguments are those of `rollout`, repeated because `jax.jit` finds the static ones by name.
    """
    count, width = prompts.tokens.shape
    rows = count * group_size
    sampler = Sampler(model, policy, config, width)
    # Gathered here, not in every step of the loop.
    params = constrain_tree(sampler_params(model, params), gathered=True)
    keys = row_keys(key, rows)
    prefilled = prefill(sampler, params, prompts, prompt_keys(keys, group_size, prompt_copies))
    most = jnp.full((rows,), config.max_new_tokens, jnp.int32)
    # Under a trace the limits are unchecked, and records hold `max_new_tokens`.
    limit = most if limits is None else jnp.minimum(jnp.asarray(limits, jnp.int32), most)
    state = begin(prefilled, keys, limit)

    def unfinished(carry: tuple[SamplerState, SegmentRecord, Array]) -> Array:
        return ~jnp.all(carry[0].done) & (carry[2] < segment_count(sampler))

    def segment(carry: tuple[SamplerState, SegmentRecord, Array]) -> tuple[SamplerState, SegmentRecord, Array]:
        state, records, index = carry
        state, record = run_segment(sampler, params, state, stop)
        # All rows begin together, so a segment has the same number in all: an in-place update of one slice.
        records = jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, index, 0), records, record)
        return state, records, index + 1

    # Shapes of one record, for the loop's carry.
    like = jax.eval_shape(lambda: run_segment(sampler, params, state, stop)[1])
    carry = (state, no_records(sampler, like), jnp.zeros((), jnp.int32))
    state, records, _ = jax.lax.while_loop(unfinished, segment, carry)
    return to_trajectory(
        sampler, prompts, prefilled.records, records, state.terminated, shared_by=group_size * prompt_copies
    )
