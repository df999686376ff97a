from __future__ import annotations

import pytest

from smd_jax.certify.record import arrays_of
from tests.certify.rolled_out import CONFIG, sample_rollout, wide_params


@pytest.fixture(scope="module")
def params():
    return wide_params(CONFIG)


@pytest.fixture(scope="module")
def arrays(params):
    return arrays_of(sample_rollout(params))
