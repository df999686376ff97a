"""Starts of the studies: their hash, one start for all arms of a seed, clean commits, resumption."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lib import provenance
from lib.arms import arms_of
from lib.command import add_rows
from lib.files import write_rows
from lib.problems import problem_of
from lib.starts import StartLevel, check_one_start, read_start, start, start_hash, write_start
from smd_jax.runs import checkpoint
from smd_jax.testing import random_params

PROBLEM = problem_of("sorting-4")
CONFIG = PROBLEM.model_config()
LEVEL = StartLevel()


def test_a_start_is_read_back_unless_it_has_another_hash_or_level(tmp_path: Path):
    params, like, path = random_params(CONFIG, 3), random_params(CONFIG, 0), tmp_path / "start.safetensors"
    write_start(path, params, LEVEL)
    restored = read_start(path, like, LEVEL)
    assert start_hash(restored) == start_hash(params) != start_hash(like)
    np.testing.assert_array_equal(restored["embed"]["embedding"], params["embed"]["embedding"])
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] + 1}, path, {"hash": start_hash(params)})
    with pytest.raises(ValueError, match="expected in start.safetensors parameters with the hash"):
        read_start(path, like, LEVEL)
    write_start(path, params, StartLevel(rows=64))
    with pytest.raises(ValueError, match=r"a start trained to .*rows=512.*; got one trained to .*rows=64"):
        read_start(path, like, LEVEL)


def row(**changes: object) -> dict[str, object]:
    base = {"task": "sorting-4", "policy": "h2o", "budget": 4, "buffer": 2, "arm": "tis", "pilot": False, "seed": 10}
    rest = {"learning_rate": 1e-3, "minibatches": 4, "prompts": 32, "start": "a", "commit": "1234567"}
    return base | rest | changes


def test_arms_of_one_seed_have_one_start():
    check_one_start([row(), row(arm="naive"), row(arm="tis", seed=11, start="b")])
    # Rows of the wall have a length instead of a task.
    walks = [{"length": length, "seed": 10, "pilot": False, "start": str(length)} for length in (512, 1024)]
    check_one_start([*walks, *walks])
    with pytest.raises(ValueError, match="expected one start for all arms of a cell and seed"):
        check_one_start([row(), row(arm="naive", start="b")])


def test_rows_without_a_hash_are_compared_by_the_reward_of_the_start():
    old = row(sparse_before=0.5)
    del old["start"]
    check_one_start([old, old | {"arm": "naive"}])
    with pytest.raises(ValueError, match=r"got two or more in \[\('sorting-4', 'h2o', 4, 10\)\]"):
        check_one_start([old, old | {"arm": "naive", "sparse_before": 0.501}])


@pytest.mark.parametrize("bad", [{"commit": "1234567+"}, {"commit": "not recorded"}, {"start": "b", "arm": "naive"}])
def test_rows_of_a_clone_are_checked(bad: dict[str, object], tmp_path: Path):
    results, source = tmp_path / "rows.json", tmp_path / "clone.json"
    write_rows(results, [row()])
    before = results.read_text()
    write_rows(source, [row(**bad)])
    with pytest.raises(ValueError, match="expected"):
        add_rows(results, source)
    assert results.read_text() == before


def test_reported_rows_need_a_clean_commit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(provenance, "commit", lambda: "1234567+")
    with pytest.raises(RuntimeError, match="expected a clean commit"):
        provenance.clean_commit()


def test_an_arm_may_train_after_another():
    (arm,) = arms_of(("anchor-then-shadow",))
    assert [(phase.name, rollouts) for phase, rollouts in arm.phases(240)] == [
        ("anchor-alone", 60),
        ("anchor-then-shadow", 180),
    ]


@pytest.mark.study
def test_an_interrupted_start_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    level = StartLevel(0.13, every=2)
    rewards = iter([0.12, 0.13, 0.12, 0.13])  # two for the whole start, two for the resumed one

    def evaluate(_: Any) -> list[SimpleNamespace]:
        return [SimpleNamespace(reward=next(rewards))]

    monkeypatch.setattr("lib.starts.evaluator_of", lambda *_: SimpleNamespace(run=evaluate))
    whole = start(PROBLEM, 3, level, tmp_path / "whole")
    save = checkpoint.Writer.save

    def save_and_interrupt(writer: checkpoint.Writer, *arguments: Any, **options: Any) -> None:
        save(writer, *arguments, **options)
        raise KeyboardInterrupt

    with mock.patch.object(checkpoint.Writer, "save", save_and_interrupt), pytest.raises(KeyboardInterrupt):
        start(PROBLEM, 3, level, tmp_path / "parts")
    resumed = start(PROBLEM, 3, level, tmp_path / "parts")
    assert start_hash(resumed) == start_hash(whole)
    (file,) = (tmp_path / "parts").iterdir()  # the checkpoints are deleted
    monkeypatch.setattr("lib.starts._trained", None)  # must not be called
    assert start_hash(start(PROBLEM, 3, level, tmp_path / "parts")) == start_hash(whole)
    assert file.name == "sorting-4-dense-0.13-seed-3.safetensors" and not list(rewards)
