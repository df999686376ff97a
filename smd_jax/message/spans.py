"""Spans of text that are evicted when a token is written, such as a thought after its summary, or a tool's output after
its turn.

    column       0    1  2    3     4    5   6   7
    token      open   a  b  close begin  s  end  x        summary=(begin, end): the span goes when `end` is written
    evicted_at        6  6                                query 5 still sees the span, query 6 does not

The tokens determine the evicted keys, so no record is needed. All layers and heads lose the same keys. This is the
eviction of Memento (arXiv:2604.09852, microsoft/memento `block_masking`) for blocks that do not nest.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from smd_jax.message.masks import NEVER
from smd_jax.pytrees import PyTreeNode
from smd_jax.typed_fields import check_types

NONE = -1  # no column


class SpanState(PyTreeNode):
    """State of the spans of each row; columns, -1 for none.

    Attributes:
      opened: `[rows]` of the newest `open` that is not closed.
      first, end: `[rows]` of the newest closed span that is still seen: its `open`, and the column after its `close`.
      summarising: `[rows]` whether that span's summary has begun.
    """

    opened: Int[Array, " rows"]
    first: Int[Array, " rows"]
    end: Int[Array, " rows"]
    summarising: Bool[Array, " rows"]


@dataclass(frozen=True)
class TokenSpans:
    """The tokens that begin and end a span, and the token that evicts it.

    Its `close`, or the end of its summary, evicts a span before that token's query. The last of several `open` counts.
    A span whose summary has not ended when another span is closed is never evicted.

    Attributes:
      open, close: ids of the first and the last token of a span.
      summary: ids of the first and the last token of a span's summary; None: `close` evicts the span.
      delimiters: whether `open` and `close` are evicted with the text between them. A `close` that evicts the span
        stays, because a query sees its own key.

    Raises:
      TypeError, ValueError: ids that are not different whole numbers >= 0.
    """

    open: int
    close: int
    summary: tuple[int, int] | None = None
    delimiters: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if min(self.ids) < 0 or len(set(self.ids)) < len(self.ids):
            raise ValueError(f"expected different token ids >= 0 for open, close and summary; got {self.ids}")

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids of delimiters."""
        return (self.open, self.close, *(self.summary or ()))

    def begin(self, rows: int) -> SpanState:
        """The state before the first token."""
        none = jnp.full((rows,), NONE, jnp.int32)
        return SpanState(none, none, none, jnp.zeros((rows,), bool))

    def advance(
        self, state: SpanState, tokens: Int[Array, " rows"], columns: Int[Array, " rows"]
    ) -> tuple[SpanState, Int[Array, " rows"], Int[Array, " rows"]]:
        """Advances by one token per row.

        Args:
          columns: columns of the tokens; -1 for rows without one, which do not change.

        Returns:
          The state, and the range `first` to `end` (exclusive) of columns that are evicted before this token's query.
        """
        there = columns >= 0
        opens = there & (tokens == self.open)
        closes = there & (tokens == self.close) & (state.opened >= 0)
        first = jnp.where(closes, state.opened, state.first)
        end = jnp.where(closes, columns + 1, state.end)
        opened = jnp.where(opens, columns, jnp.where(closes, NONE, state.opened))
        if self.summary is None:
            summarising = state.summarising
            goes = closes
        else:
            summarising = state.summarising & ~closes
            summarising = summarising | (there & (tokens == self.summary[0]) & (first >= 0))
            goes = there & (tokens == self.summary[1]) & summarising
            summarising = summarising & ~goes
        inside = 0 if self.delimiters else 1
        gone_first = jnp.where(goes, first + inside, 0)
        gone_end = jnp.where(goes, jnp.minimum(end - inside, columns), 0)
        first, end = jnp.where(goes, NONE, first), jnp.where(goes, NONE, end)
        return SpanState(opened, first, end, summarising), gone_first, gone_end

    def read(
        self, state: SpanState, tokens: Int[Array, "rows tokens"], columns: Int[Array, "rows tokens"], width: int
    ) -> tuple[SpanState, Int[Array, "rows {width}"]]:
        """Advances by consecutive tokens of all rows.

        Args:
          columns: columns of the tokens; -1 for padding.
          width: more than the last column.

        Returns:
          The state after them; and for every column the column of the token that evicts its key, `NEVER` for keys
          that these tokens do not evict.
        """

        def one(state: SpanState, token: tuple[Array, Array]) -> tuple[SpanState, tuple[Array, Array]]:
            state, first, end = self.advance(state, *token)
            return state, (first, end)

        state, (first, end) = jax.lax.scan(one, state, (tokens.T.astype(jnp.int32), columns.T))
        # Spans do not overlap, so the sum of `+ query` at their first and `- query` at their end columns is, over a
        # span, the query that evicts it.
        query = jnp.where(end > first, columns.T, 0)
        row = jnp.broadcast_to(jnp.arange(len(tokens))[None], first.shape)
        steps = jnp.zeros((len(tokens), width + 1), jnp.int32).at[row, first].add(query).at[row, end].add(-query)
        evicted_at = jnp.cumsum(steps, axis=1)[:, :width]
        return state, jnp.where(evicted_at > 0, evicted_at, NEVER)
