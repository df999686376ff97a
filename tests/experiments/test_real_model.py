"""The study on a real model, with a tiny one: task, reward, jobs, resumed runs, report."""

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import real_model
from lib.arms import arms_of
from lib.files import Row, read_rows, write_rows, write_text
from lib.runs import DECODINGS
from real.execute import execute
from real.job import Base, Job, Sizes, is_finished, keep_row, kept
from real.task import SPLITS, TRIED, DigitSums, digits_of, exact
from real_model import ARMS, Study
from reporting import real_model as reporting
from smd_jax.message.masks import NEVER
from smd_jax.metrics import evicted_share
from smd_jax.testing import byte_tokenizer, random_params, tiny_model_config
from smd_jax.train.evaluation import Decode

pytestmark = pytest.mark.study

TOKENIZER = byte_tokenizer()
CONFIG = tiny_model_config(vocab_size=len(TOKENIZER), num_layers=1, max_positions=256)
BASE = Base(CONFIG, TOKENIZER, functools.partial(random_params, CONFIG))
TINY = Sizes(
    terms=2,
    shots=0,
    response=4,
    budget=40,
    buffer=4,
    rollouts=2,
    prompts=1,
    group=2,
    microbatch=2,
    chunk=1,
    rank=2,
    training_rows=20,
    evaluation_rows=2,
    learning_rate=1e-2,
)
ORIGIN = {"commit": "0000000", "command": "a command"}
CLOCKS = ("step_time", "cpu_seconds", "commit", "commits", "command")


@pytest.mark.parametrize(
    "text, reward",
    (
        ("I start with 4. Then I add 9: 4 + 9 = 13. The answer is 13.", 1),
        ("The answer is 13. I know it since 1984", 0),  # the last number counts
        ("13", 1),
        ("13.0 apples", 1),
        ("thirteen", 0),
        ("", 0),
        ("-13", 0),
        ("17-13", 1),  # a subtraction, not a negative number
        ("It is 1.13", 0),
        ("113", 0),
    ),
)
def test_the_last_number_is_the_answer(text: str, reward: float):
    assert exact(text, 13) == reward
    prompt = [{"role": "user", "content": "4 + 9 ="}]
    assert DigitSums("train", 5).reward([prompt], [[{"role": "assistant", "content": text}]], answer=[13]) == [reward]


def test_rows_have_examples_and_their_own_split():
    tasks = {split: DigitSums(split, 20, shots=1) for split in SPLITS}
    row = tasks["train"][0]
    digits = digits_of(tasks["train"].expressions[0])
    assert row["answer"] == sum(digits) and len(digits) == 3
    system, question, answer, asked = (message["content"] for message in row["prompt"])
    assert question == "4 + 3 + 6 =" and asked == f"{digits[0]} + {digits[1]} + {digits[2]} ="
    assert answer == "I start with 4. Then I add 3: 4 + 3 = 7. Then I add 6: 7 + 6 = 13. The answer is 13."
    assert exact(answer, 13) == 1 and "step by step" in system
    for first, second in itertools.combinations(SPLITS, 2):
        assert not set(tasks[first].expressions) & set(tasks[second].expressions)
    assert all(len(set(task.expressions)) == 20 for task in tasks.values())
    assert not TRIED & {*tasks["evaluation"].expressions, *tasks["validation"].expressions}
    assert "2 + 9 + 0" in TRIED and len(TRIED) == 31
    assert DigitSums("train", 5).expressions == tasks["train"].expressions[:5]


def test_invalid_arguments_and_rows_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="expected at most .* rows, the sums that are in evaluation; got 400"):
        _ = DigitSums("evaluation", 400).expressions
    with pytest.raises(ValueError, match="expected terms and at most so many shots"):
        DigitSums("train", 5, terms=7)
    with pytest.raises(ValueError, match=r"expected arms from \['untrained', 'naive'.*got \['sparse-rl'\]"):
        arms_of(["sparse-rl"], ARMS)
    rows = [{"finished": True, "commits": [commit]} for commit in ("0000000", "1111111+")]
    write_rows(tmp_path / "rows.json", rows)
    with pytest.raises(ValueError, match=r"expected rows of clean commits; got 1 others, \[\['1111111\+'\]\]"):
        real_model.add_rows(tmp_path / "rows.json", tmp_path / "all.json")
    assert not (tmp_path / "all.json").exists()


