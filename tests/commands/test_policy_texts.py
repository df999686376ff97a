"""Eviction policies as text: names, parameters and user classes; in --eviction, --eval-decode and a run."""

import sys
from pathlib import Path

import pytest
import yaml

from smd_jax.commands.arguments import SamplerArgs
from smd_jax.commands.choices import eviction_policy
from smd_jax.commands.limits import evicts_keys
from smd_jax.commands.policy_texts import named_policy, parse_decode, parse_policy, with_sinks
from smd_jax.commands.train import main
from smd_jax.eviction import LearnedGate, TriAttention
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.policies import H2O, POLICIES, RKV, TOVA, Dense, Recent, SnapKV, StreamingLLM
from smd_jax.eviction.wrappers import OnTokens, Protect, Pyramid
from smd_jax.message.gate import AttentionGate, LinearGate
from smd_jax.message.spans import TokenSpans
from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.sampler.config import RolloutConfig
from smd_jax.train.evaluation import Decode
from tests.command_errors import error_of
from tests.commands.conftest import MakeArgv
from tests.query_centers import drawn_centers

USER_GATES = """
from dataclasses import dataclass

import jax.numpy as jnp

import smd_jax as smd
from smd_jax.eviction import AttentionGate, Gate, LearnedGate


@dataclass(frozen=True)
class Oldest(Gate):
    has_parameters = False

    def logits(self, parameters, keys, values, positions, newest, queries):
        return jnp.broadcast_to(positions[:, :, None] * 1.0, (*keys.shape[:2], newest.shape[1], keys.shape[2]))


@dataclass(frozen=True)
class Scaled(Oldest):
    has_parameters = True

    def init(self, kv_heads, head_dim, dtype):
        return {"scale": jnp.ones(kv_heads, dtype)}


@dataclass(frozen=True)
class Mine(smd.eviction.EvictionPolicy):
    inner: LearnedGate = LearnedGate(AttentionGate())

    @property
    def gate(self):
        return self.inner.gate

    @property
    def statistics(self):
        return self.inner.statistics

    def score(self, view):
        return self.inner.score(view)


@dataclass(frozen=True)
class Reversed(smd.eviction.LinearGate):
    def logits(self, *args):
        return -super().logits(*args)


by_attention = LearnedGate(AttentionGate(temperature=0.5, sinks=8))
oldest = LearnedGate(Oldest())
scaled = LearnedGate(Scaled())
mine = Mine()
reversed_gate = LearnedGate(Reversed())
"""

