"""Eviction policies with parameters and of one's own in whole runs: their flags, what is kept of them, their errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from smd_jax.commands.arguments import SamplerArgs
from smd_jax.commands.choices import eviction_policy, way_of_decoding
from smd_jax.commands.command_line import parse
from smd_jax.commands.export import main as export
from smd_jax.commands.places import from_the_root
from smd_jax.commands.prepare import prepare
from smd_jax.commands.train import main
from smd_jax.eviction.learned import LearnedGate
from smd_jax.eviction.named import POLICIES
from smd_jax.eviction.policies import Recent, SnapKV, StreamingLLM
from smd_jax.eviction.wrappers import Protect, Pyramid
from smd_jax.message.gate import LinearGate
from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.testing import tiny_model_config, write_random_checkpoint
from tests.command_errors import error_of

FADING = '''
"""Keys that received attention, the later the more."""

from dataclasses import dataclass

import jax.numpy as jnp

import smd_jax as smd


@dataclass(frozen=True)
class FadingH2O(smd.eviction.EvictionPolicy):
    half_life: float = 64.0

    @property
    def statistics(self):
        return (smd.eviction.ReceivedAttention(),)

    def score(self, view):
        age = view.newest[:, None, None] - view.positions
        return view.statistic(smd.eviction.ReceivedAttention()) * jnp.exp2(-age / self.half_life)


@dataclass(frozen=True)
class Wrong(smd.eviction.EvictionPolicy):
    def score(self, view):
        return view.positions
'''
SORT = ["--dataset", "reasoning_gym:distractor_sort", "--dataset-parameters", "num_digits=3", "num_distractors=4"]
SORT += ["--dataset-size", "20", "--reward-timeout", "None", "--distill", "none", "--sinks", "1"]
SIZES = ["--num-prompts", "2", "--num-generations", "4", "--max-completion-length", "6", "--budget", "8", "--buffer"]
SIZES += ["2", "--eviction", "h2o"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and policies of one's own."""
    folder = tmp_path_factory.mktemp("place")
    write_random_checkpoint(folder / "model", config=tiny_model_config(num_layers=1, max_positions=2048))
    (folder / "my_policies.py").write_text(FADING)
    (folder / "other").mkdir()
    (folder / "other" / "my_policies.py").write_text(f"{FADING}# another file\n")
    return folder


def words(place: Path, run: Path, *more: str) -> list[str]:
    return ["grpo", "--model", f"{place}/model", *SORT, *SIZES, "--output-dir", str(run), *more]


def test_a_text_becomes_a_policy_with_sinks():
    assert eviction_policy(SamplerArgs(eviction="snapkv(window=16)")) == Protect(SnapKV(window=16), sinks=4)
    assert eviction_policy(SamplerArgs(eviction="recent", sinks=0)) == Recent()
    pyramid = eviction_policy(SamplerArgs(eviction="snapkv(kernel=3)", sinks=2, pyramid=True))
    assert pyramid == Pyramid(Protect(SnapKV(kernel=3), sinks=2))
    decode = way_of_decoding("streaming-llm:8+2", sinks=3)
    assert (decode.policy, decode.name) == (StreamingLLM(3), "streaming_llm-8-2")
    greedy = way_of_decoding("gate(greedy=True):8", sinks=2)
    assert greedy.policy == LearnedGate(LinearGate(2), greedy=True)
    with pytest.raises(ValueError, match=r"expected a gate that samples its evictions, .*; got 'gate\(greedy=True\)'"):
        eviction_policy(SamplerArgs(eviction="gate(greedy=True)"))
    with pytest.raises(ValueError, match=r"expected the sinks of streaming_llm only in --sinks; got 'streaming_llm\("):
        way_of_decoding("streaming_llm(sinks=8):16", sinks=4)


