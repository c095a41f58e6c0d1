"""Compute attention of prompts and its column sums on a CPU, by `attention_tiles.cpp`.

Products come from the library of torch's own attention: in bfloat16 where it multiplies bfloat16 on this processor,
else in float32. Where it does neither, `attention_sums` computes in blocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib.resources
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvpass.lowering.attend import broadcast_strides
from kvpass.lowering.attention_blocks import AttentionInputs, by_group, with_dense_last_dim
from kvpass.torch_private import generated_code, inductor, processor, tensors

QUERIES, KEYS = 64, 128  # of a tile, whose logits take 32 KB
MIN_QUERIES = QUERIES // 2
"""The fewest queries whose attention is computed here: a tile of fewer queries is mostly padding."""
MIN_MASKED = 1024
"""The fewest queries for which skipping the keys that a shared mask hides makes tiles faster than the library with
AMX."""
TASKS_WITH_SUMS = 128
"""The approximate number of tasks of attention with column sums; each has one sum for each key."""
MESSAGE = 1024  # bytes of an error's text
MASKS = {None: 0, torch.bool: 1, torch.float32: 2, torch.bfloat16: 3}
NATIVE = (torch.bfloat16, torch.float32)
FLOAT32_ON_CPU: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # for any defaults of torch

log = logging.getLogger("kvpass.attention")


class AttentionOperands(ctypes.Structure):
    """The fields of `AttentionOperands` in the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "mask", "sink_logit", "log_sum_exp")),
        *((name, ctypes.c_void_p) for name in ("packed", "shift", "factor")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "groups", "queries", "keys", "dim")),
        ("query_stride", ctypes.c_int64 * 3),
        ("key_stride", ctypes.c_int64 * 3),
        ("mask_stride", ctypes.c_int64 * 4),
        ("sink_stride", ctypes.c_int64 * 4),
        ("total_stride", ctypes.c_int64 * 3),
        *((name, ctypes.c_int64) for name in ("causal", "threads")),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
    )


