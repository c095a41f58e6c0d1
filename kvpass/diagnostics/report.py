"""Report on rewritten graphs (`explain`) and on the contents of caches (`inspect`)."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.arguments import check_arguments
from kvpass.backend import backend
from kvpass.cache.layer_cache import LayerCache
from kvpass.cache.model_cache import caches_in
from kvpass.errors import CacheHandleError, KVPassError
from kvpass.policies.base import Policy
from kvpass.rewrite.context import PassRecord
from kvpass.runtime.recorder import AttentionReport, Recorder, Timings


@dataclasses.dataclass(frozen=True)
class ExplainReport:
    """Report on a model's attention calls; `str` formats it as a table.

    Attributes:
        graphs: the kind of each of Dynamo's graphs: "prompt", "step" or "no cache".
        sites: every attention call, and every cache update that feeds no attention call.
        notes: other facts.
        error: the message of an error of kvpass that the model raised; None if there was none.
        passes: the record of each pass over each step graph.
        programs: a title and a program for every stage of every graph, with `graphs=True`.
        timings: the compile times, with `timings=True`.
    """

    graphs: tuple[str, ...]
    sites: tuple[AttentionReport, ...]
    notes: tuple[str, ...]
    error: str | None = None
    passes: tuple[PassRecord, ...] = ()
    programs: tuple[tuple[str, str], ...] = ()
    timings: Timings | None = None

    @property
    def rewritten(self) -> list[AttentionReport]:
        return [site for site in self.sites if site.verdict == "rewritten"]

    @property
    def refused(self) -> list[AttentionReport]:
        return [site for site in self.sites if site.verdict == "refused"]

    def __str__(self) -> str:
        rows = [[str(s.graph), s.verdict, s.module, s.line, s.reason] for s in self.sites]
        lines = table(["graph", "verdict", "module", "line", "reason"], rows)
        summary = f"{len(self.rewritten)} of {len(self.sites)} attention calls rewritten in {len(self.graphs)} graph(s)"
        more = [*self.notes, *([f"stopped by: {self.error}"] if self.error else []), *map(str, self.passes)]
        programs = [f"\n# {title}\n{program}" for title, program in self.programs]
        timings = [str(self.timings)] if self.timings else []
        return "\n".join([lines, summary, *more, *timings, *programs])


@check_arguments
def explain(
    model: torch.nn.Module,
    policy: str | Policy = "full",
    *,
    graphs: bool = False,
    timings: bool = False,
    **settings: Any,
) -> Callable[..., ExplainReport]:
    """Report how the backend rewrites a model: `explain(model, policy=..., budget=...)(*args, **kwargs)`.

    The model is traced for one call with these arguments, and nothing is compiled.  To see a decode step, pass the
    cache from an earlier call with the same settings; the step runs on a copy of that cache.

    >>> print(kvpass.explain(model, policy="h2o", budget=1024)(ids))

    Args:
        model: the model.
        policy: the eviction policy, see `kvpass.backend`.
        graphs: keep the programs: Dynamo's graph, its canonical form, and a step graph after every pass.
        timings: compile the graphs of the call, by Inductor unless `inner` is given, and report the compile times.
        settings: the other arguments of `kvpass.backend`, except `strict`.

    Returns:
        A function that takes the arguments of the model and returns an `ExplainReport`.  A refusal is not raised but
        reported.

    Raises:
        PolicyError: an unknown policy or option, or an invalid value.
        BudgetError: a budget that the policy cannot work with.
    """
    requested = backend(policy, **{"inner": "inductor" if timings else "eager", **settings})

    def run(*args: Any, **kwargs: Any) -> ExplainReport:
        recorder = Recorder(keeps_programs=graphs)
        chosen = dataclasses.replace(requested, strict=False, recorder=recorder)
        error, spent = None, list[Timings]()
        # A step writes to its cache, and the user's cache must not change.
        args = tuple(_copy_cache(arg) for arg in args)
        kwargs = {name: _copy_cache(arg) for name, arg in kwargs.items()}
        with warnings.catch_warnings(), torch.no_grad(), recorder.stopwatch.time_call(spent):
            warnings.simplefilter("ignore")
            try:
                torch.compile(model.forward, backend=chosen)(*args, **kwargs)
            except KVPassError as raised:
                error = str(raised)
        interval = chosen.policy.budget_note(chosen.budget)
        notes = (*recorder.notes, *([interval] if interval else []))
        return ExplainReport(
            graphs=tuple(recorder.graphs),
            sites=tuple(recorder.sites),
            notes=notes,
            error=error,
            passes=tuple(recorder.passes),
            programs=tuple(recorder.programs),
            timings=spent[0] if timings else None,
        )

    return run


def _copy_cache(argument: Any) -> Any:
    """Return a copy of an argument with a kvpass cache; any other argument itself."""
    return copy.deepcopy(argument) if caches_in(argument) else argument


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """Report on one layer of a cache.

    Attributes:
        policy: the policy with its options.
        budget: tokens kept between steps, in the row with the largest budget.
        compacted: tokens kept when a row exceeds the budget; less than the budget under an `interval` above 1.
        capacity: number of slots, including the slot for the next token; of the heads with the most slots.
        seen: tokens seen, padding included.
        positions: int64 [B, Hkv, n], the positions of the cached tokens in the (padded) sequence, sorted, -1
            after the last.
        nbytes: bytes in use, metadata included.
        full_nbytes: bytes that the model's own cache would use.
        notes: other facts.
        pinned: int64 [B, Hkv, m], the pinned positions, sorted, -1 after the last.
        capacities: for each class of KV heads with different budgets, the number of heads and of slots of each; ()
            for equal heads.
    """

    policy: str
    budget: int
    compacted: int
    capacity: int
    seen: int
    positions: Tensor
    nbytes: int
    full_nbytes: int
    notes: tuple[str, ...]
    pinned: Tensor
    capacities: tuple[tuple[int, int], ...] = ()

    @property
    def slots(self) -> str:
        """The number of slots, or the numbers for each class of heads: "1x116 1x53 1x29"."""
        return " ".join(f"{heads}x{slots}" for heads, slots in self.capacities) or str(self.capacity)


@dataclasses.dataclass(frozen=True)
class CacheReport:
    """Report on the contents of a cache; `str` formats it as a table.

    Attributes:
        layers: the report on each layer.
    """

    layers: tuple[LayerReport, ...]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def full_nbytes(self) -> int:
        return sum(layer.full_nbytes for layer in self.layers)

    @property
    def ratio(self) -> float:
        """Bytes in use divided by the bytes of a full cache."""
        return self.nbytes / max(1, self.full_nbytes)

    @property
    def seen(self) -> int:
        return max(layer.seen for layer in self.layers)

    def __str__(self) -> str:
        rows = [
            [str(i), x.policy, x.slots, str(x.seen), spans(x.positions[0, 0]),
             str(x.nbytes), f"{x.nbytes / max(1, x.full_nbytes):.3f}"]
            for i, x in enumerate(self.layers)
        ]  # fmt: skip
        header = ["layer", "policy", "slots", "seen", "cached (row 0, head 0)", "bytes", "of full"]
        if any(x.pinned.shape[-1] for x in self.layers):
            header.insert(5, "pinned")
            for row, x in zip(rows, self.layers, strict=True):
                row.insert(5, spans(x.pinned[0, 0]))
        notes = sorted({note for layer in self.layers for note in layer.notes})
        return "\n".join([table(header, rows), f"{self.nbytes} bytes, {self.ratio:.3f} of a full cache", *notes])


def inspect(cache: Any) -> CacheReport:
    """Return a report on the contents of a cache.

    >>> print(kvpass.inspect(out.cache))

    Args:
        cache: a DecodeLoop, a model's cache object, its tensors, or nested tuples of them.

    Returns:
        The report, with one entry for each layer.

    Raises:
        CacheHandleError: there is no kvpass cache in the argument.
    """
    with getattr(cache, "lock", contextlib.nullcontext()):  # other threads' calls of a DecodeLoop wait
        found = caches_in(cache)
        if not found:
            raise CacheHandleError(
                f"there is no kvpass cache in this {type(cache).__name__}: the model made it uncompiled, or no prompt "
                "came yet"
            )
        return CacheReport(tuple(_layer(layer) for layer in found))


def _layer(cache: LayerCache) -> LayerReport:
    layout = cache.layout
    row = layout.heads * (layout.key_dim + layout.value_dim) * layout.dtype.itemsize
    positions, policy = cache.slots.cached_indices(layout), layout.policy
    interval = policy.budget_note(layout.budget)
    capacities = tuple((part.heads, part.capacity) for part in layout.by_class if layout.classes)
    return LayerReport(
        repr(policy), max(cache.row_budgets, default=layout.budget), policy.compacted(layout.budget), layout.capacity,
        cache.length, positions, cache.slots.nbytes, layout.batch * cache.stored_tokens * row,
        (*cache.notes, *([interval] if interval else [])), cache.slots.cached_indices(layout, pinned=True), capacities,
    )  # fmt: skip


def spans(positions: Tensor) -> str:
    """Format sorted positions as ranges: "0-3 28-39"."""
    numbers = [n for n in positions.tolist() if n >= 0]
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    written = [str(a) if a == b else f"{a}-{b}" for a, b in parts]
    return " ".join(written if len(written) <= 6 else [*written[:3], "...", *written[-3:]])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table, with columns padded to their widest entry."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]
    )
