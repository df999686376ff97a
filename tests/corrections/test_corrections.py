"""Corrections: by hand, invariances, and against TRL, verl and slime (golden/corrections.json)."""

import inspect
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.corrections import (
    DPPOTV,
    MIS,
    OPSM,
    TIS,
    Bypass,
    Chain,
    Correction,
    CorrectionInputs,
    CorrectionTerms,
    CorrectionTraits,
    GeometricRejection,
    IcePop,
    Naive,
    Rejection,
    Shadow,
    SparseRL,
    SparseRLPaper,
    Veto,
)
from smd_jax.corrections.base import terms_of
from smd_jax.corrections.chain import split_by_time
from tests.correction_cases import GOLDEN, golden_inputs, inputs_of

# Every correction gets a row, and with it all tests of invariance.
CORRECTIONS: dict[str, Correction] = {
    "Naive": Naive(),
    "Bypass": Bypass(),
    "Shadow": Shadow(),
    "token TIS": TIS("token"),
    "sequence TIS": TIS("sequence"),
    "token TIS, normalised": TIS("token", batch_normalize=True),
    "sequence TIS, normalised": TIS("sequence", batch_normalize=True),
    "token MIS": MIS("token", clip_min=0.5, clip_max=2.0),
    "sequence MIS": MIS("sequence"),
    "IcePop": IcePop(),
    "token rejection": Rejection("token"),
    "sequence rejection": Rejection("sequence"),
    "geometric rejection": GeometricRejection(),
    "Veto": Veto(),
    "OPSM": OPSM(),
    "DPPO-TV": DPPOTV(),
    "Sparse-RL": SparseRL(),
    "Sparse-RL, paper": SparseRLPaper(),
    "geometric rejection and token TIS": Chain((GeometricRejection(), TIS("token"))),
    "bypass and geometric rejection": Chain((Bypass(), GeometricRejection())),
}
EVERY_CORRECTION = pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS.keys())
WITHOUT_SAMPLER_LOGPROBS = (Naive, Bypass, Shadow)


def check(correction: Correction, inputs: CorrectionInputs, weights, counted):
    terms = correction.terms(inputs)
    np.testing.assert_allclose(terms.weights, np.atleast_2d(weights), rtol=2e-5)
    np.testing.assert_array_equal(terms.counted, np.atleast_2d(counted).astype(bool))


# --- by hand


@pytest.mark.parametrize("correction", [Naive(), Bypass(), Shadow()])
def test_naive_bypass_and_shadow_change_nothing(correction):
    check(correction, inputs_of([0.1, 7.0, 1e-9]), [1, 1, 1], [1, 1, 1])


def test_traits():
    """The other traits: test_traits_match_the_terms."""
    assert {name for name, c in CORRECTIONS.items() if c.traits.ratio_to == "sampler"} == {
        "Bypass",
        "DPPO-TV",
        "bypass and geometric rejection",
    }
    assert {name for name, c in CORRECTIONS.items() if not c.traits.clips} == {"DPPO-TV"}
    assert {name for name, c in CORRECTIONS.items() if c.traits.judges_responses} == {"OPSM"}
    assert Chain((Chain((OPSM(),)), TIS())).traits.judges_responses


def test_unbounded_tis_and_icepop():
    xi = [0.25, 0.8, 3.0]
    check(TIS("token", clip_max=None), inputs_of(xi), xi, [1, 1, 1])
    check(IcePop(), inputs_of([0.4, 0.8, 4.9, 5.1]), [0, 0.8, 4.9, 0], [1, 1, 1, 1])


def test_geometric_rejection():
    """exp of the mean log: (1.1 * 0.9) ** (1/2) = 0.99499, and (2 * 0.5 * 1.002) ** (1/3) = 1.00067."""
    inputs = inputs_of([[1.1, 0.9, 55.0], [2.0, 0.5, 1.002]], mask=[[1, 1, 0], [1, 1, 1]])
    check(GeometricRejection(), inputs, inputs.mask, [[0, 0, 0], [1, 1, 1]])
    check(GeometricRejection(low=0.99, high=1.01), inputs, inputs.mask, inputs.mask)


