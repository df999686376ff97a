"""Curves of runs, their drawing and the page: arms, intervals, starts, and that no text of a model can act."""

from __future__ import annotations

import base64
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from smd_jax.monitor.curves import (
    at_the_end,
    find_runs,
    half_interval,
    load_arms,
    main_metrics,
    mean_curve,
    read_history,
    seed_curves,
    series_of,
)
from smd_jax.monitor.metrics_log import MetricsWriter
from smd_jax.monitor.page import asset, write_page
from smd_jax.monitor.run_plots import COLOURS, plot_runs, runs_figure
from smd_jax.monitor.saved_masks import SavedMask, save_masks

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


DENSE = "eval/dense/reward"


def write_evaluated(path: Path, values: dict[int, float]) -> Path:
    """A run of 4 rollouts as `train` writes it: evaluations by finished rollouts, repeated in the rollout before."""
    with MetricsWriter(path / "metrics.jsonl") as writer:
        for rollout in range(4):
            evaluation = {DENSE: values[rollout + 1]} if rollout + 1 in values else {}
            writer.write(rollout, {"reward": rollout / 4} | evaluation)
    with MetricsWriter(path / "evaluations.jsonl") as writer:
        for finished, value in values.items():
            writer.write(finished, {DENSE: value})
    return path


EVALUATED = {0: 0.955, 2: 0.76, 4: 0.908}


def test_a_curve_of_evaluations_begins_before_training(tmp_path):
    """A loss over the run must not look like a gain after its first evaluation."""
    write_evaluated(tmp_path, EVALUATED)
    (arm,) = load_arms([tmp_path])
    (evaluations,) = seed_curves(arm, DENSE)
    assert evaluations.steps.tolist() == [0, 2, 4] and evaluations.mean.tolist() == [0.955, 0.76, 0.908]
    (rewards,) = seed_curves(arm, "reward")
    assert rewards.steps.tolist() == [0, 1, 2, 3]
    assert arm.runs[0].rollouts == 4


def test_a_run_is_drawn_from_its_first_evaluation_on(tmp_path):
    MetricsWriter(tmp_path / "metrics.jsonl").close()
    with MetricsWriter(tmp_path / "evaluations.jsonl") as writer:
        writer.write(0, {DENSE: 0.955})
    (arm,) = load_arms([tmp_path])
    assert seed_curves(arm, DENSE)[0].mean.tolist() == [0.955] and arm.runs[0].rollouts == 0
    write_page([tmp_path], tmp_path / "page.html")


def test_rows_of_metrics_alone_have_their_evaluations_one_step_later(tmp_path):
    """As runs of other loops may keep them, without a file of evaluations."""
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for rollout in range(2):
            writer.write(rollout, {"reward": 0.5, "eval/dense": rollout + 1})
    assert read_history(tmp_path) == [
        {"step": 0, "reward": 0.5},
        {"step": 1, "reward": 0.5, "eval/dense": 1},
        {"step": 2, "eval/dense": 2},
    ]