def test_the_help_names_every_policy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")  # one column of flags
    with pytest.raises(SystemExit):
        main(["grpo", "--help"])
    shown = capsys.readouterr().out
    flag = " ".join(shown[shown.index("--eviction STR") :].split("--budget")[0].replace("│", " ").split())
    assert all(name in flag for name in POLICIES), flag


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "said"),
    [
        (
            "snapk",
            "expected one of the eviction policies dense, gate, h2o, keydiff, knorm, random, recent, rkv, snapkv",
        ),
        ("snapkv(windo=16)", "expected a parameter of snapkv, which has window=32, kernel=5; got 'windo'"),
        ("snapkv(window=0)", "expected SnapKV.window >= 1; got 0"),
        ("snapkv(window=9)", "that Protect(inner=SnapKV(window=9, kernel=5), sinks=1, recent=0) protects); got 8"),
        ("FILE:FadingH20", "expected a class 'FadingH20' in"),
        ("FILE:FadingH2O(half_life='a')", "expected half_life of FadingH2O to be float; got 'a', str"),
        (
            "FILE:Wrong",
            "expected Wrong.score to give floating-point [rows, kv_heads, slots], here [1, 2, 10]; got int32",
        ),
    ],
)
def test_a_policy_that_cannot_be_is_one_box(
    flag: str, said: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    flag = flag.replace("FILE", f"{place}/my_policies.py")
    given = words(place, tmp_path / "run")
    assert said in error_of([*given, "--eviction", flag], capsys)
    way = f"{flag}:8+2"
    if "protects" not in said:  # whose sizes are the same mistake
        assert said in error_of([*given, "--eval-steps", "1", "--eval-decode", way], capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_with_a_policy_of_ones_own(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(place)
    run = tmp_path / "run"
    own = "my_policies.py:FadingH2O(half_life=16)"
    ways = [
        "--eval-steps",
        "1",
        "--eval-rows",
        "2",
        "--eval-decode",
        "sampler",
        f"{own}:8+2,dense",
        "h2o(recent=0.25):8",
    ]
    main([*words(place, run), "--eviction", own, *ways, "--max-steps", "1"])
    said = capsys.readouterr().out
    assert "eviction policy: Protect(inner=FadingH2O(half_life=16.0), sinks=1, recent=0), 8 + 2 keys per layer" in said
    (row,) = read_metrics(run / "metrics.jsonl")
    assert 0 < row["rollout/evicted_share"] < 1 and row["sampling/sampling_logp_difference/max"] < 1e-4
    names = {"sampler", "FadingH2O-half_life-16-8-2", "dense", "h2o-recent-0.25-8"}
    evaluated = read_metrics(run / "evaluations.jsonl")[-1]
    assert {name.split("/")[1] for name in evaluated if name.startswith("eval/")} == names
    kept = yaml.safe_load((run / "config.yaml").read_text())
    assert kept["eviction"] == f"{place}/my_policies.py:FadingH2O(half_life=16)"
    assert kept["eval_decode"][1] == f"{place}/my_policies.py:FadingH2O(half_life=16):8+2,dense"
    # It goes on from anywhere, with the same policy and no other.
    monkeypatch.chdir("/")
    again = ["--config", str(run / "config.yaml"), "--resume", "--max-steps", "2", "--eviction"]
    for other, difference in (
        (f"{place}/my_policies.py:FadingH2O", "loop.policy.inner.half_life: expected 16.0, got 64.0"),
        ("h2o", "loop.policy.inner._class: expected "),
        (f"{place}/other/my_policies.py:FadingH2O(half_life=16)", "eviction.holds: expected "),
    ):
        # Long lines are folded in the box.
        assert difference.replace(" ", "") in error_of([*again, other], capsys).replace(" ", "")
    main([*again, f"{place}/other/../my_policies.py:FadingH2O(half_life=16.0)"])
    assert len(read_metrics(run / "metrics.jsonl")) == 2
    export([str(run), "--out", str(tmp_path / "model")])
    assert (tmp_path / "model" / "config.json").is_file()


def test_parameters_are_kept_and_compared(place: Path, tmp_path: Path):
    """As numbers: another spelling is the same policy."""
    _, args = parse(words(place, tmp_path, "--eviction", "snapkv(window=4)"))
    assert from_the_root(args).sampler == args.sampler
    loops = [
        prepare(parse(words(place, tmp_path, "--eviction", text))[1]).loop
        for text in ("snapkv(window=4)", "SnapKV( window = 4 , kernel=5)")
    ]
    assert loops[0].config == loops[1].config
