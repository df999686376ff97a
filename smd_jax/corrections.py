"""What each method does about the mismatch of sampler and learner: log-probabilities in, weights and kept tokens out.

Three policies are in play (verl calls this decoupled): pi_sampler drew the tokens, pi_old is the learner at the
rollout's parameters, pi is the learner now. The mismatch ratio is xi = pi_old / pi_sampler, the staleness ratio
r = pi / pi_old. A correction says by how much each token counts, and which tokens leave the loss:

    loss = mean over kept tokens of  weights * surrogate(pi / pi_anchor, advantage)  +  what needs no correction (KL)

To add one: a frozen dataclass with `terms`, its name in `smd_jax/__init__.py`, a row in `tests/test_corrections.py`.

Sources, by the names used below: TRL is trl/trainer/grpo_trainer.py and grpo_config.py (1.16); verl is
verl/trainer/ppo/rollout_corr_helper.py with the presets of verl/trainer/config/algorithm.py; slime is
slime/examples/train_infer_mismatch_helper/mis.py and mis.yaml, in the copy that Sparse-RL's repository trains with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from smd_jax.mismatch import bounded_exp, log_ratio_inside, response_mean

Anchor = Literal["old", "sampler"]


@no_type_check  # JAX rebuilds pytrees with leaves that are not arrays
class CorrectionInputs(struct.PyTreeNode):
    """What a correction looks at. Log-probabilities of the sampled tokens, `[batch, R]`, nats, float32 or wider.

    Attributes:
      sampler_logprobs: of pi_sampler, as the rollout recorded them; None where it recorded none.
      old_logprobs: of pi_old, the learner (under its own mask) at the rollout's parameters.
      logprobs: of pi, the learner now, without gradient; None before its forward pass.
      advantages: `[batch]`, or `[batch, R]` where every token has its own.
      mask: the tokens of the response. What lies outside may hold anything.
    """

    sampler_logprobs: Float[Array, "batch R"] | None
    old_logprobs: Float[Array, "batch R"]
    logprobs: Float[Array, "batch R"] | None
    advantages: Float[Array, " batch"] | Float[Array, "batch R"]
    mask: Bool[Array, "batch R"]


@no_type_check  # JAX rebuilds pytrees with leaves that are not arrays
class CorrectionTerms(struct.PyTreeNode):
    """What happens to each token, `[batch, R]`. The two ways of losing one differ, and every source has its own.

    Attributes:
      weights: multiply a token's surrogate (not its KL); without gradient; 0 outside the response. A token of weight 0
        still counts in the denominators of the loss.
      keep: tokens that stay in the loss. One that is rejected leaves the denominators too; false outside the response.
    """

    weights: Float[Array, "batch R"]
    keep: Bool[Array, "batch R"]


@dataclass(frozen=True)
class Correction:
    """Base of all corrections: hashable, so that one can be a static argument."""

    @property
    def anchor(self) -> Anchor:
        """Whose log-probabilities the loss takes its ratio to: "old", pi / pi_old, or "sampler", pi / pi_sampler."""
        return "old"

    @property
    def weighs(self) -> bool:
        """Whether xi is a factor of the weights. Then the loss must not contain xi a second time."""
        return False

    @property
    def clips(self) -> bool:
        """Whether the loss clips the ratio; false where the correction brings a trust region of its own."""
        return True

    @property
    def whole_batch(self) -> bool:
        """Whether rows depend on each other: then `terms` must see the whole batch, before it is split."""
        return False

    @property
    def per_response(self) -> bool:
        """Whether a response has one weight and is kept or rejected as a whole, by xi alone."""
        return False

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        """Weights and kept tokens.

        Raises:
          ValueError: if the correction needs log-probabilities that are None.
        """
        raise TypeError(f"{type(self).__name__} has no terms: its class must define them")


def _check_threshold(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"expected {name} > 0; got {value}")


def _check_bounds(low_name: str, low: float | None, high_name: str, high: float | None) -> None:
    for name, value in ((low_name, low), (high_name, high)):
        if value is not None:
            _check_threshold(name, value)
    if low is not None and high is not None and low >= high:
        raise ValueError(f"expected {low_name} < {high_name}; got {low} and {high}")


def _bounds(low: float | None, high: float | None) -> tuple[float, float]:
    """None is no bound."""
    return 0.0 if low is None else low, math.inf if high is None else high


# --- what needs neither weight nor rejection


@dataclass(frozen=True)
class Naive(Correction):
    """Takes the sampler for the learner at the rollout's parameters, and ignores xi.

    TRL: vllm_importance_sampling_correction=False. verl: rollout_is=None.
    """

    @property
    def per_response(self) -> bool:
        return True

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        return _weighing(inputs, jnp.ones_like(inputs.old_logprobs))


@dataclass(frozen=True)
class Shadow(Naive):
    """Shadow Mask Distillation: the learner replays the sampler's visibility, so xi is 1 and nothing needs correction.

    The same terms as `Naive` with another claim: it belongs to a learner under the recorded mask (visibility "shadow"),
    where xi = 1 up to rounding, as `mismatch_kl` of every run shows. Under a dense mask it would be `Naive`.
    """


@dataclass(frozen=True)
class Bypass(Naive):
    """The loss takes its ratio to the sampler itself, pi / pi_sampler = r xi, and clips that (`anchor` is "sampler").

    Two policies, no pi_old. verl: bypass_mode=True with loss_type="ppo_clip". Tunix: use_rollout_logps=True.
    """

    @property
    def anchor(self) -> Anchor:
        return "sampler"


# --- weights


@dataclass(frozen=True)
class TIS(Correction):
    """Truncated importance sampling: the weight is xi, clamped to [clip_min, clip_max].

    TRL: vllm_importance_sampling_mode "token_truncate" | "sequence_truncate", clip_max 3. verl: rollout_is "token" |
    "sequence", threshold 2 (typically 1.5 to 5 and 2 to 10), rollout_is_batch_normalize. Tunix: sampler_is_threshold 2.

    Attributes:
      level: "token": xi of each token; "sequence": their product, one weight for all tokens of a response.
      clip_min, clip_max: bounds of the weight; None: no bound (without any: plain importance sampling).
      batch_normalize: afterwards divide by the mean weight of the batch, over tokens ("token") or over responses that
        have tokens ("sequence").
    """

    level: Literal["token", "sequence"] = "token"
    clip_min: float | None = None
    clip_max: float | None = 2.0
    batch_normalize: bool = False

    def __post_init__(self) -> None:
        _check_bounds("clip_min", self.clip_min, "clip_max", self.clip_max)

    @property
    def weighs(self) -> bool:
        return True

    @property
    def whole_batch(self) -> bool:
        return self.batch_normalize

    @property
    def per_response(self) -> bool:
        return self.level == "sequence"

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        low, high = _bounds(self.clip_min, self.clip_max)
        weights = jnp.clip(_mismatch(inputs, self.level), low, high)
        if self.batch_normalize:
            weights = _normalize(weights, inputs.mask, self.level)
        return _weighing(inputs, weights)


@dataclass(frozen=True)
class MIS(Correction):
    """Masked importance sampling: the weight is xi inside [clip_min, clip_max] and 0 outside; None: no bound.

    TRL: vllm_importance_sampling_mode "token_mask" | "sequence_mask", the latter with clip_max 3 is its default. As
    there, a masked token still counts in the denominators. verl's Seq-MIS takes it out of them: that is
    `Chain((TIS("sequence"), Rejection("sequence", 0.5, 2.0)))`.
    """

    level: Literal["token", "sequence"] = "sequence"
    clip_min: float | None = None
    clip_max: float | None = 3.0

    def __post_init__(self) -> None:
        _check_bounds("clip_min", self.clip_min, "clip_max", self.clip_max)

    @property
    def weighs(self) -> bool:
        return True

    @property
    def per_response(self) -> bool:
        return self.level == "sequence"

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        low, high = _bounds(self.clip_min, self.clip_max)
        ratio = _mismatch(inputs, self.level)
        return _weighing(inputs, jnp.where((ratio >= low) & (ratio <= high), ratio, 0.0))


@dataclass(frozen=True)
class IcePop(MIS):
    """MIS of tokens with two bounds (ringtech.notion.site/icepop). verl: decoupled_token_icepop(5.0, 0.5)."""

    level: Literal["token", "sequence"] = "token"
    clip_min: float | None = 0.5
    clip_max: float | None = 5.0


# --- rejection


@dataclass(frozen=True)
class Rejection(Correction):
    """Rejects what has xi outside [low, high]: tokens, or whole responses by the product or geometric mean of their xi.

    verl: rollout_rs "token_k1" | "seq_sum_k1" | "seq_mean_k1", for the first two with 0.5 to 2. verl bounds 1 / xi, so
    that its "low_high" is our [1 / high, 1 / low]; the same for bounds that are each other's reciprocal.
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    low: float = 0.5
    high: float = 2.0

    def __post_init__(self) -> None:
        _check_bounds("low", self.low, "high", self.high)

    @property
    def per_response(self) -> bool:
        return self.level != "token"

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        ratio = _mismatch(inputs, self.level)
        return _rejecting(inputs, (ratio >= self.low) & (ratio <= self.high))


