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
from kvpass.errors import BudgetError, CacheHandleError, PolicyError, UnsupportedGraph
from kvpass.handle import LayerCache, current
from kvpass.match import AttentionSite
from kvpass.policies.base import Attention, Plan, Policy
from kvpass.rewrite.prompt import rewrite_prompt
from kvpass.rewrite.step import StepRewrite
from kvpass.slots import Chunk, Layout, Slots, admit
from kvpass.statistics import as_attention

if TYPE_CHECKING:
    from kvpass.backend import Backend

ADOPTED = "adopted: the prompt ran uncompiled, so nothing is known of its attention"


@dataclasses.dataclass(frozen=True)
class PromptLayer:
    """What a prompt leaves of one layer: all its tokens, and the query, keys and mask that a reference wants."""

    policy: Policy
    chunk: Chunk
    extras: tuple[Tensor, Tensor, Tensor | None] | None


class PromptRunner:
    """Runs a prompt: the model's own attention, after which each layer's cache becomes slots."""

    def __init__(
        self, backend: Backend, gm: fx.GraphModule, sites: list[AttentionSite], examples: Sequence[Any], ranked: bool
    ) -> None:
        self.backend, self.sites, self.ranked = backend, sites, ranked
        self.policies = [backend.policy.for_layer(i, len(sites)) for i in range(len(sites))]
        self.adopts = any(site.past_key is not None for site in sites)
        if self.adopts and any("scan" in policy.statistics for policy in self.policies):
            raise UnsupportedGraph(
                f"{graphs.source_line(sites[0].call)}: {backend.policy} replays the attention of the prompt, and this "
                "prompt ran uncompiled; run it through the compiled model"
            )
        if self.adopts and backend.policy.renumbers:
            raise UnsupportedGraph(
                f"{graphs.source_line(sites[0].call)}: {backend.policy.name} numbers the tokens of a prompt, and this "
                "prompt ran uncompiled; run it through the compiled model"
            )
        extras = backend.inner == "reference"
        self.rewrite = rewrite_prompt(gm, sites, self.policies, backend.budget, ranked, extras, examples)
        self.inner = backend.compile_prompt(self.rewrite.gm, examples)
        self.outputs = len(graphs.results(gm.graph))

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        results = list(self.inner(*arguments))
        layers = [self._layer(results, i) for i in range(len(self.sites))]
        del results[self.outputs :]
        plans = self._plans(layers)
        for i, site in enumerate(self.sites):
            cache = self._store(i, layers[i], plans[i])
            results[site.keys_out], results[site.values_out] = cache.handles()
            layers[i] = None  # type: ignore[call-overload]  # lets go of the layer's full cache
        return tuple(results)

    def _layer(self, results: list[Any], i: int) -> PromptLayer:
        site, places = self.sites[i], self.rewrite
        key, value = results[places.raw[i]], results[site.values_out]
        real = self._real(results, i, key)
        sums = [results[place] for place in places.statistics[i]]
        attention = as_attention(self.policies[i], sums, self._new(results, i, real)) if sums else Attention()
        extras = None
        if places.extras:
            query, keys, mask = places.extras[i]
            extras = (results[query], results[keys], None if mask is None else results[mask])
        return PromptLayer(self.policies[i], Chunk(key, value, real, attention), extras)

    def _new(self, results: list[Any], i: int, real: Tensor) -> Tensor:
        """Those of `real` that are queries: all, unless a past was adopted."""
        place = self.rewrite.real[i]
        return real if place is None else real[:, real.shape[1] - results[place].shape[1] :]

    def _real(self, results: list[Any], i: int, key: Tensor) -> Tensor:
        """bool [B, S]; tokens of an adopted past count as real."""
        rows, _, count, _ = key.shape
        place = self.rewrite.real[i]
        if place is None:
            return torch.ones(rows, count, dtype=torch.bool, device=key.device)
        new = results[place].expand(rows, -1)
        return torch.nn.functional.pad(new, (count - new.shape[1], 0), value=True)

    def _plans(self, layers: list[PromptLayer]) -> list[tuple[int, Plan]]:
        """For each layer the budget that users gave and what the policy makes of it."""
        prompt = layers[0].chunk.real.shape[1]
        governed = [layer for layer in layers if layer.policy is self.backend.policy]
        budget = budgets.slots_for(self.backend.policy, self.backend.budget, prompt)
        self._check_room(budget, prompt)
        attention, key = [layer.chunk.attention for layer in governed], (len(layers), layers[0].chunk.key.shape[1])
        made = self.backend.policy.plan(attention, layers[0].chunk.real, budget, self.backend.plans.get(key))
        self.backend.plans.setdefault(key, made)
        if self.ranked and (len(governed) < len(layers) or len({plan.budget for plan in made}) > 1):
            raise PolicyError(
                f"positions='cache': {self.backend.policy} gives the layers different budgets, and a query has one "
                "place among the held tokens; use positions='absolute'"
            )
        mine = iter(made)
        whole = budgets.slots_for(self.backend.policy, None, prompt)
        return [
            (budget, next(mine)) if x.policy is self.backend.policy else (whole, Plan(whole, whole)) for x in layers
        ]

    def _check_room(self, budget: int, prompt: int) -> None:
        if not self.backend.policy.evicts and prompt > budget:
            raise BudgetError(
                f"policy {self.backend.policy.name!r} keeps every token: "
                f"a prompt of {prompt} exceeds its budget of {budget}"
            )

    def _store(self, number: int, layer: PromptLayer, planned: tuple[int, Plan]) -> LayerCache:
        budget, plan = planned
        chunk = layer.chunk
        rows, heads, count, dim = chunk.key.shape
        layout = Layout(
            policy=layer.policy,
            budget=budget,
            capacity=plan.capacity,
            rows=rows,
            heads=heads,
            key_dim=dim,
            value_dim=chunk.value.shape[-1],
            dtype=chunk.key.dtype,
            device=chunk.key.device,
            ranked=self.ranked,
            layer=0 if layer.policy.aligns == "never" else number,
        )
        notes = (ADOPTED,) if self.adopts else ()
        if layer.extras is not None:
            from kvpass.reference.layer import take_prompt  # the compiled path knows nothing of references

            store: Any = take_prompt(layout, layer, self.sites[0].scale, plan.budget)
            return LayerCache(self.backend, layout, store, count, notes=notes)
        slots = admit(layout, None, chunk, plan.budget)
        _keep_address(slots)
        clocks = tuple(layer.policy.clock((), n, plan.budget) for n in _counts(layer.policy, chunk.real))
        return LayerCache(self.backend, layout, slots, count, limit=plan.budget, clocks=clocks, notes=notes)


