"""Trees of tokens as interval masks: rows, branches and invalid trees."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smd_jax.message import tree
from smd_jax.message.tree import Branch, Node, Tree

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


def random_tree(count: int, seed: int) -> Tree:
    rng = np.random.default_rng(seed)
    nodes: list[Node] = []
    for i in range(count):
        length = int(rng.integers(2 if i == 0 else 1, 6))
        sampled = rng.random(length) < 0.6
        sampled[0] &= i > 0
        logprobs = np.where(sampled, -rng.random(length), 0)
        parent = int(rng.integers(0, i)) if i else None
        nodes.append(Node(rng.integers(0, 30, length), parent, sampled, logprobs))
    return Tree(tuple(nodes))


def ids(branch: Branch) -> tuple[int, ...]:
    return tuple(np.asarray(branch.tokens).tolist())


def test_a_packed_tree():
    row = tree.pack([Tree(NODES)])
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 3, 4]
    assert row.evicted_at.tolist() == [10, 10, 10, 8, 8, 7, 7, 8, 10, 10]
    assert row.sources.tolist() == [-1, 0, 1, 2, 3, 4, 5, 4, 2, 8]
    assert Tree(NODES).leaves == (2, 3, 4)


@settings(deadline=None, max_examples=50)
@given(st.lists(SEEDS, min_size=1, max_size=3), st.integers(0, 5))
def test_each_token_is_visible_to_its_own_subtree(seeds, padding):
    """The nearest ancestor of a token predicts it."""
    trees = [random_tree(*seed) for seed in seeds]
    total = sum(len(node.tokens) for each in trees for node in each.nodes)
    row = tree.pack(trees, total + padding, pad_token_id=77)
    visible = np.zeros((total + padding,) * 2, bool)
    column = 0
    for each in trees:
        columns_of = {}
        for index in each.order:
            node = each.nodes[index]
            columns_of[index] = own = np.arange(column, column + len(node.tokens))
            path = np.concatenate([columns_of[i] for i in each.path(index)])
            for query in own:
                before = path[path <= query]
                visible[query, before] = True
                assert row.positions[query] == len(before) - 1
                assert row.sources[query] == (before[-2] if len(before) > 1 else -1)
            for name in ("tokens", "sampled", "logprobs"):
                np.testing.assert_array_equal(getattr(row, name)[own], getattr(node, name))
            column += len(own)
    columns = np.arange(total + padding)
    interval = (columns[None] <= columns[:, None]) & (columns[:, None] < row.evicted_at[None])
    np.testing.assert_array_equal(interval, visible)
    assert (row.tokens[total:] == 77).all() and (row.sources[total:] == -1).all() and not row.sampled[total:].any()


def test_a_token_counts_in_every_branch_or_once():
    each, once = Tree(NODES).branches(), Tree(NODES).branches(once=True)
    assert [ids(branch) for branch in once] == [(1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4, 5, 8), (1, 2, 3, 9, 10)]
    assert [np.flatnonzero(branch.sampled).tolist() for branch in each] == [[3, 4, 5], [3, 4, 5], [4]]
    assert [np.flatnonzero(branch.sampled).tolist() for branch in once] == [[3, 4, 5], [5], [4]]
    assert np.asarray(once[1].logprobs).tolist() == [0, 0, 0, 0, 0, -4]


def test_branches_as_rows():
    """Prompts end before the first sampled token. Later given tokens are not in the response mask and have no set."""
    given_late = Branch([1, 2, 3, 4, 5], [False, False, True, False, True], [0, 0, -1, 0, -2])
    unsampled = Branch([1, 2, 3], [False] * 3)
    none = [-1, -1]
    rows = tree.to_trajectory([given_late, unsampled], temperature=0.5)
    assert rows.prompt_width == 2 and rows.temperature == 0.5
    assert rows.tokens.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 0, 0]]
    assert rows.response_mask.tolist() == [[True, False, True], [False] * 3]
    assert rows.logprobs.tolist() == [[-1, 0, -2], [0, 0, 0]]
    assert rows.first_columns(2).response_mask.tolist() == [[True, False], [False] * 2]
    assert rows.terminated.tolist() == [True, True] and rows.drawable is None and rows.longest is None
    support = [([3, 7, 5], [0, 2, 2, 3]), ([], [0, 0])]
    rows = tree.to_trajectory([given_late, unsampled], support=support, terminated=[False, True], longest=5)
    assert rows.drawable is not None and rows.drawable.sets is not None
    assert rows.drawable.sets.tolist() == [[[3, 7], none, [5, -1]], [none] * 3]
    assert rows.terminated.tolist() == [False, True] and rows.longest == 5


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((), "expected at least one node; got none"),
        ((Node([1], 0),), "expected parent None of the first node, .*; got 0 of node 0"),
        ((Node([1]), Node([1])), "a parent before every other; got None of node 1"),
        ((Node([1]), Node([1], 1)), "a parent before every other; got 1 of node 1"),
        ((Node([1]), Node([1], -1)), "a parent before every other; got -1 of node 1"),
        ((Node([1]), Node([], 0)), "expected at least one token in every node; got none in node 1"),
        ((Node([1], sampled=[True]),), "expected a given first token in the root"),
    ],
)
def test_invalid_trees_are_refused(nodes, message):
    with pytest.raises(ValueError, match=message):
        Tree(nodes)


@pytest.mark.parametrize("wrong", [-1, 2**32 + 5])  # -1 would read the last row of the embedding
def test_ids_outside_of_31_bits_are_refused(wrong):
    with pytest.raises(ValueError, match=rf"expected token ids of a branch from 0 to 2\*\*31 - 1; got {wrong}"):
        Branch([wrong, 7])


def test_wrong_shapes_and_sizes_are_refused():
    with pytest.raises(ValueError, match=r"expected sampled of a node to be booleans \(2,\); got bool \(1,\)"):
        Node([1, 2], sampled=[True])
    with pytest.raises(ValueError, match=r"expected logprobs of a branch of shape \(2,\); got \(3,\)"):
        Branch([1, 2], logprobs=[0, 0, 0])
    with pytest.raises(ValueError, match="expected sampled with the logprobs of a node.*; got logprobs alone"):
        Node([4, 5], parent=0, logprobs=[-1.0, -2.0])
    with pytest.raises(ValueError, match="expected at least two tokens in a branch.*; got 1"):
        Branch([1])
    with pytest.raises(ValueError, match="expected a given first token"):
        Branch([1, 2], [True, True])
    with pytest.raises(ValueError, match="expected at most 9 tokens in the trees of a row; got 10"):
        tree.pack([Tree(NODES)], 9)
    with pytest.raises(ValueError, match="expected at least one branch"):
        tree.to_trajectory([])