def test_veto():
    """One token below 1e-4 rejects its response; padding and large ratios reject nothing."""
    inputs = inputs_of(
        [[1.0, 0.9e-4, 1.0], [1.1e-4, 1.1e-4, 1.0], [1.0, 1e-6, 500.0]], mask=[[1, 1, 1], [1, 1, 0], [1, 0, 1]]
    )
    check(Veto(), inputs, inputs.mask, [[0, 0, 0], [1, 1, 0], [1, 0, 1]])


def test_sparse_rl_of_the_paper():
    inputs = inputs_of([[0.4, 1.0, 6.0, 1.2], [1.0, 1e-5, 0.9, 1.0]], mask=[[1, 1, 1, 1], [1, 1, 1, 0]])
    check(SparseRLPaper(), inputs, [[0.4, 1, 6, 1.2], [1, 1e-5, 0.9, 0]], [[1, 1, 1, 1], [0, 0, 0, 0]])


def test_opsm():
    """log(sampler / now) = -log(xi r): (log 4 + log 1.21) / 2 = 0.788 > 0.5 in row 0, 0.198 in row 1.

    Row 2 mismatches but has no negative advantage; row 3 mismatches only in padding.
    """
    inputs = inputs_of(
        [[0.25, 1 / 1.1, 9], [1 / 1.1, 0.9, 1.0], [0.1, 0.1, 0.1], [1.0, 1.0, 1e-3]],
        r=[[1.0, 1 / 1.1, 1.0], [0.9, 0.75, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]],
        advantages=[-1.0, -1.0, 0.0, -2.0],
        mask=[[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 1, 0]],
    )
    check(OPSM(), inputs, [[0, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 0]], inputs.mask)
    check(OPSM(0.8), inputs, inputs.mask, inputs.mask)


@pytest.mark.parametrize(
    ("before", "now", "advantage", "weight"),
    [
        (0.5, 0.7, 1.0, 0.0),  # more than 0.15 above the sampler, positive advantage: masked
        (0.5, 0.7, -1.0, 1.0),  # back towards the sampler
        (0.5, 0.3, -1.0, 0.0),
        (0.5, 0.3, 1.0, 1.0),
        (0.5, 0.64, 1.0, 1.0),  # within
        (0.01, 0.1, 1.0, 1.0),  # ratio 10, which ratio clipping would mask
        (0.001, 0.1, 1.0, 0.2),  # ratio 100, truncated to 20
        (0.001, 0.9, -1.0, 20 / 900),
    ],
)
def test_dppo_tv(before, now, advantage, weight):
    inputs = inputs_of([[1.3]], r=now / before / 1.3, sampler=before, advantages=[advantage])
    check(DPPOTV(), inputs, [[weight]], [[1]])
    per_token = inputs.replace(advantages=inputs.advantages[:, None])
    check(DPPOTV(), per_token, [[weight]], [[1]])


def test_dppo_low_and_high_bounds():
    up, down = (inputs_of([[1.0]], r=r, sampler=0.5, advantages=[a]) for r, a in ((1.4, 1.0), (0.6, -1.0)))
    assert DPPOTV(low=0.1, high=0.3).terms(up).weights == 1 and DPPOTV(low=0.1, high=0.3).terms(down).weights == 0
    assert DPPOTV(low=0.3, high=0.1).terms(up).weights == 0 and DPPOTV(low=0.3, high=0.1).terms(down).weights == 1


SPLIT_CASES = {
    "all early": (Chain((TIS(), Veto())), Chain((TIS(), Veto())), None),
    "all late": (DPPOTV(), Naive(), DPPOTV()),
    "both": (Chain((OPSM(), TIS())), TIS(), OPSM()),
    "several": (Chain((Bypass(), OPSM(), Veto(), DPPOTV())), Chain((Bypass(), Veto())), Chain((OPSM(), DPPOTV()))),
    "nested": (Chain((SparseRL(), Chain((OPSM(), Naive())))), Chain((*SparseRL().parts, Naive())), OPSM()),
}


