"""What all pytrees of the kernels have in common."""

from __future__ import annotations

from typing import no_type_check

any_leaves = no_type_check
"""Decorates classes whose annotations describe arrays, but which hold other things, too.

JAX rebuilds pytrees with leaves that are no arrays (tracers' shapes, shardings, axis numbers, None). A Pallas kernel
gets references in their place, and the fields of its scratch are types of buffers before it runs. Checks at
construction would refuse all of these: shapes are checked where arrays enter a function.
"""
