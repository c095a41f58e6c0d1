"""Test the analysis of machine code: instructions, loops, waits, and resident programs."""

from __future__ import annotations

import pytest

from tests.gpu.listing import COVERED, PROCESSORS, Instruction, Listing, ListingError, parsed

LINES = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR6][R8.64] ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R2], desc[UR6][R10.64] ;
        /*0028*/                   LDGDEPBAR ;
.L_x_0:
        /*0030*/                   DEPBAR.LE SB0, 0x0 ;
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0050*/                   LDSM.16.M88.4 R12, [R3] ;
        /*0060*/                   HMMA.16816.F32.BF16 R20, R4, R12, RZ ;
.L_x_1:
        /*0070*/                   LDG.E.U8 R30, desc[UR6][R8.64] ;
        /*0080*/                   LDG.E.U16 R31, desc[UR6][R8.64] ;
        /*0090*/                   IADD3 R32, R30, R31, RZ ;
        /*00a0*/              @P1  BRA `(.L_x_1) ;
        /*00b0*/                   LDGSTS.E.BYPASS.128 [R2], desc[UR6][R10.64] ;
        /*00b8*/                   LDGDEPBAR ;
        /*00c0*/               @P0 BRA `(.L_x_0) ;
        /*00d0*/                   STG.E desc[UR6][R8.64], R20 ;
        /*00e0*/                   EXIT ;
.L_x_2:
        /*00f0*/                   BRA `(.L_x_2);
        /*0100*/                   NOP;
"""


@pytest.fixture
def listing() -> Listing:
    return parsed(LINES)


def test_loops_are_branches_back(listing: Listing) -> None:
    assert [(loop.start, loop.stop) for loop in listing.loops] == [(4, 15), (8, 12)]
    assert listing.inside(listing.loops[1]).instructions == 4


def test_instructions_are_counted_by_turns(listing: Listing) -> None:
    ran = listing.executed([10, 3])
    assert ran.of("HMMA") == 10
    assert ran.widths("LDG") == {"LDG.E.128": 1, "LDG.E.U8": 30, "LDG.E.U16": 30}
    assert ran.flops == 10 * 2 * 16 * 8 * 16
    with pytest.raises(ListingError, match="2 loops"):
        listing.executed([1])


def test_bytes_are_those_of_all_threads_and_of_no_copy_too_many(listing: Listing) -> None:
    assert listing.executed([10, 3]).moved("LDGSTS") == 11 * 32 * 16
    assert listing.moved([10, 3]) == 32 * (16 + 10 * 16 + 10 * 3 * (1 + 2) + 4)


def test_a_warp_waits_where_it_reads_pending_loads(listing: Listing) -> None:
    outer, inner = listing.loops
    assert listing.waits(inner) == pytest.approx(1 - 1 / COVERED)  # two loads at once
    assert listing.waits(outer) == pytest.approx(2 - (2 + 1) / COVERED)  # the copies too
    assert listing.waited([10, 3]) == pytest.approx(10 * 3 * (1 - 1 / COVERED))  # innermost loops only


def test_an_early_load_costs_no_wait() -> None:
    between = "\n".join("        /*0010*/                   NOP ;" for _ in range(COVERED))
    early = LINES.replace("        /*0090*/", between + "\n        /*0090*/")
    assert parsed(early).waits(parsed(early).loops[1]) == 0
    ahead = LINES.replace("SB0, 0x0", "SB0, 0x1").replace("        /*00b0*/", between + "\n        /*00b0*/")
    assert parsed(ahead).waits(parsed(ahead).loops[0]) == pytest.approx(1 - 1 / COVERED)  # the inner loads only


@pytest.mark.parametrize(
    ("name", "width", "flops"),
    [
        ("LDG.E", 4, 0),
        ("LDG.E.U8", 1, 0),
        ("LDGSTS.E.64", 8, 0),
        ("STG.E.128", 16, 0),
        ("LDSM.16.MT88.4", 16, 0),
        ("STSM.16.M88.2", 8, 0),
        ("LDS.U16", 2, 0),
        ("FFMA", 0, 0),
        ("HMMA.1688.F32.TF32", 0, 2 * 16 * 8 * 8),
        ("HGMMA.64x64x16.F32.BF16", 0, 2 * 64 * 64 * 16 // 4),
    ],
)
def test_widths_and_products(name: str, width: int, flops: int) -> None:
    assert (Instruction(name).width, Instruction(name).flops) == (width, flops)


def test_products_of_warp_groups_are_read() -> None:
    line = "        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;\n"
    assert parsed(line).executed([]).flops == 2 * 64 * 128 * 16 // 4


def test_a_text_without_instructions_is_refused() -> None:
    with pytest.raises(ListingError, match="no instructions"):
        parsed("garbage")


@pytest.mark.parametrize(
    ("target", "registers", "shared", "warps", "programs"),
    [
        ("sm_90", 114, 40 << 10, 4, 4),  # limited by registers: 120 for each thread
        ("sm_80", 96, 40 << 10, 4, 4),  # limited by shared memory
        ("sm_90", 32, 0, 1, 32),  # limited by the number of programs
        ("sm_90", 32, 0, 4, 16),  # limited by warps
        ("sm_90", 255, 0, 8, 1),
    ],
)
def test_programs_side_by_side(target: str, registers: int, shared: int, warps: int, programs: int) -> None:
    assert PROCESSORS[target].resident(registers, shared, warps) == programs
