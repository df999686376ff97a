"""A decorator for the pytree classes of the library."""

from __future__ import annotations

from typing import no_type_check

any_leaves = no_type_check
"""Decorates pytree classes whose annotations describe arrays.

The annotations give the shapes that a user sees. JAX rebuilds the same classes with other leaves (shardings, axis
numbers, None), which shape checks at construction would refuse. So functions check their arguments, and constructors do
not.
"""
