"""Samples tokens from logits, with log-probability, entropy and the set of drawable tokens.

One uniform number per row inverts the cumulative sum of the weights `exp(x - max)`, in two levels:

    weights of the vocabulary    ▁▂▁▁ | ▁▁▂▁ | ▂█▁▁ | ▁▁▁▁      blocks of BLOCK tokens
    1. cumulative sums of the blocks: the block that holds `uniform * total`
    2. cumulative weights within that block: the token

The same weights give the log-probability, `x[token] - max - log(total)`, and the entropy, without a second softmax.
Only BLOCK tokens per row are gathered.

Filters are those of transformers (generation/logits_process.py: TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper),
in its order: temperature, top-k, top-p of the remaining tokens, min-p. vLLM has the same definitions, but applies min-p
before top-p (vllm/v1/sample/sampler.py). Among equally likely tokens, top-k keeps exactly k, those with the lowest ids,
because its set has a fixed size; top-p keeps all or none of them. transformers and vLLM keep more than k in the first
case, and only some of them in the second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from smd_jax.config import check_whole
from smd_jax.devices.sharding import over_rows
from smd_jax.message.quantization import pack, packed_size
from smd_jax.pytrees import PyTreeNode
from smd_jax.typed_fields import check_types

BLOCK = 128  # tokens
ID_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Temperature and filters of sampling.

    Attributes:
      temperature: divides the logits; 0 is greedy and ignores the filters.
      top_k: keep this many most likely tokens; 0 keeps all.
      top_p: keep the smallest set of most likely tokens whose probability reaches this; 1.0 keeps all.
      min_p: keep tokens at least this many times as probable as the most likely one; 0.0 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.temperature < math.inf:  # NaN is neither
            raise ValueError(f"expected a finite temperature >= 0; got {self.temperature}")
        check_whole("top_k", self.top_k, 0, "0: no filter")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"expected 0 < top_p <= 1 (1: no filter); got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"expected 0 <= min_p <= 1 (0: no filter); got {self.min_p}")

    @property
    def trainable(self) -> bool:
        """Whether a learner can reproduce the probabilities, which needs a temperature above 0."""
        return self.temperature > 0

    def left_by_top_k(self, vocab: int) -> int:
        """Number of tokens that top-k keeps; 0 if it keeps all."""
        return self.top_k if self.top_k < vocab else 0

    def filters(self, vocab: int) -> bool:
        """Whether filters may remove tokens of the vocabulary."""
        return self.trainable and (self.left_by_top_k(vocab) > 0 or self.top_p < 1 or self.min_p > 0)


class Sampled(PyTreeNode):
    """One token per row.

    Attributes:
      tokens: `[batch]` ids.
      logprobs: `[batch]` log-probabilities of the tokens after temperature and filters; greedy decoding reports those
        at temperature 1 without filters.
      entropy: `[batch]` entropy of that distribution, in nats.
      drawable: the drawable tokens in the form of `drawable_form`: int32 ids `[batch, k]`, the most likely first,
        filled with -1; or bits, uint8 `[batch, ceil(vocab / 8)]`. None without filters.
    """

    tokens: Int[Array, " batch"]
    logprobs: Float[Array, " batch"]
    entropy: Float[Array, " batch"]
    drawable: Int[Array, "batch k"] | UInt8[Array, "batch bytes"] | None


def sample(logits: Float[Array, "batch vocab"], uniforms: Float[Array, " batch"], config: SamplingConfig) -> Sampled:
    """Samples one token per row from that row's logits and uniform number.

    Args:
      logits: in float32 or wider; -inf for forbidden tokens, of which a row may have all but one.
      uniforms: in [0, 1). Their resolution, 2**-23 in float32, is that of the frequencies of very rare tokens. Greedy
        decoding ignores them.
    """
    if config.temperature == 0:
        return _greedy(logits)
    logits = logits / config.temperature
    vocab = logits.shape[-1]
    ids = None
    if config.left_by_top_k(vocab):
        # Per device for its own rows: otherwise the compiler gathers all rows on every device to sort them
        # (openxla/xla#49006).
        logits, ids = over_rows(partial(jax.lax.top_k, k=config.left_by_top_k(vocab)), logits)
    # Relative to the largest logit, so that exp cannot overflow.
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(shifted)
    if config.top_p < 1:
        # After top-k the largest weights come first.
        threshold = _top_p_threshold if ids is None else _top_p_threshold_sorted
        weights = jnp.where(weights >= threshold(weights, config.top_p)[:, None], weights, 0.0)
    if config.min_p > 0:
        weights = jnp.where(weights >= config.min_p, weights, 0.0)  # the most likely token has weight 1
    places = inverse_cdf(weights, uniforms)
    # After top-k, indices are in its order, the most likely token first; `ids` maps them to the vocabulary.
    tokens = places if ids is None else _pick(ids, places)
    return Sampled(tokens, *_logprobs_and_entropy(shifted, weights, places), _drawable(weights, ids, config, vocab))


def _greedy(logits: Float[Array, "batch vocab"]) -> Sampled:
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    last = logits.shape[-1] - 1
    # XLA's argmax over a large vocabulary takes 20 times as long on a CPU as two reductions.
    tokens = jnp.min(jnp.where(shifted == 0, jnp.arange(last + 1, dtype=jnp.int32)[None], last), axis=-1)
    return Sampled(tokens, *_logprobs_and_entropy(shifted, jnp.exp(shifted), tokens), None)


def forbid(
    logits: Float[Array, "batch vocab"], token_ids: int | tuple[int, ...], where: Bool[Array, " batch"]
) -> Float[Array, "batch vocab"]:
    """Sets tokens to -inf in the rows `where`: end tokens before the minimum length."""
    here = is_one_of(jnp.arange(logits.shape[-1])[None], token_ids)
    return jnp.where(where[:, None] & here, -jnp.inf, logits)


def is_one_of(tokens: Int[Array, "*shape"], token_ids: int | tuple[int, ...]) -> Bool[Array, "*shape"]:
    """Whether each token is this id, or one of these ids."""
    return jnp.isin(tokens, jnp.asarray(token_ids))


def _logprobs_and_entropy(
    shifted: Float[Array, "batch count"], weights: Float[Array, "batch count"], places: Int[Array, " batch"]
) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
    """`x - max` of the places minus log(total), and log(total) - sum(w (x - max)) / total."""
    total = jnp.sum(weights, axis=-1)
    inside = jnp.sum(jnp.where(weights > 0, weights * shifted, 0.0), axis=-1)  # 0 * -inf would be NaN
    return _pick(shifted, places) - jnp.log(total), jnp.log(total) - inside / total


def _pick(x: Array, places: Int[Array, " batch"]) -> Array:
    """`x[row, places[row]]`."""
    return jnp.take_along_axis(x, places[:, None], axis=-1)[:, 0]


# --- the draw


def inverse_cdf(weights: Float[Array, "batch count"], uniforms: Float[Array, " batch"]) -> Int[Array, " batch"]:
    """int32: the first index at which the running sum of a row exceeds `uniform * total`.

    Rounding never selects an index of weight zero if the row has a positive weight. A row without one (its logits hold
    NaN) gets an arbitrary valid index; its log-probability is NaN.
    """
    batch, count = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -count % BLOCK))).reshape(batch, -1, BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    target = uniforms * jnp.sum(sums, axis=-1)
    block, before = _first_beyond(sums, target)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    index = block * BLOCK + _first_beyond(inside, target - before)[0]
    return jnp.minimum(index, count - 1)  # the last block is padded beyond the vocabulary


def _first_beyond(
    weights: Float[Array, "batch count"], target: Float[Array, " batch"]
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    """The first index whose running sum exceeds the target, and the running sum before it.

    Only positive weights are considered: the running sum is computed in a tree and may change where nothing is added.
    If rounding leaves no sum above the target, the last positive weight is taken.
    """
    sums = jnp.cumsum(weights, axis=-1)
    positive = weights > 0
    beyond = positive & (sums > target[:, None])
    last = weights.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    index = jnp.where(beyond.any(axis=-1), jnp.argmax(beyond, axis=-1), last).astype(jnp.int32)
    before = jnp.where(index > 0, _pick(sums, jnp.maximum(index - 1, 0)), 0.0)
    return index, before


# --- filters


def _top_p_threshold_sorted(weights: Float[Array, "batch count"], top_p: float) -> Float[Array, " batch"]:
    """`_top_p_threshold` for weights sorted from the largest to the smallest."""
    before = jnp.cumsum(weights, axis=-1) - weights
    inside = before < top_p * jnp.sum(weights, axis=-1, keepdims=True)
    # The largest is always inside: by rounding, slightly more than 0 may precede it.
    return jnp.minimum(weights[:, 0], jnp.min(jnp.where(inside, weights, jnp.inf), axis=-1))


def _top_p_threshold(weights: Float[Array, "batch count"], top_p: float) -> Float[Array, " batch"]:
    """The smallest weight of top-p's set: the least w such that larger weights sum to less than `top_p` of the total.

    Bisection instead of a sort: the sum of weights above w falls with w, and positive floats are ordered like their
    bits. Weights are at most 1, so 30 sums per row find the last bit in float32 (62 in float64).
    """
    # An integer of the same width, to reinterpret the bits.
    kind = jnp.int64 if weights.dtype == jnp.float64 else jnp.int32
    enough = top_p * jnp.sum(weights, axis=-1)

    def halve(_: Int[Array, ""], bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        # Invariant: weights above `inside` sum to less than `enough`, weights above `outside` do not. It holds for 1
        # and 0 at the start.
        outside, inside = bounds
        middle = (outside + inside) // 2
        bound = jax.lax.bitcast_convert_type(middle, weights.dtype)
        larger = jnp.sum(jnp.where(weights > bound[:, None], weights, 0.0), axis=-1)
        return jnp.where(larger < enough, outside, middle), jnp.where(larger < enough, middle, inside)

    one = jax.lax.bitcast_convert_type(jnp.ones_like(enough), kind)
    rounds = jnp.finfo(weights.dtype).bits - 2
    inside = jax.lax.fori_loop(0, rounds, halve, (jnp.zeros_like(one), one))[1]
    return jax.lax.bitcast_convert_type(inside, weights.dtype)


# --- the set of drawable tokens


def drawable_form(config: SamplingConfig, vocab: int) -> jax.ShapeDtypeStruct | None:
    """Shape (of one row, one step) and dtype of `Sampled.drawable`; None without filters.

    Ids of top-k, or one bit per token of the vocabulary, whichever takes fewer bytes. Every sampled token has such a
    set: with a vocabulary of 151,936 it takes 19 KB without top-k, and 200 bytes with top_k=50.
    """
    if not config.filters(vocab):
        return None
    count = config.left_by_top_k(vocab)
    size = packed_size(vocab, 1)
    if count and count * ID_BYTES <= size:
        return jax.ShapeDtypeStruct((count,), jnp.int32)
    return jax.ShapeDtypeStruct((size,), jnp.uint8)


def _drawable(
    weights: Float[Array, "batch count"], ids: Int[Array, "batch count"] | None, config: SamplingConfig, vocab: int
) -> Array | None:
    """The tokens with a positive weight, in the form of `drawable_form`."""
    form = drawable_form(config, vocab)
    inside = weights > 0
    if form is None:
        return None
    if ids is not None:
        if form.dtype == jnp.int32:
            return jnp.where(inside, ids, -1)
        # Bits take fewer bytes than this many ids.
        inside = among(jnp.where(inside, ids, -1), vocab)
    return pack(inside.astype(jnp.uint8), 1)


def among(ids: Int[Array, "*lead k"], vocab: int) -> Bool[Array, "*lead {vocab}"]:
    """Which tokens of the vocabulary are among the ids; negative ids are ignored."""

    def of_one(ids: Int[Array, " k"]) -> Bool[Array, " vocab"]:
        # A negative index would count from the end: it is moved beyond the end, where `drop` ignores it.
        return jnp.zeros(vocab, bool).at[jnp.where(ids < 0, vocab, ids)].set(True, mode="drop")

    for _ in ids.shape[:-1]:
        of_one = jax.vmap(of_one)
    return of_one(ids)
