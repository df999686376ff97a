"""What a rollout hands to the learner. It never says which policy made it: the shadow mask is the whole message."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from smd_jax.drawable_tokens import DrawableTokens
from smd_jax.masks import ShadowMask, dense_mask, positions
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

    @property
    def prompt_width(self) -> int:
        """P, columns of the prompt with its padding."""
        # Log-probabilities exist for the response alone, so their width tells where it begins.
        return self.tokens.shape[1] - self.logprobs.shape[1]

    @property
    def response(self) -> Int[Array, "batch R"]:
        return self.tokens[:, self.prompt_width :]

    @property
    def response_mask(self) -> Bool[Array, "batch R"]:
        return self.valid[:, self.prompt_width :]

    @property
    def positions(self) -> Int[Array, "batch T"]:
        return positions(self.valid)

    def dense_mask(self) -> ShadowMask:
        """What a sampler that never evicts would have seen."""
        return dense_mask(self.valid)

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
        )

    def lengths(self) -> Int[Array, " batch"]:
        """Response tokens of each row."""
        return jnp.sum(self.response_mask, axis=1)


def check_finite(logprobs: Float[Array, "rows columns"] | Float[np.ndarray, "rows columns"]) -> None:
    """Raises FloatingPointError if a token was drawn from logits that are no numbers: there was no distribution, and
    the token means nothing. Reads the values, so it cannot run under jit.

    Args:
      logprobs: those of the drawn tokens, 0 for columns behind the end of a row.
    """
    bad = int(jnp.sum(~jnp.all(jnp.isfinite(jnp.asarray(logprobs)), axis=1)))
    if bad:
        raise FloatingPointError(
            f"expected finite logits in the sampler; got NaN or infinity in {bad} of {len(logprobs)} rows. The "
            "parameters hold such numbers (a diverged update, a broken checkpoint), or the compute dtype overflows"
        )
