"""The page: arms and intervals, what is embedded, and that nothing which a model wrote can act in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from smd_jax.monitor.curves import at_the_end, find_runs, half_interval, load_arms, mean_curve, seed_curves
from smd_jax.monitor.metrics_log import MetricsWriter
from smd_jax.monitor.page import write_page
from smd_jax.monitor.run_plots import plot_lifetimes, plot_runs
from smd_jax.monitor.saved_masks import SavedMask, save_masks
from smd_jax.monitor.svg_chart import Scale, ticks

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \x1b[31m"


def write_run(path: Path, rewards: list[float], **more: float) -> Path:
    with MetricsWriter(path / "metrics.jsonl") as writer:
        for step, reward in enumerate(rewards):
            writer.write(step, {"reward": reward} | more)
    return path


def hand_made(pieces: list[str]) -> SavedMask:
    """Two layers of one head, four tokens: layer 0 forgets token 0 at query 2, layer 1 tokens 0 and 1 at query 3."""
    evicted_at = np.array([[[2, 4, 4, 4]], [[3, 3, 4, 4]]], np.uint16)
    return SavedMask(evicted_at, pieces, prompt_length=2, step=0, row=0, reward=1.0)


def keep_mask(run: Path, mask: SavedMask) -> None:
    (run / "completions").mkdir()
    save_masks(run / "completions" / "masks_00000.npz", [mask])


class Reader(HTMLParser):
    """Tags with their attributes, and the text of every script by its id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str | None, str] = {}
        self.texts: list[str] = []
        self._script: str | None = None
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        self._script = dict(attrs).get("id")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style"):
            name = self._script if self._inside == "script" else "style"
            self.scripts[name] = self.scripts.get(name, "") + data
        else:
            self.texts.append(data)


@pytest.fixture
def runs(tmp_path) -> Path:
    for seed, rewards in enumerate(([0.0, 1.0, 2.0], [1.0, 2.0, 6.0], [2.0, 3.0, 4.0])):
        write_run(tmp_path / "runs" / "shadow" / f"seed-{seed}", rewards)
    write_run(tmp_path / "runs" / "naive-seed-7", [0.5, 0.5])
    return tmp_path / "runs"


# --- curves


def test_seeds_of_an_arm_are_put_together(runs):
    arms = load_arms([runs])
    assert [(arm.name, len(arm.runs)) for arm in arms] == [("naive", 1), ("shadow", 3)]
    assert [run.name for run in find_runs([runs / "shadow", runs / "shadow" / "seed-1"])] == [
        "seed-0",
        "seed-1",
        "seed-2",
    ]


def test_arms_of_one_name_are_told_apart(tmp_path):
    for study in ("a", "b"):
        write_run(tmp_path / study / "shadow" / "seed-0", [1.0])
    assert [arm.name for arm in load_arms([tmp_path])] == ["a/shadow", "b/shadow"]


def test_interval_of_the_mean_over_seeds(runs):
    shadow = load_arms([runs])[1]
    curve = mean_curve(seed_curves(shadow, "reward"))
    assert curve.steps.tolist() == [0, 1, 2] and curve.mean.tolist() == [1, 2, 4]
    # Student's t for two degrees of freedom is 4.30265; standard deviations are 1, 1 and 2.
    half = 4.302653 / np.sqrt(3) * np.array([1, 1, 2])
    assert curve.low is not None and curve.high is not None
    np.testing.assert_allclose(curve.low, curve.mean - half, rtol=1e-6)
    np.testing.assert_allclose(curve.high, curve.mean + half, rtol=1e-6)
    assert half_interval(np.array([[1.0], [3.0]]))[0] == pytest.approx(12.706205, rel=1e-6)  # t(1) · √2 / √2


def test_only_steps_that_all_seeds_have_are_averaged(tmp_path):
    write_run(tmp_path / "seed-0", [1.0, 1.0, 9.0])
    write_run(tmp_path / "seed-1", [3.0, 5.0])
    (arm,) = load_arms([tmp_path])
    assert mean_curve(seed_curves(arm, "reward")).mean.tolist() == [2, 3]
    assert [len(curve.steps) for curve in seed_curves(arm, "reward")] == [3, 2]


