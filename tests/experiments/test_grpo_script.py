"""experiments/grpo.py, GRPO in one file: exact replay, the saved model, and its length."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import smd_jax as smd
from tests.paths import ROOT

SCRIPT = ROOT / "experiments" / "grpo.py"


def run(*words: str) -> list[tuple[float, float]]:
    """Reward and largest |Δ log p| of each step."""
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=True)
    steps = re.findall(r"reward (\S+) .*largest \|Δ log p\| (\S+)", done.stdout)
    return [(float(reward), float(difference)) for reward, difference in steps]


@pytest.mark.study
def test_replay_is_exact_and_the_model_is_saved(tmp_path: Path):
    steps = run("--steps", "2", "--out", str(tmp_path))
    assert len(steps) == 2
    assert all(0 < reward < 1 and difference <= 1e-5 for reward, difference in steps)
    config, params = smd.load_checkpoint(tmp_path / "trained")
    assert config.num_layers == 2 and params["embed"]["embedding"].shape[0] == config.vocab_size
    # A learner that ignores the evictions is another policy than the sampler.
    assert all(difference > 0.05 for _, difference in run("--steps", "1", "--dense"))


def test_the_script_is_short_and_imports_only_the_library():
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    ours = {line for line in lines if re.match(r"(from|import) (smd|study|lib)", line)}
    assert ours == {"import smd_jax as smd", "from smd_jax.testing import write_random_checkpoint"}
