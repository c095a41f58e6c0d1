"""What runs in place of Dynamo's graphs: prompts fill slots, steps work on them."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass import budget as budgets
from kvpass import compat, graphs, ownership, selection
from kvpass.capture.capture import Capture
from kvpass.capture.hiding import telling
from kvpass.capture.rotary import find_rotary, given_positions
from kvpass.capture.sites import AttentionSite
from kvpass.errors import BudgetError, CacheHandleError, PolicyError, UnsupportedGraph
from kvpass.expansion import joined
from kvpass.graphs import Sizes
from kvpass.handle import LayerCache, check_layers, current
from kvpass.policies.base import LATE, Attention, Plan, Policy
from kvpass.policies.window import Window
from kvpass.rewrite.context import StepCall, StepContext, Telling
from kvpass.rewrite.pipeline import rewrite_step
from kvpass.rewrite.prompt import rewrite_prompt
from kvpass.rewrite.result import StepRewrite
from kvpass.slots import Chunk, Layout, Slots, admit
from kvpass.statistics import as_attention
from kvpass.validate import Step, Validation, validate

if TYPE_CHECKING:
    from kvpass.backend import Backend

SHOWN_AGAIN = (
    "a token that the mask hid when it came, and that was left out of the cache for that, is no longer hidden; give "
    "the whole conversation anew, or leave its mask as it was"
)
MOST_UNCLEAR = 4  # sizes that may or may not follow the cache and are tried one by one
OWN_POSITIONS = (
    "the position ids are not 0, 1, 2, ... over the real tokens of a row, and held tokens are numbered by their rank "
    "instead: leave position_ids out, or pass positions='absolute'"
)
ADOPTED = "adopted: the prompt ran uncompiled, so nothing is known of its attention"


@dataclasses.dataclass(frozen=True)
class PromptLayer:
    """What a prompt leaves of one layer.

    Attributes:
        chunk: all its tokens.
        extras: the query, the attended keys, the mask and the sink, which a reference wants.
        window: how many of the last tokens the model stores, None for all.
        heads: of the model's cache.
    """

    policy: Policy
    heads: int
    window: int | None
    chunk: Chunk
    extras: tuple[Any, ...] | None


class PromptRunner:
    """Runs a prompt: the model's own attention, after which each layer's cache becomes slots."""

    def __init__(self, backend: Backend, captured: Capture, examples: Sequence[Any], ranked: bool) -> None:
        gm, sites = captured.gm, captured.sites
        self.backend, self.sites, self.ranked = backend, sites, ranked
        self.policies = [backend.policy.for_layer(i, len(sites)) for i in range(len(sites))]
        self.adopts = any(site.past_key is not None for site in sites)
        if self.adopts and any("scan" in policy.statistics for policy in self.policies):
            raise UnsupportedGraph(
                f"{graphs.source_line(sites[0].call)}: {backend.policy} replays the attention of the prompt, and this "
                "prompt ran uncompiled; run it through the compiled model"
            )
        if self.adopts and any(site.window is not None for site in sites):
            raise UnsupportedGraph(
                f"{graphs.source_line(sites[0].call)}: the prompt ran uncompiled and this layer stored only the end "
                "of it; run the prompt through the compiled model"
            )
        if self.adopts and backend.policy.renumbers:
            raise UnsupportedGraph(
                f"{graphs.source_line(sites[0].call)}: {backend.policy.name} numbers the tokens of a prompt, and this "
                "prompt ran uncompiled; run it through the compiled model"
            )
        sliding = [site for site in sites if site.window is not None]
        if sliding and backend.policy.renumbers:
            raise UnsupportedGraph(
                f"{graphs.source_line(sliding[0].call)}: {backend.policy.name} numbers the tokens of all layers alike, "
                "and this layer has a sliding window of its own"
            )
        extras = backend.inner == "reference"
        told = told_by(gm, sites, step=False)
        self.rewrite = rewrite_prompt(gm, sites, self.policies, backend.budget, ranked, extras, examples, told)
        holders = graphs.placeholders(gm.graph)
        self.past = holders.index(sites[0].past_key) if sites[0].past_key else None
        self.positions = positions_among(gm, sites) if ranked else []
        self.told = [holders.index(node) for node in told[0]]
        self.chosen = [each for site in sites for each in selection.find(site.mask)]
        outputs = graphs.results(gm.graph)
        grown = [pair for each in self.chosen for pair in selection.cached(each, outputs)]
        self.scored_by = [(outputs.index(node), dim) for node, dim in grown]
        self.owned, self.constants = ownership.owned(gm), ownership.constants(gm)
        self.projecting = [ownership.projecting(site) for site in sites]
        self.outputs = len(graphs.results(gm.graph))

    def compile(self, examples: Sequence[Any]) -> None:
        """Hand the rewritten graph to the inner compiler, whose errors are its own."""
        returned = graphs.results(self.rewrite.gm.graph)
        layers = [returned[site.keys_out] for site in self.sites]
        self.inner = self.backend.compile_prompt(self.rewrite.gm, examples, layers)

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        results = list(self.inner(*arguments))
        adopted = 0 if self.past is None else arguments[self.past].shape[2]
        self._check_positions(arguments)
        layers = [self._layer(results, i, adopted) for i in range(len(self.sites))]
        del results[self.outputs :]
        prompt = layers[0].chunk.real.shape[1]
        for each in self.chosen:
            each.check(prompt)
        for place, dim in self.scored_by:
            results[place] = _lengthened(results[place], dim, 0)
        budget = budgets.slots_for(self.backend.policy, self.backend.budget, prompt)
        layers = [_within_window(layer, budget) for layer in layers]
        plans = self._plans(layers, budget, prompt, self._model(arguments))
        for i, site in enumerate(self.sites):
            cache = self._store(i, layers[i], plans[i])
            cache.weights = ownership.held_weakly(arguments[place] for place in self.projecting[i])
            results[site.keys_out], results[site.values_out] = cache.handles()
            layers[i] = None  # type: ignore[call-overload]  # lets go of the layer's full cache
        return tuple(results)

    def _check_positions(self, arguments: tuple[Any, ...]) -> None:
        """Positions that a user gives must count the real tokens, where held tokens are numbered by rank instead."""
        for place in self.positions:
            query = arguments[place].shape[-1]
            columns = [arguments[told][..., :query] for told in self.told]
            rows = max(
                [arguments[place].reshape(-1, query).shape[0], *(c.reshape(-1, query).shape[0] for c in columns)]
            )
            if not bool(count_tokens(arguments[place], query, rows, columns)):
                raise UnsupportedGraph(OWN_POSITIONS)

    def _layer(self, results: list[Any], i: int, adopted: int) -> PromptLayer:
        site, places = self.sites[i], self.rewrite
        key, value = results[places.raw[i]], results[places.values[i]]
        real = self._real(results, i, key)
        sums = [results[place] for place in places.statistics[i]]
        attention = as_attention(self.policies[i], sums, real[:, adopted:]) if sums else Attention()
        extras = None
        if places.extras:
            extras = tuple(None if place is None else results[place] for place in places.extras[i])
        heads = key.shape[1]
        if site.made:
            key, value = joined(key), joined(value)
        return PromptLayer(self.policies[i], heads, site.window, Chunk(key, value, real, attention), extras)

    def _real(self, results: list[Any], i: int, key: Tensor) -> Tensor:
        """bool [B, S]: which tokens are not padding."""
        rows, _, count, _ = key.shape
        place = self.rewrite.real[i]
        if place is None:
            return torch.ones(rows, count, dtype=torch.bool, device=key.device)
        real: Tensor = results[place].expand(rows, -1)
        return real

    def _model(self, arguments: tuple[Any, ...]) -> list[Any]:
        """What tells the model of a call: its tensors, or if it has none the graph."""
        return [arguments[place] for place in self.owned] or list(self.constants) or [self]

    def _plans(self, layers: list[PromptLayer], budget: int, prompt: int, model: list[Any]) -> list[tuple[int, Plan]]:
        """For each layer the budget that users gave and what the policy makes of it."""
        governed = [layer for layer in layers if layer.policy is self.backend.policy]
        self._check_room(budget, prompt)
        made = self._governed(governed, budget, model, (len(layers), layers[0].chunk.key.shape[1]))
        if self.ranked and (len(governed) < len(layers) or len({plan.budget for plan in made}) > 1):
            raise PolicyError(
                f"positions='cache': {self.backend.policy} gives the layers different budgets, and a query has one "
                "place among the held tokens; use positions='absolute'"
            )
        mine = iter(made)
        whole = budgets.slots_for(self.backend.policy, None, prompt)
        return [(budget, next(mine)) if x.policy is self.backend.policy else _alone(x, whole) for x in layers]

    def _governed(self, layers: list[PromptLayer], budget: int, model: list[Any], shape: Any) -> list[Plan]:
        """What the backend's policy gives the layers that it governs; see `ownership.Plans`."""
        if not layers:
            return []
        attention = [layer.chunk.attention for layer in layers]
        first = self.backend.plans.of(model, shape)
        made = self.backend.policy.plan(attention, layers[0].chunk.real, budget, first)
        if first is None:
            self.backend.plans.keep(model, shape, made)
        return made

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
        shown = layer.heads
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
            kv_dtype=self.backend.kv_dtype,
        )
        notes = (ADOPTED,) if self.adopts else ()
        absent = places_of(~chunk.real)
        mine = (self.backend, next(self.backend.layers), layout)
        if layer.extras is not None:
            from kvpass.reference.layer import take_prompt  # the compiled path knows nothing of references

            store: Any = take_prompt(layout, layer, self.sites[number], plan.budget)
            return LayerCache(*mine, store, count, shown, layer.window, notes=notes, absent=absent)
        slots = admit(layout, None, chunk, plan.budget)
        keep_address(slots)
        clocks = tuple(layer.policy.clock((), n, plan.budget) for n in _counts(layer.policy, chunk.real))
        limits = (plan.budget, clocks)
        return LayerCache(*mine, slots, count, shown, layer.window, *limits, notes=notes, absent=absent)


