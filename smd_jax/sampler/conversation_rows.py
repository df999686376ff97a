"""Assigns conversations to the rows of the cache; if there are more of them than rows, the others are parked on the
host.

    cache    [ 0 samples | 1 waits ]      parked  2 was answered, 3 has not begun
             [ 0 samples | 2 reads ]              1 waits,        3 has not begun         1 gave its row away

A row of the cache depends only on its own conversation, so it can be moved unchanged: see `smd_jax.cache.slots.settle`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from smd_jax.sampler.conversation import Conversations
from smd_jax.sampler.host_records import host_device


class ConversationRows:
    """The rows of the cache, and the parked conversations.

    Args:
      begin: begins the conversations of a slice, as many as there are rows.
      count: number of conversations. rows: of the cache; divide `count`.

    Raises:
      ValueError: more conversations than rows on several devices.

    Attributes:
      state: of the conversations in the cache, on the device.
      seats: `[rows]` number of each one's conversation.
      moved: how often a conversation took another one's row.
    """

    def __init__(self, begin: Callable[[slice], Conversations], count: int, rows: int) -> None:
        self.seats = np.arange(rows)
        self.moved = 0
        self._parked: dict[int, Conversations] = {}
        for first in range(rows, count, rows):
            others = begin(slice(first, first + rows))
            self._parked |= {first + row: _to_host(_take(others, jnp.int32(row))) for row in range(rows)}
        self.state = begin(slice(0, rows))
        devices = self.state.read.devices()
        if self._parked and len(devices) > 1:
            raise ValueError(
                f"expected decode_rows None on several devices, because conversations move between rows; got {rows} "
                f"on {len(devices)} devices"
            )
        self._device = next(iter(devices))

    @property
    def parked(self) -> list[int]:
        """Numbers of the parked conversations, in their order."""
        return sorted(self._parked)

    def exchange(self, seat: int, conversation: int) -> None:
        """A parked conversation takes a row, whose own is parked."""
        self._parked[int(self.seats[seat])] = _to_host(_take(self.state, jnp.int32(seat)))
        row = jax.device_put(self._parked.pop(conversation), self._device)
        self.state = _put(self.state, row, jnp.int32(seat))
        self.seats[seat] = conversation
        self.moved += 1

    def records(self) -> Conversations:
        """All conversations in their order, without caches, on the device of the cache."""
        if not self._parked:
            return _without_cache(self.state)
        here = {int(number): _to_host(_take(self.state, jnp.int32(row))) for row, number in enumerate(self.seats)}
        parts = [_without_cache(row) for _, row in sorted((here | self._parked).items())]
        joined = jax.tree.map(lambda *x: jnp.concatenate(x) if x[0].ndim else x[0], *parts)
        return jax.device_put(joined, self._device)


def _to_host(row: Conversations) -> Conversations:
    return jax.device_put(row, host_device())


def _without_cache(state: Conversations) -> Conversations:
    return state.replace(rows=state.rows.replace(cache=()))


@jax.jit
def _take(state: Conversations, row: Int[Array, ""]) -> Conversations:
    """One row; `cache_steps`, which has no rows, is unchanged."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1) if x.ndim else x, state)


@partial(jax.jit, donate_argnums=0)
def _put(state: Conversations, new: Conversations, row: Int[Array, ""]) -> Conversations:
    def put(x: Array, one: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, one, row, axis=0) if x.ndim else x

    return jax.tree.map(put, state, new)