@pytest.mark.parametrize(("correction", "early", "late"), SPLIT_CASES.values(), ids=SPLIT_CASES.keys())
def test_split_by_time(correction, early, late):
    assert split_by_time(correction) == (early, late)
    inputs = golden_inputs()
    terms, first = correction.terms(inputs), early.terms(inputs.replace(logprobs=None))
    second = Naive().terms(inputs) if late is None else late.terms(inputs)
    np.testing.assert_allclose(first.weights * second.weights, terms.weights, rtol=1e-6)
    np.testing.assert_array_equal(first.counted & second.counted, terms.counted)


def test_late_correction_of_the_whole_batch_raises():
    @dataclass(frozen=True)
    class Late(OPSM):
        @property
        def traits(self) -> CorrectionTraits:
            return CorrectionTraits(uses_present=True, whole_batch=True)

    with pytest.raises(ValueError, match=r"the current learner and the whole minibatch; got .*Late\(threshold=0.5\)"):
        split_by_time(Chain((TIS(), Late())))


def test_ratios_stay_finite():
    inputs = inputs_of([[1.0, 1.0]]).replace(old_logprobs=jnp.array([[-1e3, 1e3]]))
    for correction in CORRECTIONS.values():
        assert np.isfinite(correction.terms(inputs).weights).all()


# --- against TRL, verl and slime

GOLDEN_CASES: dict[str, Correction] = {
    "trl token_truncate None 3": TIS("token", clip_max=3.0),
    "trl token_truncate 0.5 2": TIS("token", 0.5, 2.0),
    "trl sequence_truncate None 3": TIS("sequence", clip_max=3.0),
    "trl token_mask 0.5 2": MIS("token", 0.5, 2.0),
    "trl sequence_mask None 3": MIS(),
    "trl sequence_mask 0.2 3": MIS("sequence", 0.2, 3.0),
    "trl off_policy_mask 0.5": OPSM(0.5),
    "verl token 2": TIS("token"),
    "verl sequence 2": TIS("sequence"),
    "verl token 2 normalised": TIS("token", batch_normalize=True),
    "verl sequence 2 normalised": TIS("sequence", batch_normalize=True),
    "verl icepop 0.5 5": IcePop(),
    "verl token_k1 0.5 2": Rejection("token"),
    "verl seq_sum_k1 0.5 2": Rejection("sequence"),
    "verl seq_mean_k1 0.999 1.001": GeometricRejection(),
    "verl decoupled_seq_is_rs": Chain((TIS("sequence"), Rejection("sequence"))),
    "slime sparse-rl": SparseRL(),
}


def test_every_golden_case_is_read():
    assert GOLDEN_CASES.keys() == GOLDEN["cases"].keys()


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_corrections_match_trl_verl_and_slime(name):
    terms, expected = GOLDEN_CASES[name].terms(golden_inputs()), GOLDEN["cases"][name]
    np.testing.assert_allclose(terms.weights, expected["weights"], rtol=1e-5)
    np.testing.assert_array_equal(terms.counted, expected["keep"])


def test_dppo_gradient_against_verl():
    """Weight times the unclipped surrogate has the gradient of verl's loss."""
    inputs = golden_inputs()
    weights = DPPOTV(0.15, 0.15, 20.0).terms(inputs).weights

    def loss(logprobs):
        ratio = jnp.exp(jnp.where(inputs.mask, logprobs - inputs.sampler_logprobs, 0.0))
        return -jnp.sum(weights * ratio * inputs.advantages[:, None])

    expected = GOLDEN["gradients"]["verl dppo_tv 0.15 0.15 20"]
    np.testing.assert_allclose(jax.grad(loss)(inputs.logprobs), expected, rtol=1e-5, atol=1e-7)


# --- invariances


@EVERY_CORRECTION
def test_without_mismatch_weights_are_one_and_all_tokens_count(correction):
    inputs = inputs_of(np.ones((3, 5)), sampler=0.3, advantages=[1, -1, 0], mask=np.arange(5) < [[5], [2], [0]])
    check(correction, inputs, inputs.mask, inputs.mask)


