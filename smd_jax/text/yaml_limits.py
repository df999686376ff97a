"""Limits on YAML of strangers, checked before anything is built of it: size, depth, and what aliases expand to."""

from __future__ import annotations

import yaml

MAX_CHARACTERS = 2**20
MAX_DEPTH = 50
MAX_NODES = 100_000  # with every alias written out

# libyaml's where it is installed: 20 times as fast.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check_yaml(text: str, where: str) -> None:
    """Raises ValueError for YAML that is too large to be meant, deeply nested, or grows by aliases; or is no YAML.

    Args:
      where: names the file in the error.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{where}: expected YAML of at most {MAX_CHARACTERS:,} characters; got {len(text):,}")
    try:
        _check_events(text, where)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: expected YAML; got {str(error)[:300]}") from error


def _check_events(text: str, where: str) -> None:
    sizes = dict[str, int]()  # nodes below each anchor
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]  # (anchor, nodes so far), from the outermost on
    for event in yaml.parse(text, Loader=_LOADER):
        match event:
            case yaml.CollectionStartEvent(anchor=anchor):
                open_nodes.append((anchor, 1))
                if len(open_nodes) > MAX_DEPTH:
                    raise ValueError(f"{where}: expected YAML nested at most {MAX_DEPTH} deep; got more")
                continue
            case yaml.CollectionEndEvent():
                anchor, size = open_nodes.pop()
            case yaml.ScalarEvent():
                anchor, size = event.anchor, 1
            case yaml.AliasEvent():
                if event.anchor in [anchor for anchor, _ in open_nodes]:
                    raise ValueError(f"{where}: expected YAML that ends; got an alias of what it is a part of")
                anchor, size = None, sizes.get(event.anchor, 1)
            case _:
                continue
        if anchor is not None:
            sizes[anchor] = size
        outer, before = open_nodes[-1]
        open_nodes[-1] = outer, before + size
        if before + size > MAX_NODES:
            raise ValueError(
                f"{where}: expected YAML of at most {MAX_NODES:,} values; got more, with aliases written out"
            )
