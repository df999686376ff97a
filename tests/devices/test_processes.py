"""Several processes give the results of one on the same mesh, and refuse settings that differ."""

import json
import os
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from smd_jax.commands import launch
from smd_jax.commands.arguments import LaunchArgs
from smd_jax.commands.command_line import parse
from smd_jax.commands.errors import UserError
from smd_jax.commands.train import config_text
from smd_jax.devices import processes
from smd_jax.devices.process_rows import DataShards, SamplerPlacement
from smd_jax.devices.sharding import make_mesh
from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.runs import checkpoint
from smd_jax.runs.settings import machine
from smd_jax.tasks.rewards import Graded
from smd_jax.testing import random_params, tiny_model_config, write_random_checkpoint
from smd_jax.train import grading
from smd_jax.train.grading import GradedBatch, gather_graded
from tests import joined
from tests.documented_metrics import MACHINE_METRICS
from tests.paths import ROOT

pytestmark = pytest.mark.multiprocess

# Without AVX-512 XLA rounds some logits of four rows differently from those of two (one by 4.8e-7, on an AMD EPYC).
HAS_AVX512 = Path("/proc/cpuinfo").exists() and "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
LIMIT = 420  # seconds for a set of processes


class Results(NamedTuple):
    """Results of the runs of `tests.joined`.

    Attributes:
      arrays: by `run: name`. out: directory of smd-train.
    """

    arrays: dict[str, np.ndarray]
    out: Path

    def of(self, run: str) -> dict[str, np.ndarray]:
        return {name: value for name, value in self.arrays.items() if name.startswith(f"{run}:")}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    """Results of this process on two of its devices, and of two processes with one device each."""
    folder = tmp_path_factory.mktemp("joined")
    write_random_checkpoint(folder / "model", config=tiny_model_config(num_layers=1))
    for name, rows in (("rows", 12), ("held_out", 5)):
        lines = [json.dumps({"prompt": "abcdefgh"[: 1 + row % 8]}) for row in range(rows)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    joined.command(folder, folder / "1", "--max-steps", "4")
    # Two processes resume the checkpoint that one saved after two steps.
    left_out = {"model", "completions", "3", "4"}
    shutil.copytree(folder / "1", folder / "2", ignore=lambda _, names: left_out & set(names))
    running = start(folder, count=2)
    one = joined.arrays() | joined.refused_rollout(folder / "1_refused")
    two = wait_for(running, folder / "2.npz")
    # One process resumes the checkpoint that two saved after the third step.
    joined.command(folder, folder / "2", "--max-steps", "4", "--resume")
    return {1: Results(one, folder / "1"), 2: Results(two, folder / "2")}


def start(folder: Path, count: int) -> list[subprocess.Popen[str]]:
    """Starts `count` processes of `tests.joined`, with one device each."""
    coordinator = f"localhost:{free_port()}"
    flags = " ".join(word for word in os.environ["XLA_FLAGS"].split() if "device_count" not in word)
    flags += " --xla_force_host_platform_device_count=1"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.joined", str(folder), coordinator, str(count)]
    options: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return [subprocess.Popen([*command, str(index)], env=environment, **options) for index in range(count)]


def wait_for(running: list[subprocess.Popen[str]], file: Path) -> dict[str, np.ndarray]:
    """The arrays that the first process writes. All must succeed within `LIMIT` seconds."""
    try:
        errors = [process.communicate(timeout=LIMIT)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert not any(process.returncode for process in running), "\n".join(errors)
    with np.load(file) as arrays:
        return {name: arrays[name] for name in arrays.files}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def differing(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> list[str]:
    """Names of the arrays that are not bitwise equal."""
    return [name for name in one if one[name].tobytes() != other[name].tobytes()]


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """Sampled arrays must be bitwise equal, computed ones up to rounding."""
    for name in differing(one, other):
        computed = {"logprobs", "metric", "params"} & set(name.split())
        assert computed, name
        np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("run", joined.RUNS)
def test_two_processes_sample_the_same_as_one(results: dict[int, Results], run: str):
    """Tokens, masks and rewards bitwise, computed numbers up to rounding."""
    one, two = results[1].of(run), results[2].of(run)
    assert one.keys() == two.keys() and len(one) > 40
    # `taught` sums more terms, and its divergence is a difference of nearly equal ones.
    if HAS_AVX512 and run != "taught":
        assert not differing(one, two)
    assert_same(one, two)


def test_four_processes_equal_one_on_four_devices(results: dict[int, Results], tmp_path: Path):
    """They also equal two processes with half of the experts each. Routers and adapters learn."""
    running = start(tmp_path, count=4)
    one = joined.on_four_devices()
    four = wait_for(running, tmp_path / "4.npz")
    assert one.keys() == four.keys() and len(one) > 40
    assert_same(one, four)
    assert len(set(one["numbers 0"])) == 4, "each process feeds its own prompt"
    for step in range(joined.STEPS):
        routing = one[f"routing {step}"]
        assert routing.shape == (8, 14, 1, 2) and set(np.unique(routing)) == {-1, 0, 1, 2, 3}
        assert one[f"metric {step} grad_norm"] > 0.01 and one[f"metric {step} experts/balance_loss"] > 0.5
    experts = results[2].of("experts_over_processes")
    assert_same(one, {name.partition(": ")[2]: x for name, x in experts.items()})


@pytest.mark.parametrize("count", [1, 2])
def test_every_process_reports_the_first_mismatch(results: dict[int, Results], count: int):
    """The mask is wrong in a row of the last process; the message names its row in the whole batch."""
    run, messages = results[count].out.parent / f"{count}_refused/refused", list(results[count].arrays["refused: said"])
    assert len(messages) == count and len(set(messages)) == 1, messages
    wrong = load_file(run / "refused_0.safetensors")
    assert len(wrong["tokens"]) == 8 and len(read_metrics(run / "metrics.jsonl")) == 1
    # The query before the first recorded eviction sees one key too many, so the next token is the first to differ.
    # Padding of the prompt has 0.
    times = wrong["evicted_at"][joined.WRONG_ROW, joined.WRONG_LAYER, joined.WRONG_HEAD]
    column, padding = times[times > 0].min(), np.argmax(wrong["valid"][joined.WRONG_ROW])
    (message,) = set(messages)
    assert message.startswith("RefusedRolloutError: rollout 0: expected sampler and learner within 0.00058 nats")
    assert f"first at row {joined.WRONG_ROW}, position {column - padding} (" in message
    assert f"likeliest layer {joined.WRONG_LAYER}, KV head {joined.WRONG_HEAD}: " in message
    assert f"where it evicts a query earlier. The rollout is in {run / 'refused_0.safetensors'}" in message


def test_a_failed_dump_stops_all_processes(results: dict[int, Results]):
    """Only the first process writes it."""
    first, second = results[2].arrays["no_room: said"]
    assert not list((results[2].out.parent / "2_refused/no_room").glob("refused*"))
    assert first.startswith("OSError: ") and "No space left on device" in first
    assert second.startswith("OtherProcessError: ") and "process 0 ended with OSError" in second


def test_every_process_has_a_learning_signal(results: dict[int, Results]):
    arrays = results[2].arrays
    for run in ("taught", "pairs"):
        rewards, numbers = arrays[f"{run}: rewards 0"].reshape(4, 2), arrays[f"{run}: numbers 0"].reshape(4, 2)
        assert rewards[0, 0] != rewards[0, 1] or rewards[1, 0] != rewards[1, 1]
        assert rewards[2, 0] != rewards[2, 1], "the second process has no signal"
        assert arrays[f"{run}: metric 0 grad_norm"] > 0.01
        assert (numbers[:, 0] == numbers[:, 1]).all() and len(set(numbers[:, 0])) == 4, "each feeds its own prompts"
    assert arrays["taught: metric 0 dynamic_sampling/rollouts"] == 2
    assert np.isnan(rewards[3:]).all() and np.isnan(arrays["experts_over_processes: rewards 0"][6:]).all()


def test_the_command_gives_the_same_and_writes_once(results: dict[int, Results]):
    """Four steps in one process equal a run whose third step is taken by two."""
    one, two = results[1].out, results[2].out
    left, right = (load_file(out / "model/model.safetensors") for out in (one, two))
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_allclose(left[name], right[name], rtol=1e-5, atol=1e-6)
    for name, count in (("metrics.jsonl", 4), ("evaluations.jsonl", 5)):
        rows = [read_metrics(out / name) for out in (one, two)]
        assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]] and len(rows[0]) == count
        for before, after in zip(*rows, strict=True):
            assert {k: v for k, v in before.items() if k not in MACHINE_METRICS} == pytest.approx(
                {k: v for k, v in after.items() if k not in MACHINE_METRICS}, rel=1e-4, abs=1e-5
            )
    assert (two / "completions/completions_00002.parquet").is_file()


def test_one_process_reads_the_checkpoint_of_several(results: dict[int, Results]):
    one, two = (saved_params(results[count].out / "checkpoints") for count in (1, 2))
    assert one.keys() == two.keys() and len(one) > 8
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-5, atol=1e-6)


