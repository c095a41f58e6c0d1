"""The Triton kernels: their numbers through the interpreter, and their machine code for GPUs that are not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpass.align import kernel as align_kernel
from kvpass.align.aligner import MOST_HIDDEN
from kvpass.lowering import attend_kernel, column_kernel
from kvpass.lowering.attend import MOST_ROWS, WIDEST_ROTATED, by_kernel
from kvpass.storage import KVDtype, format_of
from kvpass.testing.cuda_emission import TARGETS, Binary, compiled
from tests.testing.shared import call

NAMES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
every_dtype = pytest.mark.parametrize(
    "dtype", [pytest.param(x, marks=[] if x == torch.bfloat16 else pytest.mark.slow) for x in NAMES]
)
CODES = {torch.int8: "*i8", torch.uint8: "*u8"}
CLOSE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}


attentions = pytest.mark.parametrize(
    ("shape", "mask", "extras"),
    [
        ((2, 2, 4, 1, 300, 32, 32), (2, 1, 1, 1, 300), {}),  # decode, heads share their tokens
        ((1, 3, 1, 1, 70, 16, 16), (1, 3, 1, 1, 70), {"bias": True}),  # single heads, each with its own
        ((2, 2, 3, 2, 130, 24, 40), (2, 2, 3, 2, 130), {"bias": True, "sink": True, "cap": True}),  # odd sizes
        ((1, 2, 2, 9, 40, 64, 64), (1, 1, 1, 9, 40), {"sink": True}),  # a short chunk
        ((1, 1, 8, 1, 1, 8, 8), (1, 1, 1, 1, 1), {}),  # one slot
        ((2, 2, 4, 1, 300, 32, 32), (2, 1, 1, 1, 300), {"rope": True}),  # keys rotated at read,
        (
            (2, 3, 2, 1, 70, 24, 16),
            (2, 3, 1, 1, 70),
            {"rope": True, "interleaved": True, "own": True, "bias": True},
        ),  # in part
    ],
    ids=["decode", "single", "odd", "chunk", "one", "rotated", "interleaved"],
)


@pytest.mark.parametrize("dtype", NAMES)
@attentions
def test_attention_equals_its_plain_form(dtype: torch.dtype, shape: Any, mask: Any, extras: Any) -> None:
    for got, wanted in call("tests.lowering.interpreted:attention_of", 0, shape, dtype, mask, extras):
        torch.testing.assert_close(got, wanted, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize(
    ("shape", "hidden"),
    [((2, 2, 37, 16, 16), (12, 20)), ((1, 3, 5, 40, 24), (96, 96)), ((1, 1, 16, 64, 64), (16, 128))],
)
def test_repairs_equal_their_plain_form(dtype: torch.dtype, shape: Any, hidden: Any) -> None:
    for got, wanted in call("tests.lowering.interpreted:repairs_of", 3, shape, dtype, hidden):
        assert got.dtype == wanted.dtype == dtype
        torch.testing.assert_close(got, wanted, atol=CLOSE[dtype], rtol=CLOSE[dtype])


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
    """`split` for 8 KV heads of 4,097 slots; `full` has a mask and a bias of its own for each query.

    `rotated` is how many numbers of a key are; rows are stored as `kv_dtype` says.
    """
    stored = format_of(kv_dtype, dim, dtype)
    groups = stored.layout()[-1][0] if stored.names else 0
    slots, heads = 4097, 8
    width, padded = attend_kernel.power(dim), attend_kernel.power(rows)
    block = attend_kernel._block(width, dtype.itemsize, padded, rotated or stored.bits == 4)
    parts, each = attend_kernel._parts(heads, slots, block)
    names = attend_kernel.split.arg_names
    strides = {f"{x}_{y}": z for x in ("key", "value") for y, z in
               (("row", heads * slots * dim), ("head", slots * dim), ("slot", dim))}  # fmt: skip
    for name in ("mask", "bias"):
        strides |= {f"{name}_row": slots, f"{name}_head": 0, f"{name}_group": slots * full, f"{name}_query": 0}
    constants = dict(
        **strides, rank_row=slots, rank_head=0, BITS=stored.bits, KEY_GROUPS=groups, VALUE_GROUPS=groups,
        ROTARY=rotated, INTERLEAVED=False, POSITIONS=slots,
        SCALE=0.1, CAP=0.0, HAS_BIAS=full, STORE=True, HEADS=heads, R=rows, QUERIES=1, C=slots, D=dim,
        DV=dim, PARTS=parts, PART=each, ROWS=padded, WIDTH=width, VALUE_WIDTH=width, BLOCK=block,
    )  # fmt: skip
    pointers = dict.fromkeys(("query", "cos", "sin"), NAMES[dtype])
    pointers |= dict.fromkeys(("key", "value"), NAMES.get(stored.layout()[0][1], CODES.get(stored.layout()[0][1])))
    pointers |= dict.fromkeys(("key_scale", "value_scale"), "*bf16")
    pointers |= dict.fromkeys(("key_zero", "value_zero"), "*i8")
    pointers |= {"mask": "*i1", "bias": "*fp32", "rank": "*i64"}
    pointers |= dict.fromkeys(("logits", "m_part", "l_part", "acc_part"), "*fp32")
    signature = {name: pointers.get(name, "constexpr") for name in names}
    # As Inductor has it, whose buffers all begin on 16 bytes.
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    warps = attend_kernel._warps(padded, rotated)
    return compiled(attend_kernel.split, signature, constants, target, attributes=aligned, num_warps=warps)


shapes = pytest.mark.parametrize(
    ("dim", "rows", "full"),
    [
        pytest.param(128, 4, False, id="decode"),
        pytest.param(128, MOST_ROWS, True, id="chunk"),
        pytest.param(64, 1, False, id="narrow", marks=pytest.mark.slow),
        pytest.param(64, MOST_ROWS, True, id="narrow-chunk", marks=pytest.mark.slow),
        pytest.param(256, 8, False, id="wide", marks=pytest.mark.slow),
        pytest.param(256, MOST_ROWS, True, id="wide-chunk", marks=pytest.mark.slow),
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
        pytest.param(128, MOST_ROWS, torch.bfloat16, marks=pytest.mark.slow),
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
@every_dtype
@pytest.mark.parametrize(("dim", "hidden"), [(128, 96), (64, MOST_HIDDEN), (256, MOST_HIDDEN)])
def test_repairs_spill_nothing(target: str, dtype: torch.dtype, dim: int, hidden: int) -> None:
    slots, heads = 4097, 8
    names = align_kernel.repair.arg_names
    pointers = dict.fromkeys(("key", "value", "new_key", "new_value"), NAMES[dtype])
    pointers |= {"made": "*i64", "rank": "*i64", "moves": "*i1"}
    pointers |= dict.fromkeys(("on_key", "on_value", "from_made", "from_rank", "shift"), "*fp32")
    pointers |= dict.fromkeys(("inner", "inner_bias", "outer", "outer_bias"), "*fp32")
    strides = {f"{x}_{y}": z for x in ("key", "value") for y, z in
               (("row", heads * slots * dim), ("head", slots * dim), ("slot", dim))}  # fmt: skip
    constants = dict(
        **strides, HEADS=heads, C=slots, D=dim, DV=dim, H1=hidden, H2=hidden, FIRST=128, SECOND=128,
        KEY_STEP=align_kernel.STEP, VALUE_STEP=align_kernel.STEP, BLOCK=align_kernel.ROWS,
    )  # fmt: skip
    signature = {name: pointers.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    how: dict[str, Any] = dict(attributes=aligned, num_warps=align_kernel.WARPS)
    binary = compiled(align_kernel.repair, signature, constants, target, **how)
    assert binary.spills == 0
    assert binary.shared <= 99 << 10  # what every GPU since sm_80 has


@pytest.mark.parametrize("target", TARGETS)
@every_dtype
def test_sums_compile_and_spill_nothing(target: str, dtype: torch.dtype) -> None:
    for function in (column_kernel.totals, column_kernel.columns):
        pointers = {"query": NAMES[dtype], "key": NAMES[dtype], "mask": "*i1", "COUNT": "i32", "KEYS": "i32"}
        pointers |= dict.fromkeys(("sink", "out", "total", "weight", "sums", "squares"), "*fp32")
        signature = {name: pointers.get(name, "constexpr") for name in function.arg_names}
        side = max(16, min(64, column_kernel.TILE // (128 * dtype.itemsize)))
        known = dict(
            mask_row=0, mask_head=0, mask_query=0, sink_row=0, sink_query=0, KIND=0, CAUSAL=True, HAS_SINK=False,
            SQUARES=True, SCALE=0.1, CAP=0.0, HEADS=32, GROUPS=4, D=128, WIDTH=128, BQ=side, BK=side,
        )  # fmt: skip
        constants = {name: known[name] for name, kind in signature.items() if kind == "constexpr"}
        binary = compiled(function, signature, constants, target)
        assert binary.spills == 0
        assert binary.registers > 16


def test_what_runs_by_kernels() -> None:
    there = torch.empty(1, 2, 4, 1, 8, device="meta")
    assert not by_kernel(torch.empty(1, 2, 4, 1, 8))
    assert not by_kernel(there)
    assert MOST_ROWS == 64


@pytest.mark.parametrize(("programs", "slots"), [(1, 1), (8, 1025), (64, 4097), (2048, 65537), (8, 65537)])
def test_parts_cover_all_slots_and_no_part_is_empty(programs: int, slots: int) -> None:
    parts, each = attend_kernel._parts(programs, slots, 64)
    assert parts * each >= slots
    assert (parts - 1) * each < slots
    assert parts <= attend_kernel.MOST_PARTS
