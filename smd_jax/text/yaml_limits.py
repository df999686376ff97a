"""YAML of options, with limits that are checked before a value is built."""

from __future__ import annotations

from typing import Any

import yaml

MAX_CHARACTERS = 2**17
MAX_DEPTH = 20  # of lists and mappings


def load_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
      ValueError: no YAML, or a value that Python cannot hold; more than `MAX_CHARACTERS`; deeper than `MAX_DEPTH`;
        aliases, of which 400 bytes can fill the memory.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"expected YAML of at most {MAX_CHARACTERS:,} characters; got {len(text):,}")
    try:
        _check_events(text)
        return yaml.safe_load(text)
    # A tag of another program; a key that is a list, a date that does not exist, a number of too many digits.
    except (yaml.YAMLError, TypeError, OverflowError) as error:
        raise ValueError(f"expected YAML; got {str(error):.300}") from error


def _check_events(text: str) -> None:
    depth = 0
    for event in yaml.parse(text):  # one by one: nothing is built, and nothing recurses
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"expected YAML of at most {MAX_DEPTH} levels; got more")
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"expected YAML without aliases; got *{event.anchor:.80}")
