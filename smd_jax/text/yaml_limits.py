"""Limits on YAML, checked before a value is built: size, depth, aliases.

An alias of an alias grows without end (400 bytes fill the memory), and PyYAML's parser recurses into nested lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

# libyaml's where it is installed: 20 times as fast.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class YamlLimits:
    """What a YAML text may have.

    Attributes:
      characters: at most.
      depth: levels of lists and mappings.
      values: with every alias written out.
      aliases: whether there may be any.
    """

    characters: int
    depth: int
    values: int = 100_000
    aliases: bool = True


CARD = YamlLimits(2**20, 50)  # the card of a data set
OPTIONS = YamlLimits(2**17, 20, aliases=False)  # files of options, and values of options


def load_yaml(text: str, limits: YamlLimits) -> Any:
    """The value of a YAML text.

    Raises:
      ValueError: as `check_yaml`; a value that Python cannot hold.
    """
    check_yaml(text, limits)
    try:
        return yaml.safe_load(text)
    # A tag of another program; a key that is a list, a date that does not exist, a number of too many digits.
    except (yaml.YAMLError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"expected YAML; got {str(error):.300}") from error


def check_yaml(text: str, limits: YamlLimits) -> None:
    """Raises ValueError for a text that is no YAML, or beyond the limits."""
    if len(text) > limits.characters:
        raise ValueError(f"expected YAML of at most {limits.characters:,} characters; got {len(text):,}")
    try:
        _check_events(text, limits)
    except yaml.YAMLError as error:
        raise ValueError(f"expected YAML; got {str(error):.300}") from error


def _check_events(text: str, limits: YamlLimits) -> None:
    sizes = dict[str, int]()  # nodes below each anchor
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]  # (anchor, nodes so far), from the outermost on
    # Events come one by one, and nothing is built of them.
    for event in yaml.parse(text, Loader=_LOADER):
        match event:
            case yaml.CollectionStartEvent(anchor=anchor):
                open_nodes.append((anchor, 1))
                if len(open_nodes) - 1 > limits.depth:
                    raise ValueError(f"expected YAML of at most {limits.depth} levels; got more")
                continue
            case yaml.CollectionEndEvent():
                anchor, size = open_nodes.pop()
            case yaml.ScalarEvent():
                anchor, size = event.anchor, 1
            case yaml.AliasEvent() if not limits.aliases:
                raise ValueError(f"expected YAML without aliases; got *{event.anchor:.80}")
            case yaml.AliasEvent():
                if event.anchor in [anchor for anchor, _ in open_nodes]:
                    raise ValueError("expected YAML that ends; got an alias inside its own anchor")
                anchor, size = None, sizes.get(event.anchor, 1)
            case _:
                continue
        if anchor is not None:
            sizes[anchor] = size
        outer, before = open_nodes[-1]
        open_nodes[-1] = outer, before + size
        if before + size > limits.values:
            raise ValueError(f"expected YAML of at most {limits.values:,} values; got more, with aliases written out")
