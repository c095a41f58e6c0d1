"""What was rewritten and what is held, for people and for tests."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.arguments import checked
from kvpass.backend import backend
from kvpass.cache.handle import LayerCache, caches_in
from kvpass.errors import CacheHandleError, KVPassError
from kvpass.policies.base import Policy
from kvpass.rewrite.record import Record
from kvpass.runtime.recorder import Recorder, SiteReport
from kvpass.runtime.timings import Timings


@dataclasses.dataclass(frozen=True)
class ExplainReport:
    """What became of a model's attention calls; printable as a table.

    Attributes:
        graphs: for each graph of Dynamo's, "prompt", "step" or "no cache".
        sites: every attention call, and every cache update that feeds none.
        notes: further facts.
        error: what running the model raised, if it did.
        passes: what each pass over each step graph did.
        programs: a title and a program for every stage of every graph, if they were asked for.
        timings: where the time went, if that was asked for.
    """

    graphs: tuple[str, ...]
    sites: tuple[SiteReport, ...]
    notes: tuple[str, ...]
    error: str | None = None
    passes: tuple[Record, ...] = ()
    programs: tuple[tuple[str, str], ...] = ()
    timings: Timings | None = None

    @property
    def rewritten(self) -> list[SiteReport]:
        return [site for site in self.sites if site.verdict == "rewritten"]

    @property
    def refused(self) -> list[SiteReport]:
        return [site for site in self.sites if site.verdict == "refused"]

    def __str__(self) -> str:
        rows = [[str(s.graph), s.verdict, s.module, s.line, s.reason] for s in self.sites]
        lines = table(["graph", "verdict", "module", "line", "reason"], rows)
        summary = f"{len(self.rewritten)} of {len(self.sites)} attention calls rewritten in {len(self.graphs)} graph(s)"
        more = [*self.notes, *([f"stopped by: {self.error}"] if self.error else []), *map(str, self.passes)]
        programs = [f"\n# {title}\n{program}" for title, program in self.programs]
        timings = [str(self.timings)] if self.timings else []
        return "\n".join([lines, summary, *more, *timings, *programs])


@checked
def explain(
    model: torch.nn.Module,
    policy: str | Policy = "full",
    *,
    graphs: bool = False,
    timings: bool = False,
    **settings: Any,
) -> Callable[..., ExplainReport]:
    """Say what the backend would make of a model: `explain(model, policy=..., budget=...)(*args, **kwargs)`.

    The model is traced for one call with the arguments and nothing is compiled.  Give the cache from an
    earlier call under the same settings to see a decode step.  Takes what `kvpass.backend` takes.

    Args:
        graphs: keep the programs: Dynamo's graph, its canonical form, and a step graph after every pass.
        timings: compile what the call takes, unless `inner` says otherwise, and say where the time went.
    """
    recorder = Recorder(keeps_programs=graphs)
    chosen = backend(policy, **{"inner": "inductor" if timings else "eager", **settings})
    chosen = dataclasses.replace(chosen, strict=False, recorder=recorder)

    def run(*args: Any, **kwargs: Any) -> ExplainReport:
        error, spent = None, list[Timings]()
        # A step writes to its cache: the user's stays where it is.
        args = tuple(_copied(arg) for arg in args)
        kwargs = {name: _copied(arg) for name, arg in kwargs.items()}
        with warnings.catch_warnings(), torch.no_grad(), recorder.watch.timing(spent):
            warnings.simplefilter("ignore")
            try:
                torch.compile(model.forward, backend=chosen)(*args, **kwargs)
            except KVPassError as raised:
                error = str(raised)
        found = (tuple(recorder.graphs), tuple(recorder.sites), tuple(recorder.notes), error)
        programs = tuple(recorder.programs)
        return ExplainReport(*found, tuple(recorder.passes), programs, spent[0] if timings else None)

    return run


def _copied(argument: Any) -> Any:
    """A copy of what carries a kvpass cache; anything else as it is."""
    return copy.deepcopy(argument) if caches_in(argument) else argument


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """One layer of a cache.

    Attributes:
        policy: what decides, with its options.
        capacity: slots, the one for the next token included; budget: tokens kept between steps by the row with most.
        seen: tokens seen, padding included.
        positions: int64 [B, Hkv, n], the places of the held tokens in the (padded) sequence, sorted, -1
            after the last.
        nbytes: bytes held, metadata included; full_nbytes: what a cache of all tokens would hold.
    """

    policy: str
    budget: int
    capacity: int
    seen: int
    positions: Tensor
    nbytes: int
    full_nbytes: int
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class CacheReport:
    """What a cache holds; printable as a table."""

    layers: tuple[LayerReport, ...]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def full_nbytes(self) -> int:
        return sum(layer.full_nbytes for layer in self.layers)

    @property
    def ratio(self) -> float:
        """Bytes held beside those of a full cache."""
        return self.nbytes / max(1, self.full_nbytes)

    @property
    def seen(self) -> int:
        return max(layer.seen for layer in self.layers)

    def __str__(self) -> str:
        rows = [
            [str(i), x.policy, str(x.capacity), str(x.seen), spans(x.positions[0, 0]),
             str(x.nbytes), f"{x.nbytes / max(1, x.full_nbytes):.3f}"]
            for i, x in enumerate(self.layers)
        ]  # fmt: skip
        header = ["layer", "policy", "slots", "seen", "held (row 0, head 0)", "bytes", "of full"]
        notes = sorted({note for layer in self.layers for note in layer.notes})
        return "\n".join([table(header, rows), f"{self.nbytes} bytes, {self.ratio:.3f} of a full cache", *notes])


def inspect(cache: Any) -> CacheReport:
    """What a cache holds: a DecodeLoop, a model's cache object, its tensors, or nested tuples of them.

    Raises:
        CacheHandleError: there is no kvpass cache in it.
    """
    found = caches_in(cache)
    if not found:
        raise CacheHandleError(
            f"there is no kvpass cache in this {type(cache).__name__}: was the model compiled when it made it?"
        )
    return CacheReport(tuple(_layer(layer) for layer in found))


def _layer(cache: LayerCache) -> LayerReport:
    layout = cache.layout
    row = layout.heads * (layout.key_dim + layout.value_dim) * layout.dtype.itemsize
    positions = cache.slots.held(layout)
    return LayerReport(
        repr(layout.policy), layout.budget, layout.capacity, cache.seen, positions,
        cache.slots.nbytes, layout.batch * cache.stored * row, cache.notes,
    )  # fmt: skip


def spans(positions: Tensor) -> str:
    """Positions as ranges: "0-3 28-39"."""
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
    """Columns padded to their widest entry."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]
    )