def test_long_runs_are_drawn_by_means_of_parts(tmp_path):
    write_run(tmp_path, [float(step) for step in range(10)])
    (arm,) = load_arms([tmp_path])
    (curve,) = seed_curves(arm, "reward", part=4)
    assert curve.steps.tolist() == [1.5, 5.5, 9.5] and curve.mean.tolist() == [1.5, 5.5, 8.5]


def test_the_end_of_a_run(tmp_path):
    write_run(tmp_path, [0.0] * 18 + [1.0, 3.0])
    assert at_the_end(load_arms([tmp_path])[0], "reward") == (2.0, None)
    assert at_the_end(load_arms([tmp_path])[0], "kl") is None


def test_what_is_no_run(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="expected a run, or a folder with runs, each with a metrics.jsonl; got"
    ):
        write_page([tmp_path], tmp_path / "page.html")
    MetricsWriter(tmp_path / "metrics.jsonl").close()
    with pytest.raises(ValueError, match="expected runs with at least one row of metrics; got none in"):
        write_page([tmp_path], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("low", "high", "log", "expected"),
    [(0, 1, False, [0, 0.2, 0.4, 0.6, 0.8, 1]), (1e-6, 1e-4, True, [1e-6, 1e-5, 1e-4]), (-3, 12, False, [0, 5, 10])],
)
def test_ticks_are_round(low, high, log, expected):
    assert ticks(Scale(low, high, 0, 1, log)) == pytest.approx(expected)


def test_places_on_the_axes():
    assert Scale(0, 10, 100, 0)(2.5) == 75
    assert Scale(1e-6, 1e-2, 100, 0, log=True)(1e-3) == pytest.approx(25)
    assert Scale(1e-6, 1e-2, 100, 0, log=True)(0.0) == 100, "zeros stand at the lower end"


# --- the page


def test_the_page_needs_nothing_else(runs):
    keep_mask(runs / "naive-seed-7", hand_made(list("abcd")))
    out = runs.parent / "out" / "page.html"
    assert len(write_page([runs], out)) == 4
    page = out.read_text()
    found = Reader(page)
    assert not [tag for tag, _ in found.tags if tag in ("link", "iframe", "object", "img", "base")]
    assert not [attributes for _, attributes in found.tags if {"src", "href", "style"} & attributes.keys()]
    assert "http" not in page.replace("http-equiv", "")
    texts = " ".join(found.texts)
    assert "4 runs of 2 arms" in texts and "What the sampler had forgotten" in texts


