"""Eviction policies as texts: names, parameters, and classes of one's own; alone, and in ways of decoding."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from smd_jax.commands.choices import named_policy, try_policy, way_of_decoding
from smd_jax.commands.decode_names import parse_decode, parse_decodes, policy_text
from smd_jax.commands.limits import evicts_keys
from smd_jax.commands.places import policy_from_the_root
from smd_jax.commands.policy_names import own_place, parse_policy
from smd_jax.commands.policy_trial import check_score
from smd_jax.eviction.base import EvictionPolicy
from smd_jax.eviction.learned import LearnedGate
from smd_jax.eviction.named import POLICIES
from smd_jax.eviction.policies import H2O, RKV, TOVA, Dense, SnapKV
from smd_jax.eviction.statistics import CacheShape
from smd_jax.eviction.triattention import TriAttention
from smd_jax.eviction.wrappers import OnTokens, Protect
from smd_jax.message.spans import TokenSpans
from smd_jax.model.decoder import Decoder
from smd_jax.sampler.config import RolloutConfig
from smd_jax.testing import tiny_model_config
from smd_jax.train.decoding import Decode
from tests.query_centers import drawn_centers

OWN = """
from dataclasses import dataclass

import smd_jax as smd
from smd_jax.eviction import SnapKV


@dataclass(frozen=True)
class FadingH2O(smd.eviction.EvictionPolicy):
    half_life: float = 64.0
    layers: tuple[int, ...] = ()

    def __post_init__(self):
        if self.half_life <= 0:
            raise ValueError(f"expected half_life > 0; got {self.half_life}")
        if self.half_life == 13:
            raise RuntimeError("bad luck")

    def score(self, view):
        return view.positions * 1.0


@dataclass(frozen=True)
class Scores(smd.eviction.EvictionPolicy):
    what: str = "raises"

    def score(self, view):
        if self.what == "raises":
            return view.keyz
        if self.what == "whole numbers":
            return view.positions
        if self.what == "one head":
            return view.positions[:, 0] * 1.0
        return None


@dataclass(frozen=True)
class Needy(smd.eviction.EvictionPolicy):
    share: float


class Bare(smd.eviction.EvictionPolicy):
    half_life: float = 64.0


def function():
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with policies of one's own; the import path is put back after the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_policies.py").write_text(OWN)
    (tmp_path / "a (b)").mkdir()
    (tmp_path / "a (b)" / "own_policies.py").write_text(OWN)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "policy", "label"),
    [
        ("snapkv", SnapKV(), "snapkv"),
        (" SnapKV(window=16) ", SnapKV(window=16), "snapkv-window-16"),
        ("rkv(window=4, weight=0.25,\nkernel=3)", RKV(4, 3, 0.25), "rkv-window-4-weight-0.25-kernel-3"),
        ("h2o()", H2O(), "h2o"),
        ("h2o(recent=1)", H2O(1.0), "h2o-recent-1"),
        ("tova (shared=False)", TOVA(shared=False), "tova-shared-False"),
        ("gate(greedy=True)", LearnedGate(greedy=True), "gate-greedy-True"),
    ],
)
def test_names_and_parameters(text: str, policy: EvictionPolicy, label: str):
    found = parse_policy(text)
    assert (found.policy, found.label, found.place) == (policy, label, None)


