"""What `experiments/collectives.py` reads in a compiled program, on lines as XLA prints them; and what it found."""

import json

import numpy as np
import pytest

import collectives
from collectives import axes_of, device_groups
from tests.paths import ROOT

pytestmark = pytest.mark.study

RESULTS = ROOT / "experiments" / "results" / "collectives.json"

PROGRAM = """
%body (x: f32[4]) -> f32[4] {
  %all-reduce.1 = f32[1024]{0} all-reduce(%a), replica_groups={{0,1},{2,3}}, to_apply=%add
}

%round (x: f32[4]) -> f32[4] {
  %p = f32[4]{0} collective-permute(%a), source_target_pairs={{0,1},{2,3},{1,0},{3,2}}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %g = (bf16[256]{0}, bf16[1024]{0}) all-gather-start(%a), replica_groups=[1,4]<=[4], dimensions={0}
  %d = bf16[1024]{0} all-gather-done(%g)
  %s = (f32[8]{0}, f32[8]{0}) reduce-scatter(%a, %b), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add
  %w = f32[4]{0} while(%c), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %v = f32[4]{0} while(%c), condition=%cond, body=%round
}
"""


def test_collectives_of_a_program():
    gather, scatter, reduced, permuted = collectives.collectives(PROGRAM, 4)
    # 1,024 numbers of 2 bytes, of which a device sends 3 of 4 parts.
    assert (gather.kind, gather.payload, gather.sent, gather.rounds) == ("all-gather", 2048, 1536, 1)
    assert (scatter.kind, scatter.payload, scatter.sent) == ("reduce-scatter", 2 * 2 * 32, 64)
    assert scatter.groups == ((0, 2), (1, 3))
    assert (reduced.payload, reduced.sent, reduced.rounds, reduced.loop) == (4096, 4096, 3, False)
    assert (permuted.kind, permuted.sent, permuted.loop) == ("collective-permute", 16, True)


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", "tensor"),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", "fsdp"),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", "data"),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_2'}", "data+fsdp"),
        ("replica_groups={}", "data+fsdp+tensor"),
        ("source_target_pairs={{0,4},{4,0}}", "data"),
    ],
)
def test_the_axis_of_a_group(text: str, axis: str):
    groups = device_groups(f"%x = f32[] all-reduce(%y), {text}, to_apply=%add", 8)
    assert axes_of(groups, (2, 2, 1, 2)) == axis


def test_groups_that_cannot_be_read():
    with pytest.raises(ValueError, match="expected replica_groups or source_target_pairs"):
        device_groups("%x = f32[] all-reduce(%y), replica_groups=new[1]", 8)


def test_a_sequence_axis_follows_the_formula():
    found = json.loads(RESULTS.with_name("collectives_sequence.json").read_text(encoding="utf-8"))
    assert found["formulas"] == collectives.formulas(found["rows"])
    assert {row["mesh"] for row in found["rows"]} == {layout.name for layout in collectives.SEQUENCE_LAYOUTS}
    for row in found["formulas"]:
        # Of the weights it is a bound: what one pass has gathered another may keep.
        least = 0.95 if row["what"] == "weights" else 0.999
        assert least < row["payload_bytes"] / row["formula_bytes"] < 1.001, row
    assert sum(row["what"] == "tokens against heads" for row in found["formulas"]) == 4


def test_what_was_found_follows_the_formula():
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert found["formulas"] == collectives.formulas(found["rows"])
    assert {row["devices"] for row in found["rows"]} == {8, 64, 512, 4096}
    # The page names both exceptions.
    usual = [
        row
        for row in found["formulas"]
        if not (
            row["mesh"].startswith("data 1, fsdp")
            and row["devices"] > 1
            and row["mesh"].endswith("tensor 1")
            and row["what"] == "gradients"
        )
    ]
    ratios = [row["payload_bytes"] / row["formula_bytes"] for row in usual]
    assert len(ratios) > 25
    np.testing.assert_allclose(ratios, 1, atol=0.01)