def test_evaluations_of_a_long_run_are_drawn_one_by_one(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for rollout in range(400):
            writer.write(rollout, {"reward": float(rollout)})
    with MetricsWriter(tmp_path / "evaluations.jsonl") as writer:
        for finished in (0, 100, 200, 300, 400):
            writer.write(finished, {DENSE: finished / 400})
    arms = load_arms([tmp_path])
    (evaluations,), (rewards,) = series_of(arms, DENSE), series_of(arms, "reward")
    assert evaluations.mean.steps.tolist() == [0, 100, 200, 300, 400]
    # 401 steps in parts of 5: the first one is 0 to 4.
    assert len(rewards.mean.steps) == 80 and rewards.mean.steps[0] == rewards.mean.mean[0] == 2


def test_the_reward_of_a_single_function_is_drawn_once():
    assert main_metrics(["reward", "rewards/a/mean", "kl"]) == ["reward", "kl"]
    two = ["reward", "rewards/a/mean", "rewards/b/mean"]
    assert main_metrics(two) == two


# --- the drawing


def lines_of(figure: Figure, title: str) -> list[Line2D]:
    (axes,) = (axes for axes in figure.axes if axes.get_title() == title)
    return list(axes.get_lines())


def test_the_picture_begins_at_the_start(tmp_path):
    write_evaluated(tmp_path, EVALUATED)
    figure = runs_figure(load_arms([tmp_path]))
    assert [axes.get_title() for axes in figure.axes if axes.axison] == ["reward", DENSE]
    (line,) = lines_of(figure, DENSE)
    assert np.asarray(line.get_xydata()).tolist() == [[0, 0.955], [2, 0.76], [4, 0.908]]
    for axes in figure.axes:
        assert axes.get_xlim() == pytest.approx((-0.08, 4.08))


def test_seeds_are_thin_and_their_mean_is_drawn(runs):
    figure = runs_figure(load_arms([runs]))
    naive, *seeds, mean = lines_of(figure, "reward")
    assert len(seeds) == 3 and all(seed.get_linewidth() < mean.get_linewidth() for seed in seeds)
    assert np.asarray(mean.get_ydata()).tolist() == [1, 2, 4]
    assert [to_hex(line.get_color()).upper() for line in (naive, mean)] == list(COLOURS[:2])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["naive", "shadow (3 seeds)"]


def test_a_mismatch_is_drawn_on_a_logarithmic_axis(tmp_path):
    write_run(tmp_path, [0.5, 0.5], **{"sampling/sampling_logp_difference/mean": 1e-6})
    figure = runs_figure(load_arms([tmp_path]))
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", "log"]


def test_names_are_drawn_as_they_are(tmp_path):
    """Not as formulas, and without control characters; a character that the font lacks is no error."""
    path = write_run(tmp_path / "_$x_日\x1b", [0.5, 0.5])
    write_run(tmp_path / "b", [0.5, 0.5])
    figure = runs_figure(load_arms([tmp_path]))
    assert figure.legends[0].get_texts()[0].get_text().strip() == "_\\$x_日␛"
    plot_runs([path, tmp_path / "b"], tmp_path / "runs.png")


def test_nothing_to_draw(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(0, {"loss": 1.0})
    with pytest.raises(ValueError, match=r"expected runs with rewards or another .*; got \['loss'\]"):
        plot_runs([tmp_path], tmp_path / "runs.png")


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_ending_chooses_the_format(tmp_path, kind, start):
    write_evaluated(tmp_path, EVALUATED)
    plot_runs([tmp_path], tmp_path / f"runs.{kind}")
    assert (tmp_path / f"runs.{kind}").read_bytes().startswith(start)


# --- the page


def test_the_page_needs_nothing_else(runs):
    keep_mask(runs / "naive-seed-7", hand_made(list("abcd")))
    out = runs.parent / "out" / "page.html"
    assert len(write_page([runs], out)) == 4
    page = out.read_text()
    found = Reader(page)
    assert not [tag for tag, _ in found.tags if tag in ("link", "iframe", "object", "base")]
    assert not [attributes for _, attributes in found.tags if {"href", "style"} & attributes.keys()]
    sources = [attributes["src"] for _, attributes in found.tags if "src" in attributes]
    assert len(sources) == 1 and sources[0] is not None and sources[0].startswith("data:image/svg+xml;base64,")
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
    assert [a.get("id") for tag, a in found.tags if tag == "script"] == ["masks", None]
    assert not [tag for tag, a in found.tags if tag == "b" or "onerror" in a]
    assert [a["alt"] for tag, a in found.tags if tag == "img"] == ["reward", EVIL.replace("\x1b", "␛")]
    assert "\x1b" not in page
    assert json.loads(found.scripts["masks"])[0]["pieces"] == [EVIL.replace("\x1b", "␛"), "b", "\n", "日"]
    assert "a <b>&\"' arm" in found.texts


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


def pictures(page: Path) -> dict[str | None, str]:
    """The SVG of every metric."""
    found = {}
    for tag, attributes in Reader(page.read_text()).tags:
        if tag == "img":
            content = (attributes["src"] or "").removeprefix("data:image/svg+xml;base64,")
            found[attributes["alt"]] = base64.b64decode(content).decode()
    return found


def test_the_page_has_a_picture_of_every_metric(tmp_path):
    write_run(tmp_path / "run", [0.0, 1.0], **{"rewards/a/mean": 1.0, "rewards/b/mean": 1.0, "kl": 0.5, "loss": 1.0})
    write_page([tmp_path], tmp_path / "page.html")
    found = pictures(tmp_path / "page.html")
    assert list(found) == ["reward", "rewards/a/mean", "rewards/b/mean", "kl", "loss"]
    assert all(picture.count("<svg") == 1 and COLOURS[0].lower() in picture for picture in found.values())


def test_the_page_says_where_an_evaluation_began(tmp_path):
    write_evaluated(tmp_path, EVALUATED)
    write_page([tmp_path], tmp_path / "page.html")
    texts = Reader((tmp_path / "page.html").read_text()).texts
    cells = texts[texts.index("eval, dense") :]
    assert "0.955 → 0.908" in cells


def test_the_page_has_the_colours_of_the_pictures():
    for index, colour in enumerate(COLOURS):
        assert f".c{index} {{ --own: {colour}; }}" in asset("page.css")


def test_an_evaluation_has_its_own_interval(tmp_path):
    evaluation = {DENSE: 0.5, f"{DENSE}_low": 0.375, f"{DENSE}_high": 0.75}
    write_run(tmp_path / "run", [0.0, 1.0], **evaluation)
    (series,) = series_of(load_arms([tmp_path]), DENSE)
    assert series.mean.low is not None and series.mean.high is not None
    assert series.mean.low.tolist() == [0.375, 0.375] and series.mean.high.tolist() == [0.75, 0.75]


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
    found = Reader((runs / "page.html").read_text())
    assert json.loads(found.scripts["masks"]) == [] and "heat" not in [a.get("id") for _, a in found.tags]