def test_a_policy_of_ones_own(folder: Path):
    found = parse_policy("own_policies.py:FadingH2O(half_life=32)")
    assert str(found.policy) == "FadingH2O(half_life=32.0, layers=())" and found.given == ("half_life",)
    assert (found.label, found.place) == ("FadingH2O-half_life-32", "own_policies.py")
    # One program for two that are equal.
    again = parse_policy(f"{folder}/own_policies.py:FadingH2O(half_life=32.0)").policy
    assert found.policy == again and hash(found.policy) == hash(again)
    assert str(parse_policy("own_policies:FadingH2O").policy) == "FadingH2O(half_life=64.0, layers=())"
    assert "(1, 2)" in str(parse_policy("a (b)/own_policies.py:FadingH2O(layers=(1, 2))").policy)
    assert own_place("own_policies.py:FadingH2O(half_life=32)") == "own_policies.py" and own_place("snapkv") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "snapk(window=16)",
            "expected one of the eviction policies dense, gate, h2o, .* or one of your own as path/to/",
        ),
        ("snapk(window=16)", r"got 'snapk' in 'snapk\(window=16\)'\. Did you mean snapkv\?"),
        ("snapkv(window=16", "expected an eviction policy as name, name.parameter=value. or path/to/file.py:Class"),
        (
            "snapkv(windo=16)",
            r"expected a parameter of snapkv, which has window=32, kernel=5; got 'windo' in 'snapkv\(windo=16\)'",
        ),
        ("knorm(window=16)", "expected no parameters of knorm, which has none; got 'window'"),
        ("gate(weights=1)", "expected a parameter of gate, which has greedy=False; got 'weights'"),
        (
            "snapkv(16)",
            r"expected every parameter of snapkv once and by name, as in snapkv\(window=32\); got 'snapkv\(16\)'",
        ),
        ("snapkv(window=)", "expected every parameter of snapkv once and by name"),
        ("snapkv(window=1)(kernel=3)", "expected every parameter of snapkv once and by name"),
        ("snapkv(**{'window': 1})", "expected every parameter of snapkv once and by name"),
        ("snapkv(window=1, window=2)", "expected every parameter of snapkv once and by name"),
        ("snapkv(window=2 * 8)", r"expected window of snapkv as a number, .*; got 2 \* 8 in"),
        ("snapkv(window=__import__('os').getpid())", r"expected window of snapkv as a number, .*; got __import__"),
        ("snapkv(window='16')", "expected window of SnapKV to be int; got '16', str; the eviction policy was .snapkv"),
        ("snapkv(window=0)", "expected SnapKV.window >= 1; got 0; the eviction policy was"),
        ("h2o(recent=[1])", "expected recent of H2O to be float"),
        ("snapkv:window", "expected a number of keys after snapkv, as in snapkv:512; got 'window'"),
        ("own_policies.py:FadingH2O(half_life='long')", "expected half_life of FadingH2O to be float; got 'long', str"),
        ("own_policies.py:FadingH2O(half_life=-1)", "expected half_life > 0; got -1.0; the eviction policy was"),
        ("own_policies.py:FadingH2O(half_life=13)", "it raised RuntimeError: bad luck; the eviction policy was"),
        ("own_policies.py:FadingH2O(half=1)", r"which has half_life=64.0, layers=\(\); got 'half'"),
        ("own_policies.py:FadingH2O(layers=[1])", "expected layers of FadingH2O to be tuple"),
        ("own_policies.py:Needy", r"expected Needy\(share=…\), because these have no default"),
        ("own_policies.py:Needy(part=1)", "expected a parameter of Needy, which has share; got 'part'"),
        (
            "own_policies.py:Bare",
            r"expected a frozen dataclass as own_policies.py:Bare, with @dataclass\(frozen=True\)",
        ),
        (
            "own_policies.py:FadingH20",
            r"expected a class 'FadingH20' in own_policies.py, a subclass of EvictionPolicy; ",
        ),
        (
            "own_policies.py:FadingH20",
            r"got \['Bare', .*'FadingH2O'.*\], without it; the eviction policy was",
        ),
        (
            "own_policies.py:function",
            r"got \['Bare', .*'FadingH2O'.*\], without it",
        ),
        ("no_policies.py:FadingH2O", "expected a file of Python code at .*; got none .*'own_policies.py'"),
        ("no_policies:FadingH2O", "expected to import no_policies; .* No module named 'no_policies'"),
    ],
)
def test_texts_that_are_no_policy(text: str, said: str, folder: Path):
    with pytest.raises(ValueError, match=said):
        parse_policy(text)


def test_ways_of_decoding(folder: Path):
    assert parse_decode("snapkv(window=16):512+128") == Decode("snapkv-window-16-512-128", SnapKV(window=16), 512, 128)
    own = parse_decode("own_policies.py:FadingH2O(half_life=8):12+2")
    assert (own.name, own.budget, own.buffer) == ("FadingH2O-half_life-8-12-2", 12, 2)
    assert parse_decode("own_policies:FadingH2O:12").name == "FadingH2O-12"
    decodes = parse_decodes("dense,rkv(window=4,kernel=3):8,own_policies.py:FadingH2O(layers=(1,2),half_life=3):9+1")
    assert [decode.budget for decode in decodes] == [None, 8, 9]
    # "_" in place of what no logger takes in a name.
    assert decodes[2].name == "FadingH2O-layers-_1_2_-half_life-3-9-1"
    assert policy_text("own_policies.py:FadingH2O(half_life=8):12+2") == "own_policies.py:FadingH2O(half_life=8)"
    assert policy_text("snapkv:512+128") == "snapkv" and policy_text("dense") == "dense"
    for text, said in (
        ("snapkv(window=16)", r"expected a budget of keys, as in snapkv\(window=16\):512; got"),
        ("snapkv(windo=16):512", "which has window=32, kernel=5; got 'windo'"),
        ("own_policies.py:FadingH2O", "expected a budget of keys, as in own_policies.py:FadingH2O:512"),
        ("snapkv(window=16):512+", r"expected policy, .* snapkv\(window=16\):512\+128, with one of the eviction"),
    ):
        with pytest.raises(ValueError, match=said):
            parse_decode(text)


