"""The parser of collectives in compiled programs, on lines as XLA prints them."""

import pytest

from lib.collectives import collectives, device_groups

pytestmark = pytest.mark.study

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
    gather, scatter, reduced, permuted = collectives(PROGRAM, 4)
    # 1,024 numbers of 2 bytes, of which a device sends 3 of 4 parts.
    assert (gather.kind, gather.payload, gather.sent, gather.rounds) == ("all-gather", 2048, 1536, 1)
    assert (scatter.kind, scatter.payload, scatter.sent) == ("reduce-scatter", 2 * 2 * 32, 64)
    assert scatter.groups == ((0, 2), (1, 3))
    assert (reduced.payload, reduced.sent, reduced.rounds, reduced.loop) == (4096, 4096, 3, False)
    assert (permuted.kind, permuted.sent, permuted.loop) == ("collective-permute", 16, True)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        (
            "replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_2'}",
            ((0, 2, 4, 6), (1, 3, 5, 7)),
        ),
        ("replica_groups={}", (tuple(range(8)),)),
        ("source_target_pairs={{0,4},{4,0}}", ((0, 4), (4, 0))),
    ],
)
def test_groups_of_devices(text: str, groups: tuple[tuple[int, ...], ...]):
    assert device_groups(f"%x = f32[] all-reduce(%y), {text}, to_apply=%add", 8) == groups


def test_groups_that_cannot_be_read():
    with pytest.raises(ValueError, match="expected replica_groups or source_target_pairs"):
        device_groups("%x = f32[] all-reduce(%y), replica_groups=new[1]", 8)