USER_POLICIES = """
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

import smd_jax as smd
from smd_jax.eviction import SnapKV
from smd_jax.message.query_centers import load_query_centers


@dataclass(frozen=True)
class FadingH2O(smd.eviction.EvictionPolicy):
    half_life: float = 64.0
    layers: tuple[int, ...] = ()

    def __post_init__(self):
        if self.half_life <= 0:
            raise ValueError(f"expected half_life > 0; got {self.half_life}")

    @property
    def statistics(self):
        return (smd.eviction.ReceivedAttention(),)

    def score(self, view):
        age = view.newest[:, None, None] - view.positions
        return view.statistic(smd.eviction.ReceivedAttention()) * jnp.exp2(-age / self.half_life)


@dataclass(frozen=True)
class Ranked(smd.eviction.StreamingLLM):
    weight: float = 1.0


@dataclass(frozen=True)
class Linear(smd.eviction.StreamingLLM):
    slope: float = 1.0

    def __post_init__(self):
        pass


class Bare(smd.eviction.EvictionPolicy):
    half_life: float = 64.0


def function():
    pass


blocks = smd.eviction.OnTokens(smd.eviction.TokenSpans(open=3, close=4), inner=SnapKV())
if Path("centers.npz").is_file():
    centers = smd.eviction.TriAttention(load_query_centers("centers.npz"))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with user policies; restores the import path after the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path, tmp_path / "a (b)"):
        place.mkdir(exist_ok=True)
        (place / "own_policies.py").write_text(USER_POLICIES)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        *POLICIES.items(),
        (" SnapKV(window=16) ", SnapKV(window=16)),
        ("rkv(window=4, weight=0.25,\nkernel=3)", RKV(4, 3, 0.25)),
        ("h2o(recent=1.0)", H2O(1.0)),
        ("tova (shared=False)", TOVA(shared=False)),
        ("gate(greedy=True)", LearnedGate(greedy=True)),
    ],
)
def test_names_and_parameters(text: str, policy: EvictionPolicy):
    assert parse_policy(text) == policy


def test_user_policies(folder: Path):
    policy = parse_policy("own_policies.py:FadingH2O(half_life=32)")
    # Equal policies share one compiled program.
    again = parse_policy(f"{folder}/own_policies.py:FadingH2O(half_life=32.0)")
    assert policy == again and hash(policy) == hash(again)
    assert str(parse_policy("own_policies:FadingH2O")) == "FadingH2O(half_life=64.0, layers=())"
    assert "(1, 2)" in str(parse_policy("a (b)/own_policies.py:FadingH2O(layers=(1, 2))"))
    spans = OnTokens(TokenSpans(3, 4), inner=SnapKV())
    assert parse_policy("own_policies.py:blocks") == spans and named_policy("own_policies.py:blocks", 2) == Protect(
        spans, sinks=2
    )
    assert evicts_keys(spans, RolloutConfig(max_new_tokens=8, budget=64, buffer=4), 1, 8), "under any budget"


def test_query_centers_come_from_a_file(folder: Path):
    centers = drawn_centers(heads=4, half=8, layers=2)
    centers.save(folder / "centers.npz")
    assert parse_decode("own_policies.py:centers:512", sinks=4).policy == TriAttention(centers, sinks=4)
    assert with_sinks(TriAttention(centers, sinks=100), 4) == TriAttention(centers, sinks=100)


def test_a_subclass_of_a_policy_with_sinks_keeps_its_class(folder: Path):
    for text, sinks in (("(weight=2.0)", 8), ("(weight=2.0,sinks=9)", 9)):
        policy = named_policy(f"own_policies.py:Ranked{text}", 8)
        assert type(policy).__name__ == "Ranked"
        assert isinstance(policy, StreamingLLM) and policy.sinks == sinks and str(policy).endswith("weight=2.0)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("snapk(window=16)", r"expected one of the eviction policies dense, gate, h2o, .*; got 'snapk\(window=16\)'"),
        ("snapkv(window=16", "expected an eviction policy as name, name.parameter=value. or path/to/file.py:Class"),
        ("snapkv(windo=16)", r"SnapKV among \['window', 'kernel'\]; got 'windo' in .*Did you mean window"),
        ("snapkv(16)", "expected the parameters of an eviction policy by name"),
        ("snapkv(window=1)(kernel=3)", "expected the parameters of an eviction policy by name"),
        ("snapkv(window=__import__('os').getpid())", "expected the parameters of an eviction policy by name, each a"),
        ("snapkv(window='16')", "the eviction policy was .snapkv"),
        ("snapkv(window=0)", "expected SnapKV.window >= 1; got 0; the eviction policy was"),
        ("own_policies.py:FadingH2O(half_life=-1)", "expected half_life > 0; got -1; the eviction policy was"),
        ("own_policies.py:FadingH2O(layers=[1])", "unhashable type: 'list'; the eviction policy was"),
        (
            "own_policies.py:Linear(slope='4')",
            "expected slope of Linear to be float; got '4', str; the eviction policy",
        ),
        ("own_policies.py:Bare", r"to be a frozen dataclass, with @dataclass\(frozen=True\); got a plain class"),
        (
            "own_policies.py:FadingH20",
            r"'FadingH20' in .*; got the subclasses \['Bare', 'FadingH2O', 'Linear', 'Ranked'\]",
        ),
        (
            "own_policies.py:function",
            "expected 'function' in own_policies.py, a subclass .* got function <function",
        ),
        ("no_policies:FadingH2O", "expected to import no_policies; .* No module named 'no_policies'"),
    ],
)
def test_invalid_policy_texts(text: str, message: str, folder: Path):
    with pytest.raises(ValueError, match=message):
        parse_policy(text)


def test_decode_texts(folder: Path):
    assert parse_decode("snapkv(window=16):512+128") == Decode("snapkv-window-16-512-128", SnapKV(window=16), 512, 128)
    assert parse_decode("dense") == Decode("dense", Dense()) == parse_decode("dense", sinks=4)
    assert parse_decode("Streaming-LLM:8+2", sinks=3) == Decode("streaming_llm-8-2", StreamingLLM(3), 8, 2)
    own = parse_decode("a (b)/own_policies.py:FadingH2O(layers=(1,2),half_life=8):12+2")
    assert (own.name, own.budget, own.buffer) == ("FadingH2O-layers-1-2-half_life-8-12-2", 12, 2)
    assert parse_decode("own_policies:FadingH2O:12").name == "FadingH2O-12"
    for text, message in (
        ("snapkv(window=16)", r"expected a budget of keys, as in snapkv:512; got 'snapkv\(window=16\)'"),
        ("dense:512", "expected no budget, because all keys are kept; got 'dense:512'"),
        ("snapkv(window=16):512+", r"expected policy, policy:budget or policy:budget\+buffer"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_decode(text)


def test_sinks_and_pyramids():
    assert eviction_policy(SamplerArgs(eviction="snapkv(window=16)")) == Protect(SnapKV(window=16), sinks=4)
    assert eviction_policy(SamplerArgs(eviction="recent", sinks=0)) == Recent()
    # Dense never evicts: it has no keys to protect and no budget to spread over layers.
    assert eviction_policy(SamplerArgs(eviction="dense", sinks=4, pyramid=True)) == Dense()
    pyramid = eviction_policy(SamplerArgs(eviction="snapkv(kernel=3)", sinks=2, pyramid=True))
    assert pyramid == Pyramid(Protect(SnapKV(kernel=3), sinks=2))
    assert named_policy("streaming_llm", 0) == StreamingLLM(0)
    assert named_policy("gate(greedy=True)", 2) == LearnedGate(LinearGate(2), greedy=True)


def test_user_gates(tmp_path: Path):
    file = tmp_path / "gates.py"
    file.write_text(USER_GATES)
    policy = named_policy(f"{file}:by_attention", 4)
    assert policy == LearnedGate(AttentionGate(temperature=0.5, sinks=8)), "more sinks than --sinks"
    assert named_policy(f"{file}:by_attention", 9) == LearnedGate(AttentionGate(temperature=0.5, sinks=9))
    for sinks in (0, 4):
        text = f"LearnedGate(weights=Oldest(sinks={sinks}), greedy=False)"
        assert repr(named_policy(f"{file}:oldest", sinks)) == text
    assert eviction_policy(SamplerArgs(eviction=f"{file}:oldest", sinks=0)) == named_policy(f"{file}:oldest", 0)
    with pytest.raises(ValueError, match=r"expected a LinearGate or a gate without .*; got Scaled\(sinks=0\)"):
        eviction_policy(SamplerArgs(eviction=f"{file}:scaled", sinks=0))
    with pytest.raises(ValueError, match=r"expected a LinearGate .*; got Reversed\(sinks=0\)"):
        eviction_policy(SamplerArgs(eviction=f"{file}:reversed_gate", sinks=0))
    assert named_policy(f"{file}:mine", 0).gate == AttentionGate()
    for sinks, pyramid in ((4, False), (0, True)):
        with pytest.raises(ValueError, match="because its draws would not be recorded"):
            named_policy(f"{file}:mine", sinks, pyramid)
    with pytest.raises(ValueError, match=r"expected the sinks of streaming_llm only in --sinks; got StreamingLLM\("):
        named_policy("streaming_llm(sinks=8)", 4)


@pytest.mark.slow
def test_a_run_with_a_user_policy(
    folder: Path,
    train_argv: MakeArgv,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    own = "own_policies.py:FadingH2O(half_life=16)"
    flags = ["--eval-steps", "1", "--eval-rows", "2", "--eval-decode", "sampler", f"{own}:8+2", "h2o(recent=0.25):8"]
    main(train_argv("--eviction", own, *flags, "--budget", "8", "--sinks", "1"))
    assert f"eviction: {folder}/{own} --sinks 1, 8 + 2 keys per layer and KV head\n" in capsys.readouterr().out
    run = tmp_path / "run"
    (row,) = read_metrics(run / "metrics.jsonl")
    assert 0 < row["rollout/evicted_share"] < 1 and row["sampling/sampling_logp_difference/max"] < 1e-4
    names = {"sampler", "FadingH2O-half_life-16-8-2", "h2o-recent-0.25-8"}
    evaluated = read_metrics(run / "evaluations.jsonl")[-1]
    assert {name.split("/")[1] for name in evaluated if name.startswith("eval/")} == names
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert (saved["eviction"], saved["eval_decode"][1]) == (f"{folder}/{own}", f"{folder}/{own}:8+2")
    # It resumes from any folder, with the same policy only.
    monkeypatch.chdir("/")
    (folder / "a (b)" / "own_policies.py").write_text(f"{USER_POLICIES}# another file\n")
    again = ["--config", str(run / "config.yaml"), "--resume", "--max-steps", "2", "--eval-steps", "0", "--eviction"]
    for other, difference in (
        (f"{folder}/own_policies.py:FadingH2O", "loop.policy.inner.half_life: expected 16, got 64.0"),
        ("h2o", "loop.policy.inner._class: expected "),
        (f"{folder}/a (b)/own_policies.py:FadingH2O(half_life=16)", "eviction.holds: expected "),
    ):
        # Long lines are folded in the box.
        assert difference.replace(" ", "") in error_of([*again, other], capsys).replace(" ", "")
    main([*again, f"{folder}/a (b)/../own_policies.py:FadingH2O(half_life=16.0)"])
    assert len(read_metrics(run / "metrics.jsonl")) == 2