def test_no_script_runs_but_its_own(runs):
    write_page([runs], runs / "page.html")
    found = Reader((runs / "page.html").read_text())
    (policy,) = [a["content"] for tag, a in found.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'")
    for kind, text in (("script", found.scripts[None]), ("style", found.scripts["style"])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_what_others_wrote_is_text(tmp_path):
    run = write_run(tmp_path / "a <b>&\"' arm", [1.0, 2.0], **{EVIL: 3.0})
    keep_mask(run, hand_made([EVIL, "b", "\n", "日"]))
    write_page([run], tmp_path / "page.html", title=EVIL)
    page = (tmp_path / "page.html").read_text()
    found = Reader(page)
    assert [a.get("id") for tag, a in found.tags if tag == "script"] == ["charts", "masks", None]
    assert not [tag for tag, a in found.tags if tag in ("img", "b") or "onerror" in a]
    assert "\x1b" not in page
    assert json.loads(found.scripts["masks"])[0]["pieces"] == [EVIL.replace("\x1b", "␛"), "b", "\n", "日"]
    assert json.loads(found.scripts["charts"])["arms"] == ["a <b>&\"' arm"]


def test_the_embedded_masks_say_what_was_forgotten(runs):
    mask = hand_made(list("abcd"))
    keep_mask(runs / "naive-seed-7", mask)
    write_page([runs], runs / "page.html")
    (data,) = json.loads(Reader((runs / "page.html").read_text()).scripts["masks"])
    assert data["title"] == "naive, rollout 0, completion 0, reward 1" and data["prompt"] == 2
    evicted = np.frombuffer(base64.b64decode(data["evicted"]), "<u4")
    evicted = evicted.reshape(data["layers"], data["heads"], data["tokens"])
    # Worked out by hand: by query, then by layer.
    expected = {0: [[], []], 1: [[], []], 2: [[0], []], 3: [[0], [0, 1]]}
    for query, layers in expected.items():
        for layer, tokens in enumerate(layers):
            forgotten = [s for s in range(4) if s <= query and evicted[layer, 0, s] <= query]
            assert forgotten == tokens == np.flatnonzero(mask.forgotten(query)[layer, 0]).tolist()


def test_numbers_under_the_pointer(runs):
    write_page([runs], runs / "page.html")
    found = Reader((runs / "page.html").read_text())
    data = json.loads(found.scripts["charts"])
    assert data["arms"] == ["naive", "shadow"]
    naive, shadow = data["charts"][0]
    assert naive == {"arm": 0, "x": [0, 1], "y": [0.5, 0.5]}
    assert shadow["y"] == [1, 2, 4] and shadow["low"][0] == pytest.approx(1 - 4.302653 / 3**0.5, rel=1e-4)
    charts = [a for tag, a in found.tags if tag == "svg"]
    assert len(charts) == 1 and charts[0]["aria-label"] == "reward"


def test_an_evaluation_has_its_own_interval(tmp_path):
    evaluation = {"eval/dense/reward": 0.5, "eval/dense/reward_low": 0.375, "eval/dense/reward_high": 0.75}
    write_run(tmp_path / "run", [0.0, 1.0], **evaluation, **{"rewards/format/mean": 1.0, "kl": 0.5})
    write_page([tmp_path], tmp_path / "page.html")
    found = Reader((tmp_path / "page.html").read_text())
    named = [a["aria-label"] for tag, a in found.tags if tag == "svg"]
    assert named[:4] == ["reward", "rewards/format/mean", "eval/dense/reward", "kl"]
    (curve,) = json.loads(found.scripts["charts"])["charts"][2]
    assert curve["low"] == [0.375, 0.375] and curve["high"] == [0.75, 0.75]
    assert "eval, dense" in found.texts


def test_the_page_is_the_same_every_time(runs):
    keep_mask(runs / "naive-seed-7", hand_made(list("abcd")))
    pages = []
    for name in ("a", "b"):
        write_page([runs], runs / f"{name}.html")
        plot_runs([runs], runs / f"{name}.png")
        pages.append((runs / f"{name}.html").read_bytes())
    assert pages[0] == pages[1]
    assert (runs / "a.png").read_bytes() == (runs / "b.png").read_bytes()


def test_only_as_many_masks_as_a_page_can_hold(runs, monkeypatch):
    keep_mask(runs / "naive-seed-7", hand_made(list("abcd")))
    monkeypatch.setattr("smd_jax.monitor.page.MASK_NUMBERS", 7)
    write_page([runs], runs / "page.html")
    page = (runs / "page.html").read_text()
    assert json.loads(Reader(page).scripts["masks"]) == [] and 'id="heat"' not in re.sub("<script.*", "", page)


def test_a_picture_in_which_nothing_was_evicted(tmp_path):
    mask = SavedMask(np.full((1, 1, 3), 3, np.uint16), list("abc"), prompt_length=1, step=0, row=0, reward=0.0)
    plot_lifetimes(mask, tmp_path / "mask.png")
    assert (tmp_path / "mask.png").stat().st_size > 1000


def test_pictures(runs):
    plot_runs([runs], runs / "runs.png")
    plot_lifetimes(hand_made(list("abcd")), runs / "mask.png")
    for name in ("runs", "mask"):
        assert (runs / f"{name}.png").read_bytes().startswith(b"\x89PNG")
