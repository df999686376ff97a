"""The study of agents: its task, the examples of its start, and a run."""

from dataclasses import replace
from pathlib import Path

import pytest

from lib import runs
from lib.arms import arms_of
from lib.command import QUICK
from lib.lookup import NOISE_LENGTH, Lookup, Shelf, encoded, examples_of_lookup
from lib.problems import problem_of, tokenizer
from lib.runs import DECODINGS, Job
from lib.samplers import sampler_of
from lib.starts import write_start
from smd_jax.testing import random_params
from smd_jax.train.evaluation import Decode


def test_a_correct_conversation_is_the_example_of_the_start():
    problem = Lookup(4)
    assert problem_of(problem.label) == problem
    rows = [problem.rows("train")[index] for index in (0, 1, 77)]
    examples = examples_of_lookup(problem, rows, tokenizer())
    for place, row in enumerate(rows):
        shelf, letters, answer = Shelf(), row["prompt"][:-1], row["answer"]
        text = shelf.reset(row)
        for turn, letter in enumerate(letters):
            reply, reward, done = shelf.step(answer[:turn] + letter)
            assert (reply[0], len(reply), reward, done) == (answer[turn], 1 + NOISE_LENGTH, 0.0, False)
            text += f"{answer[:turn]}{letter}|{reply}"
        assert shelf.step(answer) == ("", 1.0, True)
        ids, targets = encoded(row, tokenizer())
        assert str(tokenizer().decode(ids)).replace("<end>", "|") == f"{text}{answer}|"
        assert sum(targets) == 4 + 6 + 4 + 5 and len(ids) <= problem.prompt_width + problem.response_width
        assert max(len(answer) + 2, 5) == problem.turn_tokens
        length = int(examples.valid[place].sum())
        assert examples.tokens[place, :length].tolist() == ids and examples.targets[place, :length].tolist() == targets
        assert not examples.targets[place, length:].any()


@pytest.mark.parametrize(("answer", "reward"), [("", 0.0), ("21", 0.0), ("19", 0.5), ("123", 1.0)])
def test_the_last_turn_is_graded(answer: str, reward: float):
    shelf = Shelf()
    shelf.reset({"prompt": "ab=", "answer": "12", "values": "12345678", "noise": ["qr", "st"]})
    assert shelf.step("c") == ("3qr", 0.0, False)
    assert shelf.step("=") == ("=st", 0.0, False)
    assert shelf.step(answer) == ("", reward, True)


@pytest.mark.slow
def test_a_run_of_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # One program instead of four.
    monkeypatch.setattr(runs, "decodings", lambda policy: tuple(Decode(name, policy) for name in DECODINGS))
    problem, sizes = Lookup(2), replace(QUICK, rollouts=1)
    name = f"{problem.label}-{sizes.start.label}-seed-3.safetensors"
    write_start(tmp_path / "starts" / name, random_params(problem.model_config()), sizes.start)
    job = Job(problem, sampler_of("snapkv:8+4"), arms_of(("shadow",))[0], 1e-3, 3, False, sizes)
    row = runs.execute(job, tmp_path / "runs")
    assert 0 <= row["sparse"] <= 1 and row["mismatch_kl"] <= runs.MAX_MISMATCH_KL and row["task"] == "lookup-2"