def saved_params(directory: Path) -> dict[str, np.ndarray]:
    """The newest parameters, all on one device of this process."""
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), random_params(tiny_model_config(num_layers=1))
    )
    params = checkpoint.restore_part(directory, {"params": like})["params"]
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(params)}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("only one resumes", "process 1: arguments.run.resume: expected true, got false"),
        ("one that resumes fails", "process 1 ended with UserError: expected rows on this host; got none"),
        ("other checkpoints", "process 1: checkpoints: expected [2], got []"),
        ("other bound", "process 1: guard: expected 0.25, got 0.5"),
        ("other seed", "process 1: run.seed: expected 0, got 1"),
        ("other evaluation", "process 1: evaluator.rows: expected 4, got 8"),
        ("other held-out rows", "process 1: held-out prompts: expected 12, got 11"),
        ("other version", 'process 1: versions.jax: expected "0.0.0", got "0.1.0"'),
        ("failure", "process 1 ended with KeyError: 'no such row'"),
        ("mesh", "data axis 1, fsdp axis 1, sequence axis 1 and tensor axis 1; got 2 in 2 processes"),
        ("failed rewards", "expected at most 25% of the completions without a reward; got 4 of 8"),
        ("failed rewards of an evaluation", "expected at most 25% of the completions without a reward; got 10 of 12"),
        ("no room for checksums", "OSError: checkpoint 1 in"),
        ("no room for checksums", " | OtherProcessError: expected every process to continue; process 0 ended with OS"),
        ("unseen file", "OtherProcessError: expected every process to continue; process 1 ended with Damaged"),
        ("unseen file", "checkpoint 2 in"),
        ("part that cannot be read", "DamagedCheckpointError: checkpoint 2 in"),
        ("part that cannot be read", "expected every process to continue; process 1 ended with Damaged"),
        ("data that cannot be read", "process 1 ended with OSError: no answer from the network | OSError: no answer"),
        ("prompts", "divide over 2 processes, because all completions of a prompt are sampled by one; got 3 prompts"),
    ],
)
def test_refusals_of_several_processes(results: dict[int, Results], case: str, message: str):
    assert message in str(results[2].arrays[f"refused: {case}"])