def _within_window(layer: PromptLayer, budget: int) -> PromptLayer:
    """A layer whose own window is within the budget keeps that window and needs no policy."""
    if layer.window is None or (layer.policy.evicts and budget < layer.window):
        return layer
    return dataclasses.replace(layer, policy=Window())


def _alone(layer: PromptLayer, whole: int) -> tuple[int, Plan]:
    """The plan of a layer that the backend's policy does not govern."""
    budget = whole if layer.window is None else layer.window
    return budget, Plan(budget, layer.policy.capacity(budget))


def keep_address(slots: Slots) -> None:
    for tensor in slots.tensors():
        compat.mark_in_place(tensor)


def _counts(policy: Policy, real: Tensor) -> list[int]:
    """Real tokens of each row, for policies that keep a clock; reading them waits for the device."""
    if not policy.clock((), 1, 1 << 30):
        return []
    counts: list[int] = real.sum(-1).tolist()
    return counts


@dataclasses.dataclass(frozen=True)
class Counter:
    """A number among a graph's arguments: the tokens seen plus `number`, or `number` itself."""

    counts: bool
    number: int


@dataclasses.dataclass
class Ready:
    """A step graph that has been rewritten for caches of certain layouts.

    Attributes:
        run: what runs it, None until it is compiled.
        came: whether it has run uncompiled.
    """

    rewrite: StepRewrite
    run: compat.Compiled | None = None
    came: bool = False

    def runner(self, backend: Backend, flat: list[Any], ranked: bool) -> compat.Compiled:
        """What is to run on these arguments.

        The length of a chunk may come once, as that of the rest of a prompt or of a turn does, and compiling takes half
        a minute: the rewritten graph itself runs, and is compiled when that length comes again.
        """
        if not self.came and not backend.compiles_at_once(self.rewrite.queries):
            self.came = True
            return self.rewrite.gm.forward
        with compat.one_at_a_time():
            self.run = self.run or backend.compile_step(self.rewrite.gm, flat, ranked)
        return self.run


