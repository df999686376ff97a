"""Fields that a configuration got later. At its default such a field is left out of the configuration's repr and of
saved settings: what was written before the field existed stays equal to what is written now.
"""

from __future__ import annotations

import dataclasses
from typing import Any

_ADDED = "added"


def added(default: Any) -> Any:
    """A dataclass field that was added with a default under which nothing changes."""
    return dataclasses.field(default=default, metadata={_ADDED: True})


def written_fields(config: Any) -> list[dataclasses.Field[Any]]:
    """The fields of a dataclass, without added ones that have their default, and without those that do not compare:
    arrays that a digest stands for."""
    return [
        field
        for field in dataclasses.fields(config)
        if field.compare and (_ADDED not in field.metadata or getattr(config, field.name) != field.default)
    ]


class WrittenRepr:
    """Base of dataclasses with added fields, which are declared with `repr=False`."""

    def __repr__(self) -> str:
        values = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in written_fields(self))
        return f"{type(self).__qualname__}({values})"
