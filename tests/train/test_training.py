"""Files of a GRPO run: completions, masks, times."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from smd_jax.monitor.completions import CompletionsLog, load_masks
from smd_jax.monitor.metrics_log import read_metrics
from smd_jax.runs.run import train
from smd_jax.runs.run_config import RunConfig
from smd_jax.train.samples import Samples
from tests.documented_metrics import documented
from tests.toy_loop import CONFIG, new_loop, new_state, share_programs


def test_completions_masks_and_times_of_a_run(tmp_path):
    seen = []

    def watch(step: int, samples: Samples) -> None:
        seen.append((step, samples))
        log(step, samples)

    unwatched = new_loop()
    log = CompletionsLog(tmp_path, unwatched.tokenizer, table_rows=0, masks=3)
    loop = dataclasses.replace(unwatched, watch=watch, watch_every=2)
    share_programs(loop)
    train(loop, new_state(), RunConfig(steps=4), tmp_path)
    assert [step for step, _ in seen] == [0, 2, 3], "every second, and the last"
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    for row in metrics:
        assert documented("Times") - {"time/environment"} <= row.keys()
        assert 0 < row["time/rollout"] + row["time/grading"] + row["time/update"] <= row["step_time"] + 1e-3
        assert row["rollout/tokens"] == 8 * row["completions/mean_length"]
        assert row["rollout/tokens_per_second"] == pytest.approx(row["rollout/tokens"] / row["time/rollout"])
    for step, samples in seen:
        assert samples.rewards.mean() == pytest.approx(metrics[step]["reward"])
        groups = samples.advantages.reshape(-1, CONFIG.group_size)
        np.testing.assert_allclose(groups.mean(1), 0, atol=1e-6)
    assert sorted(path.name for path in (tmp_path / "completions").glob("*.parquet")) == [
        *("completions_00000.parquet", "completions_00002.parquet", "completions_00003.parquet")
    ]
    trajectory = seen[2][1].trajectory
    for row, mask in enumerate(load_masks(tmp_path / "completions" / "masks_00003.npz")):
        # Against the explicit mask of the same rollout, without its padding.
        keep = np.flatnonzero(trajectory.valid[row])
        expected = np.asarray(trajectory.mask.to_boolean())[row][..., keep[0] : keep[-1] + 1, keep[0] : keep[-1] + 1]
        causal = np.tril(np.ones(expected.shape[-2:], bool))
        for query in range(len(keep)):
            np.testing.assert_array_equal(mask.forgotten(query), causal[query] & ~expected[:, :, query])
