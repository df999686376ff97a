"""The message from sampler to learner. It does not depend on the eviction policy: the mask records the evictions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from smd_jax.message import foreign
from smd_jax.message.drawable_tokens import DrawableTokens
from smd_jax.message.draws import EvictionDraws
from smd_jax.message.masks import ShadowMask, dense_mask, positions
from smd_jax.message.packing import Packing
from smd_jax.pytrees import PyTreeNode


class Trajectory(PyTreeNode):
    """A batch of prompts and responses. Columns: prompt 0 … P-1 (left-padded), response P … T-1.

    Attributes:
      tokens: `[batch, T]` ids, padded after the end of a response.
      valid: `[batch, T]` true for prompt tokens and for response tokens including the end-of-sequence token.
      logprobs: `[batch, R]` the sampler's log-probabilities of the response tokens, 0 where not valid.
      terminated: `[batch]` whether an end token or a stop string ended the response.
      mask: the sampler's mask.
      temperature: the sampler's; the learner divides its logits by it. Static.
      replayable: false if the sampler was greedy, which a learner cannot replay. Static.
      entropy: `[batch, R]` entropy of the tokens' distributions, in nats, 0 where not valid; None if not recorded.
      drawable: the drawable tokens, with filters or a minimum length; None: all tokens.
      evictions: the sampled evictions of an eviction policy with a gate; else None.
      packing: layout of several sequences in a row; then R is its K, and there is no column P. None: one sequence per
        row.
      sampled: `[batch, R]` which tokens of a response the policy sampled. The others were given, such as the answer of
        a tool: queries see them, and the loss leaves them out. None: all valid ones were sampled.
      routing: experts of each token in every layer with experts; -1 for a token that was not read. The learner replays
        them, and recomputes their gates. None: the learner's router chooses.
      expert_count: experts per layer of the sampler's model; a model with another number is refused. None: unknown.
        Static.
      longest: tokens of the longest possible row, which the model's context must hold; a batch of unequal prompts has
        more columns. None: the columns. Static.
    """

    tokens: Int[Array, "batch T"]
    valid: Bool[Array, "batch T"]
    logprobs: Float[Array, "batch R"]
    terminated: Bool[Array, " batch"]
    mask: ShadowMask
    temperature: float = struct.field(pytree_node=False, default=1.0)
    replayable: bool = struct.field(pytree_node=False, default=True)
    entropy: Float[Array, "batch R"] | None = None
    drawable: DrawableTokens | None = None
    evictions: EvictionDraws | None = None
    packing: Packing | None = None
    sampled: Bool[Array, "batch R"] | None = None
    routing: Int[Array, "batch T mixtures per_token"] | None = None
    expert_count: int | None = struct.field(pytree_node=False, default=None)
    longest: int | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def from_records(
        cls,
        prompts: Sequence[foreign.Ints],
        responses: Sequence[foreign.Ints],
        logprobs: Sequence[foreign.Floats],
        *,
        terminated: Sequence[bool] | np.ndarray,
        layers: int,
        kv_heads: int,
        kept: Sequence[Sequence[foreign.Compression]] | None = None,
        dropped: Sequence[Sequence[foreign.Compression]] | None = None,
        evicted_at: Sequence[np.ndarray] | None = None,
        support: Sequence[tuple[foreign.Ints, foreign.Ints]] | None = None,
        sampled: Sequence[Sequence[bool] | np.ndarray] | None = None,
        routed_experts: Sequence[np.ndarray] | None = None,
        experts: foreign.ExpertSizes | None = None,
        temperature: float = 1.0,
        vocab_size: int | None = None,
        prompt_width: int | None = None,
        response_width: int | None = None,
        longest: int | None = None,
        pad_token_id: int = 0,
    ) -> Trajectory:
        """Builds and checks a trajectory from the records of another sampler. `smd_jax.message.foreign` has an example.

        Rows have no padding (`smd_jax.message.foreign.unpad` removes it). Tokens, queries and keys are numbered by the
        position in their row: prompt 0 … p-1, response p … n-1. Give one of `kept`, `dropped` and `evicted_at`, an
        entry per row; without evictions `dropped=[[]] * rows`. Cached keys must be those of RoPE at these positions.

        Args:
          prompts, responses: token ids. A response includes its end-of-sequence token, if any.
          logprobs: of the response tokens, in nats, at the sampler's temperature, over `support` or all tokens.
          terminated: whether each response ended before the length limit.
          layers, kv_heads, vocab_size: of the model; with a vocab_size, ids are checked.
          kept: compressions of each row's cache in time order, `(after, keys[layer][kv_head])`: after the attention of
            query `after`, only these keys were kept. Heads may keep different numbers of keys.
          dropped: like `kept`, with the evicted keys.
          evicted_at: `[layers, kv_heads, n]` first query that did not see a key, n or more for a key that was never
            evicted. The first two axes may be 1 if shared; in the mask they are 1 if they are in every row.
          support: the tokens that pass the sampler's filters, see `DrawableTokens.from_csr`; None: all tokens.
          sampled: which response tokens the policy sampled. The others were given, such as the answer of a tool; their
            log-probabilities are ignored, and their support may be empty. None: all were sampled.
          routed_experts, experts: of a model with experts, see `smd_jax.message.foreign`; None: not recorded.
          temperature, pad_token_id: of the sampler.
          prompt_width, response_width: columns P and R of the batch; None: as the longest row needs. With the same
            values for every batch of a run, jitted functions compile once.
          longest: tokens of the longest row of a run, at most the model's context; None: P + R, which may exceed it.

        Raises:
          TypeError: a compression that is no pair. ValueError: rows, layers, heads or tokens that do not fit together;
            a log-probability that is NaN, infinite or positive; an id outside the vocabulary; a compression out of
            order or after a query outside the row; a key that comes back, is evicted before its own query, or is named
            twice. Names row, layer, head and position.
        """
        if not 0 < temperature < math.inf:
            raise ValueError(f"expected a temperature > 0, because a greedy choice is no draw; got {temperature}")
        rows = foreign.pad_tokens(
            prompts, responses, logprobs, sampled, vocab_size, (prompt_width, response_width), pad_token_id
        )
        foreign.check_width("longest", longest, rows.lengths)
        ended = foreign.check_terminated(terminated, len(rows.lengths))
        seen = foreign.evicted_by_row(rows.lengths, layers, kv_heads, kept=kept, dropped=dropped, evicted_at=evicted_at)
        experts = None if experts is None else foreign.ExpertSizes(*experts)  # a plain tuple has a method `count`
        routing = foreign.routing_by_column(routed_experts, rows, experts)
        drawable, width = None, rows.logprobs.shape[1]
        if support is not None:
            drawable = DrawableTokens.from_csr(support, responses, sampled, response_width=width, vocab_size=vocab_size)
        return cls(
            tokens=jnp.asarray(rows.tokens),
            valid=jnp.asarray(rows.valid),
            logprobs=jnp.asarray(rows.logprobs),
            terminated=jnp.asarray(ended),
            mask=ShadowMask(jnp.asarray(foreign.to_columns(seen, rows))),
            temperature=temperature,
            drawable=drawable,
            sampled=None if rows.sampled is None else jnp.asarray(rows.sampled),
            routing=None if routing is None else jnp.asarray(routing),
            expert_count=None if experts is None else experts.count,
            longest=longest,
        )

    @property
    def prompt_width(self) -> int:
        """P, columns of the prompt with its padding."""
        # Log-probabilities have only the response's columns.
        return self.tokens.shape[1] - self.logprobs.shape[1]

    @property
    def response(self) -> Int[Array, "batch R"]:
        if self.packing is not None:
            return jnp.take_along_axis(self.tokens, self.packing.columns, axis=1)
        return self.tokens[:, self.prompt_width :]

    @property
    def response_mask(self) -> Bool[Array, "batch R"]:
        """The response tokens that the policy sampled."""
        if self.packing is not None:
            return self.packing.response
        valid = self.valid[:, self.prompt_width :]
        return valid if self.sampled is None else valid & self.sampled

    @property
    def positions(self) -> Int[Array, "batch T"]:
        if self.packing is not None:
            return self.packing.positions
        found = positions(self.valid)
        # Padding after a row also needs a position within the model's context.
        return found if self.longest is None else jnp.minimum(found, self.longest - 1)

    def dense_mask(self) -> ShadowMask:
        """The mask without evictions."""
        return dense_mask(self.valid) if self.packing is None else ShadowMask(self.packing.ends[:, None, None])

    def first_columns(self, response_tokens: int) -> Trajectory:
        """The rollout with only the first `response_tokens` columns of the response, to skip columns of padding."""
        columns = self.prompt_width + response_tokens
        return self.replace(
            tokens=self.tokens[:, :columns],
            valid=self.valid[:, :columns],
            logprobs=self.logprobs[:, :response_tokens],
            mask=self.mask.first_columns(columns),
            entropy=None if self.entropy is None else self.entropy[:, :response_tokens],
            drawable=None if self.drawable is None else self.drawable.first_columns(response_tokens),
            evictions=None if self.evictions is None else self.evictions.first_columns(columns),
            routing=None if self.routing is None else self.routing[:, :columns],
            sampled=None if self.sampled is None else self.sampled[:, :response_tokens],
        )

    def lengths(self) -> Int[Array, " batch"]:
        """Number of sampled tokens per row."""
        return jnp.sum(self.response_mask, axis=1)

    def turns(self) -> Int[Array, "batch R"]:
        """The turn in which the policy sampled each token, from 1; 0 for tokens that it did not sample."""
        mask = self.response_mask
        begins = mask & ~jnp.pad(mask, [(0, 0), (1, 0)])[:, :-1]
        return jnp.where(mask, jnp.cumsum(begins, axis=1, dtype=jnp.int32), 0)

    def columns_after_prompt(self) -> Int[Array, " batch"]:
        """Number of tokens per row after its prompt, sampled or read."""
        if self.packing is not None:
            return self.lengths()
        return jnp.sum(self.valid[:, self.prompt_width :], axis=1)


class NonFiniteLogitsError(FloatingPointError):
    """The model's logits were NaN or infinite."""


def check_finite(logprobs: Float[Array, "rows columns"] | Float[np.ndarray, "rows columns"]) -> None:
    """Raises NonFiniteLogitsError if a token was sampled from non-finite logits. Reads the values, so it cannot run
    under jit.

    Args:
      logprobs: of the sampled tokens, 0 after the end of a row.
    """
    # Host arrays in NumPy: on a device every new number of rows would be a program.
    xp = np if isinstance(logprobs, np.ndarray) else jnp
    bad = int(xp.sum(~xp.all(xp.isfinite(logprobs), axis=1)))
    if bad:
        raise NonFiniteLogitsError(
            f"expected finite logits in the sampler; got NaN or infinity in {bad} of {len(logprobs)} rows. Either the "
            "parameters hold such numbers (a diverged update, a broken checkpoint), or the compute dtype overflows"
        )
