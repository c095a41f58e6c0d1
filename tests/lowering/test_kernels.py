"""Test the Triton kernels: results in the interpreter, and machine code for GPUs that are not present."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpass.lowering import attend_kernel, column_kernel
from kvpass.lowering.attend import MAX_ROWS, WIDEST_ROTATED, Rope, RotaryPairs, by_kernel
from kvpass.lowering.attention_blocks import AttentionInputs
from kvpass.lowering.formats import EncodedVectors, KVDtype, format_of
from tests.gpu.cuda_emission import TARGETS, Binary, compiled
from tests.gpu.launches import launched
from tests.gpu.shared import call

NAMES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
every_dtype = pytest.mark.parametrize(
    "dtype", [pytest.param(x, marks=[] if x == torch.bfloat16 else pytest.mark.slow) for x in NAMES]
)
CLOSE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}


attentions = pytest.mark.parametrize(
    ("shape", "mask", "extras"),
    [
        ((2, 2, 4, 1, 300, 32, 32), (2, 1, 1, 1, 300), {}),  # decode, heads share their tokens
        ((1, 3, 1, 1, 70, 16, 16), (1, 3, 1, 1, 70), {"bias": True}),  # single heads with different tokens
        ((2, 2, 3, 2, 130, 24, 40), (2, 2, 3, 2, 130), {"bias": True, "sink": True, "cap": True}),  # odd sizes
        ((1, 2, 2, 9, 40, 64, 64), (1, 1, 1, 9, 40), {"sink": True}),  # a short chunk
        ((1, 1, 8, 1, 1, 8, 8), (1, 1, 1, 1, 1), {}),  # one slot
        ((2, 2, 4, 1, 300, 32, 32), (2, 1, 1, 1, 300), {"rope": True}),  # keys rotated at read,
        (
            (2, 3, 2, 1, 70, 24, 16),
            (2, 3, 1, 1, 70),
            {"rope": True, "interleaved": True, "own": True, "bias": True},
        ),  # in part
        ((2, 2, 4, 1, 300, 32, 32), (2, 1, 1, 1, 300), {"empty": True}),  # the first row has no tokens
        ((2, 2, 4, 1, 300, 32, 32), (2, 1, 1, 1, 300), {"empty": True, "sink": True}),
        ((1, 2, 2, 9, 40, 16, 16), (1, 1, 1, 9, 40), {"hidden": True}),  # all slots are hidden, and some are empty
    ],
    ids=["decode", "single", "odd", "chunk", "one", "rotated", "interleaved", "empty", "sink-alone", "hidden"],
)


@pytest.mark.few(14)
@pytest.mark.parametrize("dtype", NAMES)
@attentions
def test_attention_equals_its_plain_form(dtype: torch.dtype, shape: Any, mask: Any, extras: Any) -> None:
    for got, wanted in call("tests.lowering.interpreted:attention_of", 0, shape, dtype, mask, extras):
        torch.testing.assert_close(got, wanted, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.few(11)
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize(
    "dtype", [pytest.param(x, marks=[] if x == torch.float32 else pytest.mark.slow) for x in NAMES]
)
@attentions
def test_attention_to_codes_equals_its_plain_form(
    dtype: torch.dtype, shape: Any, mask: Any, extras: Any, kv_dtype: str
) -> None:
    for got, wanted in call("tests.lowering.interpreted:attention_of", 0, shape, dtype, mask, extras, kv_dtype):
        torch.testing.assert_close(got, wanted, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.few(5)
@every_dtype
@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
@pytest.mark.parametrize(("causal", "extra"), [(True, False), (False, True), (True, True)])
def test_sums_equal_their_plain_form(dtype: torch.dtype, kind: str, causal: bool, extra: bool) -> None:
    seed = len(kind) + causal
    pairs = call("tests.lowering.interpreted:column_sums", seed, dtype, kind, causal, extra, extra)
    assert len(pairs) == 5
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, atol=CLOSE[dtype], rtol=CLOSE[dtype])


def split_for(
    target: str, dtype: torch.dtype, dim: int, rows: int, full: bool, rotated: int = 0, kv_dtype: KVDtype | None = None
) -> Binary:
    """Compile `split` for 8 KV heads of 4,097 slots; `full` has a mask and a bias for each query.

    `rotated` is the number of rotated dimensions of a key, and `kv_dtype` the storage format.
    """
    slots, heads, there = 4097, 8, torch.device("meta")
    key, value = (EncodedVectors.empty(format_of(kv_dtype, dim, dtype), (1, heads, slots), there) for _ in range(2))
    query = torch.empty(1, heads, rows, 1, dim, dtype=dtype, device=there)
    beside = torch.empty(1, 1, rows if full else 1, 1, slots, device=there)
    table = torch.empty(slots, dim, dtype=dtype, device=there)
    ranks = torch.empty(1, 1, slots, dtype=torch.int64, device=there)
    given: dict[str, Any] = dict(
        mask=beside.bool(), bias=beside if full else None, scale=0.1, cap=None, sink_logit=None
    )
    rope = Rope(table, table, RotaryPairs(rotated, False), ranks) if rotated else None
    split, join = launched(attend_kernel.attend_by_kernel, query, key, value, with_logits=True, rope=rope, **given)
    assert (split.name, join.name) == ("split", "join")
    return split.binary(target)


shapes = pytest.mark.parametrize(
    ("dim", "rows", "full"),
    [
        pytest.param(128, 4, False, id="decode"),
        pytest.param(128, MAX_ROWS, True, id="chunk"),
        pytest.param(64, 1, False, id="narrow", marks=pytest.mark.slow),
        pytest.param(64, MAX_ROWS, True, id="narrow-chunk", marks=pytest.mark.slow),
        pytest.param(256, 8, False, id="wide", marks=pytest.mark.slow),
        pytest.param(256, MAX_ROWS, True, id="wide-chunk", marks=pytest.mark.slow),
        pytest.param(128, 32, True, id="half-a-chunk", marks=pytest.mark.slow),
    ],
)


@shapes
@pytest.mark.parametrize("target", TARGETS)
@every_dtype
def test_attention_spills_nothing(target: str, dtype: torch.dtype, dim: int, rows: int, full: bool) -> None:
    binary = split_for(target, dtype, dim, rows, full)
    assert binary.spills == 0
    assert binary.registers <= 255
    assert binary.shared <= {"sm_80": 163 << 10, "sm_90": 227 << 10}[target]


@pytest.mark.parametrize("target", TARGETS)
@every_dtype
@pytest.mark.parametrize(("dim", "rows"), [(64, 4), (128, 4), (256, 8)])
def test_attention_to_rotated_keys_spills_nothing(target: str, dtype: torch.dtype, dim: int, rows: int) -> None:
    binary = split_for(target, dtype, dim, rows, False, rotated=dim)
    assert binary.spills == 0 or dim * dtype.itemsize > WIDEST_ROTATED
    assert binary.shared <= {"sm_80": 163 << 10, "sm_90": 227 << 10}[target]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(
    ("dim", "rows", "dtype"),
    [
        (128, 4, torch.bfloat16),
        pytest.param(64, 4, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(128, MAX_ROWS, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(128, 4, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_attention_to_codes_spills_nothing(
    target: str, kv_dtype: KVDtype, rotated: bool, dtype: torch.dtype, dim: int, rows: int
) -> None:
    binary = split_for(target, dtype, dim, rows, False, rotated=dim * rotated, kv_dtype=kv_dtype)
    assert binary.spills == 0 or dtype == torch.float32  # see docs/quantised.md
    assert binary.shared <= {"sm_80": 163 << 10, "sm_90": 227 << 10}[target]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("kv_dtype", "rotated"), [(None, 0), (None, 128), ("int8", 0)])
def test_rows_come_by_wide_copies_that_one_wait_is_for(target: str, kv_dtype: KVDtype | None, rotated: int) -> None:
    """Check copies of 16 bytes for each thread that read K and V once, without other waits in an iteration."""
    binary = split_for(target, torch.bfloat16, 128, 4, False, rotated=rotated, kv_dtype=kv_dtype)
    listing = binary.listing
    (loop,) = listing.loops
    turn = listing.inside(loop)
    block = int(binary.configuration.partition(" BLOCK=")[2].split()[0])
    row = 128 * (1 if kv_dtype == "int8" else 2)
    tables = 2 * row if rotated else 0
    copied = turn.moved("LDGSTS") * binary.warps
    assert copied >= block * (2 * row + tables)
    assert copied - block * (2 * row + tables) <= 2 * 4 * block * binary.warps  # scales or a mask
    if kv_dtype is None:
        assert set(turn.widths("LDGSTS")) == {"LDGSTS.E.BYPASS.128"}
    assert turn.of("HMMA") > 0
    assert listing.waits(loop) < 1.3  # operands of a product are requested one iteration ahead


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rotated", [0, 128])
def test_a_byte_of_two_codes_is_loaded_once(target: str, rotated: int) -> None:
    binary = split_for(target, torch.bfloat16, 128, 4, False, rotated=rotated, kv_dtype="int4")
    listing = binary.listing
    (loop,) = listing.loops
    turn = listing.inside(loop)
    widths = turn.widths("LDG", "LDGSTS")
    assert sum(n for name, n in widths.items() if name.endswith("U8")) <= 8  # only zero points and the mask
    block = int(binary.configuration.partition(" BLOCK=")[2].split()[0])
    wide = [n for name, n in widths.items() if name.endswith(".128")]
    assert sum(wide) * 32 * 16 * binary.warps == block * (2 * 64 + 2 * 2 * rotated)


def test_sums_of_a_prompt_are_products_of_warp_groups_and_compare_nothing_where_all_is_seen() -> None:
    query, key = (torch.empty(1, heads, 8192, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
    weight = torch.ones(1, 8192, device="meta")
    both = launched(column_kernel.column_sums_by_kernel, AttentionInputs(query, key, None, True, 0.1), weight, 1)
    assert [launch.name for launch in both] == ["totals", "columns"]
    for launch in both:
        listing = launch.binary("sm_90").listing
        assert len(listing.loops) == 2  # complete blocks, and blocks that some queries do not see
        assert all(listing.inside(loop).of("HGMMA") == 128 // 16 for loop in listing.loops)
        whole, diagonal = listing.loops if launch.name == "totals" else reversed(listing.loops)
        assert listing.inside(whole).instructions < listing.inside(diagonal).instructions


@pytest.mark.parametrize("target", TARGETS)
@every_dtype
def test_sums_compile_and_spill_nothing(target: str, dtype: torch.dtype) -> None:
    for function in (column_kernel.totals, column_kernel.columns):
        pointers = {"query": NAMES[dtype], "key": NAMES[dtype], "mask": "*i1", "COUNT": "i32", "KEYS": "i32"}
        pointers |= dict.fromkeys(("sink_logit", "out", "total", "weight", "sums", "squares"), "*fp32")
        signature = {name: pointers.get(name, "constexpr") for name in function.arg_names}
        side = column_kernel.side_of(128, dtype)
        known = dict(
            mask_row=0, mask_head=0, mask_query=0, sink_row=0, sink_query=0, KIND=0, CAUSAL=True, HAS_SINK=False,
            SQUARES=True, SCALE=0.1, CAP=0.0, HEADS=32, GROUPS=4, D=128, WIDTH=128, BQ=side, BK=side,
        )  # fmt: skip
        constants = {name: known[name] for name, kind in signature.items() if kind == "constexpr"}
        binary = compiled(function, signature, constants, target)
        assert binary.spills == 0
        assert binary.registers > 16


def test_kernels_run_on_gpus_alone() -> None:
    there = torch.empty(1, 2, 4, 1, 8, device="meta")
    assert not by_kernel(torch.empty(1, 2, 4, 1, 8))
    assert not by_kernel(there)
    assert MAX_ROWS == 64


@pytest.mark.parametrize(
    ("programs", "slots"), [(1, 1), (8, 1025), (64, 4097), (2048, 65537), (8, 65537), (1, 65537), (3, 65537)]
)
def test_parts_cover_all_slots_and_no_part_is_empty(programs: int, slots: int) -> None:
    parts, each = attend_kernel._parts(programs, slots, 64)
    assert parts <= attend_kernel.MIN_SPLITS or programs < 8
    assert parts * each >= slots
    assert (parts - 1) * each < slots
    assert parts <= attend_kernel.MAX_SPLITS
