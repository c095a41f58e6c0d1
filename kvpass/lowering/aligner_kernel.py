"""Run the network of recipe "direct" in one Triton kernel: all three products, one block of rows per program.

Torch's operations would need one launch per product and per operation between products, and would write rows, hidden
values and changes in float32.  This kernel reads each row once for the first product and once to change it, and writes
it once.

The module is imported when the first graph for a GPU is traced, and needs triton.
"""

# Triton infers the types of kernel arguments at compile time.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.lowering.attend_kernel import as_contiguous, as_dense, power

BLOCK_ROWS, WIDE_BLOCK_ROWS = 32, 16  # rows per program; wide heads and dtypes leave registers for fewer
WIDE_HEAD = 256  # numbers of a head that counts as wide
INPUT_STEP = 32  # numbers of a head per step of the input product
OUTPUT_STEP = 64  # numbers of a head per step of the output product
WARPS = 8  # fewer would spill registers
TF32_MASK = tl.constexpr(-8192)  # the bits of a float32 that tensor cores use


@triton.jit
def split_tf32(x):
    """Split a float32 into the bits that tensor cores use and the rest."""
    coarse = (x.to(tl.int32, bitcast=True) & TF32_MASK).to(tl.float32, bitcast=True)
    return coarse, x - coarse


@triton.jit
def product(coarse, fine, weight, total, EXACT: tl.constexpr):
    """Return `total` plus the product of a split number and a weight, nearly as exact as in float32.

    With EXACT the number is of half precision, and its fine part is zero.
    """
    weight_coarse, weight_fine = split_tf32(weight)
    total = tl.dot(coarse, weight_fine, total, input_precision="tf32")
    if not EXACT:
        total = tl.dot(fine, weight_coarse, total, input_precision="tf32")
    return tl.dot(coarse, weight_coarse, total, input_precision="tf32")


