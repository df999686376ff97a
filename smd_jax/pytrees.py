"""What all pytrees of the library have in common."""

from __future__ import annotations

from typing import no_type_check

any_leaves = no_type_check
"""Decorates pytree classes whose annotations describe arrays.

The annotations say which shapes a user sees. JAX itself rebuilds the same classes with other leaves (tracers' shapes,
shardings, axis numbers, None), which shape checks at construction would refuse: checks are made where arrays enter a
function, not where a pytree is put together.
"""
