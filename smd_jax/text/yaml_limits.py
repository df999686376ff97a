"""YAML of options and of data sets' cards, with limits that are checked before a value is built."""

from __future__ import annotations

from collections import Counter
from typing import Any

import yaml

MAX_CHARACTERS = 2**17
MAX_DEPTH = 20  # of lists and mappings
MAX_VALUES = 100_000  # with aliases written out
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, where it is installed, is 20 times as fast


def load_yaml(text: str, characters: int = MAX_CHARACTERS, depth: int = MAX_DEPTH, allow_aliases: bool = False) -> Any:
    """The value of a YAML text.

    Raises:
      ValueError: no YAML, or a value that Python cannot hold; too many characters; too deep; a name twice in a mapping;
        aliases, of which 400 bytes can fill the memory. With `allow_aliases`, which other programs' files need, the
        last of equal names counts, and at most `MAX_VALUES` values are allowed when aliases are written out.
    """
    if len(text) > characters:
        raise ValueError(f"expected YAML of at most {characters:,} characters; got {len(text):,}")
    try:
        _check_events(text, depth, allow_aliases)
        value = yaml.load(text, yaml.SafeLoader if allow_aliases else _UniqueNames)  # noqa: S506
    # A tag of another program; a key that is a list, a date that does not exist, a number of too many digits.
    except (yaml.YAMLError, TypeError, OverflowError) as error:
        raise ValueError(f"expected YAML; got {str(error):.300}") from error
    if allow_aliases:
        _check_values(value)
    return value


class _UniqueNames(yaml.SafeLoader):
    """Refuses a mapping in which a name occurs twice: YAML would take the last value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = Counter((name.tag, name.value) for name, _ in node.value if isinstance(name.value, str))
        for (_, name), number in names.items():
            if number > 1:
                raise ValueError(f"expected {name!r:.80} once in a mapping; got it {number} times")
        return node


def _check_events(text: str, most: int, allow_aliases: bool) -> None:
    depth = 0
    for event in yaml.parse(text, LOADER):  # one by one: nothing is built, and nothing recurses
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > most:
            raise ValueError(f"expected YAML of at most {most} levels; got more")
        if isinstance(event, yaml.AliasEvent) and not allow_aliases:
            raise ValueError(f"expected YAML without aliases; got *{event.anchor:.80}")


def _check_values(value: Any) -> None:
    """Raises ValueError for more than `MAX_VALUES`. Values shared by aliases are built once, and counted at every
    use."""
    stack, count = [value], 0
    while stack:
        item = stack.pop()
        stack += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        count += 1
        if count + len(stack) > MAX_VALUES:
            raise ValueError(f"expected YAML of at most {MAX_VALUES:,} values with aliases written out; got more")