@triton.jit
def add_inputs(
    hidden,  # [BLOCK, FIRST]
    rows,  # one row of the batch: [H, C, D] by strides
    weight,  # [H * D, H1]
    c,
    in_range,
    row_head: tl.constexpr,
    row_slot: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    H1: tl.constexpr,
    FIRST: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Add the product of all heads' keys or values and the weight to `hidden`."""
    h = tl.arange(0, FIRST)
    for head in range(HEADS):
        for start in range(0, D, WIDE):
            d = start + tl.arange(0, WIDE)
            x = tl.load(
                rows + head * row_head + c[:, None] * row_slot + d[None, :],
                mask=in_range[:, None] & (d < D)[None, :],
                other=0.0,
            )
            inside = (d < D)[:, None] & (h < H1)[None, :]
            w = tl.load(weight + (head * D + d)[:, None] * H1 + h[None, :], mask=inside, other=0.0)
            coarse, fine = split_tf32(x.to(tl.float32))
            hidden = product(coarse, fine, w, hidden, x.dtype != tl.float32)
    return hidden


@triton.jit
def write_changed_vectors(
    hidden,  # [BLOCK, SECOND]
    rows,  # one row of the batch: [H, C, D] by strides
    out,  # [H, C, D], dense
    weight,  # [H2, TOTAL]; these rows' columns begin at FROM
    bias,  # [TOTAL]
    shift,  # [P, TOTAL]
    made,
    rank,
    moves,
    c,
    in_range,
    row_head: tl.constexpr,
    row_slot: tl.constexpr,
    HEADS: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    H2: tl.constexpr,
    FROM: tl.constexpr,
    TOTAL: tl.constexpr,
    SECOND: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write keys or values of all heads, changed where `moves` is true."""
    s = tl.arange(0, SECOND)
    coarse, fine = split_tf32(hidden)
    for head in range(HEADS):
        for start in range(0, D, WIDE):
            d = start + tl.arange(0, WIDE)
            column = FROM + head * D + d
            inside = in_range[:, None] & (d < D)[None, :]
            x = tl.load(rows + head * row_head + c[:, None] * row_slot + d[None, :], mask=inside, other=0.0)
            known = (s < H2)[:, None] & (d < D)[None, :]
            w = tl.load(weight + s[:, None] * TOTAL + column[None, :], mask=known, other=0.0)
            shifted = tl.load(shift + rank[:, None] * TOTAL + column[None, :], mask=inside, other=0.0)
            shifted -= tl.load(shift + made[:, None] * TOTAL + column[None, :], mask=inside, other=0.0)
            shifted += tl.load(bias + column, mask=d < D, other=0.0)[None, :]  # before the product, which waits
            change = product(coarse, fine, w, shifted, False)
            new = tl.where(moves[:, None], (x.to(tl.float32) + change).to(x.dtype), x)
            tl.store(out + (head * C + c[:, None]) * D + d[None, :], new, mask=inside)


@triton.jit
def repair(
    key,  # [B, H, C, D], the last dimension dense; likewise the values
    value,  # [B, H, C, Dv]
    made,  # int64 [B, C], dense; likewise the next two
    rank,
    moves,  # bool
    on_key,  # [H * D, H1]
    on_value,  # [H * Dv, H1]
    from_made,  # [P, H1]
    from_rank,
    shift,  # [P, H * (D + Dv)]
    inner,  # [H1, H2]
    inner_bias,
    outer,  # [H2, H * (D + Dv)]
    outer_bias,
    new_key,  # as key and value, dense
    new_value,
    key_row: tl.constexpr,
    key_head: tl.constexpr,
    key_slot: tl.constexpr,
    value_row: tl.constexpr,
    value_head: tl.constexpr,
    value_slot: tl.constexpr,
    HEADS: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    H1: tl.constexpr,
    H2: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    KEY_STEP: tl.constexpr,
    VALUE_STEP: tl.constexpr,
    KEY_OUT: tl.constexpr,
    VALUE_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Align one block of slots of one batch row, keys and values of all heads."""
    row = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_range = c < C
    m = tl.load(made + row * C + c, mask=in_range, other=0)
    r = tl.load(rank + row * C + c, mask=in_range, other=0)
    moving = tl.load(moves + row * C + c, mask=in_range, other=0) != 0
    h, s = tl.arange(0, FIRST), tl.arange(0, SECOND)
    known = in_range[:, None] & (h < H1)[None, :]
    hidden = tl.load(from_made + m[:, None] * H1 + h[None, :], mask=known, other=0.0)
    hidden += tl.load(from_rank + r[:, None] * H1 + h[None, :], mask=known, other=0.0)
    keys, values = key + row * key_row, value + row * value_row
    hidden = add_inputs(hidden, keys, on_key, c, in_range, key_head, key_slot, HEADS, D, H1, FIRST, KEY_STEP)
    hidden = add_inputs(hidden, values, on_value, c, in_range, value_head, value_slot, HEADS, DV, H1, FIRST, VALUE_STEP)
    within = (h < H1)[:, None] & (s < H2)[None, :]
    w = tl.load(inner + h[:, None] * H2 + s[None, :], mask=within, other=0.0)
    coarse, fine = split_tf32(tl.maximum(hidden, 0.0))
    hidden = product(coarse, fine, w, tl.zeros([BLOCK, SECOND], tl.float32), False)
    hidden = tl.maximum(hidden + tl.load(inner_bias + s, mask=s < H2, other=0.0)[None, :], 0.0)
    write_changed_vectors(
        hidden, keys, new_key + row * HEADS * C * D, outer, outer_bias, shift, m, r, moving, c, in_range,
        key_head, key_slot, HEADS, C, D, H2, 0, HEADS * (D + DV), SECOND, KEY_OUT,
    )  # fmt: skip
    write_changed_vectors(
        hidden, values, new_value + row * HEADS * C * DV, outer, outer_bias, shift, m, r, moving, c, in_range,
        value_head, value_slot, HEADS, C, DV, H2, HEADS * D, HEADS * (D + DV), SECOND, VALUE_OUT,
    )  # fmt: skip


@torch.library.triton_op("kvpass::repair_vectors", mutates_args={})
def repair_vectors(
    key: Tensor,
    value: Tensor,
    made: Tensor,
    rank: Tensor,
    moves: Tensor,
    on_key: Tensor,
    on_value: Tensor,
    from_made: Tensor,
    from_rank: Tensor,
    shift: Tensor,
    inner: Tensor,
    inner_bias: Tensor,
    outer: Tensor,
    outer_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """Align keys and values in one launch.

    Args:
        key, value: [B, H, C, D] and [B, H, C, Dv], the last dimension dense.
        made, rank: int64 [B, C], the cache positions at which rows were computed and at which they are read.
        moves: bool [B, C], the rows to change.
        on_key, ..., outer_bias: the weights of one layer, float32 and dense; H1 and H2 are the hidden sizes, up to
            `kvpass.policies.aligners.aligner.MAX_HIDDEN`.

    Returns:
        Keys and values in the shapes and dtypes of the inputs, dense.
    """
    rows, heads, slots, dim = key.shape
    width, (first, second) = value.shape[3], inner.shape
    new_key, new_value = key.new_empty((rows, heads, slots, dim)), value.new_empty((rows, heads, slots, width))
    narrow = max(dim, width) < WIDE_HEAD and key.element_size() < 4
    block = BLOCK_ROWS if narrow else WIDE_BLOCK_ROWS
    torch.library.wrap_triton(repair)[(triton.cdiv(slots, block), rows)](
        key, value, as_contiguous(made), as_contiguous(rank), as_contiguous(moves), on_key, on_value, from_made,
        from_rank, shift, inner, inner_bias, outer, outer_bias, new_key, new_value, *key.stride()[:3],
        *value.stride()[:3],
        HEADS=heads, C=slots, D=dim, DV=width, H1=first, H2=second, FIRST=power(first), SECOND=power(second),
        KEY_STEP=min(INPUT_STEP, power(dim)), VALUE_STEP=min(INPUT_STEP, power(width)),
        KEY_OUT=min(OUTPUT_STEP, power(dim)), VALUE_OUT=min(OUTPUT_STEP, power(width)), BLOCK=block,
        num_warps=WARPS, num_stages=2,
    )  # fmt: skip
    return new_key, new_value


def repair_by_kernel(
    weights: list[Tensor], key: Tensor, value: Tensor, made: Tensor, rank: Tensor, moves: Tensor
) -> tuple[Tensor, Tensor]:
    """Align keys and values as `kvpass.policies.aligners.Aligner.repair` does, with the weights of one layer."""
    new_key, new_value = torch.ops.kvpass.repair_vectors(as_dense(key), as_dense(value), made, rank, moves, *weights)
    return new_key, new_value