class StepRunner:
    """Runs one token, or a chunk, on live slots.

    The graph is rewritten at its first run, when the layouts are known, and compiled then or later, see `Ready`.
    """

    def __init__(self, backend: Backend, model: fx.GraphModule, captured: Capture) -> None:
        self.backend = backend
        self.model, _ = compat.copy_graph_module(model)  # Dynamo strips the original of its shapes
        self.gm, self.sites = captured.gm, captured.sites
        holders = graphs.placeholders(self.gm.graph)
        self.pasts = [(holders.index(s.past_key), holders.index(s.past_value)) for s in self.sites]  # type: ignore[arg-type]
        self.projecting = [ownership.projecting(site) for site in self.sites]
        self.sizes, self.others = _free_sizes(self.gm, self.sites)
        self.counters = _counters(self.gm)
        self.queries: dict[tuple[int, ...], int] = {}
        self.telling = told_by(self.gm, self.sites, step=True)
        self.told = {node: holders.index(node) for nodes in self.telling for node in nodes}
        self.readings: dict[Any, Sizes] = {}
        self.positions: list[int] | None = None
        self.validation: Validation | None = None
        self.ready: dict[Any, Ready] = {}
        self.worked: set[tuple[int | None, ...]] = set()

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        caches = [self._cache(arguments, places) for places in self.pasts]
        check_layers(caches)
        self._check_weights(caches, arguments)
        for cache in caches:
            make_room(cache, 1)
        listener, step = _LISTENER.get(), kind(caches)
        known, before = self._known(caches, arguments), caches[0].seen
        others = self._others(caches, arguments, known)
        self._check_positions(caches, arguments)
        rewrite, results, aside = self.advance(caches, arguments, others, known)
        self._note_padding(caches, arguments, before)
        if listener is not None:
            listener.append(Ran(self, caches, arguments, others, known, results, step, rewrite.repeats))
        return self._outputs(rewrite, results, aside, caches, arguments)

    def advance(
        self,
        caches: list[LayerCache],
        arguments: tuple[Any, ...],
        others: tuple[int | None, ...],
        known: frozenset[int],
    ) -> tuple[StepRewrite, Sequence[Any], list[Any]]:
        """Run the tokens among Dynamo's arguments.

        Args:
            others, known: see `_others`, `_known`.

        Returns:
            The description of the rewritten graph, what it gave, and `StepRewrite.on_all_tokens`.
        """
        queries = self._queries(self._numbers(arguments))
        for cache in caches:
            make_room(cache, queries)
        if self.backend.inner == "reference":
            for cache, told in zip(caches, self.telling, strict=True):
                columns = self._columns(arguments, told, cache.seen, queries)
                cache.slots.prepare(~_padding(columns, cache.layout.rows, queries, cache.layout.device))
        sweep, clocks = tick(caches) if queries == 1 else (False, [cache.clocks for cache in caches])
        ready = self._ready(caches, arguments, others, known, sweep)
        rewrite = ready.rewrite
        aside = rewrite.on_all_tokens(arguments)
        flat = rewrite.flat([cache.slots for cache in caches], arguments, aside, caches[0].seen)
        run = ready.runner(self.backend, flat, caches[0].layout.ranked)
        for cache in caches:
            cache.broken = True
        results = run(*flat)
        rewrite.count([cache.slots for cache in caches], results)
        for layer, places in enumerate(rewrite.chunks):
            _admit(caches[layer], [results[place] for place in places])
        count(caches, queries, clocks)
        return rewrite, results, aside

    def _ready(
        self,
        caches: list[LayerCache],
        arguments: tuple[Any, ...],
        others: tuple[int | None, ...],
        known: frozenset[int],
        sweep: bool,
    ) -> Ready:
        """The rewritten graph for caches in which there is room."""
        windows = tuple(cache.window if cache.stored < cache.seen else None for cache in caches)
        numbers = self._numbers(arguments)
        counters = tuple(self._counter(place, arguments[place], caches[0].seen) for place in self.counters.values())
        layouts = tuple((cache.layout, cache.slots.capacity) for cache in caches)
        key = (numbers, counters, others, windows, known, sweep, layouts)
        if key not in self.ready:
            sizes = self._sizes(numbers, counters, others, windows)
            with compat.one_at_a_time():
                self.ready[key] = Ready(self._specialise(caches, arguments, sizes, windows, known, sweep))
                self.worked.add(others)
        return self.ready[key]

    def _others(
        self, caches: list[LayerCache], arguments: tuple[Any, ...], known: frozenset[int]
    ) -> tuple[int | None, ...]:
        """The sizes of other inputs, None for those that follow the cache.

        A size that follows the cache equals the tokens seen, but so may another, such as the length of what an
        encoder read, at one step.  What the graph can be rewritten for is what it is.
        """
        queries = self._queries(self._numbers(arguments))
        sizes = [_size(arguments, at) for at in self.others.values()]
        readings = self._readings(sizes, _lengths(caches, queries))
        worked = [reading for reading in readings if reading in self.worked]
        return worked[-1] if worked else self._first_that_works(caches, arguments, readings, known)

    def _first_that_works(
        self,
        caches: list[LayerCache],
        arguments: tuple[Any, ...],
        readings: list[tuple[int | None, ...]],
        known: frozenset[int],
    ) -> tuple[int | None, ...]:
        """The first reading of sizes for which the graph can be rewritten."""
        if len(readings) == 1:
            return readings[0]
        queries, refusals = self._queries(self._numbers(arguments)), []
        for cache in caches:
            make_room(cache, queries)
        sweep, _ = tick(caches) if queries == 1 else (False, [])
        for reading in readings:
            try:
                self._ready(caches, arguments, reading, known, sweep)
            except UnsupportedGraph as refusal:
                refusals.append(refusal)
            else:
                return reading
        raise refusals[0]

    def _numbers(self, arguments: tuple[Any, ...]) -> tuple[int, ...]:
        return tuple(_size(arguments, place) for place in self.sizes.values())

    def _known(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> frozenset[int]:
        """Which of the inputs that tell padding still say of every token that went before what they said then.

        They are taken to be one for all that is held; of others, each slot's entry is looked up.  On a GPU the host
        does not wait for the answer: where it is no, the next step ends in an error.

        Raises:
            CacheHandleError: a token that was left out as padding is to be seen.
        """
        known, queries = set(), self._queries(self._numbers(arguments))
        for node, place in self.told.items():
            for cache in self._those_told_by(caches, node)[:1]:
                same, gone = agreement(cache, arguments[place])
                waits = not same.is_cuda or queries > 1
                if not waits:
                    cache.doubts.add(same & gone)
                elif not bool(gone):
                    raise CacheHandleError(SHOWN_AGAIN)
                if not waits or bool(same):
                    known.add(place)
        return frozenset(known)

    def _check_positions(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> None:
        """Positions that a user gives must count the real tokens, where held tokens are numbered by rank instead."""
        cache = caches[0]
        if not cache.layout.ranked:
            return
        if self.positions is None:
            self.positions = positions_among(self.gm, self.sites)
        queries = self._queries(self._numbers(arguments))
        for place in self.positions:
            columns = self._columns(arguments, self.telling[0], cache.seen, queries)
            fits = count_tokens(arguments[place], queries, cache.layout.rows, columns, cache.real_seen)
            if fits.is_cuda:
                cache.doubts.add(fits)
            elif not bool(fits):
                raise UnsupportedGraph(OWN_POSITIONS)

    def _note_padding(self, caches: list[LayerCache], arguments: tuple[Any, ...], before: int) -> None:
        """Remember which of the new tokens were padding; of a single one on a GPU that is left to the counts."""
        queries, found = self._queries(self._numbers(arguments)), dict[tuple[fx.Node, ...], Tensor | None]()
        for cache, told in zip(caches, self.telling, strict=True):
            if told not in found:
                columns = self._columns(arguments, told, before, queries)
                found[told] = self._padding_in(columns, queries, cache.layout.rows)
            padding = found[told]
            if padding is not None:
                cache.absent = torch.cat([cache.absent, places_of(padding, before)], 1)

    def _padding_in(self, columns: list[Tensor], queries: int, rows: int) -> Tensor | None:
        """bool [B, q]: which of the new tokens are padding; None if none is, or if the host would have to wait."""
        if not columns or (queries == 1 and columns[0].is_cuda):
            return None
        padding = _padding(columns, rows, queries, columns[0].device)
        return padding if bool(padding.any()) else None

    def _columns(
        self, arguments: tuple[Any, ...], told: tuple[fx.Node, ...], before: int, queries: int
    ) -> list[Tensor]:
        """What the inputs that tell padding say of the new tokens, each [B or 1, q] or [q]."""
        return [arguments[self.told[node]][..., before : before + queries] for node in told]

    def _those_told_by(self, caches: list[LayerCache], node: fx.Node) -> list[LayerCache]:
        return [cache for cache, nodes in zip(caches, self.telling, strict=True) if node in nodes]

    def following(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of the step before with those that are numbers and count tokens as they stand now."""
        moved = list(arguments)
        for place in self.counters.values():
            if arguments[place] == caches[0].seen - 1:
                moved[place] = caches[0].seen
        return tuple(moved)

    def moved(self, caches: list[LayerCache], arguments: tuple[Any, ...], by: int) -> tuple[Any, ...]:
        """The arguments of the step before as they would be if so many more tokens had gone before it."""
        counting = [place for place in self.counters.values() if arguments[place] == caches[0].seen - 1]
        return tuple(x + by if place in counting else x for place, x in enumerate(arguments))

    def _cache(self, arguments: tuple[Any, ...], places: tuple[int, int]) -> LayerCache:
        cache = current(arguments[places[0]], "keys", self.backend)
        if current(arguments[places[1]], "values", self.backend) is not cache:
            raise CacheHandleError(
                "the keys and the values of a layer come from different layers or different conversations"
            )
        return cache

    def _check_weights(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> None:
        """Where layers are in graphs of their own, what their keys are made of tells which cache is whose."""
        for site, cache, places in zip(self.sites, caches, self.projecting, strict=True):
            here = [arguments[place] for place in places]
            self.backend.stepped.add(here)
            if ownership.made_elsewhere(cache.weights, here, self.backend.stepped):
                raise CacheHandleError(
                    f"{graphs.source_line(site.call)}: the caches of layers were exchanged: what was given here is of "
                    "another layer, or of another copy of the model"
                )

    def _counter(self, place: int, number: int, seen: int) -> Counter:
        """What an argument that is a number is: one that equals the tokens seen counts them."""
        return Counter(True, 0) if number == seen else Counter(False, number)

    def _queries(self, numbers: tuple[int, ...]) -> int:
        """q, for the sizes of `self.sizes`."""
        if numbers not in self.queries:
            known = dict(zip(self.sizes, numbers, strict=True))
            self.queries[numbers] = int(graphs.expr(self.sites[0].queries).subs(known))
        return self.queries[numbers]

    def _readings(self, sizes: list[int], lengths: set[int]) -> list[tuple[int | None, ...]]:
        """What sizes of inputs may be, None for one that follows the cache; as many as can first."""
        unclear = [place for place, size in enumerate(sizes) if size in lengths]
        counts = range(len(unclear) + 1) if len(unclear) <= MOST_UNCLEAR else (0, len(unclear))
        fixed = [set(places) for count in counts for places in itertools.combinations(unclear, count)]
        return [
            tuple(None if place in unclear and place not in kept else size for place, size in enumerate(sizes))
            for kept in fixed
        ]

    def _sizes(self, *key: Any) -> Sizes:
        """How the graph's symbols are to be read in this call."""
        if key not in self.readings:
            self.readings[key] = self._read(*key)
        return self.readings[key]

    def _read(
        self,
        numbers: tuple[int, ...],
        counters: tuple[Counter, ...],
        others: tuple[int | None, ...],
        windows: tuple[int | None, ...],
    ) -> Sizes:
        known: dict[Any, int] = dict(zip(self.sizes, numbers, strict=True))
        known.update({x: c.number for x, c in zip(self.counters, counters, strict=True) if not c.counts})
        known.update({x: size for x, size in zip(self.others, others, strict=True) if size is not None})
        lengths = [x - c.number for x, c in zip(self.counters, counters, strict=True) if c.counts]
        for site, window in zip(self.sites, windows, strict=True):
            for past in (site.past_key, site.past_value):
                stored = graphs.expr(graphs.value(past).shape[2])  # type: ignore[arg-type]
                if window is None:
                    lengths.append(stored)
                else:
                    known.update(dict.fromkeys(stored.free_symbols, window))
        least = max((window + 1 for window in windows if window is not None), default=0)
        whole = [site for site, window in zip(self.sites, windows, strict=True) if window is None]
        totals = {graphs.expr(size): size for size in (graphs.value(site.grown_key).shape[2] for site in whole)}
        return Sizes(tuple(dict.fromkeys(lengths)), known, self._queries(numbers), least, tuple(totals.values()))

    def _specialise(
        self,
        caches: list[LayerCache],
        arguments: tuple[Any, ...],
        sizes: Sizes,
        windows: tuple[int | None, ...],
        known: frozenset[int],
        sweep: bool,
    ) -> StepRewrite:
        layouts, slots = [cache.layout for cache in caches], [cache.slots for cache in caches]
        told = Telling(tuple(self.telling), frozenset(node for node, place in self.told.items() if place in known))
        given = (self.gm, self.sites, layouts, slots, arguments, sizes, caches[0].seen, windows, told, sweep)
        call = StepCall(*given)
        with graphs.reading(site.call for site in self.sites):
            context, rewrite = self.backend.rewrite(call)
            self._validate(context, rewrite)
        return rewrite

    def _validate(self, context: StepContext, rewrite: StepRewrite) -> None:
        """Hold the first rewrite of the graph against the graph; later ones differ in sizes alone."""
        if not self.backend.validate or self.validation is not None or self.backend.inner == "reference":
            return
        call = context.call
        given = (call.arguments, self.pasts, self.told, call.seen, self.backend.kv_dtype)
        step = Step(self.model, self.sites, context, rewrite, call.layouts, call.slots, *given)
        if self.backend.kv_dtype is not None:  # the same with rows as the model makes them
            plain = [dataclasses.replace(layout, kv_dtype=None) for layout in call.layouts]
            described = [each.described(layout) for each, layout in zip(call.slots, plain, strict=True)]
            own = StepContext(dataclasses.replace(call, layouts=plain, slots=described))
            unrounded = Step(self.model, self.sites, own, rewrite_step(own), plain, described, *given)
            step = dataclasses.replace(step, plain=unrounded)
        self.validation = validate(step)
        self.backend.note_validation(self.validation)

    def _outputs(
        self, rewrite: StepRewrite, results: Sequence[Any], aside: list[Any], caches: list[LayerCache], arguments: Any
    ) -> tuple[Any, ...]:
        outputs = [None if place is None else results[place] for place in rewrite.outputs]
        for place, result in zip(rewrite.grown, aside, strict=False):
            outputs[place] = result
        for place, beyond in rewrite.lengths.items():
            outputs[place] = caches[0].seen - rewrite.queries + beyond
        for place, (past, dim) in rewrite.unread.items():
            outputs[place] = _lengthened(arguments[past], dim, rewrite.queries)
        for site, cache in zip(self.sites, caches, strict=True):
            outputs[site.keys_out], outputs[site.values_out] = cache.handles()
        return tuple(outputs)


def _lengthened(past: Tensor, dim: int, count: int) -> Tensor:
    """A tensor that is longer by so much and holds no data, as nothing may read it."""
    shape = list(past.shape)
    shape[dim] += count
    empty = past.new_full((), torch.nan).expand(shape)
    compat.mark_growing(empty, dim)
    return empty


def _lengths(caches: list[LayerCache], queries: int) -> set[int]:
    """The sizes of what follows the cache: a padding mask's, say."""
    lengths = {cache.seen for cache in caches} | {cache.stored for cache in caches}
    return lengths | {length + queries for length in lengths}


Places = dict[Any, tuple[int, int]]
"""For a symbol an argument's place and the dimension to look at."""


def _free_sizes(gm: fx.GraphModule, sites: list[AttentionSite]) -> tuple[Places, Places]:
    """Symbols that a step graph is compiled for as numbers, such as the rows, and those of other inputs.

    Of the latter some follow the cache: a padding mask's length, say.  The past's own is left out.
    """
    known: Places = {}
    for place, node in enumerate(graphs.placeholders(gm.graph)):
        if not graphs.is_tensor(node):
            continue
        for dim, size in enumerate(graphs.value(node).shape):
            if isinstance(size, torch.SymInt):
                known.setdefault(graphs.expr(size), (place, dim))
    wanted = {
        symbol for site in sites for size in graphs.value(site.query).shape for symbol in graphs.expr(size).free_symbols
    }
    pasts = [past for site in sites for past in (site.past_key, site.past_value)]
    grown = {symbol for past in pasts for symbol in graphs.expr(graphs.value(past).shape[2]).free_symbols}  # type: ignore[arg-type]
    others = {symbol: place for symbol, place in known.items() if symbol not in wanted | grown and symbol.is_Symbol}
    return {symbol: place for symbol, place in known.items() if symbol in wanted}, others


def _counters(gm: fx.GraphModule) -> dict[Any, int]:
    """Symbols that are arguments themselves and no tensor's size, such as a cache's own count, and their places.

    Dynamo also hands over the strides and the offset of a tensor that is a slice of a growing one.  No node computes
    with these: the tensor that they belong to is copied where that matters, see `StepRewrite.flat`.
    """
    holders = graphs.placeholders(gm.graph)
    tensors = [graphs.value(node) for node in holders if graphs.is_tensor(node)]
    sized = {symbol for tensor in tensors for size in tensor.shape for symbol in graphs.expr(size).free_symbols}
    found: dict[Any, int] = {}
    for place, node in enumerate(holders):
        if node.users and isinstance(graphs.value(node), torch.SymInt) and graphs.expr(node).is_Symbol:
            found.setdefault(graphs.expr(node), place)
    return {symbol: place for symbol, place in found.items() if symbol not in sized}


def agreement(cache: LayerCache, column: Tensor) -> tuple[Tensor, Tensor]:
    """What an input that tells padding says now of the tokens that went before, as bools on the device.

    Returns:
        Whether it has one for every real token and zero for all others, and whether it has zero for every token that
        was left out of the cache as padding.
    """
    before, absent = column.reshape(-1, column.shape[-1])[:, : cache.seen], cache.absent
    shown = torch.zeros((), dtype=torch.bool, device=absent.device)
    if absent.shape[1]:
        row = torch.arange(absent.shape[0], device=absent.device)[:, None].clamp(max=before.shape[0] - 1)
        shown = ((before[row, absent.clamp(min=0)] != 0) & (absent >= 0)).any()
    same = ((before == 1).sum(-1) == cache.real_seen) & ((before != 0).sum(-1) == cache.real_seen)
    return same.all(), ~shown


def _padding(columns: list[Tensor], rows: int, queries: int, device: torch.device) -> Tensor:
    """bool [B, q]: which tokens are zero in any of the columns, each [B or 1, q] or [q]."""
    none = torch.zeros(rows, queries, dtype=torch.bool, device=device)
    return torch.stack([none, *((column == 0).expand(rows, -1) for column in columns)]).any(0)


def told_by(gm: fx.GraphModule, sites: list[AttentionSite], step: bool) -> list[tuple[fx.Node, ...]]:
    """For each site the inputs that tell padding in all masks on its cache; layers mostly share their masks."""
    masks = [tuple(each.mask for each in site.all) for site in sites]
    known = {among: telling(gm, list(among), step) for among in dict.fromkeys(masks)}
    return [known[among] for among in masks]


def positions_among(gm: fx.GraphModule, sites: list[AttentionSite]) -> list[int]:
    """Which of a graph's arguments are positions that turn queries and keys."""
    holders = graphs.placeholders(gm.graph)
    rotaries = [(find_rotary(gm, site), site) for site in sites]
    given = [node for rotary, site in rotaries if rotary for node in given_positions(rotary, site)]
    return [holders.index(node) for node in dict.fromkeys(given)]


def count_tokens(ids: Tensor, queries: int, rows: int, columns: list[Tensor], seen: Tensor | int = 0) -> Tensor:
    """Whether position ids [..., q] of real tokens go on from `seen` [B], one by one; a bool on the device.

    Args:
        columns: zero for padding, each [B or 1, q] or [q].
    """
    real = ~_padding(columns, rows, queries, ids.device)
    before = seen[:, None].to(ids.device) if isinstance(seen, Tensor) else seen
    wanted = before + real.long().cumsum(-1) - 1
    given = ids.reshape(-1, queries) if ids.shape[-1] == queries else ids.reshape(queries, -1).T
    return ((given == wanted) | ~real).all()


def places_of(chosen: Tensor, start: int = 0) -> Tensor:
    """Where bool [B, n] is true: int64 [B, P], counted from `start`, -1 after the last of a row."""
    most = int(chosen.sum(-1).max())
    places = torch.arange(start, start + chosen.shape[1], device=chosen.device)
    ordered = torch.where(chosen, places, LATE).sort(-1).values[:, :most]
    return torch.where(ordered == LATE, -1, ordered)


def _size(arguments: tuple[Any, ...], place: tuple[int, int]) -> int:
    argument, dim = place
    return int(arguments[argument].shape[dim])


def make_room(cache: LayerCache, queries: int) -> None:
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
    keep_address(cache.slots)


def tick(caches: list[LayerCache]) -> tuple[bool, list[tuple[Any, ...]]]:
    """Whether this step is one with the policy's sweep, from the host's counts, and the counts after it."""
    ticked = [[cache.layout.policy.tick(clock, cache.limit) for clock in cache.clocks] for cache in caches]
    sweep = any(due for layer in ticked for due, _ in layer)
    return sweep, [tuple(clock for _, clock in layer) for layer in ticked]


def kind(caches: list[LayerCache]) -> Any:
    """What a step of one token depends on beside the contents of tensors; equal for two that can replace each other."""
    sweep, _ = tick(caches)
    windows = tuple(cache.stored < cache.seen for cache in caches if cache.window is not None)
    return sweep, windows, tuple(id(cache.slots) for cache in caches)


def count(caches: list[LayerCache], queries: int, clocks: Sequence[tuple[Any, ...]]) -> None:
    """What the host knows of a conversation, after so many more tokens."""
    for cache, clock in zip(caches, clocks, strict=True):
        cache.broken = False
        cache.seen += queries
        if queries == 1:
            cache.clocks = clock


@dataclasses.dataclass(frozen=True)
class Ran:
    """One run of a step: on what caches, with which of Dynamo's arguments, and what the rewritten graph gave.

    `kind` is equal for two steps of one token that run the same code on the same buffers.  `repeats` is false if
    the step needs arguments that follow the cache.
    """

    runner: StepRunner
    caches: list[LayerCache]
    arguments: tuple[Any, ...]
    others: tuple[int | None, ...]
    known: frozenset[int]
    results: Sequence[Any]
    kind: Any
    repeats: bool


_LISTENER: contextvars.ContextVar[list[Ran] | None] = contextvars.ContextVar("kvpass_listener", default=None)


@contextlib.contextmanager
def listening() -> Iterator[list[Ran]]:
    """Collects the steps that run inside."""
    ran: list[Ran] = []
    token = _LISTENER.set(ran)
    try:
        yield ran
    finally:
        _LISTENER.reset(token)


def _admit(cache: LayerCache, results: list[Any]) -> None:
    key, value, real, *sums = results
    policy = cache.layout.policy
    attention = as_attention(policy, sums, real) if sums else Attention()
    before = cache.slots
    cache.slots = admit(cache.layout, before, Chunk(key, value, real, attention), cache.limit)
    if cache.slots is not before:
        keep_address(cache.slots)
    counts = _counts(policy, real)
    cache.clocks = tuple(policy.clock(c, n, cache.limit) for c, n in zip(cache.clocks, counts, strict=False))