@dataclass(frozen=True)
class GeometricRejection(Rejection):
    """Rejects responses whose geometric mean of xi is not close to 1, at any length. verl: decoupled_geo_rs()."""

    level: Literal["token", "sequence", "geometric"] = "geometric"
    low: float = 0.999
    high: float = 1.001


@dataclass(frozen=True)
class Veto(Correction):
    """Rejects a response in which any token has xi < threshold. slime: rs_veto_threshold 1e-4, calculate_veto_mask."""

    threshold: float = 1e-4

    def __post_init__(self) -> None:
        _check_threshold("threshold", self.threshold)

    @property
    def per_response(self) -> bool:
        return True

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        catastrophic = inputs.mask & (_log_mismatch(inputs) < math.log(self.threshold))
        return _rejecting(inputs, ~jnp.any(catastrophic, axis=1, keepdims=True))


# --- methods with a trust region of their own: they look at the learner now


@dataclass(frozen=True)
class OPSM(Correction):
    """Off-policy sequence mask, DeepSeek-V3.2 (arXiv:2512.02556) eq. 9: weight 0 for all tokens of a response with a
    negative advantage and mean(log pi_sampler - log pi) > threshold, mismatch and staleness together.

    TRL: off_policy_mask_threshold (its documentation: e.g. 0.5), get_off_policy_mask; a masked response still counts in
    the denominators. slime: --opsm-delta 1e-4.
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        _check_threshold("threshold", self.threshold)

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        if inputs.advantages.ndim != 1:
            raise ValueError(f"OPSM: expected one advantage per response, [batch]; got {inputs.advantages.shape}")
        log_ratio = log_ratio_inside(_sampler_logprobs(inputs), _present_logprobs(inputs), inputs.mask)
        divergence = response_mean(log_ratio, inputs.mask)
        on_policy = (inputs.advantages[:, None] >= 0) | (divergence <= self.threshold)
        return _weighing(inputs, jnp.broadcast_to(on_policy, inputs.mask.shape).astype(divergence.dtype))


@dataclass(frozen=True)
class DPPOTV(Correction):
    """DPPO with the binary total variation (arXiv:2602.04879): a trust region in probability in place of the ratio's.

    Weight 0 where an update would lead further away from the sampler: pi - pi_sampler > high with a positive advantage,
    pi_sampler - pi > low with another. Elsewhere min(1, clip_max / ratio), which makes ratio * advantage the truncated
    surrogate. The loss takes its ratio to the sampler (`anchor`) and must not clip it (`clips`).

    verl: verl/trainer/ppo/core_algos.py, compute_policy_loss_dppo_tv: clip_ratio_low and _high (0.15 in
    examples/dppo_trainer), clip_ratio_c 20. prime-rl: dppo_mask_low and _high 0.2.
    """

    low: float = 0.15
    high: float = 0.15
    clip_max: float = 20.0

    def __post_init__(self) -> None:
        _check_threshold("low", self.low)
        _check_threshold("high", self.high)
        _check_threshold("clip_max", self.clip_max)

    @property
    def anchor(self) -> Anchor:
        return "sampler"

    @property
    def clips(self) -> bool:
        return False

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        now, before = (jnp.where(inputs.mask, x, 0.0) for x in (_present_logprobs(inputs), _sampler_logprobs(inputs)))
        further = jnp.exp(now) - jnp.exp(before)
        advantages = inputs.advantages[:, None] if inputs.advantages.ndim == 1 else inputs.advantages
        inside = jnp.where(advantages > 0, further <= self.high, further >= -self.low)
        truncation = jnp.minimum(1.0, self.clip_max / bounded_exp(now - before))
        return _weighing(inputs, jnp.where(inside, truncation, 0.0))


# --- composition


@dataclass(frozen=True)
class Chain(Correction):
    """Several corrections at once, each on its own: weights multiply, and a token stays if all keep it.

    `Chain((TIS(), GeometricRejection()))` is verl's decoupled_geo_rs_token_tis.

    Raises:
      ValueError: if xi would count twice: two parts weigh by it, or one does and the ratio to the sampler contains it.
    """

    parts: tuple[Correction, ...]

    def __post_init__(self) -> None:
        names = [type(part).__name__ for part in self.parts]
        if not self.parts:
            raise ValueError("expected at least one correction in a Chain; got none")
        if sum(part.weighs for part in self.parts) > 1:
            raise ValueError(f"expected at most one correction that weighs by xi in a Chain; got {names}")
        if self.weighs and self.anchor == "sampler":
            raise ValueError(
                f"expected no weights by xi with a ratio to the sampler, which contains xi already; got {names}"
            )

    @property
    def anchor(self) -> Anchor:
        return "sampler" if any(part.anchor == "sampler" for part in self.parts) else "old"

    @property
    def weighs(self) -> bool:
        return any(part.weighs for part in self.parts)

    @property
    def clips(self) -> bool:
        return all(part.clips for part in self.parts)

    @property
    def whole_batch(self) -> bool:
        return any(part.whole_batch for part in self.parts)

    @property
    def per_response(self) -> bool:
        return all(part.per_response for part in self.parts)

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        first, *others = [part.terms(inputs) for part in self.parts]
        for other in others:
            first = CorrectionTerms(first.weights * other.weights, first.keep & other.keep)
        return first


@dataclass(frozen=True)
class SparseRL(Chain):
    """Sparse-RL as released (github.com/lsjia/Sparse-RL, slime/examples/train_infer_mismatch_helper/mis.yaml).

    Token weights min(xi, 1.5), then divided by their mean over all tokens of the batch, the rejected ones included;
    tokens outside [0.5, 1.5] are rejected, and responses with any token below 1e-4.
    """

    parts: tuple[Correction, ...] = (
        TIS("token", clip_max=1.5, batch_normalize=True),  # use_tis, tis_mode: truncate, tis_upper_bound: 1.5
        Rejection("token", 0.5, 1.5),  # use_rs; its bounds are null in the file: those of tis apply
        Veto(1e-4),
    )


@dataclass(frozen=True)
class SparseRLPaper(Chain):
    """Sparse-RL as its text has it (arXiv:2601.10079): rejection of whole responses, weights xi for single tokens.

    A response is rejected if any of its tokens has xi < 1e-4 ("sparsity-aware rejection sampling"; the threshold of the
    released configuration); tokens of the others weigh xi ("importance-based reweighting"), with neither truncation nor
    rejection of tokens nor normalisation, which the summaries of the text that we could read do not name.
    """

    parts: tuple[Correction, ...] = (TIS("token", clip_max=None), Veto(1e-4))


# --- arithmetic


def _weighing(inputs: CorrectionInputs, weights: Float[Array, "batch R"]) -> CorrectionTerms:
    """Weights, and every token of the response kept."""
    return CorrectionTerms(jnp.where(inputs.mask, weights, 0.0), inputs.mask)


def _rejecting(inputs: CorrectionInputs, keep: Bool[Array, "batch _"]) -> CorrectionTerms:
    """Weights of 1, and the tokens `[batch, R]` or responses `[batch, 1]` that are kept."""
    return CorrectionTerms(inputs.mask.astype(inputs.old_logprobs.dtype), inputs.mask & keep)


def _sampler_logprobs(inputs: CorrectionInputs) -> Float[Array, "batch R"]:
    if inputs.sampler_logprobs is None:
        raise ValueError("expected the sampler's log-probabilities (sampler_logprobs) for this correction; got None")
    return jax.lax.stop_gradient(inputs.sampler_logprobs)


def _present_logprobs(inputs: CorrectionInputs) -> Float[Array, "batch R"]:
    if inputs.logprobs is None:
        raise ValueError("expected the learner's present log-probabilities (logprobs) for this correction; got None")
    return jax.lax.stop_gradient(inputs.logprobs)


def _log_mismatch(inputs: CorrectionInputs) -> Float[Array, "batch R"]:
    """log xi of every token, 0 outside the response."""
    return log_ratio_inside(jax.lax.stop_gradient(inputs.old_logprobs), _sampler_logprobs(inputs), inputs.mask)


def _mismatch(inputs: CorrectionInputs, level: Literal["token", "sequence", "geometric"]) -> Float[Array, "batch R"]:
    """xi of every token, or the product or geometric mean over its response."""
    log_ratio = _log_mismatch(inputs)
    if level == "sequence":
        log_ratio = jnp.broadcast_to(log_ratio.sum(axis=1, keepdims=True), log_ratio.shape)
    elif level == "geometric":
        log_ratio = jnp.broadcast_to(response_mean(log_ratio, inputs.mask), log_ratio.shape)
    return bounded_exp(log_ratio)


def _normalize(
    weights: Float[Array, "batch R"], mask: Bool[Array, "batch R"], level: Literal["token", "sequence"]
) -> Float[Array, "batch R"]:
    """Weights over their mean; unchanged where that is 0 (at most 1e-8, as in verl and slime)."""
    # All tokens of a response have one weight at the sequence level: its first token stands for it.
    counted = mask if level == "token" else mask & (jnp.cumsum(mask, axis=1) == 1)
    mean = jnp.where(counted, weights, 0.0).sum() / jnp.maximum(counted.sum(), 1)
    return weights / jnp.where(mean > 1e-8, mean, 1.0)
