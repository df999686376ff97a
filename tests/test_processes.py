"""Several real processes give what one gives on the same mesh; and what they refuse."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from smd_jax import processes
from smd_jax.process_rows import Feeders, feeders, sampling_mesh
from smd_jax.sharding import make_mesh

ROOT = Path(__file__).resolve().parents[1]


def start(file: Path, count: int, devices: int) -> list[subprocess.Popen[str]]:
    """Processes of `tests.joined` with so many devices each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    flags = " ".join(word for word in os.environ["XLA_FLAGS"].split() if "device_count" not in word)
    environment = os.environ | {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tests.joined", str(file), coordinator, str(count)]
    return [
        subprocess.Popen([*command, str(index)], env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, np.ndarray]]:
    """What one process with four devices found, and what two with two devices each did."""
    folder = tmp_path_factory.mktemp("joined")
    results = {}
    for count in (1, 2):
        file = folder / f"{count}.npz"
        running = start(file, count, 4 // count)
        errors = [process.communicate()[1] for process in running]
        assert [process.returncode for process in running] == [0] * count, "\n".join(errors)
        with np.load(file) as arrays:
            results[count] = {name: arrays[name] for name in arrays.files}
    return results


def of_run(found: dict[str, np.ndarray], run: str) -> dict[str, np.ndarray]:
    return {name: value for name, value in found.items() if name.startswith(f"{run}:")}


def test_grpo_is_the_same_to_the_last_bit(found: dict[int, dict[str, np.ndarray]]):
    """Tokens, masks, rewards, metrics and parameters of two steps."""
    one, two = of_run(found[1], "grpo"), of_run(found[2], "grpo")
    assert one.keys() == two.keys()
    different = [name for name in one if one[name].tobytes() != two[name].tobytes()]
    assert not different
    rewards = one["grpo: rewards 0"].reshape(4, 2)
    assert (rewards[:, 0] != rewards[:, 1]).any(), "something is learnt"
    assert one["grpo: metric 0 grad_norm"] > 0.01
    assert (one["grpo: numbers 0"].reshape(4, 2)[:, 0] == one["grpo: numbers 0"].reshape(4, 2)[:, 1]).all()
    assert len(set(one["grpo: numbers 0"])) == 4, "each process feeds prompts of its own"


# --- by one process alone


def test_rows_of_a_process():
    assert Feeders(((0,), (1,)), own=1).part(8) == slice(4, 8)
    assert Feeders(((0, 1), (2, 3)), own=0).part(8) == slice(0, 4)
    assert Feeders(((0, 1), (2, 3)), own=0).of_teams(["a", "b", "c", "d"]) == ["a", "c"]


def test_one_process_feeds_all():
    mesh = make_mesh(2, 2, 2)
    assert feeders(mesh) == Feeders(((0,),), own=0)
    assert sampling_mesh(mesh) is mesh


def test_one_process_talks_to_nobody():
    processes.check_same({"seed": 0})
    assert processes.gather_json({"a": [1, float("inf")]}) == [{"a": [1, float("inf")]}]
    assert processes.is_first() and processes.any_process(True) and not processes.any_process(False)
    assert jax.process_count() == 1


def test_differences_are_named():
    expected = {"seed": 0, "loop": {"rate": 1.0, "policy": "h2o"}, "versions": {"jax": "0.10.2"}}
    got = {"seed": 0, "loop": {"rate": 1.5, "policy": "h2o"}, "versions": {"jax": "0.11.0"}, "more": None}
    assert processes.differences(expected, got) == [
        "loop.rate: expected 1.0, got 1.5",
        'versions.jax: expected "0.10.2", got "0.11.0"',
        'more: expected "(absent)", got null',
    ]
    assert not processes.differences({"x": float("nan")}, {"x": float("nan")})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("localhost:1", None, 0), "together, or none"),
        ((None, 2, None), "together, or none"),
        (("localhost:1", 2, 2), "from 0 to 1, of 2 processes; got 2"),
    ],
)
def test_a_process_that_cannot_be(given: tuple[str | None, int | None, int | None], said: str):
    with pytest.raises(ValueError, match=said):
        processes.join(*given)