@EVERY_CORRECTION
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e30])
def test_padding_changes_nothing(correction, junk):
    clean = golden_inputs()
    expected = correction.terms(clean)

    def dirty(x):
        return jnp.pad(jnp.where(clean.mask, x, junk), ((0, 0), (0, 2)), constant_values=junk)

    wide = CorrectionInputs(
        dirty(clean.sampler_logprobs),
        dirty(clean.old_logprobs),
        dirty(clean.logprobs),
        clean.advantages,
        jnp.pad(clean.mask, ((0, 0), (0, 2))),
    )
    terms = correction.terms(wide)
    np.testing.assert_allclose(terms.weights[:, :-2], expected.weights, rtol=1e-6)
    np.testing.assert_array_equal(terms.counted[:, :-2], expected.counted)
    assert not terms.weights[:, -2:].any() and not terms.counted[:, -2:].any()


@EVERY_CORRECTION
def test_row_order_and_empty_rows_change_nothing(correction):
    inputs = golden_inputs()
    expected = correction.terms(inputs)
    order = jnp.array([4, 2, 0, 5, 1, 3, 0])
    shuffled = jax.tree.map(lambda x: x[order], inputs)
    shuffled = shuffled.replace(mask=shuffled.mask.at[-1].set(False))
    terms = correction.terms(shuffled)
    np.testing.assert_allclose(terms.weights[:-1], expected.weights[order[:-1]], rtol=1e-6)
    np.testing.assert_array_equal(terms.counted[:-1], expected.counted[order[:-1]])
    assert not terms.weights[-1].any() and not terms.counted[-1].any()


@EVERY_CORRECTION
def test_rows_can_be_split_unless_whole_batch(correction):
    inputs = golden_inputs()
    whole = correction.terms(inputs).weights
    parts = [correction.terms(jax.tree.map(lambda x, i=i: x[i : i + 2], inputs)).weights for i in (0, 2, 4)]
    assert np.allclose(whole, jnp.concatenate(parts), rtol=1e-6) == (not correction.traits.whole_batch)


@EVERY_CORRECTION
def test_traits_match_the_terms(correction):
    """Inputs outside the traits have no effect and may be missing; late corrections reject no token."""
    inputs = golden_inputs()
    terms = correction.terms(inputs)
    if correction.traits.uses_present:
        np.testing.assert_array_equal(terms.counted, inputs.mask)
        assert not correction.traits.whole_batch
    else:
        jax.tree.map(np.testing.assert_array_equal, correction.terms(inputs.replace(logprobs=None)), terms)
    other = correction.terms(inputs.replace(old_logprobs=inputs.old_logprobs - 2.0 * jnp.arange(1.0, 9.0)[None]))
    same = bool((other.weights == terms.weights).all() and (other.counted == terms.counted).all())
    assert same == (not correction.traits.uses_mismatch)


@EVERY_CORRECTION
def test_weights_have_no_gradient(correction):
    def total(inputs):
        return correction.terms(inputs).weights.sum()

    inputs = golden_inputs()
    grads = jax.grad(lambda a, b, c: total(inputs.replace(sampler_logprobs=a, old_logprobs=b, logprobs=c)), (0, 1, 2))
    for gradient in grads(inputs.sampler_logprobs, inputs.old_logprobs, inputs.logprobs):
        np.testing.assert_array_equal(gradient, jnp.zeros_like(gradient))


# --- bad input


@EVERY_CORRECTION
def test_missing_sampler_logprobs_raise_where_they_are_used(correction):
    inputs = golden_inputs().replace(sampler_logprobs=None)
    if isinstance(correction, WITHOUT_SAMPLER_LOGPROBS):
        correction.terms(inputs)
        return
    with pytest.raises(ValueError, match=r"expected the sampler's log-probabilities .* got None"):
        jax.eval_shape(correction.terms, inputs)