def test_the_share_of_evicted_keys_is_that_of_the_last_query():
    # Two rows of six columns; the first has padding in front, the second ended after four.
    valid = np.array([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], bool)
    evicted_at = np.full((2, 1, 2, 6), NEVER)
    evicted_at[0, :, :, 0] = 0  # padding does not count
    evicted_at[0, 0, 0, 1:3] = 3  # two keys in one of two heads
    evicted_at[1, 0, :, 1] = 4  # after the last query, which is 3
    assert float(evicted_share(jnp.asarray(evicted_at), jnp.asarray(valid))) == pytest.approx(2 / 2 / 9)


def make_study(folder: Path, **options: Any) -> Study:
    settings = {"arms": ARMS, "seeds": (0, 1)} | options
    return Study(base=BASE, runs=folder / "runs", sizes=TINY, **settings)


def test_jobs_are_ordered_by_seed_with_one_untrained_model(tmp_path: Path):
    names = [arm.name for arm in ARMS]
    jobs = make_study(tmp_path).jobs()
    assert [(job.seed, job.arm.name) for job in jobs] == [(0, n) for n in names] + [(1, n) for n in names[1:]]


def test_rules_have_separate_rows(tmp_path: Path):
    study = make_study(tmp_path)
    job, other = study.jobs()[1], replace(study, rule="r-kv").jobs()[1]
    assert job.settings(BASE) != other.settings(BASE) and job.folder(tmp_path) != other.folder(tmp_path)
    keep_row(job, BASE, study.runs, {"finished": True})
    assert is_finished(job, BASE, study.runs) and not is_finished(other, BASE, study.runs)
    assert "--rule r-kv" in real_model.command(other)


def stops_after(calls: int) -> Any:
    """A clock whose time is up after so many calls."""
    count = itertools.count(1)
    return lambda: next(count) > calls


def without_clocks(row: Row) -> Row:
    bare = {name: value for name, value in row.items() if name not in CLOCKS}
    return bare | {"curve": [{name: x for name, x in point.items() if name not in CLOCKS} for point in row["curve"]]}


def test_a_stopped_run_resumes_to_the_same_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # One program instead of four.
    monkeypatch.setattr("real.execute.decodings", lambda policy: tuple(Decode(name, policy) for name in DECODINGS))
    job = Job(arms_of(("naive",))[0], 0, TINY)
    never = stops_after(100)
    assert execute(job, BASE, tmp_path / "whole", ORIGIN, never)
    assert not execute(job, BASE, tmp_path / "parts", ORIGIN, stops_after(1))
    partial = kept(job, BASE, tmp_path / "parts")
    assert partial is not None and not partial["finished"] and partial["done"] == 1 and len(partial["curve"]) == 1
    assert "sparse" not in partial and not is_finished(job, BASE, tmp_path / "parts")
    assert execute(job, BASE, tmp_path / "parts", ORIGIN | {"commit": "1111111"}, never)
    whole, parts = (kept(job, BASE, tmp_path / name) for name in ("whole", "parts"))
    assert whole is not None and parts is not None and without_clocks(whole) == without_clocks(parts)
    assert parts["commits"] == ["0000000", "1111111"] and whole["commits"] == ["0000000"]
    assert whole["done"] == 2 and whole["mismatch_kl"] > 1e-6, "a dense learner is another policy"
    assert whole["evicted_share"] > 1 / 3 and whole.keys() >= set(DECODINGS)
    other = Job(job.arm, job.seed, Sizes())  # has the same name
    text = (job.folder(tmp_path / "whole") / "run.json").read_text()
    write_text(other.folder(tmp_path / "moved") / "run.json", text)
    with pytest.raises(ValueError, match="expected in .* a run of the present settings"):
        kept(other, BASE, tmp_path / "moved")


