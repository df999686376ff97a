"""YAML of bounded size and depth, without aliases: counted before a value is built.

An alias of an alias grows without end (400 bytes fill the memory), and PyYAML's parser recurses into nested lists.
"""

from __future__ import annotations

from typing import Any

import yaml

MOST_CHARACTERS = 2**17
MOST_DEPTH = 20
_OPEN = (yaml.SequenceStartEvent, yaml.MappingStartEvent)
_CLOSE = (yaml.SequenceEndEvent, yaml.MappingEndEvent)


def load(text: str) -> Any:
    """The value of a YAML text.

    Raises:
      ValueError: no YAML; a text that is too long, nested too deeply, or has an alias; a value that Python cannot hold.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"expected at most {MOST_CHARACTERS:,} characters of YAML; got {len(text):,}")
    try:
        # Events come one by one, and nothing is built of them.
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"expected YAML without aliases; got *{event.anchor:.80}")
            depth += isinstance(event, _OPEN) - isinstance(event, _CLOSE)
            if depth > MOST_DEPTH:
                raise ValueError(f"expected YAML of at most {MOST_DEPTH} levels; got more")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"expected YAML; got {str(error):.500}") from error
    # A key that is a list, a date that does not exist, a number of too many digits.
    except (TypeError, OverflowError) as error:
        raise ValueError(f"expected YAML; got {str(error):.300}") from error