# --- a single process


def test_rows_of_a_process():
    assert DataShards(((0,), (1,)), own=1).part(8) == slice(4, 8)
    assert DataShards(((0, 1), (2, 3)), own=0).part(8) == slice(0, 4)
    assert DataShards(((0, 1), (2, 3)), own=0).one_per_group(["a", "b", "c", "d"]) == ["a", "c"]


def test_a_single_process_feeds_the_whole_mesh():
    placement = SamplerPlacement(make_mesh(2, 2, 2))
    assert placement.data_shards == DataShards(((0,),), own=0)
    assert placement.own_mesh is placement.mesh


def test_a_single_process_does_not_communicate():
    processes.check_same({"seed": 0})
    assert processes.gather_json({"a": [1, float("inf")]}) == [{"a": [1, float("inf")]}]
    assert processes.is_first()
    with pytest.raises(KeyError), processes.all_or_none():
        raise KeyError("as it was raised")
    assert jax.process_count() == 1


def test_a_step_takes_the_time_of_its_slowest_process(monkeypatch: pytest.MonkeyPatch):
    took = {"time/rollout": 2.0, "time/grading": 0.5, "rollout/utilisation": 0.5}
    other = {"time/rollout": 1.0, "time/grading": 1.5, "rollout/utilisation": 1.0}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(grading, "gather_json", lambda message: [message, message | {"measured": other}])
    part = GradedBatch(["text"], Graded(np.zeros(1, np.float32), {}, ()), took)
    whole = gather_graded(DataShards(((0,), (1,)), own=0), part)
    assert whole.measured == {"time/rollout": 2.0, "time/grading": 1.5, "rollout/utilisation": 0.75}
    assert whole.completions == ["text", "text"] and whole.graded.rewards.shape == (2,)


