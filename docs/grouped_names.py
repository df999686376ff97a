"""Splits docstring entries of several names, because mkdocstrings supports only one name per entry.

keys, values: `[batch, …]` what a cache holds        ->     two entries with this text
group: rows of a prompt. width: columns of it        ->     two entries, each with its own
"""

import re
from collections.abc import Iterator

import griffe

SECTION = re.compile(r"^ *(?:Args|Attributes):$")
NAMES = r"\w+(?:, \w+)*"
ENTRY = re.compile(rf"^(?P<indent> +)(?P<names>{NAMES}): ")
FURTHER = re.compile(rf"[.;]\s+({NAMES}): ")


class GroupedNames(griffe.Extension):
    """Splits entries after a package is loaded and before its docstrings are parsed."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: object) -> None:
        for documented in objects_below(pkg):
            if documented.docstring is not None:
                documented.docstring.value = split_entries(documented.docstring.value, names_of(documented))


def objects_below(parent: griffe.Object) -> Iterator[griffe.Object]:
    yield parent
    for member in parent.members.values():
        if isinstance(member, griffe.Object):  # imported names are documented in their own module
            yield from objects_below(member)


def names_of(documented: griffe.Object) -> set[str]:
    """Names that a docstring may document: parameters of a function, members of a class."""
    if isinstance(documented, griffe.Function):
        return {parameter.name for parameter in documented.parameters}
    return set(documented.members)


def split_entries(docstring: str, known: set[str]) -> str:
    """Gives each known name an entry; the rest of the docstring is unchanged."""
    result: list[str] = []
    in_section = False
    lines = iter([*docstring.splitlines(), ""])
    line = next(lines, None)
    while line is not None:
        if line and not line.startswith(" "):
            in_section = SECTION.match(line) is not None
        entry = ENTRY.match(line) if in_section else None
        if entry is None:
            result.append(line)
            line = next(lines, None)
            continue
        text = [line.removeprefix(entry.group())]
        line = next(lines, None)
        while line is not None and line.startswith(entry["indent"] + " "):
            text.append(line)
            line = next(lines, None)
        for names, words in parts(entry["names"], "\n".join(text), known):
            result += [f"{entry['indent']}{name}: {words}" for name in names.split(", ")]
    return "\n".join(result).rstrip()


def parts(names: str, text: str, known: set[str]) -> Iterator[tuple[str, str]]:
    """Yields the names and the text of an entry, then those of further names inside it."""
    begin = 0
    for further in FURTHER.finditer(text):
        if set(further[1].split(", ")) <= known:
            yield names, text[begin : further.start() + 1]
            names, begin = further[1], further.end()
    yield names, text[begin:]
