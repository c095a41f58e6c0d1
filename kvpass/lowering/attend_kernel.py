"""Define the Triton kernels of `attend`: decode steps and short chunks on a GPU.

`split` cuts the slots of each KV head into parts for parallel programs, as flash decoding does (Dao et al., 2023,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html).  All query heads of a KV head, and all queries of a short
chunk, are rows of one product in one program.  The kernel therefore loads a row of K or V from memory once.  `join`
combines the parts to one output.

The module is imported when the first graph for a GPU is traced, and needs triton.
"""

# Triton gives the arguments of kernels their types when it compiles them.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.lowering.attend import Rope, UnknownQueries, broadcast_strides
from kvpass.lowering.formats import EncodedVectors

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LOG2_E = tl.constexpr(1.4426950408889634)  # log2(e): a GPU has an instruction for powers of two
TILE = 16 << 10  # bytes of K, and of V, that a program holds at a time
PROGRAMS = 1024  # enough for several waves on current GPUs
ONE_WAVE = 512  # programs, for which slots are cut into many parts
MIN_SPLITS, MAX_SPLITS = 64, 256  # with enough programs, and with a single head
JOINED = 4096  # numbers of all parts that a program of `join` holds at a time


@triton.jit
def load_numbers(
    rows,  # rows of one head, at the slots
    scale,  # [B, Hkv, C, GROUPS]; unused except with 4 BITS, likewise the next
    zero,
    c,  # slot indices over all heads
    d,
    inside,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
):
    """Return the numbers of keys or values, or their codes if callers multiply by one scale for each slot."""
    if BITS == 4:
        byte = tl.load(rows + d % (D // 2), mask=inside, other=0).to(tl.int32)
        at = c * GROUPS + d * GROUPS // D
        code = tl.where(d < D // 2, byte & 15, byte >> 4) + tl.load(zero + at, mask=inside, other=0)
        return code.to(tl.float32) * tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
    elif BITS == 8:
        return tl.load(rows + d, mask=inside, other=0).to(tl.float32)
    else:
        return tl.load(rows + d, mask=inside, other=0)


@triton.jit
def packed_vectors(
    rows,  # rows of one head, [C, D / 2]
    scale,  # scales of that head [C, GROUPS], likewise the zero points
    zero,
    c,
    slot: tl.constexpr,
    GROUPS: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
):
    """Load four-bit keys or values: bytes [BLOCK, HALF], then scales and zero points of both halves [BLOCK, SPANS]."""
    SPANS: tl.constexpr = HALF // 32 if D % 64 == 0 else 1
    e, g = tl.arange(0, HALF)[None, :], tl.arange(0, SPANS)[None, :]
    there, low, second = (c < C)[:, None], c[:, None] * GROUPS + g, GROUPS // 2
    byte = tl.load(rows + c[:, None] * slot + e, mask=there & (e < D // 2), other=0)
    first, last = there & (g < GROUPS), there & (second + g < GROUPS)
    low_scale, low_zero = tl.load(scale + low, mask=first, other=0.0), tl.load(zero + low, mask=first, other=0)
    high = low + second
    high_scale, high_zero = tl.load(scale + high, mask=last, other=0.0), tl.load(zero + high, mask=last, other=0)
    return byte, low_scale, low_zero, high_scale, high_zero


@triton.jit
def decode_codes(
    code,  # int32 [BLOCK, HALF]
    scale,  # [BLOCK, SPANS], likewise the zero points
    zero,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):
    """Decode the codes of one half of D to float32 numbers."""
    SPANS: tl.constexpr = scale.shape[1]
    step = scale.to(tl.float32)
    apart = tl.reshape(code.to(tl.float32), [BLOCK, SPANS, HALF // SPANS])
    return tl.reshape(apart * step[:, :, None] + (zero.to(tl.float32) * step)[:, :, None], [BLOCK, HALF])


@triton.jit
def halves(
    rows,  # rows of one head, at slots [BLOCK, 1]
    there,
    D: tl.constexpr,
    HALF: tl.constexpr,
):
    """Load the two halves of D, [BLOCK, HALF] each; eight-bit codes are not multiplied by their scale."""
    e = tl.arange(0, HALF)[None, :]
    inside = there[:, None] & (e < D // 2)
    return tl.load(rows + e, mask=inside, other=0), tl.load(rows + D // 2 + e, mask=inside, other=0)


@triton.jit
def rotate(
    number,  # [BLOCK, HALF]
    partner,
    cos,  # at the positions of slots [BLOCK, 1] and the half
    sin,
    inside,
    HALF: tl.constexpr,
):
    """Rotate numbers of keys with their partners, in float32."""
    e = tl.arange(0, HALF)[None, :]
    result = number.to(tl.float32) * tl.load(cos + e, mask=inside, other=0.0).to(tl.float32)
    return result + partner.to(tl.float32) * tl.load(sin + e, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_mask(
    rows,  # a mask or a bias of one KV head
    group,  # query groups of the program's rows [ROWS], likewise the next two
    query_row,
    here,
    c,
    C: tl.constexpr,
    of_group: tl.constexpr,
    of_query: tl.constexpr,
):
    """Load a mask or bias at slots: [1, BLOCK] where it is the same for all rows, else [ROWS, BLOCK]."""
    if of_group == 0 and of_query == 0:
        return tl.load(rows + c, mask=c < C, other=0)[None, :]
    else:
        index = group * of_group + query_row * of_query
        return tl.load(rows + index[:, None] + c[None, :], mask=here[:, None] & (c < C)[None, :], other=0)


@triton.jit
def split(
    query,  # [B, Hkv, R, D]
    key,  # [B, Hkv, C, D], the last dimension dense; likewise the values; with 4 BITS half as many bytes
    value,  # [B, Hkv, C, Dv]
    key_scale,  # [B, Hkv, C, KEY_GROUPS], dense; unused without BITS; likewise the next
    value_scale,
    key_zero,  # the same shape; unused except with 4 BITS; likewise the next
    value_zero,
    mask,  # bool [B or 1, Hkv or 1, G or 1, q or 1, C]
    bias,  # the same shape, floating point; unused without HAS_BIAS
    rank,  # int64 [B or 1, Hkv or 1, C], each key's row of the next two; unused without ROTARY
    cos,  # [N, D]: factors of a key's numbers,
    sin,  # [N, D]: and of their partners
    logits,  # float32 [B, Hkv, R, C]; unused without STORE
    m_part,  # float32 [B, Hkv, R, parts]: the largest logit of a part
    l_part,  # the sum of exp(logit - m)
    acc_part,  # float32 [B, Hkv, R, parts, Dv]: the values weighted by exp(logit - m)
    key_row: tl.constexpr,
    key_head: tl.constexpr,
    key_slot: tl.constexpr,
    value_row: tl.constexpr,
    value_head: tl.constexpr,
    value_slot: tl.constexpr,
    mask_row: tl.constexpr,
    mask_head: tl.constexpr,
    mask_group: tl.constexpr,
    mask_query: tl.constexpr,
    bias_row: tl.constexpr,
    bias_head: tl.constexpr,
    bias_group: tl.constexpr,
    bias_query: tl.constexpr,
    rank_row: tl.constexpr,
    rank_head: tl.constexpr,
    BITS: tl.constexpr,  # bits of a code; 0 where rows are plain numbers
    KEY_GROUPS: tl.constexpr,
    VALUE_GROUPS: tl.constexpr,
    ROTARY: tl.constexpr,  # how many numbers of a key are mixed in pairs; 0 without a rotary embedding
    INTERLEAVED: tl.constexpr,
    HALVED: tl.constexpr,  # keys are processed in halves of D
    POSITIONS: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STORE: tl.constexpr,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    QUERIES: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    VALUE_HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attend with R = G * q rows to one part of the slots of one KV head."""
    part, which = tl.program_id(0), tl.program_id(1)  # `which`: row and KV head
    row, head = (which // HEADS).to(tl.int64), (which % HEADS).to(tl.int64)
    r, d, dv = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    here = r < R
    group, query_row = r // QUERIES, r % QUERIES
    first = which.to(tl.int64) * R + r
    if HALVED:
        e = tl.arange(0, HALF)
        loaded = here[:, None] & (e < D // 2)[None, :]
        q = tl.load(query + first[:, None] * D + e[None, :], mask=loaded, other=0.0)
        q_high = tl.load(query + first[:, None] * D + D // 2 + e[None, :], mask=loaded, other=0.0)
    else:
        q = tl.load(query + first[:, None] * D + d[None, :], mask=here[:, None] & (d < D)[None, :], other=0.0)
    keys = key + row * key_row + head * key_head
    values = value + row * value_row + head * value_head
    masks = mask + row * mask_row + head * mask_head
    biases = bias + row * bias_row + head * bias_head
    if ROTARY > 0:
        ranks = rank + row * rank_row + head * rank_head
        if INTERLEAVED:
            partner = tl.where(d < ROTARY, d ^ 1, d)
        else:
            partner = tl.where(d < ROTARY // 2, d + ROTARY // 2, tl.where(d < ROTARY, d - ROTARY // 2, d))
    m_i = tl.full([ROWS], LOWEST, tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    if BITS == 4:
        acc = tl.zeros([ROWS, VALUE_HALF], tl.float32)
        acc_high = tl.zeros([ROWS, VALUE_HALF], tl.float32)
    else:
        acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    # Operands in registers are loaded one iteration ahead: the product would otherwise wait for them after K.
    c = part * PART + tl.arange(0, BLOCK)
    of_head = which.to(tl.int64) * C
    # Masks and biases with a value per row are not: they would take too many registers.
    MASK_AHEAD: tl.constexpr = mask_group == 0 and mask_query == 0
    BIAS_AHEAD: tl.constexpr = HAS_BIAS and bias_group == 0 and bias_query == 0
    if MASK_AHEAD:
        shown = load_mask(masks, group, query_row, here, c, C, mask_group, mask_query)
    if BIAS_AHEAD:
        more = load_mask(biases, group, query_row, here, c, C, bias_group, bias_query)
    if BITS == 8:
        key_step = tl.load(key_scale + of_head + c, mask=c < C, other=0.0)
        value_step = tl.load(value_scale + of_head + c, mask=c < C, other=0.0)
    if ROTARY > 0:
        slot_rank = tl.load(ranks + c, mask=c < C, other=0)
    if BITS == 4:
        k_scale, k_zero = key_scale + of_head * KEY_GROUPS, key_zero + of_head * KEY_GROUPS
        v_scale, v_zero = value_scale + of_head * VALUE_GROUPS, value_zero + of_head * VALUE_GROUPS
        if HALVED:
            k_byte, k_s, k_z, k_s_high, k_z_high = packed_vectors(
                keys, k_scale, k_zero, c, key_slot, KEY_GROUPS, C, D, HALF
            )  # fmt: skip
        v_byte, v_s, v_z, v_s_high, v_z_high = packed_vectors(
            values, v_scale, v_zero, c, value_slot, VALUE_GROUPS, C, DV, VALUE_HALF
        )  # fmt: skip
    for start in range(part * PART, min(part * PART + PART, C), BLOCK):
        c = start + tl.arange(0, BLOCK)
        there, after = c < C, c + BLOCK
        slot = of_head + c
        if MASK_AHEAD:
            shown_after = load_mask(masks, group, query_row, here, after, C, mask_group, mask_query)
        if BIAS_AHEAD:
            more_after = load_mask(biases, group, query_row, here, after, C, bias_group, bias_query)
        if BITS == 8:
            key_step_after = tl.load(key_scale + slot + BLOCK, mask=after < C, other=0.0)
            value_step_after = tl.load(value_scale + slot + BLOCK, mask=after < C, other=0.0)
        if ROTARY > 0:
            slot_rank_after = tl.load(ranks + after, mask=after < C, other=0)
            at = tl.minimum(tl.maximum(slot_rank, 0), POSITIONS - 1) * D  # a free slot has no position
        if HALVED:
            if BITS == 4:
                both = k_byte.to(tl.int32)
                low, high = (
                    decode_codes(both & 15, k_s, k_z, BLOCK, HALF),
                    decode_codes(both >> 4, k_s_high, k_z_high, BLOCK, HALF),
                )
                k_byte, k_s, k_z, k_s_high, k_z_high = packed_vectors(
                    keys, k_scale, k_zero, after, key_slot, KEY_GROUPS, C, D, HALF
                )  # fmt: skip
            else:
                low, high = halves(keys + c[:, None] * key_slot, there, D, HALF)
            if ROTARY > 0:
                inside = there[:, None] & (e < D // 2)[None, :]
                at_cos, at_sin = cos + at[:, None], sin + at[:, None]
                rotated_low = rotate(low, high, at_cos, at_sin, inside, HALF)
                high = rotate(high, low, at_cos + D // 2, at_sin + D // 2, inside, HALF)
                low = rotated_low
            qk = tl.dot(q, tl.trans(low.to(q.dtype)), input_precision="ieee")
            qk = tl.dot(q_high, tl.trans(high.to(q.dtype)), qk, input_precision="ieee") * SCALE
        else:
            inside = there[None, :] & (d < D)[:, None]
            at_keys = keys + c[None, :] * key_slot
            indices = slot[None, :]
            k = load_numbers(at_keys, key_scale, key_zero, indices, d[:, None], inside, BITS, KEY_GROUPS, D).to(q.dtype)
            if ROTARY > 0:
                at = at[None, :] + d[:, None]
                other = partner[:, None]
                paired = load_numbers(at_keys, key_scale, key_zero, indices, other, inside, BITS, KEY_GROUPS, D)
                rotated = k.to(tl.float32) * tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
                rotated += paired.to(tl.float32) * tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
                k = rotated.to(q.dtype)
            qk = tl.dot(q, k, input_precision="ieee") * SCALE  # [ROWS, BLOCK]
        if BITS == 8:
            qk *= key_step.to(tl.float32)[None, :]
        if CAP > 0:
            qk = (2.0 / (1.0 + tl.exp(-2.0 / CAP * qk)) - 1.0) * CAP  # tanh
        if BIAS_AHEAD:
            qk += more.to(tl.float32)
        elif HAS_BIAS:
            qk += load_mask(biases, group, query_row, here, c, C, bias_group, bias_query).to(tl.float32)
        if MASK_AHEAD:
            qk = tl.where(shown != 0, qk, float("-inf"))
        else:
            shown_here = load_mask(masks, group, query_row, here, c, C, mask_group, mask_query)
            qk = tl.where(shown_here != 0, qk, float("-inf"))
        if STORE:
            tl.store(logits + first[:, None] * C + c[None, :], qk, mask=here[:, None] & there[None, :])
        qk = tl.where(there[None, :], qk, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        alpha = tl.exp2((m_i - m_new) * LOG2_E)
        p = tl.exp2((qk - m_new[:, None]) * LOG2_E)
        l_i = l_i * alpha + tl.sum(p, 1)
        if BITS == 8:
            p *= value_step.to(tl.float32)[None, :]
        probs = p.to(q.dtype)
        if BITS == 4:
            both = v_byte.to(tl.int32)
            low = decode_codes(both & 15, v_s, v_z, BLOCK, VALUE_HALF)
            high = decode_codes(both >> 4, v_s_high, v_z_high, BLOCK, VALUE_HALF)
            v_byte, v_s, v_z, v_s_high, v_z_high = packed_vectors(
                values, v_scale, v_zero, after, value_slot, VALUE_GROUPS, C, DV, VALUE_HALF
            )  # fmt: skip
            acc = acc * alpha[:, None] + tl.dot(probs, low.to(q.dtype), input_precision="ieee")
            acc_high = acc_high * alpha[:, None] + tl.dot(probs, high.to(q.dtype), input_precision="ieee")
        else:
            at_values, within = values + c[:, None] * value_slot, there[:, None] & (dv < DV)[None, :]
            v = load_numbers(
                at_values, value_scale, value_zero, slot[:, None], dv[None, :], within, BITS, VALUE_GROUPS, DV
            )
            acc = acc * alpha[:, None] + tl.dot(probs, v.to(q.dtype), input_precision="ieee")
        m_i = m_new
        if MASK_AHEAD:
            shown = shown_after
        if BIAS_AHEAD:
            more = more_after
        if BITS == 8:
            key_step, value_step = key_step_after, value_step_after
        if ROTARY > 0:
            slot_rank = slot_rank_after
    result = first * PARTS + part
    tl.store(m_part + result, m_i, mask=here)
    tl.store(l_part + result, l_i, mask=here)
    into = acc_part + result[:, None] * DV
    if BITS == 4:
        ev = tl.arange(0, VALUE_HALF)[None, :]
        within = here[:, None] & (ev < DV // 2)
        tl.store(into + ev, acc, mask=within)
        tl.store(into + DV // 2 + ev, acc_high, mask=within)
    else:
        tl.store(into + dv[None, :], acc, mask=here[:, None] & (dv < DV)[None, :])


@triton.jit
def join(
    m_part,  # the results of `split`
    l_part,
    acc_part,
    sink_logit,  # float32 [B or 1, Hkv, G, q or 1]; unused without HAS_SINK
    output,  # [B, Hkv, R, Dv]
    most,  # float32 [B, Hkv, R]: the highest logit, the sink's included; -inf for a query without visible slots
    total,  # the sum of exp(logit - most); 1 for a query without visible slots
    sink_row: tl.constexpr,
    sink_query: tl.constexpr,
    HAS_SINK: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    DV: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Combine the parts of one query for PIECE numbers of its output; ROWS is Hq * q."""
    which = tl.program_id(0).to(tl.int64)
    s, dv = tl.arange(0, WIDTH), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside_both = (s < PARTS)[:, None] & (dv < DV)[None, :]
    accs = tl.load(acc_part + (which * PARTS + s)[:, None] * DV + dv[None, :], mask=inside_both, other=0.0)
    m_parts = tl.load(m_part + which * PARTS + s, mask=s < PARTS, other=float("-inf"))
    l_parts = tl.load(l_part + which * PARTS + s, mask=s < PARTS, other=0.0)
    m_i = tl.max(m_parts, 0)
    if HAS_SINK:
        row, inside = which // ROWS, which % ROWS
        index = row * sink_row + inside // QUERIES * sink_query + (inside % QUERIES) * (sink_query > 1)
        of_sink = tl.load(sink_logit + index)
        m_i = tl.maximum(m_i, of_sink)
    alpha = tl.exp(m_parts - m_i)  # [WIDTH]
    l_i = tl.sum(alpha * l_parts, 0)
    if HAS_SINK:
        l_i += tl.exp(of_sink - m_i)
    m_i = tl.where(l_i == 0.0, float("-inf"), m_i)
    l_i = tl.where(l_i == 0.0, 1.0, l_i)
    acc = tl.sum(accs * alpha[:, None], 0) / l_i
    tl.store(output + which * DV + dv, acc.to(output.dtype.element_ty), mask=dv < DV)
    tl.store(most + which, m_i, mask=tl.program_id(1) == 0)
    tl.store(total + which, l_i, mask=tl.program_id(1) == 0)


def power(number: int, least: int = 16) -> int:
    """Return the next power of two, as Triton requires for tensor sizes; products need at least 16."""
    return int(max(least, triton.next_power_of_2(number)))


def _in_halves(bits: int, dim: int, rotary: int, interleaved: bool) -> bool:
    """Return whether keys are processed in halves.

    Both codes of a byte, or a number and its partner, are then loaded together.
    """
    if rotary:
        return rotary == dim and not interleaved
    return bits == 4


def _block(width: int, itemsize: int, rows: int, costly: bool) -> int:
    """Return how many slots a program loads at a time.

    Many rows need the registers, so programs load fewer slots.  So do `costly` rows: decoded from four bits,
    decoded and rotated, or rotated with partners that are loaded separately.
    """
    most = 128 if rows <= 16 else 32 if rows * width <= 8192 else 16
    return max(16, min(most, TILE // (width * itemsize)) // (2 if costly else 1))


def _launch_options(rows: int, bits: int, rotary: int, halved: bool) -> dict[str, int]:
    """Return the number of warps and of pipeline stages.

    Many rows and rotated keys need the registers of more warps.  Eight-bit codes take about as long to convert as to
    load, so another stage overlaps the two.
    """
    many_warps = rows > 16 or (rotary > 0 and not (bits > 0 and halved))
    return {"num_warps": 8 if many_warps else 4, "num_stages": 3 if bits == 8 and not (many_warps or rotary) else 2}


def _parts(programs: int, capacity: int, block: int) -> tuple[int, int]:
    """Return the number of parts that the slots are cut into, and the slots of each part."""
    blocks = -(-capacity // block)
    most = min(MAX_SPLITS, max(MIN_SPLITS, ONE_WAVE // programs))
    count = max(1, min(blocks, most, -(-PROGRAMS // programs)))
    each = -(-blocks // count)
    return -(-blocks // each), each * block


def as_contiguous(x: Tensor) -> Tensor:
    """Return x.contiguous(), in a form that can be traced for a GPU on a machine without one."""
    return x if x.is_contiguous() else torch.clone(x, memory_format=torch.contiguous_format)


@torch.library.triton_op("kvpass::attend_slots", mutates_args={})
def attend_slots(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    key_zero: Tensor | None,
    value_zero: Tensor | None,
    mask: Tensor,
    bias: Tensor | None,
    sink_logit: Tensor | None,
    rank: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rotary: int,
    interleaved: bool,
    scale: float,
    cap: float | None,
    store: bool,
    bits: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attend to slots in two launches; see `kvpass.lowering.attend.attend` for the other arguments.

    Args:
        query: [B, Hkv, G, q, D] with G * q up to `attend.MAX_ROWS`; key, value: numbers, or codes of `bits` bits.
        key_scale, value_scale, key_zero, value_zero: [B, Hkv, C, groups], the format's scales and zero points.
        mask, bias: [B or 1, Hkv or 1, G or 1, q or 1, C].
        rank, cos, sin, rotary, interleaved: the fields of a `Rope`, which is applied to the keys at read, or None.

    Returns:
        output [B, Hkv, G, q, Dv]; the highest logit and the sum of exp(logit - highest), float32 [B, Hkv, G, q]; the
        masked logits, float32 [B, Hkv, G, q, C] with `store`, else [0].
    """
    rows, heads, groups, queries, dim = query.shape
    capacity, width = key.shape[2], value.shape[3] * (2 if bits == 4 else 1)
    padded, halved = power(groups * queries), _in_halves(bits, dim, rotary, interleaved)
    costly = bits == 4 or (rotary > 0 and (bits == 8 or not halved))
    block = _block(power(max(dim, width)), query.element_size(), padded, costly)
    parts, each = _parts(rows * heads, capacity, block)
    query, mask = as_contiguous(query), as_contiguous(mask)
    has_bias, bias = bias is not None, value if bias is None else as_contiguous(bias)  # without a bias it is never read
    positions = 0 if cos is None else cos.shape[0]
    rank, cos, sin = (value if x is None else as_contiguous(x) for x in (rank, cos, sin))
    groups_of_key, groups_of_value = (0 if x is None else x.shape[3] for x in (key_scale, value_scale))
    quantization = [value if x is None else as_contiguous(x) for x in (key_scale, value_scale, key_zero, value_zero)]
    m_part = query.new_empty((rows, heads, groups, queries, parts), dtype=torch.float32)
    l_part = torch.empty_like(m_part)
    acc_part = query.new_empty((*m_part.shape, width), dtype=torch.float32)
    logits = query.new_empty((rows, heads, groups, queries, capacity) if store else (0,), dtype=torch.float32)
    torch.library.wrap_triton(split)[(parts, rows * heads)](
        query, key, value, *quantization, mask, bias, rank, cos, sin, logits, m_part, l_part, acc_part,
        *key.stride()[:3], *value.stride()[:3], *broadcast_strides(mask)[:4],
        *(broadcast_strides(bias)[:4] if has_bias else (0, 0, 0, 0)), *broadcast_strides(rank)[:2],
        BITS=bits, KEY_GROUPS=groups_of_key, VALUE_GROUPS=groups_of_value, ROTARY=rotary, INTERLEAVED=interleaved,
        HALVED=halved, POSITIONS=positions, SCALE=scale, CAP=cap or 0.0, HAS_BIAS=has_bias, STORE=store, HEADS=heads,
        R=groups * queries, QUERIES=queries, C=capacity, D=dim, DV=width, PARTS=parts, PART=each, ROWS=padded,
        WIDTH=power(dim), VALUE_WIDTH=power(width), HALF=power(dim // 2), VALUE_HALF=power(width // 2),
        BLOCK=block, **_launch_options(padded, bits, rotary, halved),
    )  # fmt: skip
    return *_launch_join(query, m_part, l_part, acc_part, sink_logit), logits


def _launch_join(
    query: Tensor, m_part: Tensor, l_part: Tensor, acc_part: Tensor, sink_logit: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the results of `split` to the output, the highest logit and the sum, as `attend_slots` returns them."""
    (rows, heads, groups, queries, parts), width = m_part.shape, acc_part.shape[-1]
    output = query.new_empty((rows, heads, groups, queries, width))
    most = query.new_empty((rows, heads, groups, queries), dtype=torch.float32)
    total = torch.empty_like(most)
    sinks = as_contiguous(sink_logit.float()) if sink_logit is not None else m_part  # unused then
    per_group, width_of_parts = sinks.shape[3], power(parts, 1)
    piece = max(16, min(power(width), JOINED // width_of_parts))
    torch.library.wrap_triton(join)[(rows * heads * groups * queries, triton.cdiv(width, piece))](
        m_part, l_part, acc_part, sinks, output, most, total,
        sink_row=0 if sinks.shape[0] == 1 else heads * groups * per_group, sink_query=per_group,
        HAS_SINK=sink_logit is not None, ROWS=heads * groups * queries, QUERIES=queries, DV=width, PARTS=parts,
        WIDTH=width_of_parts, PIECE=piece, num_warps=4, num_stages=1,
    )  # fmt: skip
    return output, most, total


def attend_by_kernel(
    query: Tensor,
    key: EncodedVectors,
    value: EncodedVectors,
    *,
    scale: float,
    mask: Tensor,
    bias: Tensor | None,
    cap: float | None,
    sink_logit: Tensor | None,
    with_logits: bool,
    rope: Rope | None = None,
    unknown_queries: UnknownQueries | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the results of `attend`, by the kernels and by plain torch around them, which the compiler fuses."""
    keys, values = _as_dense(key.codes), _as_dense(value.codes)
    mask, bias = _expand_mask(mask, key.shape[2]), None if bias is None else _expand_mask(bias, key.shape[2])
    rotary: tuple[object, ...] = (None, None, None, 0, False)
    if rope is not None:
        rotary = rope.rank, rope.cos, rope.sin, rope.pairs.width, rope.pairs.interleaved
    stored = _scales_and_zeros(key, value)
    options = (mask, bias, sink_logit, *rotary, scale, cap, with_logits, key.format.bits)
    output, most, total, logits = torch.ops.kvpass.attend_slots(query, keys, values, *stored, *options)
    most = most[..., None]
    if unknown_queries is not None:
        output = torch.where(unknown_queries.mask(most), torch.nan, output)
    if not with_logits:
        return output, None, None
    return output, torch.exp(logits - most.clamp_min(LOWEST.value)) / total[..., None], logits


def _scales_and_zeros(key: EncodedVectors, value: EncodedVectors) -> list[Tensor | None]:
    """Return the scales of keys and of values, and their zero points, or None for each that is missing."""
    found = itertools.zip_longest(*(vectors.parts[1:] for vectors in (key, value)))
    flat: list[Tensor | None] = [part for pair in found for part in pair]
    return flat + [None] * (4 - len(flat))


def _as_dense(buffer: Tensor) -> Tensor:
    """Return K or V with a dense last dimension.

    Slots are dense, but rows that a policy computed may not be.
    """
    return buffer if buffer.stride(-1) == 1 else as_contiguous(buffer)


def _expand_mask(mask: Tensor, capacity: int) -> Tensor:
    """Expand a mask or bias [..., C or 1] to [..., C]."""
    return mask if mask.shape[-1] == capacity else mask.expand(*mask.shape[:-1], capacity)