def test_all_or_none_ignores_an_error_that_is_being_handled():
    try:
        raise KeyError("handled")
    except KeyError:
        with processes.all_or_none():
            finished = True
    assert finished


def test_versions_include_the_libraries_that_build_rows(monkeypatch: pytest.MonkeyPatch):
    libraries = {"transformers", "tokenizers", "datasets", "reasoning-gym"}
    assert libraries < processes.versions().keys()
    version = metadata.version

    def without_an_extra(name: str) -> str:
        if name == "reasoning-gym":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without_an_extra)
    assert libraries - processes.versions().keys() == {"reasoning-gym"}
    assert machine(make_mesh()).keys() > processes.versions().keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("localhost:1", None, 0), "together, or none"),
        ((None, 2, None), "together, or none"),
        (("localhost:1", 2, 2), "from 0 to 1, of 2 processes; got 2"),
    ],
)
def test_invalid_process_ids_are_refused(arguments: tuple[str | None, int | None, int | None], message: str):
    with pytest.raises(ValueError, match=message):
        processes.join(*arguments)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (LaunchArgs(coordinator="auto", num_processes=2), "--coordinator auto without --num-processes and --process"),
        (LaunchArgs(coordinator="localhost:1"), "together, or none"),
        (LaunchArgs(process_id=1), "together, or none"),
    ],
)
def test_incomplete_launch_flags_are_refused(flags: LaunchArgs, message: str):
    with pytest.raises(UserError, match=message):
        launch.join(flags)


def test_launch_flags_are_not_saved_with_the_run():
    flags = ["--coordinator", "host0:1234", "--num-processes", "2", "--process-id", "1"]
    algorithm, args = parse(["grpo", "--model", "somewhere", "--dataset", "sorting", *flags])
    assert args.launch == LaunchArgs(coordinator="host0:1234", num_processes=2, process_id=1)
    assert "host0" not in config_text(algorithm, args) and "process_id: null" in config_text(algorithm, args)


JOIN = """
import jax
from smd_jax.devices import processes
processes.join()
print(jax.process_count(), jax._src.xla_bridge.CUDA_VISIBLE_DEVICES.value)
"""


@pytest.mark.parametrize(("variables", "devices"), [({}, "3"), ({"JAX_LOCAL_DEVICE_IDS": "0,1"}, "0,1")])
def test_accelerators_of_a_process_under_slurm(variables: dict[str, str], devices: str):
    """A task has the one of its number on the node unless set otherwise (docs/many_hosts.md)."""
    # The fourth task of its node, in a step that has no other task.
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    slurm |= {"SLURM_LOCALID": "3", "JAX_COORDINATOR_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    environment = os.environ | slurm | variables
    result = subprocess.run([sys.executable, "-c", JOIN], env=environment, text=True, check=False, capture_output=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["1", devices]