@pytest.mark.parametrize("correction", [OPSM(), DPPOTV()])
def test_missing_current_logprobs_raise(correction):
    with pytest.raises(ValueError, match=r"expected the learner's current log-probabilities .* got None"):
        correction.terms(golden_inputs().replace(logprobs=None))


@dataclass(frozen=True)
class ByHand(Correction):
    """Terms that a user may get wrong."""

    kind: str

    def terms(self, inputs: CorrectionInputs) -> CorrectionTerms:
        if self.kind == "present":
            return CorrectionTerms(jnp.exp(inputs.logprobs - inputs.old_logprobs), inputs.mask)  # pyright: ignore
        if self.kind == "all":
            return CorrectionTerms(jnp.ones(inputs.mask.shape), jnp.ones_like(inputs.mask))
        weights = jnp.ones(inputs.mask.shape[: 1 if self.kind == "rows" else 2])
        return CorrectionTerms(weights, inputs.mask * 1.0 if self.kind == "floats" else inputs.mask)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("present", ValueError, r"CorrectionTraits\(uses_present=True\) as traits of ByHand .*; got unsup"),
        ("rows", ValueError, r"expected the weights of ByHand.terms of shape \[6, 8\]; got \[6\]"),
        ("floats", TypeError, "expected the counted tokens of ByHand.terms as booleans; got float32"),
    ],
)
def test_invalid_terms_raise(kind: str, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        inspect.unwrap(terms_of)(ByHand(kind), golden_inputs().replace(logprobs=None))


def test_tokens_outside_the_response_never_count():
    """A user's `xi < 5` is true for padding, too."""
    inputs = golden_inputs()
    assert not inputs.mask.all()
    found = terms_of(ByHand("all"), inputs)
    np.testing.assert_array_equal(found.counted, inputs.mask)


def test_opsm_with_token_advantages_raises():
    inputs = golden_inputs()
    with pytest.raises(ValueError, match=r"expected one advantage per response, \[batch\]; got \(6, 8\)"):
        OPSM().terms(inputs.replace(advantages=jnp.ones(inputs.mask.shape)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TIS(clip_max=0.0), "expected clip_max > 0; got 0.0"),
        (lambda: TIS(clip_min=-1.0), "expected clip_min > 0; got -1.0"),
        (lambda: TIS(clip_min=3.0), "expected clip_min < clip_max; got 3.0 and 2.0"),
        (lambda: TIS(clip_max=float("nan")), "expected clip_max > 0; got nan"),
        (lambda: MIS(clip_min=3.0), "expected clip_min < clip_max; got 3.0 and 3.0"),
        (lambda: IcePop(clip_min=6.0), "expected clip_min < clip_max; got 6.0 and 5.0"),
        (lambda: Rejection("token", 0.0), "expected low > 0; got 0.0"),
        (lambda: Rejection("sequence", 2.5), "expected low < high; got 2.5 and 2.0"),
        (lambda: GeometricRejection(high=0.5), "expected low < high; got 0.999 and 0.5"),
        (lambda: Veto(0.0), "expected threshold > 0; got 0.0"),
        (lambda: OPSM(-0.5), "expected threshold > 0; got -0.5"),
        (lambda: DPPOTV(low=0.0), "expected low > 0; got 0.0"),
        (lambda: DPPOTV(high=-0.1), "expected high > 0; got -0.1"),
        (lambda: DPPOTV(clip_max=0.0), "expected clip_max > 0; got 0.0"),
        (lambda: Chain(()), r"expected Chain\.parts with at least one correction; got \(\)"),
        (lambda: Chain((TIS(), IcePop())), r"at most one .* weights by xi in a Chain; got \['TIS', 'IcePop'\]"),
        (lambda: Chain((SparseRL(), TIS())), "at most one .* weights by xi in a Chain"),
        (lambda: Chain((Bypass(), TIS())), r"ratio to the sampler, which contains xi already; got \['Bypass', 'TIS'\]"),
        (lambda: Chain((DPPOTV(), MIS())), "ratio to the sampler, which contains xi already"),
    ],
)
def test_invalid_options_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()
