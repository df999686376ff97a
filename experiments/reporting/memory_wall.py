"""How many completions fit."""

from __future__ import annotations

from collections.abc import Sequence

from reporting.page import Section, machines, table
from study.files import Row

LENGTHS = (2048, 8192, 32768)
CACHES = ("dense", "dense, 4 bits", "512 + 128", "2048 + 128")


def section(rows: Sequence[Row]) -> Section:
    one = {
        (row["model"], row["cache"], row["length"]): row
        for row in rows
        if row["learner"] == "full" and row["devices"] == 1 and row["memory"] == "80GB"
    }
    lora = {
        (row["model"], row["cache"], row["length"]): row
        for row in rows
        if row["learner"] == "lora" and row["devices"] == 1 and row["memory"] == "80GB"
    }
    lines = []
    for model, learner, found in (("0.5B", "full", one), ("1.5B", "full", one), ("7B", "lora", lora)):
        for cache in CACHES:
            counts = [found[model, cache, length]["rows"] for length in LENGTHS]
            lines.append([f"{model}, {learner}, {cache}", *(f"{count:,}" for count in counts)])
    long, short = lora["7B", "dense", 32768]["rows"], lora["7B", "512 + 128", 32768]["rows"]
    whole, large = lora["7B", "dense", 2048]["rows"], lora["7B", "2048 + 128", 2048]["rows"]
    return Section(
        "The memory wall",
        "How many completions fit into 80 GB beside the learner, with the whole cache, with a budget, with 4 bits?",
        f"At 32,768 tokens a 7B model with adapters has room for {long} completions with the whole cache and for "
        f"{short:,} with 512 + 128 keys; a budget as large as the sequences only costs: at 2,048 tokens {whole} with "
        f"the whole cache and {large} with 2,048 + 128 keys. Planned by the library, not measured on a device.",
        table(["model, learner, cache", *(f"{length:,} tokens" for length in LENGTHS)], lines)
        + "\n\nAll models, learners and budgets: [the memory wall](docs/memory_wall.md).",
        "python experiments/memory_wall.py --out experiments/results/memory_wall.json",
        f"some minutes on one core, {machines(rows)}",
        ("memory_wall.json",),
    )
