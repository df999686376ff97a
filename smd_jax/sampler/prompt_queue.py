"""Queue of waiting prompts for the engine.

Prompts are read in batches of one size, and a program is compiled for each width. So prompts wait in queues by length:

    whole       widths 25, 50, 100 of a prompt of 100 columns: a prompt waits at the first width that holds it
    in chunks   prompts of up to one chunk by widths, as above; longer ones by their number of chunks, because one
                program for all columns skips chunks that are padding in the whole batch
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

NARROWEST = 16  # columns of the smallest bucket


class PromptsToRead(NamedTuple):
    """The next batch.

    Attributes:
      prompts: indices of the prompts.
      width: columns, counted from the prompts' end, that hold all of them.
    """

    prompts: list[int]
    width: int


@dataclass(frozen=True)
class PromptQueue:
    """Waiting prompts; `next` removes a batch.

    Attributes:
      widths: width of each queue's batches, in columns.
      queues: prompts' indices, ascending.
    """

    widths: list[int]
    queues: list[deque[int]]

    @classmethod
    def of(cls, lengths: np.ndarray, width: int, chunk: int | None) -> PromptQueue:
        """The queue of all prompts.

        Args:
          lengths: `[prompts]` tokens of each prompt.
          width: columns of their batch.
          chunk: columns read at once; None: all.
        """
        widths = buckets(width if chunk is None else min(chunk, width))
        # The first width that is not below the length.
        queue_of = np.searchsorted(widths, lengths)
        if chunk is not None and chunk < width:
            chunks = -(-lengths // chunk)
            # Queues of two chunks, three chunks and so on follow the last queue by width.
            queue_of = np.where(chunks > 1, len(widths) + chunks - 2, queue_of)
            most_chunks = -(-width // chunk)
            # All of these are read in the full width, by one program that skips padding.
            widths = widths + [width] * (most_chunks - 1)
        queues = [deque(np.flatnonzero(queue_of == index).tolist()) for index in range(len(widths))]
        return cls(widths, queues)

    def __bool__(self) -> bool:
        """Whether any prompt waits."""
        return any(self.queues)

    def next(self, most: int) -> PromptsToRead:
        """The prompt with the lowest index, and up to `most - 1` others from its queue."""
        waiting = (index for index, queue in enumerate(self.queues) if queue)
        index = min(waiting, key=lambda index: self.queues[index][0])
        queue = self.queues[index]
        prompts = [queue.popleft() for _ in range(min(len(queue), most))]
        return PromptsToRead(prompts, self.widths[index])


def buckets(width: int) -> list[int]:
    """Widths of prefill batches, ascending: the whole, its half, its quarter, …"""
    widths = [width]
    while widths[0] > NARROWEST:
        widths.insert(0, -(-widths[0] // 2))
    return widths
