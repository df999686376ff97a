"""Grouped names in docstrings, for mkdocstrings: `keys, values: [batch, …]` becomes one entry for each name.

Google's style has one name per entry; ours groups names that share a sentence, and the text would be read as a type.
"""

import re

import griffe

SECTION = re.compile(r"^(?P<indent> *)(?:Args|Attributes|Returns|Raises):$")
GROUP = re.compile(r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+)(?P<text>: .*)$")


class GroupedNames(griffe.Extension):
    """Splits grouped names before docstrings are parsed."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = split_groups(obj.docstring.value)


def split_groups(docstring: str) -> str:
    """The docstring with an entry for each name of a group, all with the same text."""
    lines = docstring.splitlines()
    result: list[str] = []
    in_section = False
    index = 0
    while index < len(lines):
        line = lines[index]
        if SECTION.match(line):
            in_section = True
        elif line.strip() and not line.startswith(" "):
            in_section = False
        group = GROUP.match(line) if in_section else None
        if group is None:
            result.append(line)
            index += 1
            continue
        end = index + 1
        while end < len(lines) and lines[end].startswith(group["indent"] + " "):
            end += 1
        for name in group["names"].split(", "):
            result += [group["indent"] + name + group["text"], *lines[index + 1 : end]]
        index = end
    return "\n".join(result)
