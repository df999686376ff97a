"""Load-balancing loss: matches transformers, over microbatches too, and raises for missing inputs."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from smd_jax.learner.auxiliary_terms import BalanceTerm
from smd_jax.learner.config import UpdateConfig
from smd_jax.learner.forward import Replay, Visibility, response_hidden, response_hidden_and_router
from smd_jax.learner.objective import prepare
from smd_jax.learner.state import TrainBatch
from smd_jax.learner.terms import Minibatch, Needs, Term, TermInputs, TermOutputs
from smd_jax.message.tree import Branch, to_trajectory
from smd_jax.model.decoder import Decoder
from smd_jax.model.protocol import Routed
from tests.learner.test_routing_replay import CONFIG, params_of, sampled
from tests.tiny_update import metrics_and_gradients


def update_with_balance_term(microbatch_size: int | None) -> tuple[dict[str, Any], Any]:
    trajectory = sampled(CONFIG, "H2O")
    batch = TrainBatch(trajectory, jnp.zeros(6), trajectory.logprobs)
    config = UpdateConfig(microbatch_size=microbatch_size, terms=(BalanceTerm(6, 0.5),))
    return metrics_and_gradients(config, batch, model=Decoder(CONFIG), params=params_of(CONFIG))


def transformers_balance_loss() -> float:
    """transformers' `load_balancing_loss_func` in NumPy, over the tokens with recorded routing."""
    trajectory = sampled(CONFIG, "H2O")
    _, router = response_hidden_and_router(Decoder(CONFIG), params_of(CONFIG), trajectory, trajectory.mask)
    routing = np.asarray(trajectory.routing)
    read = routing[..., 0] >= 0
    logits = np.asarray(router, np.float64)[read]
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    choices = (routing[read][:, :, None] == np.arange(6)).sum((0, 1)) / len(logits)
    return 6 * float((choices * shares.mean(0)).sum())


@pytest.mark.slow
def test_loss_matches_transformers():
    routers = []
    for microbatch_size in (None, 2):
        metrics, gradients = update_with_balance_term(microbatch_size)
        assert metrics["experts/balance_loss"] == pytest.approx(transformers_balance_loss(), rel=1e-5)
        routers.append(gradients["layers_0"]["mlp"]["router"]["kernel"])
    np.testing.assert_allclose(*routers, atol=1e-6)
    assert np.abs(routers[0]).max() > 1e-4


def no_replay(visibility: Visibility) -> Replay:
    raise AssertionError(f"the weights need no log-probabilities; got a request for {visibility!r}")


@pytest.mark.slow
def test_weights_do_not_overflow_int32():
    """49,152 squared is more than 2**31."""
    trajectory = sampled(CONFIG, "H2O")
    routing = jnp.zeros((6, 4096, 2, 2), jnp.int8).at[..., 1].set(3)
    batch = TrainBatch(trajectory.replace(routing=routing), jnp.zeros(6), None)
    weights = BalanceTerm(6).prepare(Minibatch(batch, trajectory.response_mask, no_replay))
    expert_shares = np.array([1.0, 0, 0, 1, 0, 0])
    np.testing.assert_allclose(weights, np.broadcast_to(6 / (6 * 4096 * 2) * expert_shares, (6, 6)), rtol=1e-6)


@dataclass(frozen=True)
class ReadsRouter(Term):
    """A user-defined term that checks no combinations itself."""

    @property
    def needs(self) -> Needs:
        return Needs(router=True)

    def evaluate(self, inputs: TermInputs) -> TermOutputs:
        raise AssertionError("not reached")


class NoLogits(Decoder):
    """A user-defined model that returns experts without router logits."""

    def hidden(self, *args: Any) -> Any:
        hidden, layers = super().hidden(*args)
        return hidden, tuple(layer._replace(logits=None) if isinstance(layer, Routed) else layer for layer in layers)


def test_missing_router_logits_raise_only_where_they_are_read():
    trajectory, params = sampled(CONFIG, "H2O"), params_of(CONFIG)
    model: Any = NoLogits(CONFIG)
    hidden = response_hidden(model, params, trajectory, trajectory.mask)
    expected, _ = response_hidden_and_router(Decoder(CONFIG), params, trajectory, trajectory.mask)
    np.testing.assert_array_equal(hidden, expected)
    with pytest.raises(ValueError, match=r"expected Routed\.logits of every layer with experts"):
        response_hidden_and_router(model, params, trajectory, trajectory.mask)


def test_invalid_inputs_raise():
    trajectory = to_trajectory([Branch([1, 2, 3], [False, False, True])])
    batch = TrainBatch(trajectory, jnp.zeros(1), None)
    for term in (BalanceTerm(6), ReadsRouter()):
        with pytest.raises(ValueError, match="expected a trajectory with recorded routing"):
            prepare(Decoder(CONFIG), UpdateConfig(terms=(term,)), params_of(CONFIG), batch)
        with pytest.raises(ValueError, match=r"expected no eviction_coef .* got eviction_coef 0\.1 and"):
            UpdateConfig(eviction_coef=0.1, terms=(term,))
        with pytest.raises(ValueError, match=r"expected no eviction_coef and no pack_columns .* pack_columns 24"):
            UpdateConfig(microbatch_size=2, pack_columns=24, terms=(term,))
    with pytest.raises(ValueError, match="expected a finite coef >= 0; got -1.0"):
        replace(BalanceTerm(6), coef=-1.0)
