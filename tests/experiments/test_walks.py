"""Walks of any length, and their shared start."""

from __future__ import annotations

import numpy as np
import pytest

from lib.problems import WALK_ENDS, Walk, tokenizer
from lib.starts import examples_of
from smd_jax.text.prompts import eos_token_id

pytestmark = pytest.mark.study


def test_walks_of_all_lengths_share_a_start():
    assert Walk(16).start_problem == Walk(256).start_problem == Walk(512)
    assert Walk(600).start_problem == Walk(600)
    assert Walk(512).lesson(0) == Walk(512).lesson(101) == (Walk(32), 96) and Walk(512).lesson(100) == (Walk(512), 8)


def test_short_lessons_do_not_teach_to_end():
    """The start of long walks trains on short ones first, without their end of sequence."""
    short, long = (examples_of(Walk(512), step, 0, tokenizer()) for step in (0, 100))
    assert short.targets.sum(axis=1).tolist() == [32] * 96, "its steps, without an end"
    assert long.targets.sum(axis=1).tolist() == [513] * 8, "its steps and its end"
    assert (np.asarray(short.tokens)[:, -1] == eos_token_id(tokenizer())).all()


def test_a_walk_has_its_edges():
    for row in (Walk(40).rows("train")[i] for i in range(20)):
        graph, first = [WALK_ENDS[step] for step in row["prompt"][:-1]], row["prompt"][-1]
        assert len(set(graph)) == 12 and all(a != b for a, b in graph)
        assert sorted(a for a, _ in graph) == sorted(2 * "abcdef")
        walk = [WALK_ENDS[step] for step in row["answer"]]
        assert set(walk) <= set(graph) and [a for a, _ in walk] == [first, *(b for _, b in walk[:-1])]