class OutputOperands(ctypes.Structure):
    """The fields of `OutputOperands` in the source."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("value", "packed", "output", "log_sum_exp", "weights", "sums", "squares")
        ),
        ("value_stride", ctypes.c_int64 * 3),
        ("output_stride", ctypes.c_int64 * 3),
        ("parts", ctypes.c_int64),
    )


@dataclasses.dataclass(frozen=True)
class TiledResults:
    """The memory of results of attention.

    Attributes:
        operands: the values and the results, as addresses.
        tensors: the tensors at the addresses.
        output, log_sum_exp: [B, Hq, q, D] and [B, Hq, q].
        sums: one for each power, [B, Hkv, G, parts, S], with S rounded up to blocks of keys.
    """

    operands: OutputOperands
    tensors: tuple[Tensor | None, ...]
    output: Tensor
    log_sum_exp: Tensor
    sums: list[Tensor]


@dataclasses.dataclass(frozen=True)
class TiledAttention:
    """Attention in tiles of queries and keys, and sums of its probabilities.

    Attributes:
        operands: the operands and the totals of each query, as addresses.
        dtype: the dtype of the products.
        mask: dtype of the mask, or None.
        tensors: the tensors at the addresses.
        shape: B, Hkv, G, q, S.
    """

    operands: AttentionOperands
    dtype: torch.dtype
    mask: torch.dtype | None
    tensors: tuple[Tensor | None, ...]
    shape: tuple[int, int, int, int, int]

    @staticmethod
    def of(
        attention: AttentionInputs, log_sum_exp: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> TiledAttention:
        """Describe the attention of queries to keys in a dtype with products here; nothing is computed yet.

        Args:
            log_sum_exp: [B, Hq, q], of the queries' logits and the sink's, or None.
            dtype: the dtype of the products; None for `dtype_of_products`.
        """
        query, key, mask, sink_logit = attention.query, attention.key, attention.mask, attention.sink_logit
        dtype = dtype or dtype_of_products(query.dtype, query.shape[3])
        assert dtype is not None
        (batch, q_heads, queries, dim), (heads, keys) = query.shape, key.shape[1:3]
        shape = batch, heads, q_heads // heads, queries, keys
        assert mask is None or mask.shape[-1] == keys
        query, key = (with_dense_last_dim(x.to(dtype)) for x in (query, key))
        mask = None if mask is None else with_dense_last_dim(by_group(mask, heads))
        mask = mask if mask is None or mask.dtype in MASKS else mask.float()
        sink = None if sink_logit is None else by_group(sink_logit.float(), heads)[..., 0]
        known = None if log_sum_exp is None else log_sum_exp.float()
        packed = _memory_for_blocks(key)
        shift, factor = query.new_empty(2, batch, q_heads, queries, dtype=torch.float32)
        used = query, key, mask, sink, known, packed, shift, factor
        strided = (query, 3), (key, 3), (mask, 4), (sink, 4), (known, 3)
        operands = AttentionOperands(
            *map(_address, used),
            *(*shape, dim),
            *(_strides(x, count) for x, count in strided),
            *(int(attention.causal), torch.get_num_threads(), attention.scale, attention.cap or 0.0),
        )
        return TiledAttention(operands, dtype, None if mask is None else mask.dtype, used, shape)

    def with_totals(self) -> TiledAttention:
        """Compute the totals of all queries, which `column_sums` and `probabilities` need.

        Raises:
            RuntimeError: the library cannot multiply matrices of these sizes, or there is no memory for the tiles.
        """
        self._run("prepare")
        return self

    def attend(
        self, value: Tensor, weight: Tensor | None = None, powers: int = 0
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Compute attention by an online softmax, and the result of `column_sums`.

        Here sums take a tenth of attention's time.  Probabilities are added as they are multiplied, in bfloat16 where
        products are in bfloat16.

        Args:
            value: [B, Hkv, S, D], with the dimension of a key.
            weight: [B, q], the weight of each query in the sums; None without powers.

        Returns:
            The output [B, Hq, q, D] in the dtype of `value` and in the memory of [B, q, Hq, D]; the log-sum-exp of the
            logits, float32 [B, Hq, q]; and the sums.  Zero and -infinity for a query that sees no key.

        Raises:
            RuntimeError: the library cannot multiply matrices of these sizes, or there is no memory for the tiles.
        """
        attended = self._attended(value, weight, powers)
        self._run("attend", ctypes.addressof(attended.operands))
        sums = [each.sum(3)[..., : self.shape[4]].contiguous() for each in attended.sums]
        return attended.output.to(value.dtype), attended.log_sum_exp, sums

    def attend_with_means(self, value: Tensor) -> tuple[Tensor, Callable[[int, slice, int], Tensor]]:
        """Return the output of `attend`, and a function that computes it for some queries.

        Args:
            value: [B, Hkv, S, D], with the dimension of a key.

        Returns:
            The output in the dtype of `value`, and a function (row of the batch, queries, keys) that fills it for
            consecutive queries of the row and returns the mean of their probabilities over all heads, float32
            [1, 1, 1, n, keys].  The slice of queries starts and ends at multiples of `QUERIES`, or at the last query;
            there are at least as many keys as the queries see.
        """
        attended = self._attended(value)
        output = attended.output
        if value.dtype != self.dtype:
            output = torch.empty_like(output, dtype=value.dtype)

        def means(row: int, queries: slice, keys: int) -> Tensor:
            assert queries.start % QUERIES == 0
            assert queries.stop % QUERIES == 0 or queries.stop == self.shape[3]
            count, stride = queries.stop - queries.start, -(-keys // KEYS) * KEYS
            made = torch.empty(1, 1, 1, count, stride, **FLOAT32_ON_CPU)
            results = ctypes.addressof(attended.operands)
            self._run("attend_with_means", results, row, queries.start, count, stride, _address(made))
            if output is not attended.output:
                output[row, :, queries] = attended.output[row, :, queries]
            return made[..., :keys]

        return output, means

    def _attended(self, value: Tensor, weight: Tensor | None = None, powers: int = 0) -> TiledResults:
        """Lay out keys and values, and return memory for results; for the arguments see `attend`."""
        (batch, heads, groups, count, keys), dim = self.shape, value.shape[3]
        values = with_dense_last_dim(value.to(self.dtype))
        packed = _memory_for_blocks(values)
        output = values.new_empty(batch, count, heads * groups, dim).transpose(1, 2)
        log_sum_exp = values.new_empty(batch, heads * groups, count, dtype=torch.float32)
        weight = weight.float().contiguous() if weight is not None and powers else None
        parts = -(-count // QUERIES)
        if powers:  # each part has separate sums, so that results do not depend on the number of threads
            parts = min(parts, -(-TASKS_WITH_SUMS // max(1, batch * heads * groups)))
        shape = powers, batch, heads, groups, parts, -(-keys // KEYS) * KEYS
        sums = [*log_sum_exp.new_zeros(shape)]
        used = values, packed, output, log_sum_exp, weight, *sums, *[None] * (2 - powers)
        operands = OutputOperands(*map(_address, used), _strides(values, 3), _strides(output, 3), parts)
        self._run("pack_values", ctypes.addressof(operands))
        return TiledResults(operands, used, output, log_sum_exp, sums)

    def column_sums(self, weight: Tensor, powers: int) -> list[Tensor]:
        """Sum the probabilities over the queries, and with two `powers` also their squares.

        Args:
            weight: [B, q], the weight of each query.

        Returns:
            One or two float32 tensors [B, Hkv, G, S].
        """
        weight, (batch, heads, groups, _, keys) = weight.float().contiguous(), self.shape
        sums = [weight.new_empty(batch, heads, groups, keys) for _ in range(powers)]
        self._run("column_sums", *map(_address, (weight, *sums, *[None] * (2 - powers))))
        return sums

    def probabilities(self, row: int, queries: slice, keys: int) -> Tensor:
        """Return the probabilities of consecutive queries of a row for the first keys, float32 [1, Hkv, G, n, keys].

        Args:
            queries: a slice with both ends.
            keys: at least as many as the queries see.
        """
        _, heads, groups, _, _ = self.shape
        count = queries.stop - queries.start
        made = torch.empty(1, heads, groups, count, keys, **FLOAT32_ON_CPU)
        self._run("row_probabilities", row, queries.start, count, keys, _address(made))
        return made

    def _run(self, name: str, *arguments: int | None) -> None:
        message = ctypes.create_string_buffer(MESSAGE)
        function = getattr(_library(self.dtype, self.mask), name)
        more = [ctypes.c_void_p(x) for x in arguments]  # a word each, as in the source
        if function(ctypes.byref(self.operands), message, ctypes.c_int64(MESSAGE), *more):
            raise RuntimeError(f"attention in C++ failed: {message.value.decode(errors='replace')}")


def dtype_of_products(dtype: torch.dtype, dim: int) -> torch.dtype | None:
    """Return the dtype in which queries and keys [., D] are multiplied; None if the loops cannot run here."""
    wanted = dtype if dtype in NATIVE and dim % 2 == 0 else torch.float32
    usable = [each for each in (wanted, torch.float32) if dtype != torch.float64 and _runs(each)]
    return usable[0] if usable else None


@functools.cache
def _runs(dtype: torch.dtype) -> bool:
    """Return whether the source compiles and the library multiplies this dtype correctly on this processor."""
    try:
        with tensors.real_tensors():  # a graph may be traced meanwhile
            right, why = _is_right(dtype), "the results are wrong"
    except (RuntimeError, OSError) as error:  # no compiler, or another signature or processor
        right, why = False, str(error)
    if not right:
        log.info("no attention in C++ with products in %s: %s", dtype, why)
    return right


def _is_right(dtype: torch.dtype) -> bool:
    """Compare the attention of three small queries, and its column sums, with torch's operators."""
    x = torch.arange(-6.0, 6.0, **FLOAT32_ON_CPU).view(1, 1, 3, 4).div(4)
    future = torch.ones(3, 3, dtype=torch.bool, device="cpu").triu(1)
    probs = (x @ x.mT).masked_fill(future, -torch.inf).softmax(-1)
    computed = TiledAttention.of(AttentionInputs(x, x, None, True, 1.0), dtype=dtype)
    weight = torch.ones(1, 3, **FLOAT32_ON_CPU)
    [sums] = computed.with_totals().column_sums(weight, 1)
    output, _, [same_sums] = computed.attend(x, weight, 1)
    right_sums = torch.allclose(sums[:, :, 0], probs.sum(2), atol=1e-4)
    return right_sums and torch.allclose(same_sums, sums, atol=1e-2) and torch.allclose(output, probs @ x, atol=1e-2)


def is_faster(query: Tensor, mask: Tensor | None, summed: bool) -> bool:
    """Return whether attention of queries [B, Hq, q, D] is faster here than by torch's kernel.

    torch's kernel multiplies bfloat16 by AMX where the processor has it, as fast as the tiles.  But it skips no tile
    that a mask hides, sums need a second pass, and a mask of each head is first copied as numbers for all query heads.
    Otherwise it multiplies by MKL, which is slower than the products used here, in float32 also for tensors of 16 bits.

    Args:
        query: may be fake; a dynamic number of queries counts as many.
        mask: [B or 1, Hq, Hkv or 1, q or 1, S], or None; may be fake.
        summed: whether sums or means of the probabilities are also computed.
    """
    count = query.shape[2] if isinstance(query.shape[2], int) else sys.maxsize
    shared = mask is None or mask.shape[1] == 1
    library_is_fast = query.dtype == torch.bfloat16 and processor.has_matrix_tiles() and shared and not summed
    if library_is_fast and mask is None:
        return False
    if count < (MIN_MASKED if library_is_fast else MIN_QUERIES):
        return False
    products = dtype_of_products(query.dtype, query.shape[3])  # which may compile, so it comes last
    return products == torch.float32 or products in processor.dot_products()


def start_builds(dtype: torch.dtype) -> threading.Thread:
    """Build C++ libraries in a thread while Dynamo traces the first call.

    Before its first kernel Inductor compiles and loads a few small programs, to learn which vector instructions work.
    That takes about five seconds once for a cache folder, and half a second in later processes.  The thread's errors
    are dropped: missing libraries are then built where they are used.

    Args:
        dtype: of keys and values.
    """
    inductor.import_compiler()  # before the thread starts: two threads must not import parts of it at the same time

    def build() -> None:
        with contextlib.suppress(Exception):
            inductor.probe_vector_instructions()
            dtype_of_products(dtype, dim=2)  # builds the library that it needs

    thread = threading.Thread(target=build, name="kvpass-early-builds", daemon=True)
    thread.start()
    return thread


@functools.cache
def _library(dtype: torch.dtype, mask: torch.dtype | None) -> ctypes.CDLL:
    """Compile the source for products in `dtype` and masks of a dtype, once for all processes."""
    return generated_code.cpp_library(source(dtype, mask))


def source(dtype: torch.dtype, mask: torch.dtype | None) -> str:
    """Return the C++ source for products in `dtype` and masks of a dtype, with the sizes of a tile."""
    sizes = f"#define TILE_QUERIES {QUERIES}\n#define TILE_KEYS {KEYS}\n"
    macros = f"#define BFLOAT16_PRODUCTS {int(dtype == torch.bfloat16)}\n#define MASK {MASKS[mask]}\n{sizes}"
    library = importlib.resources.files(__package__).joinpath("attention_tiles.cpp").read_text()
    return generated_code.MATRIX_PRODUCTS + macros + library


def _memory_for_blocks(x: Tensor) -> Tensor:
    """Return memory for vectors [B, Hkv, S, D] as right operands of products."""
    batch, heads, keys, dim = x.shape
    return x.new_empty(batch * heads * -(-keys // KEYS) * KEYS * dim)


def _address(x: Tensor | None) -> int | None:
    assert x is None or not tensors.is_fake(x)
    return None if x is None else x.data_ptr()


def _strides(x: Tensor | None, count: int) -> ctypes.Array[ctypes.c_int64]:
    """Return the first `count` strides, or zeros without a tensor."""
    return (ctypes.c_int64 * count)(*([] if x is None else broadcast_strides(x)[:count]))
