"""Settings of the property tests."""

import os
from collections.abc import Iterator

import jaxtyping
import pytest
from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("HYPOTHESIS_PERCENT", "100")) / 100
SLOW = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)


@pytest.fixture(autouse=True)
def without_jaxtyping() -> Iterator[None]:
    """Turns off the tests' shape checks, which would raise before the library's own."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def cases(count: int) -> settings:
    return settings(max_examples=int(count * TIMES), deadline=None, suppress_health_check=SLOW)
