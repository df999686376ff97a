"""Cycles that are read from machine code, against counts by hand."""

from __future__ import annotations

import sys
from unittest import mock

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.study

with mock.patch.object(sys, "path", [str(ROOT / "experiments"), *sys.path]):
    import machine_code

# A loop of one product from registers and one from shared memory, with a loop around it, and what waits at a barrier
# behind the end of the kernel and jumps back.
SASS = """
.L_x_1:
        /*0000*/                   MOV R1, R2 ;
.L_x_2:
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R88, R24, gdesc[UR20].tnspB, R88 ;
        /*0030*/                   MUFU.EX2 R3, R3 ;
        /*0040*/                   ISETP.GE.AND P0, PT, R3, R4, PT ;
        /*0050*/              @!P1 LDS.64 R5, [R6] ;
        /*0060*/               @P0 BRA `(.L_x_2) ;
        /*0070*/               @P1 BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   NANOSLEEP R1 ;
        /*00a0*/                   BRA `(.L_x_2) ;
"""


def test_innermost_loops_alone():
    [loop] = machine_code.loops(SASS)
    assert loop.instructions == loop.issue == 6
    assert loop.wgmma == 2 and loop.flops == 2 * 2 * 64 * 128 * 16
    assert loop.tensor == 2 * 64  # 128 columns, half a cycle each
    assert loop.special == 8 and loop.integer == 2
    # The right factor twice, the left one once; 32 lanes of four warps with eight bytes each.
    assert loop.shared == (2 * 2 * 128 * 16 + 2 * 64 * 16 + 4 * 32 * 8) / 128


def test_what_overlaps_takes_the_largest_sum():
    [loop] = machine_code.loops(SASS)
    overlapped, in_turn, bound = machine_code.cycles([(loop, 2.0), (loop._replace(special=1000.0), 1.0)])
    assert (overlapped, bound) == (2 * 8 + 1000, "special")
    assert in_turn == pytest.approx(3 * 128 + 2 * 8 + 1000)
