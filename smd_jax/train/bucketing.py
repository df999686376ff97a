"""How many columns of a rollout the learner runs over: what its longest response needs, in a few sizes.

A rollout has room for `max_new_tokens` a row, and a learner would work as long on padding as on tokens. Every size is a
program of its own, so there are few of them:

    max_new_tokens 256, 4 sizes       64, 128, 192, 256         longest response 97 tokens ─► 128
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from smd_jax.message.trajectory import Trajectory

# Columns between two widths at least: to compile one more program would take longer than fewer columns ever save.
LEAST_STEP = 32


def response_widths(max_new_tokens: int, sizes: int, ways: int = 1) -> tuple[int, ...]:
    """At most `sizes` numbers of columns in equal steps of at least `LEAST_STEP`, ascending; the last is
    `max_new_tokens`. Where that many columns divide over `ways` devices behind a prompt, the others do, too: they are
    the next numbers that differ from it by a multiple of `ways`."""
    count = max(min(sizes, max_new_tokens // max(LEAST_STEP, ways)), 1)
    equal = (-(-max_new_tokens * number // count) for number in range(1, count + 1))
    return tuple(width + (max_new_tokens - width) % ways for width in equal)


def shortened(trajectory: Trajectory, widths: tuple[int, ...]) -> Trajectory:
    """The rollout with the least of these widths that holds its longest response. Reads the values, so it cannot run
    under jit.

    Args:
      widths: ascending; the last holds every response.
    """
    longest = int(jnp.max(trajectory.lengths()))
    width = next(width for width in widths if width >= longest)
    return trajectory if width == widths[-1] else _first_columns(trajectory, width)


# One program a width, in place of one a field.
@partial(jax.jit, static_argnums=1)
def _first_columns(trajectory: Trajectory, width: int) -> Trajectory:
    return trajectory.first_columns(width)