def test_every_policy_has_a_name():
    assert all(parse_policy(name).policy == policy for name, policy in POLICIES.items())
    assert [name for name, policy in POLICIES.items() if not policy.evicts] == ["dense"] and Dense() == POLICIES[
        "dense"
    ]


def test_a_score_is_tried_on_shapes(folder: Path):
    shape = CacheShape(rows=2, heads=4, kv_heads=2, slots=10, head_dim=8, dtype="bfloat16")
    for policy in (*POLICIES.values(), Protect(SnapKV(window=2)), parse_policy("own_policies.py:FadingH2O").policy):
        if policy.evicts:
            check_score(policy, shape, budget=8)
    for what, said in (
        ("raises", r"score a cache; it raised AttributeError in line 29 of .*/own_policies.py: .* 'keyz'"),
        ("whole numbers", r"floating-point \[rows, kv_heads, slots\], here \[2, 2, 10\]; got int32 \[2, 2, 10\]"),
        ("one head", r"here \[2, 2, 10\]; got float32 \[2, 10\]"),
        ("nothing", "got None"),
    ):
        policy = parse_policy(f"own_policies.py:Scores(what={what!r})").policy
        with pytest.raises(ValueError, match=f"expected Scores.score to .*{said}"):
            check_score(policy, shape, budget=8)


# --- policies that a file or ids of tokens describe


def test_query_centers_come_from_a_file(folder: Path):
    centers = drawn_centers(heads=4, half=8, layers=2)
    centers.save(folder / "my centers.npz")
    named = parse_policy('triattention(centers="my centers.npz", longest=64)')
    assert named.policy == TriAttention(centers, longest=64)
    assert named.label == "triattention-centers-my_centers-longest-64"
    decode = way_of_decoding("triattention(centers='my centers.npz'):512+128", sinks=4)
    assert decode.policy == TriAttention(centers, sinks=4) and decode.budget == 512
    full = policy_from_the_root('triattention(centers="my centers.npz"):512')
    assert full == f'triattention(centers="{folder}/my centers.npz"):512'
    shape = Decoder(tiny_model_config(num_layers=1)).shape
    with pytest.raises(ValueError, match=r"expected query centers \[layers, heads, head_dim / 2\] .*; got \[2, 4, 8\]"):
        try_policy('triattention(centers="my centers.npz")', shape, 8, 2)
    (folder / "other.npz").write_bytes(b"no arrays")
    for name, said in (("none.npz", "query centers at none.npz; found none"), ("other.npz", "an .npz file with the")):
        with pytest.raises(ValueError, match=f"expected .*{said}.*the eviction policy was"):
            parse_policy(f'triattention(centers="{name}")')
    with pytest.raises(ValueError, match="expected triattention.centers=….*have no default"):
        parse_policy("triattention")


def test_tokens_that_evict():
    spans = TokenSpans(3, 4, (5, 6))
    assert parse_policy("on_tokens(open=3, close=4, summary=(5, 6))").policy == OnTokens(spans)
    named = parse_policy('on-tokens(open=3, close=4, delimiters=True, inner="h2o")')
    assert named.policy == OnTokens(TokenSpans(3, 4, None, True), inner=H2O())
    policy = named_policy('on_tokens(open=3, close=4, inner="h2o")', sinks=2, pyramid=False)
    assert policy == Protect(OnTokens(TokenSpans(3, 4), inner=H2O()), sinks=2)
    assert evicts_keys(OnTokens(spans), RolloutConfig(8, budget=64, buffer=4), 1, 8), "whatever the budget"
    for parameters, said in (
        ("open=3, close=3", "expected different token ids"),
        ("open=3, close=4, summary=(5,)", "expected summary of SpanTokens to be"),
        ('open=3, close=4, inner="h3o"', "expected inner as one of"),
        ("open=3", "expected on_tokens.close=….*have no default"),
    ):
        with pytest.raises(ValueError, match=said):
            parse_policy(f"on_tokens({parameters})")