def _keep_address(slots: Slots) -> None:
    for tensor in slots.tensors():
        compat.mark_in_place(tensor)


def _counts(policy: Policy, real: Tensor) -> list[int]:
    """Real tokens of each row, for policies that keep a clock; reading them waits for the device."""
    if not policy.clock((), 1, 1 << 30):
        return []
    counts: list[int] = real.sum(-1).tolist()
    return counts


class StepRunner:
    """Runs one token, or a chunk, on live slots; compiled at the first run, when the layouts are known."""

    def __init__(self, backend: Backend, gm: fx.GraphModule, sites: list[AttentionSite]) -> None:
        self.backend = backend
        self.gm, moved = compat.copy_graph_module(gm)  # Dynamo strips the original of its shapes
        self.sites = [site.moved(moved) for site in sites]
        holders = graphs.placeholders(self.gm.graph)
        self.pasts = [(holders.index(s.past_key), holders.index(s.past_value)) for s in self.sites]  # type: ignore[arg-type]
        self.sizes = _free_sizes(self.gm, self.sites)
        self.compiled: dict[Any, tuple[StepRewrite, compat.Compiled]] = {}

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        caches = [self._cache(arguments, places) for places in self.pasts]
        numbers = tuple(_size(arguments, place) for place in self.sizes.values())
        known = dict(zip(self.sizes, numbers, strict=True))
        queries = int(graphs.expr(self.sites[0].queries).subs(known))
        for cache in caches:
            _make_room(cache, queries)
        if self.backend.inner == "reference":
            for cache in caches:
                cache.slots.prepare(torch.ones(cache.layout.rows, queries, dtype=torch.bool))
        sweep, clocks = _tick(caches) if queries == 1 else (False, [cache.clocks for cache in caches])
        key = (numbers, sweep, *((cache.layout, cache.slots.capacity) for cache in caches))
        if key not in self.compiled:
            self.compiled[key] = self._specialise(caches, arguments, known, sweep)
        rewrite, run = self.compiled[key]
        flat = rewrite.flat([cache.slots for cache in caches], arguments)
        for cache in caches:
            cache.broken = True
        results = run(*flat)
        for cache, clock in zip(caches, clocks, strict=True):
            cache.clocks = clock
        for layer, places in enumerate(rewrite.chunks):
            _admit(caches[layer], [results[place] for place in places])
        for cache in caches:
            cache.broken = False
            cache.seen += queries
        return self._outputs(rewrite, results, caches)

    def _cache(self, arguments: tuple[Any, ...], places: tuple[int, int]) -> LayerCache:
        cache = current(arguments[places[0]], self.backend)
        if current(arguments[places[1]], self.backend) is not cache:
            raise CacheHandleError("the keys and the values of a layer come from different conversations")
        return cache

    def _specialise(
        self, caches: list[LayerCache], arguments: tuple[Any, ...], known: dict[Any, int], sweep: bool
    ) -> tuple[StepRewrite, compat.Compiled]:
        layouts, slots = [cache.layout for cache in caches], [cache.slots for cache in caches]
        rewriter = self.backend.rewriter(self.gm, self.sites, layouts, slots, arguments, known, caches[0].seen, sweep)
        rewrite = rewriter.run()
        flat = rewrite.flat(slots, arguments)
        return rewrite, self.backend.compile_step(rewrite.gm, flat, layouts[0].ranked)

    def _outputs(self, rewrite: StepRewrite, results: Sequence[Any], caches: list[LayerCache]) -> tuple[Any, ...]:
        outputs = [None if place is None else results[place] for place in rewrite.outputs]
        for site, cache in zip(self.sites, caches, strict=True):
            outputs[site.keys_out], outputs[site.values_out] = cache.handles()
        return tuple(outputs)


