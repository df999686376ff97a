"""What the studies share: errors in the words of their flags, and where a result comes from."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ROOT / "experiments"
RESULTS = sorted((EXPERIMENTS / "results").glob("*.json"))


def module(name: str) -> ModuleType:
    with mock.patch.object(sys, "path", [str(EXPERIMENTS), *sys.path]):
        return importlib.import_module(name)


@dataclasses.dataclass
class Args:
    microbatch: int = 1
    runs: Path = Path()


def test_an_option_is_explained_by_the_flag_that_the_script_has():
    said = module("flags").explanation("lower microbatch_size or prefill_chunk", Args)
    assert said == "lower microbatch_size or prefill_chunk\nIn flags: microbatch_size is --microbatch."
    # "buffer" is a word of the message here, and no flag of this script.
    assert module("flags").explanation("a buffer is full", Args) == "a buffer is full"


def test_what_cannot_be_ends_in_a_message_and_status_2(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end, module("flags").explained(Args):
        raise FileExistsError("expected no earlier run; name another directory")
    assert end.value.code == 2
    said = "expected no earlier run; name another directory\nIn flags: directory is --runs.\n"
    assert capsys.readouterr().err == said
    with pytest.raises(TypeError), module("flags").explained(Args):  # a bug keeps its traceback
        raise TypeError


def test_too_little_memory_is_one_message(tmp_path: Path):
    command = [sys.executable, str(EXPERIMENTS / "quickstart.py"), "--memory", "1KiB", "--runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and "expected a plan of at most 1.00 KiB" in done.stderr


INTEL = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 207
model name\t: Intel(R) Xeon(R) Processor
stepping\t: 2

processor\t: 1
model name\t: another
"""


def test_a_cpu_is_named_with_its_numbers():
    describe = module("provenance").describe_cpu
    assert describe(INTEL, 2) == "2 x Intel(R) Xeon(R) Processor (family 6, model 207, stepping 2)"
    with mock.patch("platform.machine", lambda: "aarch64"):
        assert describe("processor\t: 0\nBogoMIPS\t: 50.00\n", 4) == "4 x aarch64"


def test_a_command_has_no_path_of_this_machine():
    script = str(EXPERIMENTS / "bench" / "update.py")
    with mock.patch.object(sys, "argv", [script, "--torch-python", "/home/me/torch/bin/python", "--json"]):
        said = module("provenance").command_line()
    assert said == "python experiments/bench/update.py --torch-python python --json"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_committed_results_say_where_they_come_from(path: Path):
    content = json.loads(path.read_text())
    rows = content if isinstance(content, list) else [content]
    for row in rows:
        assert row["cpu"]
        if path.name == "showdown_curves.json":  # beside showdown.json, which has a command for each row
            continue
        assert row["date"] and row["commit"]
        script = row["command"].split()[1]
        assert (ROOT / script).is_file(), f"expected the script of {row['command']!r}; got nothing at {script}"
