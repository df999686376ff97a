"""Curves, plots and the page of runs; texts of a model cannot run scripts."""

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

INJECTION = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \x1b[31m"


def write_run(path: Path, rewards: list[float], **more: float) -> Path:
    with MetricsWriter(path / "metrics.jsonl") as writer:
        for step, reward in enumerate(rewards):
            writer.write(step, {"reward": reward} | more)
    return path


def hand_made_mask(pieces: list[str]) -> SavedMask:
    """Two layers of one head, four tokens: layer 0 forgets token 0 at query 2, layer 1 tokens 0 and 1 at query 3."""
    evicted_at = np.array([[[2, 4, 4, 4]], [[3, 3, 4, 4]]], np.uint16)
    return SavedMask(evicted_at, pieces, prompt_length=2, step=0, row=0, reward=1.0, turns=[0, 0, 1, 1])


def write_mask(run: Path, mask: SavedMask) -> None:
    (run / "completions").mkdir()
    save_masks(run / "completions" / "masks_00000.npz", [mask])


class PageParser(HTMLParser):
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


def test_runs_are_found_once_with_distinct_names(tmp_path, runs):
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


def test_folders_without_rows_are_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="expected a run, or a folder with runs, each with a metrics.jsonl; got"
    ):
        write_page([tmp_path], tmp_path / "page.html")
    MetricsWriter(tmp_path / "metrics.jsonl").close()
    with pytest.raises(ValueError, match="expected runs with at least one row of metrics; got none in"):
        write_page([tmp_path], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


DENSE, SAMPLER = "eval/dense/reward", "eval/sampler/reward"


def write_evaluated(path: Path, values: dict[int, float]) -> Path:
    """A run of 4 rollouts as `train` writes it: evaluations by finished rollouts."""
    with MetricsWriter(path / "metrics.jsonl") as writer:
        for rollout in range(4):
            writer.write(rollout, {"reward": rollout / 4})
    with MetricsWriter(path / "evaluations.jsonl") as writer:
        for finished, value in values.items():
            writer.write(finished, {DENSE: value, SAMPLER: value / 2})
    return path


EVALUATED = {0: 0.955, 2: 0.76, 4: 0.908}


def test_a_curve_of_evaluations_begins_before_training(tmp_path):
    """Without the start a decline could look like a gain."""
    write_evaluated(tmp_path, EVALUATED)
    (run,) = load_runs([tmp_path])
    assert points_of(run, DENSE) == [(0, 0.955), (2, 0.76), (4, 0.908)]
    assert points_of(run, "reward") == [(0, 0), (1, 0.25), (2, 0.5), (3, 0.75)] and points_of(run, "kl") == []


def test_a_run_with_one_evaluation_is_drawn(tmp_path):
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


# --- plots


def lines_of(figure: Figure, title: str) -> list[Line2D]:
    (axes,) = (axes for axes in figure.axes if axes.get_title() == title)
    return list(axes.get_lines())


def test_plots_begin_before_training(tmp_path):
    write_evaluated(tmp_path, EVALUATED)
    figure = runs_figure(load_runs([tmp_path]))
    assert [axes.get_title() for axes in figure.axes if axes.axison] == ["reward", DENSE, SAMPLER]
    (line,) = lines_of(figure, DENSE)
    assert np.asarray(line.get_xydata()).tolist() == [[0, 0.955], [2, 0.76], [4, 0.908]]
    for axes in figure.axes:
        assert axes.get_xlim() == pytest.approx((-0.08, 4.08))
    dense, sampler = figure.axes[1:]
    assert dense.get_ylim() == sampler.get_ylim()
    assert dense.get_ylim()[0] < 0.38 and dense.get_ylim()[1] > 0.955, "both ways to decode fit"


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
    ticks = figure.axes[1].yaxis
    assert {tick.label1.get_fontsize() for tick in (ticks.get_major_ticks()[0], ticks.get_minor_ticks()[0])} == {8}


def test_run_names_are_drawn_literally(tmp_path):
    """Without formulas or control characters; a character that the font lacks is no error."""
    path = write_run(tmp_path / "_$x_日\x1b", [0.5, 0.5])
    write_run(tmp_path / "b", [0.5, 0.5])
    figure = runs_figure(load_runs([tmp_path]))
    assert figure.legends[0].get_texts()[0].get_text().strip() == "_\\$x_日␛"
    plot_runs([path, tmp_path / "b"], tmp_path / "runs.png")


def test_runs_without_known_metrics_are_refused(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(0, {"loss": 1.0})
    with pytest.raises(ValueError, match=r"expected runs with rewards or another .*; got \['loss'\]"):
        plot_runs([tmp_path], tmp_path / "runs.png")


def test_metrics_that_are_not_numbers_are_ignored(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 1.0, "phase": "train", "shape": [2, 3]}\n')
    assert load_runs([tmp_path])[0].history == [{"step": 0, "reward": 1.0}]


# --- the page


def test_the_page_loads_no_other_files(runs):
    write_mask(runs / "naive", hand_made_mask(list("abcd")))
    out = runs.parent / "out" / "page.html"
    assert len(write_page([runs], out)) == 2
    page = out.read_text()
    parsed = PageParser(page)
    assert not [tag for tag, _ in parsed.tags if tag in ("link", "iframe", "object", "base")]
    assert not [attributes for _, attributes in parsed.tags if {"href", "style"} & attributes.keys()]
    sources = [attributes["src"] for _, attributes in parsed.tags if "src" in attributes]
    assert len(sources) == 1 and sources[0] is not None and sources[0].startswith("data:image/svg+xml;base64,")
    assert "http" not in page.replace("http-equiv", "")
    texts = " ".join(parsed.texts)
    assert "What the sampler had forgotten" in texts


def test_the_page_allows_only_its_own_script_and_style(runs):
    write_page([runs], runs / "page.html")
    parsed = PageParser((runs / "page.html").read_text())
    (policy,) = [a["content"] for tag, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'")
    for kind, text in (("script", parsed.scripts[None]), ("style", parsed.scripts["style"])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_names_titles_and_tokens_are_escaped(tmp_path):
    run = write_run(tmp_path / "a <b>&\"' arm", [1.0, 2.0], **{INJECTION: 3.0})
    write_mask(run, hand_made_mask([INJECTION, "b", "\n", "日"]))
    write_page([run], tmp_path / "page.html", title=INJECTION)
    page = (tmp_path / "page.html").read_text()
    parsed = PageParser(page)
    assert [a.get("id") for tag, a in parsed.tags if tag == "script"] == ["masks", None]
    assert not [tag for tag, a in parsed.tags if tag == "b" or "onerror" in a]
    assert [a["alt"] for tag, a in parsed.tags if tag == "img"] == ["reward of a <b>&\"' arm"]
    assert "\x1b" not in page
    assert json.loads(parsed.scripts["masks"])[0]["pieces"] == [INJECTION.replace("\x1b", "␛"), "b", "\n", "日"]
    assert INJECTION.replace("\x1b", "␛") in parsed.texts


def test_embedded_masks_equal_the_saved_ones(runs):
    mask = hand_made_mask(list("abcd"))
    write_mask(runs / "naive", mask)
    write_page([runs], runs / "page.html")
    (data,) = json.loads(PageParser((runs / "page.html").read_text()).scripts["masks"])
    assert data["title"] == "naive, rollout 0, completion 0, reward 1" and data["prompt"] == 2
    evicted = np.frombuffer(base64.b64decode(data["evicted"]), "<u4")
    evicted = evicted.reshape(data["layers"], data["heads"], data["tokens"])
    # Worked out by hand: by query, then by layer.
    expected = {0: [[], []], 1: [[], []], 2: [[0], []], 3: [[0], [0, 1]]}
    for query, layers in expected.items():
        for layer, tokens in enumerate(layers):
            forgotten = [s for s in range(4) if s <= query and evicted[layer, 0, s] <= query]
            assert forgotten == tokens == np.flatnonzero(mask.forgotten(query)[layer, 0]).tolist()


def test_pages_and_plots_are_reproducible(runs):
    write_mask(runs / "naive", hand_made_mask(list("abcd")))
    pages = []
    for name in ("a", "b"):
        write_page([runs], runs / f"{name}.html")
        plot_runs([runs], runs / f"{name}.png")
        pages.append((runs / f"{name}.html").read_bytes())
    assert pages[0] == pages[1]
    assert (runs / "a.png").read_bytes() == (runs / "b.png").read_bytes()
    plot_runs([runs], runs / "a.pdf")
    assert (runs / "a.pdf").read_bytes().startswith(b"%PDF"), "the suffix chooses the format"


def test_the_page_has_masks_of_the_last_and_the_first_rollout(runs):
    folder = runs / "naive" / "completions"
    folder.mkdir()
    for step in (100_000, 0, 99_999):
        save_masks(folder / f"masks_{step:05d}.npz", [replace(hand_made_mask(list("abcd")), step=step)])
    write_page([runs], runs / "page.html")
    masks = json.loads(PageParser((runs / "page.html").read_text()).scripts["masks"])
    assert [mask["title"].split(", ")[1] for mask in masks] == ["rollout 100000", "rollout 0"]


def test_masks_over_the_limit_of_a_page_are_left_out(runs, monkeypatch):
    write_mask(runs / "naive", hand_made_mask(list("abcd")))
    monkeypatch.setattr("smd_jax.monitor.page.MASK_NUMBERS", 7)
    write_page([runs], runs / "page.html")
    parsed = PageParser((runs / "page.html").read_text())
    assert json.loads(parsed.scripts["masks"]) == [] and "heat" not in [a.get("id") for _, a in parsed.tags]
    # A large mask leaves room for the small ones after it.
    evicted_at = np.array([[[2, 3, 3]], [[3, 3, 3]]], np.uint16)
    write_mask(runs / "shadow", SavedMask(evicted_at, list("abc"), 2, step=0, row=0, reward=1.0, turns=[0, 0, 1]))
    write_page([runs], runs / "page.html")
    assert len(json.loads(PageParser((runs / "page.html").read_text()).scripts["masks"])) == 1
    assert "<p>1 saved masks are not shown: a page holds 7 numbers.</p>" in (runs / "page.html").read_text()
