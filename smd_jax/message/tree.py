"""Trees of tokens: branches that share their beginnings, in one row under one interval mask.

A token is visible to exactly its own subtree. In depth-first order a subtree is a run of columns, so `evicted_at` of a
key is the end of its subtree, and its position is its depth:

    p ─┬─ a ─┬─ c        column      0  1  2  3  4  5  6  7  8  9
       │     └─ d        node        p  p  p  a  a  c  c  d  b  b
       └─ b              position    0  1  2  3  4  5  6  5  3  4
                         evicted_at 10 10 10  8  8  7  7  8 10 10
                         source      -  0  1  2  3  4  5  4  2  8

The hidden state of column `source` predicts the token. The last token of `a` is the source of two tokens.

A branch is the path from the root to a leaf: all tokens of one context that the policy saw. The loss takes branches as
rows (`to_trajectory`), and `smd_jax.learner.packed` puts their shared beginnings into the model once. So the loss of a
tree is that of separate rows by definition: a sampled token that two branches share counts in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from smd_jax.message.foreign import MOST_IDS, ExpertSizes, Floats, Ints, whole_numbers
from smd_jax.message.masks import NEVER, ShadowMask
from smd_jax.message.trajectory import Trajectory

Flags = Sequence[Any] | np.ndarray  # booleans

NO_SOURCE = -1  # of a root's first token, and of padding


@dataclass(frozen=True, eq=False)
class Branch:
    """One context of the policy: the tokens from the root to a leaf.

    Attributes:
      tokens: `[n]` ids, at least two.
      sampled: `[n]` which tokens the policy sampled; the others were given: prompts, tool results, text that is read
        again. (): all but the first.
      logprobs: `[n]` the sampler's log-probabilities; 0 for given tokens. (): all 0.
      evicted_at: `[layers, kv_heads, n]` first position whose query did not see a key, as in `Trajectory.from_records`;
        None: nothing was evicted.
      routed_experts: experts that the tokens went to, as in `Trajectory.from_records`; None: not recorded.
    """

    tokens: Ints
    sampled: Flags = ()
    logprobs: Floats = ()
    evicted_at: Int[np.ndarray, "layers kv_heads n"] | None = None
    routed_experts: np.ndarray | None = None

    def __post_init__(self) -> None:
        _set_tokens(self, "a branch", lambda count: np.arange(count) > 0)
        if len(self.tokens) < 2:
            raise ValueError(
                f"expected at least two tokens in a branch, one to predict another; got {len(self.tokens)}"
            )
        if self.sampled[0]:
            raise ValueError("expected a given first token, because nothing predicts it; got a sampled one")


@dataclass(frozen=True, eq=False)
class Node:
    """A run of tokens that follows the last token of its parent.

    Attributes:
      tokens: `[n]` ids, at least one.
      parent: index of the parent in `Tree.nodes`; None for the root.
      sampled, logprobs: `[n]` as in Branch. (): nothing was sampled.

    Raises:
      ValueError: logprobs without `sampled`.
    """

    tokens: Ints
    parent: int | None = None
    sampled: Flags = ()
    logprobs: Floats = ()

    def __post_init__(self) -> None:
        if not len(self.sampled) and any(float(x) for x in self.logprobs):
            raise ValueError(
                "expected sampled with the logprobs of a node, whose tokens are given by default; got logprobs alone"
            )
        _set_tokens(self, "a node", lambda count: np.zeros(count, bool))


@dataclass(frozen=True, eq=False)
class Tree:
    """Nodes of one tree: the root first, every other node after its parent.

    Raises:
      ValueError: no nodes; a node without tokens, or whose parent is not before it; a root whose first token was
        sampled.
    """

    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        if not self.nodes:
            raise ValueError("expected at least one node; got none")
        for index, node in enumerate(self.nodes):
            if not len(node.tokens):
                raise ValueError(f"expected at least one token in every node; got none in node {index}")
            if node.parent is not None if index == 0 else node.parent not in range(index):
                raise ValueError(
                    f"expected parent None of the first node, and a parent before every other; got {node.parent} of "
                    f"node {index}"
                )
        if self.nodes[0].sampled[0]:
            raise ValueError("expected a given first token in the root, because nothing predicts it; got a sampled one")

    @property
    def order(self) -> tuple[int, ...]:
        """Indices of the nodes in depth-first order; children in the order of `nodes`."""
        children: list[list[int]] = [[] for _ in self.nodes]
        for index, node in enumerate(self.nodes):
            if node.parent is not None:
                children[node.parent].append(index)
        order, pending = [], [0]
        while pending:
            order.append(pending.pop())
            pending += reversed(children[order[-1]])
        return tuple(order)

    @property
    def leaves(self) -> tuple[int, ...]:
        """Indices of the nodes without children, in depth-first order."""
        parents = {node.parent for node in self.nodes}
        return tuple(index for index in self.order if index not in parents)

    def path(self, index: int | None) -> tuple[int, ...]:
        """Indices of the nodes from the root to this one."""
        path = []
        while index is not None:
            path.append(index)
            index = self.nodes[index].parent
        return tuple(reversed(path))

    def branches(self, *, once: bool = False) -> tuple[Branch, ...]:
        """One branch per leaf, in depth-first order.

        Args:
          once: whether a sampled token that branches share counts only in the first of them. Text-level compaction
            samples a token once and reads it in several contexts; sibling rollouts each sample their own copy.
        """
        found = []
        before: set[int] = set()
        for leaf in self.leaves:
            path = self.path(leaf)
            nodes = [self.nodes[index] for index in path]
            counts = [np.asarray(self.nodes[index].sampled) & (not once or index not in before) for index in path]
            tokens = np.concatenate([np.asarray(node.tokens) for node in nodes])
            logprobs = np.concatenate([np.asarray(node.logprobs) for node in nodes])
            found.append(Branch(tokens, np.concatenate(counts), logprobs))
            before |= set(path)
        return tuple(found)


@dataclass(frozen=True, eq=False)
class TreeRow:
    """Trees in one row, one after another, then padding.

    Attributes:
      tokens: `[T]` ids. positions: `[T]` depth of each token in its tree, 0 for padding.
      evicted_at: `[T]` first column after the subtree of each token; 0 for padding.
      sources: `[T]` column whose hidden state predicts the token; -1 for the first token of a tree and for padding.
      sampled, logprobs: `[T]` as in Branch.
    """

    tokens: Int[np.ndarray, " T"]
    positions: Int[np.ndarray, " T"]
    evicted_at: Int[np.ndarray, " T"]
    sources: Int[np.ndarray, " T"]
    sampled: Bool[np.ndarray, " T"]
    logprobs: Float[np.ndarray, " T"]

    @property
    def mask(self) -> ShadowMask:
        """The mask of the row, for all layers and heads."""
        return ShadowMask(jnp.asarray(self.evicted_at)[None, None, None])


def pack(trees: Sequence[Tree], columns: int | None = None, pad_token_id: int = 0) -> TreeRow:
    """Trees as one row, in depth-first order.

    Args:
      columns: of the row; None: as many as there are tokens.

    Raises:
      ValueError: the trees have more tokens than the row has columns.
    """
    total = sum(len(node.tokens) for tree in trees for node in tree.nodes)
    columns = total if columns is None else columns
    if total > columns:
        raise ValueError(f"expected at most {columns} tokens in the trees of a row; got {total}")
    row = TreeRow(
        tokens=np.full(columns, pad_token_id, np.int32),
        positions=np.zeros(columns, np.int32),
        evicted_at=np.zeros(columns, np.int32),
        sources=np.full(columns, NO_SOURCE, np.int32),
        sampled=np.zeros(columns, bool),
        logprobs=np.zeros(columns, np.float32),
    )
    start = 0
    for tree in trees:
        place: dict[int, slice] = {}  # columns of each node
        for index in tree.order:
            node = tree.nodes[index]
            place[index] = part = slice(start, start + len(node.tokens))
            start = part.stop
            source = NO_SOURCE if node.parent is None else place[node.parent].stop - 1
            depth = 0 if node.parent is None else row.positions[source] + 1
            row.tokens[part], row.sampled[part], row.logprobs[part] = node.tokens, node.sampled, node.logprobs
            row.positions[part] = depth + np.arange(len(node.tokens))
            row.sources[part] = [source, *range(part.start, part.stop - 1)]
        for index in reversed(tree.order):
            node, part = tree.nodes[index], place[index]
            # The end of the last child's subtree, or of a leaf itself.
            end = max(row.evicted_at[part.stop - 1], part.stop)
            row.evicted_at[part] = end
            if node.parent is not None:
                last = place[node.parent].stop - 1
                row.evicted_at[last] = max(row.evicted_at[last], end)
    return row


def to_trajectory(
    branches: Sequence[Branch],
    *,
    layers: int = 1,
    kv_heads: int = 1,
    terminated: Sequence[bool] | np.ndarray | None = None,
    support: Sequence[tuple[Ints, Ints]] | None = None,
    experts: ExpertSizes | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    prompt_width: int | None = None,
    response_width: int | None = None,
    longest: int | None = None,
    pad_token_id: int = 0,
) -> Trajectory:
    """Branches of one or several trees as a Trajectory: one row per branch, whose prompt ends before its first sampled
    token. Advantages, weights and corrections are those of rows, `[branches]` or `[branches, R]`.

    Args:
      layers, kv_heads: of the recorded evictions; 1 where there are none.
      terminated: as in `Trajectory.from_records`; None: all true.
      support: as in `Trajectory.from_records`, of each branch's tokens from its first sampled one on; given tokens may
        have empty sets.
      experts: sizes of the model's experts, if the branches have `routed_experts`.
      temperature, vocab_size, prompt_width, response_width, longest, pad_token_id: as in `Trajectory.from_records`.

    Raises:
      ValueError: no branch, branches with and without `routed_experts`, or as `Trajectory.from_records`.
    """
    if not branches:
        raise ValueError("expected at least one branch; got none")
    # A branch without sampled tokens has its last token as its response, which does not count.
    starts = [int(np.argmax(b.sampled)) if np.any(b.sampled) else len(b.tokens) - 1 for b in branches]
    routed = [b.routed_experts for b in branches if b.routed_experts is not None]
    if 0 < len(routed) < len(branches):
        raise ValueError(f"expected routed_experts in all {len(branches)} branches or in none; got {len(routed)}")
    # All axes, so that batches with and without evictions have one shape.
    never = [np.broadcast_to(NEVER, (layers, kv_heads, len(b.tokens))) for b in branches]
    stays = [n if b.evicted_at is None else b.evicted_at for b, n in zip(branches, never, strict=True)]
    return Trajectory.from_records(
        [b.tokens[:start] for b, start in zip(branches, starts, strict=True)],
        [b.tokens[start:] for b, start in zip(branches, starts, strict=True)],
        [b.logprobs[start:] for b, start in zip(branches, starts, strict=True)],
        sampled=[np.asarray(b.sampled[start:]) for b, start in zip(branches, starts, strict=True)],
        terminated=[True] * len(branches) if terminated is None else terminated,
        layers=layers,
        kv_heads=kv_heads,
        evicted_at=stays,
        support=support,
        routed_experts=routed or None,
        experts=experts,
        temperature=temperature,
        vocab_size=vocab_size,
        prompt_width=prompt_width,
        response_width=response_width,
        longest=longest,
        pad_token_id=pad_token_id,
    )


def _set_tokens(part: Branch | Node, what: str, default: Callable[[int], np.ndarray]) -> None:
    """Checks the arrays of a frozen `part`, and sets them. `default`: `sampled` of so many tokens, if it is empty."""
    tokens = whole_numbers(part.tokens, what)
    for token in tokens[(tokens < 0) | (tokens > MOST_IDS)][:1]:
        raise ValueError(f"expected token ids of {what} from 0 to 2**31 - 1; got {token}")
    tokens = tokens.astype(np.int32)
    sampled = np.asarray(part.sampled) if len(part.sampled) else default(len(tokens))
    logprobs = np.asarray(part.logprobs, np.float32) if len(part.logprobs) else np.zeros(len(tokens), np.float32)
    if sampled.shape != tokens.shape or sampled.dtype != bool:
        raise ValueError(
            f"expected sampled of {what} to be booleans {tokens.shape}; got {sampled.dtype} {sampled.shape}"
        )
    if logprobs.shape != tokens.shape:
        raise ValueError(f"expected logprobs of {what} of shape {tokens.shape}; got {logprobs.shape}")
    for name, value in (("tokens", tokens), ("sampled", sampled), ("logprobs", np.where(sampled, logprobs, 0))):
        object.__setattr__(part, name, value)
