"""Decorator for pytrees with jaxtyping annotations."""

from __future__ import annotations

from typing import no_type_check

any_leaves = no_type_check
"""Turns off runtime shape checks in the constructor of a pytree class.

JAX rebuilds pytrees with leaves that are not arrays: tracers, shardings, axis numbers, None. Pallas passes references
to kernels in the same classes, and buffer types as scratch. Functions that take the pytree still check its shapes.
"""
