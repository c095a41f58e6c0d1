"""What runs in place of Dynamo's graphs: prompts fill slots, steps work on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass import budget as budgets
from kvpass import compat, graphs
from kvpass.errors import BudgetError, CacheHandleError
from kvpass.handle import Handle, LayerCache, current
from kvpass.match import AttentionSite
from kvpass.policies.base import Attention
from kvpass.rewrite import PromptRewrite, StepRewrite, StepRewriter, rewrite_prompt
from kvpass.slots import Chunk, Layout, Slots, admit

if TYPE_CHECKING:
    from kvpass.backend import Backend


class PromptRunner:
    """Runs a prompt: the model's own attention, after which each layer's cache becomes slots."""

    def __init__(self, backend: Backend, gm: fx.GraphModule, sites: list[AttentionSite], examples: Sequence[Any], ranked: bool) -> None:
        self.backend, self.ranked = backend, ranked
        holders = graphs.placeholders(gm.graph)
        self.pasts = [holders.index(past) for site in sites for past in (site.past_key,) if past is not None]
        self.rewrite: PromptRewrite = rewrite_prompt(gm, sites, backend.policy, ranked)
        self.inner = backend.compile_inner(self.rewrite.gm, examples)
        self.outputs = len(graphs.results(gm.graph))

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        results = list(self.inner(*arguments))
        notes = self._notes()
        for layer, site in enumerate(self.rewrite.sites):
            cache = self._fill(results, layer)
            cache.notes = notes
            results[site.keys_out], results[site.values_out] = cache.handles()
        return tuple(results[: self.outputs])

    def _notes(self) -> tuple[str, ...]:
        return ("adopted: the prompt ran uncompiled, so nothing is known of its attention",) if self.pasts else ()

    def _fill(self, results: list[Any], layer: int) -> LayerCache:
        site, places = self.rewrite.sites[layer], self.rewrite
        key, value = results[places.raw[layer]], results[site.values_out]
        rows, heads, count, dim = key.shape
        kept = budgets.slots_for(self.backend.policy, self.backend.budget, count)
        self.backend.check_room(kept, count)
        layout = Layout(
            self.backend.policy, kept, kept + self.backend.policy.evicts, rows, heads, dim, value.shape[-1],
            key.dtype, key.device, self.ranked,
        )  # fmt: skip
        real = self._real(results, layer, rows, count, key.device)
        attention = Attention()
        if places.statistics[layer]:
            sums = [results[place] for place in places.statistics[layer]]
            attention = Attention(*sums, queries=real.sum(-1)[:, None, None])
        slots = admit(layout, None, Chunk(key, value, real, attention))
        for tensor in slots.tensors():
            compat.mark_in_place(tensor)
        return LayerCache(self.backend, layout, slots, count)

    def _real(self, results: list[Any], layer: int, rows: int, count: int, device: torch.device) -> Tensor:
        """bool [B, S]; tokens of an adopted past count as real."""
        place = self.rewrite.real[layer]
        if place is None:
            return torch.ones(rows, count, dtype=torch.bool, device=device)
        new = results[place].expand(rows, -1)
        return torch.nn.functional.pad(new, (count - new.shape[1], 0), value=True)


class StepRunner:
    """Runs one token, or a chunk, on live slots; compiled at the first run, when the layouts are known."""

    def __init__(self, backend: Backend, gm: fx.GraphModule, sites: list[AttentionSite]) -> None:
        self.backend = backend
        self.gm, moved = compat.copy_graph_module(gm)  # Dynamo strips the original of its shapes
        self.sites = [site.moved(moved) for site in sites]
        holders = graphs.placeholders(self.gm.graph)
        self.pasts = [(holders.index(s.past_key), holders.index(s.past_value)) for s in self.sites]  # type: ignore[arg-type]
        self.query = None
        self.compiled: dict[Any, tuple[StepRewrite, compat.Compiled]] = {}

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        caches = [self._cache(arguments, place) for place in self.pasts]
        queries = self._queries(arguments, caches[0].seen)
        self._make_room(caches, queries)
        key = (queries, *(cache.layout for cache in caches), *self._other_sizes(arguments))
        if key not in self.compiled:
            self.compiled[key] = self._specialise(caches, arguments)
        rewrite, run = self.compiled[key]
        flat = rewrite.flat([cache.slots for cache in caches], arguments)
        for cache in caches:
            cache.broken = True
        results = run(*flat)
        for layer, places in enumerate(rewrite.chunks):
            self._admit(caches[layer], [results[place] for place in places])
        for cache in caches:
            cache.broken = False
            cache.seen += queries
        return self._outputs(rewrite, results, caches)

    def _cache(self, arguments: tuple[Any, ...], places: tuple[int, int]) -> LayerCache:
        cache = current(arguments[places[0]], self.backend)
        if current(arguments[places[1]], self.backend) is not cache:
            raise CacheHandleError("the keys and the values of a layer come from different conversations")
        return cache

    def _queries(self, arguments: tuple[Any, ...], seen: int) -> int:
        size = self.sites[0].queries
        if isinstance(size, int):
            return size
        return _bindings(self.gm, arguments)[graphs.expr(size)]

    def _other_sizes(self, arguments: tuple[Any, ...]) -> tuple[int, ...]:
        """What the graph was traced with as a symbol and is compiled for as a number, such as the rows."""
        return tuple(arguments[place] for place, size in self._free_sizes)

    @property
    def _free_sizes(self) -> list[tuple[int, Any]]:
        return []

    def _make_room(self, caches: list[LayerCache], queries: int) -> None:
        """A policy that never evicts needs a slot for every token: double the slots, or say that the budget is spent."""
        if self.backend.policy.evicts:
            return
        for cache in caches:
            if cache.seen + queries > cache.layout.capacity:
                if self.backend.budget is not None:
                    raise BudgetError(
                        f"policy {self.backend.policy.name!r} keeps every token and its budget of {cache.layout.budget} is full; "
                        "give it more, or none, or choose a policy that evicts"
                    )
                _grow(cache, cache.seen + queries)

    def _specialise(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> tuple[StepRewrite, compat.Compiled]:
        layouts, slots = [cache.layout for cache in caches], [cache.slots for cache in caches]
        rewriter = StepRewriter(self.gm, self.sites, layouts, slots, arguments, caches[0].seen)
        rewrite = rewriter.run()
        fused = compat.FUSE_INTO_REDUCTIONS if layouts[0].ranked else {}
        return rewrite, self.backend.compile_inner(rewrite.gm, rewrite.flat(slots, arguments), fused)

    def _admit(self, cache: LayerCache, results: list[Any]) -> None:
        key, value, real, *sums = results
        attention = Attention(*sums, queries=real.sum(-1)[:, None, None]) if sums else Attention()
        admit(cache.layout, cache.slots, Chunk(key, value, real, attention))

    def _outputs(self, rewrite: StepRewrite, results: Sequence[Any], caches: list[LayerCache]) -> tuple[Any, ...]:
        outputs = [None if place is None else results[place] for place in rewrite.outputs]
        for site, cache in zip(self.sites, caches, strict=True):
            outputs[site.keys_out], outputs[site.values_out] = cache.handles()
        return tuple(outputs)


def _bindings(gm: fx.GraphModule, arguments: tuple[Any, ...]) -> dict[Any, int]:
    """What each symbol of the graph is in this call."""
    known: dict[Any, int] = {}
    for node, actual in zip(graphs.placeholders(gm.graph), arguments, strict=True):
        if isinstance(actual, Tensor):
            for size, number in zip(graphs.value(node).shape, actual.shape, strict=True):
                if isinstance(size, torch.SymInt):
                    known[graphs.expr(size)] = number
        elif graphs.is_size(node):
            known[graphs.expr(node)] = int(actual)
    return known


def _grow(cache: LayerCache, needed: int) -> None:
    """Move a layer into twice as many slots (or more), which the decode graph is compiled for anew."""
    layout = cache.layout
    capacity = budgets.slots_for(layout.policy, None, needed)
    cache.layout = dataclasses.replace(layout, budget=capacity, capacity=capacity)
    old, new = cache.slots, Slots.empty(cache.layout)
    count = layout.capacity
    new.key[:, :, :count], new.value[:, :, :count] = old.key, old.value
    for name in ("position", "index", "rank"):
        getattr(new, name)[..., :count] = getattr(old, name)
    for name, state in new.state.items():
        state[..., :count] = old.state[name]
    new.seen.copy_(old.seen)
    new.length.copy_(old.length)
    new.free.copy_((new.position >= 0).sum(-1))
    cache.slots = new


def is_handle(value: Any) -> bool:
    return isinstance(value, Handle)