def test_rows_are_merged_and_finished_runs_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    study = make_study(tmp_path, arms=arms_of(("untrained",)))
    study.run()
    (row,) = read_rows(study.results)
    assert row["arm"] == "untrained" and row["finished"] and row["done"] == 0 and row["task"] == "digit-sums-2"
    command = "python experiments/real_model.py --rule snapkv --arms untrained --runs runs/again --seeds 0"
    assert row["command"] == command
    for name in DECODINGS:
        assert len(row[f"{name}_rewards"]) == 2 and np.mean(row[f"{name}_rewards"]) == row[name]
    monkeypatch.setattr(real_model, "execute", None)  # must not be called
    study.run()
    other, unfinished = row | {"arm": "another"}, row | {"arm": "unfinished", "finished": False}
    write_rows(study.results, [row | {"sparse": -1}, other, unfinished])
    study.collect()
    assert read_rows(study.results) == [other, unfinished, row]
    clean = [kept | {"commits": ["0000000"]} for kept in (other, unfinished, row)]
    write_rows(study.results, clean)
    reported = tmp_path / "all.json"
    write_rows(reported, [row | {"sparse": -1}])
    real_model.add_rows(study.results, reported)
    assert read_rows(reported) == [clean[0], clean[2]]


def test_the_report_needs_all_seeds():
    sizes = {"budget": 128, "buffer": 16, "length": 227, "prompt_width": 163, "rollouts": 16}
    sizes |= {"prompts": 4, "group": 8, "lora_rank": 16, "evaluation_rows": 4, "cpu_seconds": 30.0}
    rows: list[Row] = []
    for rule, seed, arm in itertools.product(reporting.NAMES, reporting.SEEDS, reporting.ARMS):
        right = [1, 1, 1, 0] if arm in ("shadow", "mixed-50") else [1, 0, 0, seed % 2]
        rewards = {f"{kind}_rewards": right for kind in reporting.KINDS}
        rewards |= dict.fromkeys(reporting.KINDS, np.mean(right))
        nats = 0.14 if (rule, arm) == ("snapkv", "tis") else 2.0
        rows.append(sizes | rewards | {"arm": arm, "seed": seed, "mismatch_kl": nats, "policy": rule})
        rows[-1]["curve"] = [{"mismatch_kl": 0.9 * nats}, {"mismatch_kl": nats}]
    for part in (reporting.section, reporting.bullet, reporting.primary):
        with pytest.raises(ValueError, match="expected all seeds of r-kv in smollm2.json; got too few of mixed-50"):
            part(rows[:-1])
    section = reporting.section(rows)
    assert "| shadow | 0.750 |" in section and "at temperature 1: +0.375 (" in section and "is refuted." not in section
    assert "SnapKV, is +0.375 (" in reporting.bullet(rows)
    assert "naive 30, tis 30, shadow 30, mixed-50 30." in section and "32 of 40 leads survive" in section
    assert "SnapKV (mismatch 0.140 ± 0.000 nats per token)" in section, "of the TIS runs"
    assert "in their first rollout it is 0.126 under SnapKV and 1.800 under R-KV" in section
    # Leads 0.25 and 0.5, four each: the mean of seven; s = 0.134, (t(0.975) + t(0.8)) s / √8 = 0.154.
    assert "Without its best seed it is +0.357" in section and "eight seeds find 0.15 with" in section
    assert f"| shadow minus naive | {' | '.join(4 * ['+0.50', '+0.25'])} |" in reporting.by_seeds(rows)


def test_the_interval_includes_the_errors_of_seeds_and_questions():
    # Every question has one sign, so all seeds agree: only the questions vary.
    signs = np.repeat([1, 0, -1], (60, 20, 20))
    rows = {"shadow": [], "naive": []}
    for seed in range(8):
        ours, theirs = (signs > 0).astype(int), (signs < 0).astype(int)
        rows["shadow"].append({"seed": seed, "sparse_rewards": ours.tolist()})
        rows["naive"].append({"seed": seed, "sparse_rewards": theirs.tolist()})
    lead = reporting.lead(rows["shadow"], rows["naive"], "sparse")
    half = (8 / 7) ** 0.5 * 2.3646 * signs.std() / 10  # t(0.975) of eight seeds
    assert lead.mean == pytest.approx(0.4) and lead.low == pytest.approx(0.4 - half, abs=0.02)
    assert lead.high == pytest.approx(0.4 + half, abs=0.02)
    # Seeds that differ widen it.
    rows["shadow"][0]["sparse_rewards"] = [0] * 100
    assert reporting.lead(rows["shadow"], rows["naive"], "sparse").low < 0.4 - 0.075 - half
