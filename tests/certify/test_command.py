"""Exit status and reports of smd-certify."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import smd_jax as smd
from smd_jax.certify.record import arrays_of, save_record
from smd_jax.commands.certify import main
from smd_jax.testing import write_random_checkpoint
from tests.certify.conftest import CONFIG, sample_rollout


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    write_random_checkpoint(place, config=CONFIG)
    return place


def test_exit_status_and_reports_of_the_command(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    params = smd.load_checkpoint(directory)[1]
    save_record(tmp_path / "good.npz", arrays_of(sample_rollout(params)))
    main([str(tmp_path / "good.npz"), "--model", str(directory), "--out", str(tmp_path / "good.json")])
    assert "one policy" in capsys.readouterr().out
    assert json.loads((tmp_path / "good.json").read_text(encoding="utf-8"))["one_policy"] is True
    bad = arrays_of(sample_rollout(params))
    bad["logprobs"] = np.roll(bad["logprobs"], 1, 1)
    save_record(tmp_path / "bad.npz", bad)
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "bad.npz"), "--model", str(directory), "--out", str(tmp_path / "bad.html")])
    assert stopped.value.code == 1 and "tokens misaligned" in capsys.readouterr().out
    page = (tmp_path / "bad.html").read_text(encoding="utf-8")
    assert "tokens misaligned" in page and "data:image/png;base64," in page and "http" not in page
    bare = shutil.copytree(directory, tmp_path / "bare", ignore=shutil.ignore_patterns("*token*", "*.jinja"))
    main([str(tmp_path / "good.npz"), "--model", str(bare)])
    assert "no tokenizer: BOS token and chat template are not tested" in capsys.readouterr().out
    main([str(tmp_path / "good.npz"), "--model", str(bare), "--tokenizer", str(directory)])
    assert "no tokenizer" not in capsys.readouterr().out
    overflowing = {**params, "norm": {"scale": jnp.full(CONFIG.hidden_size, 3e38)}}
    smd.save_checkpoint(tmp_path / "nan", overflowing, CONFIG)
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "good.npz"), "--model", str(tmp_path / "nan"), "--out", str(tmp_path / "nan.json")])
    assert stopped.value.code == 2 and "from the learner; got NaN for" in capsys.readouterr().err
    assert not (tmp_path / "nan.json").exists()
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "missing.npz"), "--model", str(directory)])
    assert stopped.value.code == 2 and "expected a readable record" in capsys.readouterr().err
