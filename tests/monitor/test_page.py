"""Curves of runs, their drawing and the page: names, intervals, starts, and that no text of a model can act."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from smd_jax.monitor.completions import SavedMask, save_masks
from smd_jax.monitor.metrics_log import MetricsWriter
from smd_jax.monitor.page import write_page
from smd_jax.monitor.run_plots import COLOURS, Run, load_runs, main_metrics, plot_runs, points_of, runs_figure

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \x1b[31m"


def write_run(path: Path, rewards: list[float], **more: float) -> Path:
    with MetricsWriter(path / "metrics.jsonl") as writer:
        for step, reward in enumerate(rewards):
            writer.write(step, {"reward": reward} | more)
    return path


def hand_made(pieces: list[str]) -> SavedMask:
    """Two layers of one head, four tokens: layer 0 forgets token 0 at query 2, layer 1 tokens 0 and 1 at query 3."""
    evicted_at = np.array([[[2, 4, 4, 4]], [[3, 3, 4, 4]]], np.uint16)
    return SavedMask(evicted_at, pieces, prompt_length=2, step=0, row=0, reward=1.0, turns=[0, 0, 1, 1])


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
    write_run(tmp_path / "runs" / "shadow", [0.0, 1.0, 2.0])
    write_run(tmp_path / "runs" / "naive", [0.5, 0.5])
    return tmp_path / "runs"


# --- curves


def test_runs_are_found_once_and_named_apart(tmp_path, runs):
    assert [run.name for run in load_runs([runs, runs / "shadow"])] == ["naive", "shadow"]
    for study in ("a", "b"):
        write_run(tmp_path / "studies" / study / "shadow", [1.0])
    assert [run.name for run in load_runs([tmp_path / "studies"])] == ["a/shadow", "b/shadow"]
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "first").symlink_to(runs / "naive")
    write_run(tmp_path / "links" / ".second", [1.0])
    (tmp_path / "links" / "latest").symlink_to(".second")
    (tmp_path / "links" / "up").symlink_to(".")
    assert [run.path.name for run in load_runs([tmp_path / "links"])] == [".second", "first"]
    write_run(runs / "naive" / "inside", [1.0])
    assert [run.name for run in load_runs([runs / "naive"])] == ["naive"]


def test_what_is_no_run(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="expected a run, or a folder with runs, each with a metrics.jsonl; got"
    ):
        write_page([tmp_path], tmp_path / "page.html")
    MetricsWriter(tmp_path / "metrics.jsonl").close()
    with pytest.raises(ValueError, match="expected runs with at least one row of metrics; got none in"):
        write_page([tmp_path], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


DENSE = "eval/dense/reward"


def write_evaluated(path: Path, values: dict[int, float]) -> Path:
    """A run of 4 rollouts as `train` writes it: evaluations by finished rollouts."""
    with MetricsWriter(path / "metrics.jsonl") as writer:
        for rollout in range(4):
            writer.write(rollout, {"reward": rollout / 4})
    with MetricsWriter(path / "evaluations.jsonl") as writer:
        for finished, value in values.items():
            writer.write(finished, {DENSE: value})
    return path


EVALUATED = {0: 0.955, 2: 0.76, 4: 0.908}


def test_a_curve_of_evaluations_begins_before_training(tmp_path):
    """A loss over the run must not look like a gain after its first evaluation."""
    write_evaluated(tmp_path, EVALUATED)
    (run,) = load_runs([tmp_path])
    assert points_of(run, DENSE) == [(0, 0.955), (2, 0.76), (4, 0.908)]
    assert points_of(run, "reward") == [(0, 0), (1, 0.25), (2, 0.5), (3, 0.75)] and points_of(run, "kl") == []


def test_a_run_is_drawn_from_its_first_evaluation_on(tmp_path):
    MetricsWriter(tmp_path / "metrics.jsonl").close()
    with MetricsWriter(tmp_path / "evaluations.jsonl") as writer:
        writer.write(0, {DENSE: 0.955})
    (run,) = load_runs([tmp_path])
    assert points_of(run, DENSE, f"{DENSE}_low") == [] and points_of(run, DENSE) == [(0, 0.955)]
    write_page([tmp_path], tmp_path / "page.html")


def test_the_reward_of_a_single_function_is_drawn_once():
    for names, drawn in (
        (["rewards/a/mean", "kl", "reward"], ["reward", "kl"]),
        (["rewards/b/mean", "reward", "rewards/a/mean"], ["reward", "rewards/a/mean", "rewards/b/mean"]),
    ):
        assert main_metrics([Run("a", Path("a"), [dict.fromkeys(names, 1.0)])]) == drawn


# --- the drawing


def lines_of(figure: Figure, title: str) -> list[Line2D]:
    (axes,) = (axes for axes in figure.axes if axes.get_title() == title)
    return list(axes.get_lines())


def test_the_picture_begins_at_the_start(tmp_path):
    write_evaluated(tmp_path, EVALUATED)
    figure = runs_figure(load_runs([tmp_path]))
    assert [axes.get_title() for axes in figure.axes if axes.axison] == ["reward", DENSE]
    (line,) = lines_of(figure, DENSE)
    assert np.asarray(line.get_xydata()).tolist() == [[0, 0.955], [2, 0.76], [4, 0.908]]
    for axes in figure.axes:
        assert axes.get_xlim() == pytest.approx((-0.08, 4.08))


def test_every_run_has_a_line_of_its_colour(runs):
    figure = runs_figure(load_runs([runs]))
    naive, shadow = lines_of(figure, "reward")
    assert np.asarray(shadow.get_ydata()).tolist() == [0, 1, 2]
    assert [to_hex(line.get_color()).upper() for line in (naive, shadow)] == list(COLOURS[:2])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["naive", "shadow"]


def test_a_mismatch_is_drawn_on_a_logarithmic_axis(tmp_path):
    write_run(tmp_path, [0.5, 0.5], **{"sampling/sampling_logp_difference/mean": 1e-6})
    figure = runs_figure(load_runs([tmp_path]))
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", "log"]


def test_names_are_drawn_as_they_are(tmp_path):
    """Not as formulas, and without control characters; a character that the font lacks is no error."""
    path = write_run(tmp_path / "_$x_日\x1b", [0.5, 0.5])
    write_run(tmp_path / "b", [0.5, 0.5])
    figure = runs_figure(load_runs([tmp_path]))
    assert figure.legends[0].get_texts()[0].get_text().strip() == "_\\$x_日␛"
    plot_runs([path, tmp_path / "b"], tmp_path / "runs.png")


def test_nothing_to_draw(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(0, {"loss": 1.0})
    with pytest.raises(ValueError, match=r"expected runs with rewards or another .*; got \['loss'\]"):
        plot_runs([tmp_path], tmp_path / "runs.png")


def test_metrics_of_other_tools_may_be_no_numbers(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 1.0, "phase": "train", "shape": [2, 3]}\n')
    assert load_runs([tmp_path])[0].history == [{"step": 0, "reward": 1.0}]


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_ending_chooses_the_format(tmp_path, kind, start):
    write_evaluated(tmp_path, EVALUATED)
    plot_runs([tmp_path], tmp_path / f"runs.{kind}")
    assert (tmp_path / f"runs.{kind}").read_bytes().startswith(start)


# --- the page


def test_the_page_needs_nothing_else(runs):
    keep_mask(runs / "naive", hand_made(list("abcd")))
    out = runs.parent / "out" / "page.html"
    assert len(write_page([runs], out)) == 2
    page = out.read_text()
    found = Reader(page)
    assert not [tag for tag, _ in found.tags if tag in ("link", "iframe", "object", "base")]
    assert not [attributes for _, attributes in found.tags if {"href", "style"} & attributes.keys()]
    sources = [attributes["src"] for _, attributes in found.tags if "src" in attributes]
    assert len(sources) == 1 and sources[0] is not None and sources[0].startswith("data:image/svg+xml;base64,")
    assert "http" not in page.replace("http-equiv", "")
    texts = " ".join(found.texts)
    assert "What the sampler had forgotten" in texts


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
    assert [a.get("id") for tag, a in found.tags if tag == "script"] == ["masks", None]
    assert not [tag for tag, a in found.tags if tag == "b" or "onerror" in a]
    assert [a["alt"] for tag, a in found.tags if tag == "img"] == ["reward of a <b>&\"' arm"]
    assert "\x1b" not in page
    assert json.loads(found.scripts["masks"])[0]["pieces"] == [EVIL.replace("\x1b", "␛"), "b", "\n", "日"]
    assert EVIL.replace("\x1b", "␛") in found.texts


def test_the_embedded_masks_say_what_was_forgotten(runs):
    mask = hand_made(list("abcd"))
    keep_mask(runs / "naive", mask)
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


def test_the_page_is_the_same_every_time(runs):
    keep_mask(runs / "naive", hand_made(list("abcd")))
    pages = []
    for name in ("a", "b"):
        write_page([runs], runs / f"{name}.html")
        plot_runs([runs], runs / f"{name}.png")
        pages.append((runs / f"{name}.html").read_bytes())
    assert pages[0] == pages[1]
    assert (runs / "a.png").read_bytes() == (runs / "b.png").read_bytes()


def test_masks_of_the_last_and_the_first_rollout(runs):
    folder = runs / "naive" / "completions"
    folder.mkdir()
    for step in (100_000, 0, 99_999):
        save_masks(folder / f"masks_{step:05d}.npz", [replace(hand_made(list("abcd")), step=step)])
    write_page([runs], runs / "page.html")
    masks = json.loads(Reader((runs / "page.html").read_text()).scripts["masks"])
    assert [mask["title"].split(", ")[1] for mask in masks] == ["rollout 100000", "rollout 0"]


def test_only_as_many_masks_as_a_page_can_hold(runs, monkeypatch):
    keep_mask(runs / "naive", hand_made(list("abcd")))
    monkeypatch.setattr("smd_jax.monitor.page.MASK_NUMBERS", 7)
    write_page([runs], runs / "page.html")
    found = Reader((runs / "page.html").read_text())
    assert json.loads(found.scripts["masks"]) == [] and "heat" not in [a.get("id") for _, a in found.tags]
    # A large mask leaves room for the small ones after it.
    evicted_at = np.array([[[2, 3, 3]], [[3, 3, 3]]], np.uint16)
    keep_mask(runs / "shadow", SavedMask(evicted_at, list("abc"), 2, step=0, row=0, reward=1.0, turns=[0, 0, 1]))
    write_page([runs], runs / "page.html")
    assert len(json.loads(Reader((runs / "page.html").read_text()).scripts["masks"])) == 1
    assert "<p>1 saved masks are not shown: a page holds 7 numbers.</p>" in (runs / "page.html").read_text()