def _free_sizes(gm: fx.GraphModule, sites: list[AttentionSite]) -> dict[Any, tuple[int, int | None]]:
    """Symbols that a step graph is compiled for as numbers, such as the rows, and where to read them.

    Each is an argument's place and the dimension to look at, None for an argument that is the size itself.
    What grows with the cache is left out: a padding mask's length, and the past's.
    """
    known: dict[Any, tuple[int, int | None]] = {}
    for place, node in enumerate(graphs.placeholders(gm.graph)):
        if not graphs.is_tensor(node):
            continue
        for dim, size in enumerate(graphs.value(node).shape):
            if isinstance(size, torch.SymInt):
                known.setdefault(graphs.expr(size), (place, dim))
    wanted = {
        symbol for site in sites for size in graphs.value(site.query).shape for symbol in graphs.expr(size).free_symbols
    }
    return {symbol: known[symbol] for symbol in known if symbol in wanted}


def _size(arguments: tuple[Any, ...], place: tuple[int, int | None]) -> int:
    argument, dim = place
    return int(arguments[argument] if dim is None else arguments[argument].shape[dim])


def _make_room(cache: LayerCache, queries: int) -> None:
    """A policy that never evicts needs a slot for every token: double the slots, or say that the budget is spent."""
    layout, backend = cache.layout, cache.backend
    if layout.policy.evicts or cache.seen + queries <= layout.capacity:
        return
    if layout.policy is backend.policy and backend.budget is not None:
        raise BudgetError(
            f"policy {layout.policy.name!r} keeps every token and its budget of {layout.budget} is full; "
            "give it more, or none, or choose a policy that evicts"
        )
    capacity = budgets.slots_for(layout.policy, None, cache.seen + queries)
    cache.layout = dataclasses.replace(layout, budget=capacity, capacity=capacity)
    cache.slots = cache.slots.grown(cache.layout)
    _keep_address(cache.slots)


def _tick(caches: list[LayerCache]) -> tuple[bool, list[tuple[Any, ...]]]:
    """Whether this step is one with the policy's sweep, from the host's counts, and the counts after it."""
    ticked = [[cache.layout.policy.tick(clock, cache.limit) for clock in cache.clocks] for cache in caches]
    sweep = any(due for layer in ticked for due, _ in layer)
    return sweep, [tuple(clock for _, clock in layer) for layer in ticked]


def _admit(cache: LayerCache, results: list[Any]) -> None:
    key, value, real, *sums = results
    policy = cache.layout.policy
    attention = as_attention(policy, sums, real) if sums else Attention()
    before = cache.slots
    cache.slots = admit(cache.layout, before, Chunk(key, value, real, attention), cache.limit)
    if cache.slots is not before:
        _keep_address(cache.slots)
    counts = _counts(policy, real)
    cache.clocks = tuple(policy.clock(c, n, cache.limit) for c, n in zip(cache.clocks, counts, strict=False))
