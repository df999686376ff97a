"""The metrics that docs/monitoring.md documents."""

import re

from tests.paths import ROOT

PAGE = ROOT / "docs" / "monitoring.md"
HEADING = re.compile(r"\| \*\*(.+)\*\*")  # of a group, with or without a condition behind it
METRIC = re.compile(r"\| `(\S+)` \| \S.* \|")


def documented(*groups: str) -> frozenset[str]:
    """Names of the metrics in these groups of the table, by default in all; `{name}` is a placeholder."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## Metrics\n")[2].partition("\n## ")[0]
    of_group: dict[str, list[str]] = {}
    for line in [line for line in section.splitlines() if line.startswith("|")][2:]:
        if heading := HEADING.match(line):
            names = of_group.setdefault(heading[1], [])
            continue
        metric = METRIC.fullmatch(line)
        assert metric is not None, f"expected a name and its meaning; got {line}"
        names.append(metric[1])
    found = [name for group in groups or of_group for name in of_group[group]]
    assert len(found) == len(set(found)), "each once"
    return frozenset(found)


METRICS = documented()
MACHINE_METRICS = documented("Times", "Memory")
