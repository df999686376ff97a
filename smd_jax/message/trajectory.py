"""What a rollout hands to the learner. It never says which policy made it: the shadow mask is the whole message."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from smd_jax.message import foreign, foreign_tokens, tensorrt_llm
from smd_jax.message.drawable_tokens import DrawableTokens
from smd_jax.message.draws import EvictionDraws
from smd_jax.message.masks import ShadowMask, dense_mask, positions
from smd_jax.message.packing import Packing
from smd_jax.pytrees import any_leaves


@any_leaves
class Trajectory(struct.PyTreeNode):
    """A batch of prompts and responses. Columns: prompt 0 … P-1 (left-padded), response P … T-1.

    Attributes:
      tokens: `[batch, T]` ids; what follows the end of a response is padding.
      valid: `[batch, T]` true for prompt tokens and for response tokens up to and with the end-of-sequence token.
      logprobs: `[batch, R]` the sampler's log-probabilities of the response tokens, 0 where not valid.
      terminated: `[batch]` whether the response ended by itself, with an end-of-sequence token or a stop string.
      mask: what the sampler saw: a ShadowMask, or booleans `[batch, layers, kv_heads, T, T]`.
      temperature: the sampler's; the learner divides its logits by it. Static.
      replayable: false if the sampler was greedy, which a learner cannot replay. Static.
      entropy: `[batch, R]` entropy of the distributions that the tokens were drawn from, in nats, 0 where not valid;
        None if nobody wrote it down.
      drawable: which tokens could be drawn, where filters or a minimum length left only some; None: all of them.
      evictions: the draws by which keys were evicted, where the eviction policy draws from a gate's logits; else None.
      packing: where the sequences lie, if several of them share a row; then R is its K, and there is no column P. None:
        one sequence a row.
      sampled: `[batch, R]` which tokens of a response the policy sampled. The others were given, such as the answer of
        a tool: queries see them, and the loss leaves them out. None: all valid ones were sampled.
    """

    tokens: Int[Array, "batch T"]
    valid: Bool[Array, "batch T"]
    logprobs: Float[Array, "batch R"]
    terminated: Bool[Array, " batch"]
    mask: ShadowMask | Bool[Array, "batch layers kv_heads T T"]
    temperature: float = struct.field(pytree_node=False, default=1.0)
    replayable: bool = struct.field(pytree_node=False, default=True)
    entropy: Float[Array, "batch R"] | None = None
    drawable: DrawableTokens | None = None
    evictions: EvictionDraws | None = None
    packing: Packing | None = None
    sampled: Bool[Array, "batch R"] | None = None

    @classmethod
    def from_records(
        cls,
        prompts: Sequence[foreign_tokens.Ints],
        responses: Sequence[foreign_tokens.Ints],
        logprobs: Sequence[foreign_tokens.Floats],
        *,
        terminated: Sequence[bool] | np.ndarray,
        layers: int,
        kv_heads: int,
        kept: Sequence[Sequence[foreign.Compression]] | None = None,
        dropped: Sequence[Sequence[foreign.Compression]] | None = None,
        evicted_at: Sequence[np.ndarray] | None = None,
        visible: Sequence[np.ndarray] | None = None,
        support: Sequence[tuple[foreign_tokens.Ints, foreign_tokens.Ints]] | None = None,
        temperature: float = 1.0,
        vocab_size: int | None = None,
        prompt_width: int | None = None,
        response_width: int | None = None,
        pad_token_id: int = 0,
    ) -> Trajectory:
        """What a sampler of any other library reports of a batch, checked. `smd_jax.message.foreign` has a picture.

        Rows come without padding (`smd_jax.message.foreign_tokens.unpad` takes it off). Tokens, queries and keys are
        named by their position in their own row: prompt 0 … p-1, response p … n-1. Of `kept`, `dropped`, `evicted_at`
        and `visible` exactly one says what was seen, an entry a row. Keys must have been cached after RoPE at these
        positions, and must not have been changed or merged.

        Args:
          prompts, responses: token ids. A response has its end-of-sequence token, if there was one.
          logprobs: of the response tokens, in nats, at the sampler's temperature, over the whole vocabulary or over
            `support`.
          terminated: whether each response ended by itself, rather than at a limit of its length.
          layers, kv_heads: of the model.
          kept: compressions of each row's cache in the order of time, `(after, keys[layer][kv_head])`: once query
            `after` had attended, nothing but these keys was left. Heads may have kept different numbers of keys.
          dropped: as `kept`, with the keys that went.
          evicted_at: `[layers, kv_heads, n]` first query that did not see a key, any number from n on for a key that
            stayed. The first two axes may be 1, for what all layers or heads share.
          visible: `[layers, kv_heads, n, n]` booleans, which query saw which key; axes of 1 as in `evicted_at`.
          support: the tokens that the sampler's filters left, `(token_ids, offsets)` of each row, see
            `smd_jax.message.drawable_tokens.DrawableTokens.from_csr`; None: all tokens.
          temperature: of the sampler.
          vocab_size: with it, ids are checked against the vocabulary.
          prompt_width, response_width: columns P and R of the batch; None: what the longest row needs. The same ones
            for every batch of a run, and everything jitted compiles once.
          pad_token_id: fills rows up.

        Raises:
          ValueError: rows, layers, heads or tokens that don't fit together; a log-probability that is NaN, infinite or
            positive; a temperature that isn't positive; an id outside of the vocabulary; a compression out of order or
            after a query that isn't the row's; a key that comes back, goes before its own query saw it, or is named
            twice. The message names row, layer, head and position.
        """
        if not 0 < temperature < math.inf:
            raise ValueError(f"expected a temperature > 0, because a greedy choice is no draw; got {temperature}")
        rows = foreign_tokens.pad_tokens(
            prompts,
            responses,
            logprobs,
            vocab_size=vocab_size,
            prompt_width=prompt_width,
            response_width=response_width,
            pad_token_id=pad_token_id,
        )
        batch = len(rows.lengths)
        ended = np.asarray(terminated)
        if ended.shape != (batch,) or ended.dtype != bool:
            raise ValueError(f"expected a boolean for each of {batch} rows in terminated; got {terminated}")
        seen = foreign.evicted_by_row(
            rows.lengths, layers, kv_heads, kept=kept, dropped=dropped, evicted_at=evicted_at, visible=visible
        )
        drawable = None
        if support is not None:
            width = rows.logprobs.shape[1]
            drawable = DrawableTokens.from_csr(support, responses, response_width=width, vocab_size=vocab_size)
        return cls(
            tokens=jnp.asarray(rows.tokens),
            valid=jnp.asarray(rows.valid),
            logprobs=jnp.asarray(rows.logprobs),
            terminated=jnp.asarray(ended),
            mask=ShadowMask(jnp.asarray(foreign.to_columns(seen, rows))),
            temperature=temperature,
            drawable=drawable,
        )

    @classmethod
    def from_tensorrt_llm(
        cls,
        prompts: Sequence[foreign_tokens.Ints],
        responses: Sequence[foreign_tokens.Ints],
        logprobs: Sequence[foreign_tokens.Floats],
        rounds: Sequence[Sequence[tensorrt_llm.Round]],
        *,
        mode: tensorrt_llm.EvictionMode,
        terminated: Sequence[bool] | np.ndarray,
        layers: int,
        kv_heads: int,
        full_layers: Sequence[int] = (),
        support: Sequence[tuple[foreign_tokens.Ints, foreign_tokens.Ints]] | None = None,
        temperature: float = 1.0,
        vocab_size: int | None = None,
        prompt_width: int | None = None,
        response_width: int | None = None,
        pad_token_id: int = 0,
    ) -> Trajectory:
        """A rollout of TensorRT-LLM with TriAttention, from the rounds of its compression manager. The others of the
        arguments are those of `from_records`.

        Args:
          rounds: of each row, in the order of time, see `smd_jax.message.tensorrt_llm`. mode: the engine's
            `eviction_mode`.
          full_layers: layers with a sliding window, which the engine does not score.

        Raises:
          ValueError: what `from_records` refuses; a round whose cache is smaller than the one before left it, or larger
            than the row; ordinals of the prompt, beyond the cache, not rising, or of another shape than the mode's. A
            key that is gone has no ordinal, so none can come back. The message names row and round.
        """
        lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=False)]
        evicted_at = tensorrt_llm.evicted_by_rounds(
            rounds,
            [len(prompt) for prompt in prompts],
            lengths,
            mode=mode,
            layers=layers,
            kv_heads=kv_heads,
            full_layers=full_layers,
        )
        return cls.from_records(
            prompts,
            responses,
            logprobs,
            terminated=terminated,
            layers=layers,
            kv_heads=kv_heads,
            evicted_at=evicted_at,
            support=support,
            temperature=temperature,
            vocab_size=vocab_size,
            prompt_width=prompt_width,
            response_width=response_width,
            pad_token_id=pad_token_id,
        )

    @property
    def prompt_width(self) -> int:
        """P, columns of the prompt with its padding."""
        # Log-probabilities exist for the response alone, so their width tells where it begins.
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
        return positions(self.valid) if self.packing is None else self.packing.positions

    def dense_mask(self) -> ShadowMask:
        """What a sampler that never evicts would have seen."""
        return dense_mask(self.valid) if self.packing is None else ShadowMask(self.packing.ends[:, None, None])

    def first_columns(self, response_tokens: int) -> Trajectory:
        """The same rollout with the first so many columns of the response alone. Where what follows them is padding in
        every row, whoever learns from it does the same with less work."""
        columns = self.prompt_width + response_tokens
        mask = self.mask
        return self.replace(
            tokens=self.tokens[:, :columns],
            valid=self.valid[:, :columns],
            logprobs=self.logprobs[:, :response_tokens],
            mask=mask.first_columns(columns) if isinstance(mask, ShadowMask) else mask[..., :columns, :columns],
            entropy=None if self.entropy is None else self.entropy[:, :response_tokens],
            drawable=None if self.drawable is None else self.drawable.first_columns(response_tokens),
            evictions=None if self.evictions is None else self.evictions.first_columns(columns),
            sampled=None if self.sampled is None else self.sampled[:, :response_tokens],
        )

    def lengths(self) -> Int[Array, " batch"]:
        """Tokens that the policy sampled, of each row."""
        return jnp.sum(self.response_mask, axis=1)

    def turns(self) -> Int[Array, "batch R"]:
        """The turn in which the policy sampled each token, from 1; 0 for tokens that it did not sample."""
        mask = self.response_mask
        begins = mask & ~jnp.pad(mask, [(0, 0), (1, 0)])[:, :-1]
        return jnp.where(mask, jnp.cumsum(begins, axis=1, dtype=jnp.int32), 0)

    def columns_after_prompt(self) -> Int[Array, " batch"]:
        """Tokens of each row after its prompt: those that were sampled, and those that were read between them."""
        if self.packing is not None:
            return self.lengths()
        return jnp.sum(self.valid[:, self.prompt_width :], axis=1)


class NonFiniteLogitsError(FloatingPointError):
    """The model's logits were NaN or infinite, so its tokens were drawn from no distribution."""


def check_finite(logprobs: Float[Array, "rows columns"] | Float[np.ndarray, "rows columns"]) -> None:
    """Raises NonFiniteLogitsError if a token was drawn from logits that are no numbers: there was no distribution, and
    the token means nothing. Reads the values, so it cannot run under jit.

    Args:
      logprobs: those of the drawn tokens, 0 for columns behind the end of a row.
    """
    bad = int(jnp.sum(~jnp.all(jnp.isfinite(jnp.asarray(logprobs)), axis=1)))
    if bad:
        raise NonFiniteLogitsError(
            f"expected finite logits in the sampler; got NaN or infinity in {bad} of {len(logprobs)} rows. The "
            "parameters hold such numbers (a diverged update, a broken checkpoint), or the compute dtype overflows"
        )
