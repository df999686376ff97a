"""Trees of tokens as interval masks: rows, the way back, branches, and inputs that are no tree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smd_jax.message import tree
from smd_jax.message.tree import Branch, Node, Tree, TreeRow

# p ─┬─ a ─┬─ c
#    │     └─ d
#    └─ b
NODES = (
    Node([1, 2, 3]),
    Node([4, 5], parent=0, sampled=[True, True], logprobs=[-1.0, -2.0]),
    Node([6, 7], parent=1, sampled=[True, False], logprobs=[-3.0, 0.0]),
    Node([8], parent=1, sampled=[True], logprobs=[-4.0]),
    Node([9, 10], parent=0, sampled=[False, True], logprobs=[0.0, -5.0]),
)


SEEDS = st.tuples(st.integers(1, 7), st.integers(0, 2**16))  # nodes of a tree and its seed


def random_tree(count: int, seed: int, most_tokens: int = 4, vocabulary: int = 30) -> Tree:
    """A tree with its nodes in random order; children of a node may begin with the same token."""
    rng = np.random.default_rng(seed)
    names = rng.permutation(count)
    nodes: list = [None] * count
    for i in range(count):
        length = int(rng.integers(2 if i == 0 else 1, most_tokens + 2))
        sampled = rng.random(length) < 0.6
        sampled[0] &= i > 0
        logprobs = np.where(sampled, -rng.random(length), 0)
        parent = None if i == 0 else int(names[rng.integers(0, i)])
        nodes[names[i]] = Node(rng.integers(0, vocabulary, length), parent, sampled, logprobs)
    return Tree(tuple(nodes))


def same(left, right):
    """Whether two branches are the same."""
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in ("tokens", "sampled", "logprobs"))


def ids(branch: Branch) -> tuple[int, ...]:
    return tuple(np.asarray(branch.tokens).tolist())


def test_the_picture():
    row = tree.pack([Tree(NODES)])
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 3, 4]
    assert row.evicted_at.tolist() == [10, 10, 10, 8, 8, 7, 7, 8, 10, 10]
    assert row.sources.tolist() == [-1, 0, 1, 2, 3, 4, 5, 4, 2, 8]
    assert Tree(NODES).leaves == (2, 3, 4)


@settings(deadline=None, max_examples=50)
@given(st.lists(SEEDS, min_size=1, max_size=3), st.integers(0, 5))
def test_a_row_shows_each_token_to_its_own_subtree(seeds, padding):
    """The mask, from the definition: a query sees its ancestors and itself. And the way back."""
    several = [random_tree(*seed) for seed in seeds]
    total = sum(len(node.tokens) for one in several for node in one.nodes)
    row = tree.pack(several, total + padding)
    visible = np.zeros((total + padding,) * 2, bool)
    column = 0
    for one in several:
        columns_of = {}
        for index in one.order:
            size = len(one.nodes[index].tokens)
            columns_of[index] = np.arange(column, column + size)
            path = np.concatenate([columns_of[i] for i in one.path(index)])
            for place in columns_of[index]:
                visible[place, path[path <= place]] = True
            column += size
    places = np.arange(total + padding)
    interval = (places[None] <= places[:, None]) & (places[:, None] < row.evicted_at[None])
    np.testing.assert_array_equal(interval, visible)
    again = tree.unpack(row)
    assert len(again) == len(several)
    for one, other in zip(several, again, strict=True):
        assert all(map(same, one.branches(), other.branches())) and len(one.leaves) == len(other.leaves)
    # The same row from what came back: nothing is lost.
    for name in ("tokens", "positions", "evicted_at", "sampled", "logprobs"):
        np.testing.assert_array_equal(getattr(tree.pack(again, total + padding), name), getattr(row, name))


@settings(deadline=None, max_examples=50)
@given(SEEDS)
def test_branches_merge_into_the_smallest_tree(seed):
    """Two tokens are one exactly where the branches begin with the same tokens."""
    branches = random_tree(*seed, vocabulary=3).branches()
    merged = Tree.from_branches(branches)
    paths = [ids(branch) for branch in branches]
    beginnings = {path[:n] for path in paths for n in range(1, len(path) + 1)}
    assert sum(len(node.tokens) for node in merged.nodes) == len(beginnings)
    found = {ids(branch) for branch in merged.branches()}
    assert found == {path for path in paths if not any(other != path and other[: len(path)] == path for other in paths)}


def test_a_token_counts_in_every_branch_or_once():
    each, once = Tree(NODES).branches(), Tree(NODES).branches(once=True)
    assert [ids(branch) for branch in once] == [(1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4, 5, 8), (1, 2, 3, 9, 10)]
    assert [np.flatnonzero(branch.sampled).tolist() for branch in each] == [[3, 4, 5], [3, 4, 5], [4]]
    assert [np.flatnonzero(branch.sampled).tolist() for branch in once] == [[3, 4, 5], [5], [4]]
    assert np.asarray(once[1].logprobs).tolist() == [0, 0, 0, 0, 0, -4]


def test_branches_as_rows():
    """Prompts end before the first sampled token; what was given later does not count."""
    given_late = Branch([1, 2, 3, 4, 5], [False, False, True, False, True], [0, 0, -1, 0, -2])
    nothing = Branch([1, 2, 3], [False] * 3)
    rows = tree.to_trajectory([given_late, nothing], temperature=0.5)
    assert rows.prompt_width == 2 and rows.temperature == 0.5
    assert rows.tokens.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 0, 0]]
    assert rows.response_mask.tolist() == [[True, False, True], [False] * 3]
    assert rows.logprobs.tolist() == [[-1, 0, -2], [0, 0, 0]]
    assert rows.first_columns(2).response_mask.tolist() == [[True, False], [False] * 2]


NODE = Node([1])


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((), "expected one root, a node whose parent is None; got none"),
        ((NODE, NODE), r"expected one root, a node whose parent is None; got nodes \[0, 1\]"),
        ((NODE, Node([1], 2), Node([1], 1)), "expected every node to descend from the root; got the cycle 1 -> 2 -> 1"),
        ((NODE, Node([1], 1)), "expected every node to descend from the root; got the cycle 1 -> 1"),
        ((NODE, Node([], 0)), "expected at least one token in every node; got none in node 1"),
        ((NODE, Node([1], 5)), "expected a parent from 0 to 1, or None for the root; got 5 .node 1"),
        ((NODE, Node([1], -1)), "expected a parent from 0 to 1, or None for the root; got -1 .node 1"),
        ((Node([1], sampled=[True]),), "expected a given first token in the root"),
    ],
)
def test_what_is_no_tree(nodes, message):
    with pytest.raises(ValueError, match=message):
        Tree(nodes)


def test_parts_that_do_not_fit():
    with pytest.raises(ValueError, match=r"expected sampled of a node to be booleans \(2,\); got bool \(1,\)"):
        Node([1, 2], sampled=[True])
    with pytest.raises(ValueError, match=r"expected logprobs of a branch of shape \(2,\); got \(3,\)"):
        Branch([1, 2], logprobs=[0, 0, 0])
    with pytest.raises(ValueError, match="expected at least two tokens in a branch.*; got 1"):
        Branch([1])
    with pytest.raises(ValueError, match="expected a given first token"):
        Branch([1, 2], [True, True])
    with pytest.raises(ValueError, match=r"expected branches that begin with the same token.*; got .* \[1, 2"):
        Tree.from_branches([Branch([1, 2]), Branch([2, 2])])
    with pytest.raises(ValueError, match="expected at most 9 tokens in the trees of a row; got 10"):
        tree.pack([Tree(NODES)], 9)
    with pytest.raises(ValueError, match="expected at least one branch"):
        tree.to_trajectory([])


@pytest.mark.parametrize(
    ("positions", "evicted_at", "message"),
    [
        ([0, 2], [2, 2], "expected a position of at most 1 at column 1; got 2"),
        ([0, 1, 1], [3, 3, 3], "expected evicted_at to be the end of every token's subtree; got 3 at column 2"),
        ([0, 1, 1], [2, 2, 3], "expected evicted_at to be the end of every token's subtree; got 3 at column 2"),
        ([0, 1], [2, 3], "expected evicted_at to be the end of every token's subtree; got 3 at column 1"),
    ],
)
def test_rows_that_hold_no_trees(positions, evicted_at, message):
    zeros = np.zeros(len(positions), np.int32)
    row = TreeRow(zeros, np.array(positions), np.array(evicted_at), zeros > 0, zeros.astype(np.float32))
    with pytest.raises(ValueError, match=message):
        tree.unpack(row)
