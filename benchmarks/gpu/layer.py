"""Time one attention layer: bandwidth, steps of policies, the caching operation, and statistics of a prompt."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.gpu.bench import Bench, Row
from kvpass.cache.cached_attention import CachedAttention, NewTokens
from kvpass.cache.layout import Layout
from kvpass.cache.slots import Slots
from kvpass.cache.step import decode_step
from kvpass.lowering.attend import Rope, RotaryPairs, RotateKeys, attend
from kvpass.lowering.attention_statistics import StatisticsArguments, attention_statistics
from kvpass.lowering.formats import EncodedVectors, KVDtype, Sections, format_of
from kvpass.policies import resolve
from kvpass.policies.aligners import Aligner, AlignerScope
from kvpass.policies.aligners.networks import DirectNetwork

HEADS, GROUPS, DIM = 8, 4, 128
BATCHES, LENGTHS = (1, 8, 32), (1024, 4096, 16384, 65536)
PROMPT = 8192
REPAIRED = (8, 1024)  # rows of a batch, slots


class Case(NamedTuple):
    """Attention over slots: their number, rows, format, and whether keys are rotated at read."""

    rows: int
    slots: int
    kv_dtype: KVDtype | None = None
    turned: bool = False

    @property
    def name(self) -> str:
        extras = [self.kv_dtype or "", "keys rotated at read" if self.turned else ""]
        return ", ".join([f"batch {self.rows}, {self.slots} slots", *filter(None, extras)])

    @property
    def aimed(self) -> bool:
        """True if the case has a target."""
        return self.slots >= 4096 and self.rows >= 8 and self.kv_dtype is None and not self.turned

    def held(self, device: torch.device, dtype: torch.dtype) -> tuple[EncodedVectors, EncodedVectors]:
        """Return keys and values of zeros."""
        kept = format_of(self.kv_dtype, DIM, dtype)
        key, value = (EncodedVectors.empty(kept, (self.rows, HEADS, self.slots), device) for _ in range(2))
        return key, value


def cases(batches: Sequence[int] = BATCHES, lengths: Sequence[int] = LENGTHS) -> list[Case]:
    """Return plain cases of all sizes, then other formats and rotated keys of some sizes."""
    plain = [Case(rows, slots) for rows, slots in itertools.product(batches, lengths)]
    others: list[tuple[KVDtype | None, bool]] = [(None, True), ("int8", False), ("int4", False), ("int4", True)]
    few = [case for case in plain if case.slots in (256, 4096, 16384)]
    return plain + [Case(case.rows, case.slots, *other) for other in others for case in few]


def copy_bandwidth(bench: Bench) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.empty(1 << (22 if bench.small else 30), dtype=torch.int8, device=bench.device)
    into = torch.empty_like(source)
    return 2 * source.nbytes / bench.seconds(lambda: into.copy_(source))


def rotary(slots: int, like: Tensor) -> tuple[RotateKeys, Rope]:
    """Return Llama's rotary embedding of slots in their order, plain and for the kernels, in the dtype of `like`."""
    kind: dict[str, Any] = dict(device=like.device, dtype=torch.float32)
    phase = torch.arange(slots, **kind)[:, None] * 1e4 ** -(torch.arange(0, DIM, 2, **kind) / DIM)
    cos, sin = torch.cat([phase.cos(), phase.cos()], -1), torch.cat([-phase.sin(), phase.sin()], -1)
    cos, sin = cos.to(like.dtype), sin.to(like.dtype)

    def rotate(sections: Sections) -> list[Tensor]:
        keys = sections.join()
        return [keys * cos.to(keys) + keys.roll(DIM // 2, -1) * sin.to(keys)]

    return rotate, Rope(cos, sin, RotaryPairs(DIM, False), torch.arange(slots, device=like.device)[None, None])


def bandwidth(bench: Bench) -> Iterator[Row]:
    """Return the bandwidth of `attend` over stored K and V, as a share of a copy."""
    reached = copy_bandwidth(bench)
    yield Row("copy", "1 GiB", reached / 1e9, "GB/s")
    for case in cases((1, 2), (256,)) if bench.small else cases():
        if size_of(case) * 2 > bench.memory() or not bench.in_time(f"attend, {case.name}", 10):
            continue
        share = size_of(case) / _attending(bench, case) / reached
        goal = (">= 0.85", share >= 0.85) if case.aimed else ("", None)
        yield Row("attend, of copy", case.name, share, "", *goal)


def size_of(case: Case) -> int:
    """Return the bytes of K and V, with scales and zero points."""
    held = case.held(torch.device("meta"), torch.bfloat16)
    return sum(part.nbytes for stored in held for part in stored.parts)


def _attending(bench: Bench, case: Case) -> float:
    """Return the seconds of `attend` over all slots."""
    query = bench.randn(case.rows, HEADS, GROUPS, 1, DIM)
    key, value = case.held(bench.device, bench.dtype)
    for part in (*key.parts, *value.parts):
        part.normal_() if part.is_floating_point() else part.random_(0, 127)
    mask = torch.ones(case.rows, 1, 1, 1, case.slots, dtype=torch.bool, device=bench.device)
    given: dict[str, Any] = dict(zip(("rotate", "rope"), rotary(case.slots, query), strict=True)) if case.turned else {}

    def function(q: Tensor, k: list[Tensor], v: list[Tensor], m: Tensor) -> Tensor:
        keys, values = EncodedVectors(key.format, tuple(k)), EncodedVectors(value.format, tuple(v))
        return attend(q, keys, values, scale=0.1, mask=m, with_logits=False, **given)[0]

    run = torch.compile(function, dynamic=False)
    return bench.seconds(lambda: run(query, list(key.parts), list(value.parts), mask))


class RepairOperands(NamedTuple):
    """Cached keys and values [B, H, C, D], and the distances that they move."""

    aligner: Aligner
    weights: list[Tensor]
    key: Tensor
    value: Tensor
    made: Tensor
    rank: Tensor

    @staticmethod
    def drawn(bench: Bench, rows: int, slots: int) -> RepairOperands:
        """Return random rows, with a random network of the default size."""
        scope = AlignerScope("any", 1, HEADS, DIM, DIM, slots)
        network = DirectNetwork(scope)
        with torch.no_grad():
            network.outer.normal_(std=0.1)
        made, rank = torch.randint(0, slots + 1, (2, rows, slots), device=bench.device).sort(0, descending=True).values
        key, value = (bench.randn(rows, HEADS, slots, DIM) for _ in range(2))
        aligner = Aligner("direct", scope, network.to_tensors())
        weights = [tensor.to(key.device) for tensor in aligner.layer_weights(0)]
        return RepairOperands(aligner, weights, key, value, made, rank)

    def on_cpu(self) -> RepairOperands:
        """Return the rows on the CPU."""
        return RepairOperands(self.aligner, [tensor.cpu() for tensor in self.weights], *(x.cpu() for x in self[2:]))

    def repaired(self) -> tuple[Tensor, Tensor]:
        """Return the repaired rows."""
        moves = self.made > self.rank
        return self.aligner.repair(self.weights, self.key, self.value, self.made, self.rank, moves)


def repairs(bench: Bench) -> Iterator[Row]:
    """Time kv_align's repair of all rows in a step, and a copy of them."""
    batch, slots = (1, 256) if bench.small else REPAIRED
    rows = RepairOperands.drawn(bench, batch, slots)
    copied = bench.seconds(lambda: (rows.key.clone(), rows.value.clone()))
    yield Row(
        "repair of a layer", f"batch {batch}, {slots} slots, of a copy", bench.seconds(rows.repaired) / copied, "x"
    )


def step(bench: Bench, name: str, slots: int, rows: int) -> Callable[[], Any]:
    """Return a compiled decode step of a policy on one layer."""
    policy = resolve(name, {})
    capacity = policy.capacity(slots, slots)
    layout = Layout(policy, slots, capacity, rows, HEADS, DIM, DIM, bench.dtype, bench.device, False)
    held = Slots.empty(layout)
    held.position.copy_(torch.arange(capacity, device=bench.device).expand_as(held.position))
    held.index.copy_(held.position)
    held.seen.fill_(capacity)
    held.length.fill_(capacity)

    def function(*tensors: Tensor) -> Tensor:
        state, new = tensors[:-4], NewTokens(*tensors[-4:])
        return decode_step(layout, CachedAttention(DIM**-0.5), held.with_tensors(list(state)), new).output

    new = [bench.randn(rows, count, 1, DIM) for count in (HEADS * GROUPS, HEADS, HEADS)]
    arguments = [*held.tensors(), *new, torch.ones(rows, dtype=torch.bool, device=bench.device)]
    compiled = torch.compile(make_fx(function, tracing_mode="fake")(*arguments), dynamic=False)
    return lambda: compiled(*arguments)


def policies(bench: Bench) -> Iterator[Row]:
    """Time the step of each policy, and of one without scores."""
    rows, slots = (1, 256) if bench.small else (8, 4096)
    plain = bench.seconds(step(bench, "window", slots, rows))
    yield Row("step of a layer", f"window, batch {rows}, {slots} slots", plain * 1e6, "us")
    for name in bench.few(("h2o", "tova", "roco", "buzz", "cascade", "d2o", "snapkv", "sage")):
        if bench.in_time(f"step {name}", 20):
            ratio = bench.seconds(step(bench, name, slots, rows)) / plain
            goal = ("<= 1.15", ratio <= 1.15) if name in ("h2o", "tova") else ("", None)
            yield Row("step of a layer", f"{name}, of window", ratio, "x", *goal)


def caching(bench: Bench) -> Iterator[Row]:
    """Time storing a token by concatenation and in place (table 4 of Cascade, arXiv:2406.17808)."""
    slots = 256 if bench.small else 4096
    key, value = bench.randn(1, 32, slots, DIM), bench.randn(1, 32, slots, DIM)
    row = bench.randn(1, 32, 1, DIM)
    by_cat = bench.seconds(lambda: (torch.cat([key, row], 2), torch.cat([value, row], 2)))
    free = torch.full((1, 32), 7, dtype=torch.int64, device=bench.device)
    heads = torch.arange(32, device=bench.device)[None]

    def write(key: Tensor, value: Tensor, row: Tensor, free: Tensor) -> None:
        for buffer in (key, value):
            buffer.index_put_((torch.zeros_like(free), heads, free), row[:, :, 0])

    compiled = torch.compile(write, dynamic=False)
    in_place = bench.seconds(lambda: compiled(key, value, row, free))
    yield Row("caching one token", "concatenation", by_cat * 1e3, "ms")
    faster = by_cat / in_place
    yield Row("caching one token", "row in place, of concatenation", faster, "x faster", ">= 20", faster >= 20)


def prompt_scores(bench: Bench) -> Iterator[Row]:
    """Time the statistics of a prompt, and its attention."""
    count = 128 if bench.small else PROMPT
    query = bench.randn(1, HEADS * GROUPS, count, DIM)
    key, value = bench.randn(1, HEADS, count, DIM), bench.randn(1, HEADS, count, DIM)
    valid = torch.ones(1, count, dtype=torch.bool, device=bench.device)
    whole = torch.nn.functional.scaled_dot_product_attention
    attention = bench.seconds(lambda: whole(query, key, value, is_causal=True, enable_gqa=True), 10)
    yield Row("prompt", f"flash attention, {count} tokens", attention * 1e3, "ms")
    for name, statistics in (("sums", ["total"]), ("sums and squares", ["squares", "total"]), ("64 rows", ["window"])):
        request = StatisticsArguments(tuple(statistics), True, DIM**-0.5, None, HEADS, window=64).to_text()
        spent = bench.seconds(
            lambda: attention_statistics(query, key, None, None, None, valid, None, request),  # noqa: B023
            10,
        )
        goal = ("<= 1.35", spent / attention <= 1.35) if "total" in statistics else ("", None)
        yield Row("prompt", f"{name}, of attention", spent / attention, "x", *goal)
        yield Row("prompt", name, spent * 1e3, "ms")
