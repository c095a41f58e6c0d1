"""Runner of step graphs: a step graph processes one token, or a chunk, on slots."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.handle import LayerCache, check_layers, current
from kvpass.cache.slots import Layout
from kvpass.capture.capture import Capture
from kvpass.errors import CacheHandleError, UnsupportedGraph
from kvpass.fx import shapes, walk
from kvpass.fx.shapes import Sizes
from kvpass.rewrite.call import PaddingInputs, StepCall
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.pipeline import rewrite_step
from kvpass.rewrite.result import StepRewrite, of_new
from kvpass.rewrite.rotary_slice import probe_rotaries
from kvpass.rewrite.validation.conversation import StepCase
from kvpass.rewrite.validation.lockstep import Validation
from kvpass.rewrite.validation.steps import validate
from kvpass.runtime import model_identity
from kvpass.runtime.caches import count, kind, lengthened, make_room, tick
from kvpass.runtime.compiler import Compiler
from kvpass.runtime.cropping import calls_before, remember
from kvpass.runtime.fast_step import FastStep
from kvpass.runtime.padding import (
    HIDDEN_BEFORE,
    OTHER_ANGLES,
    SHOWN_AGAIN,
    PositionCheck,
    agreement,
    alike,
    padding_of,
    places_of,
    told_by,
    wrong_mask,
)
from kvpass.runtime.pins import given_pins, pins_for
from kvpass.runtime.sizes import Counter, SizeTie, counters, free_sizes, lasting, lengths_of, size_at, ties
from kvpass.runtime.subclasses import UnwrappedSubclasses
from kvpass.runtime.variants import CompiledVariant, DynamicDims, ShapeKey, VariantCache
from kvpass.torch_private import dynamo, fx_nodes, inductor, regions, symbolic_shapes, tensor_types

MOST_UNCLEAR = 4  # sizes that may or may not follow the cache, of which all combinations are tried


class StepRunner:
    """Runner of a step graph, for a decode step of one token or a chunk, on the slots of a cache.

    The graph is rewritten at its first run, when the layouts are known.  It is compiled then or later, see
    `CompiledVariant`.

    Attributes:
        model: a copy of Dynamo's graph, for validation.
        gm, sites: the canonical graph and its attention sites.
        pasts: for each site the argument indices of the past keys and values.
        sizes: the sizes that the graph is specialised for, each with the argument and the dimension to read it from.
        others: the sizes of other inputs, likewise.
        counters: the integer arguments that may count tokens, with their argument indices.
        padding_inputs: for each site the inputs that mark padding.
        told: the argument index of each input that marks padding.
        worked: readings of `others` for which the graph has been rewritten.
    """

    def __init__(self, backend: Compiler, model: fx.GraphModule, captured: Capture) -> None:
        self.backend = backend
        self.model, _ = fx_nodes.copy_graph_module(model)  # Dynamo removes the example values of the original
        self.gm, self.sites = captured.gm, captured.sites
        holders = walk.placeholders(self.gm.graph)
        self.pasts = [(holders.index(s.past_key), holders.index(s.past_value)) for s in self.sites]  # type: ignore[arg-type]
        self.as_traced = UnwrappedSubclasses(place for pair in self.pasts for place in pair)
        self.projecting = [model_identity.projecting(site) for site in self.sites]
        self.sizes, self.others = free_sizes(self.gm, self.sites)
        self.counters = counters(self.gm)
        self.queries: dict[tuple[int, ...], int] = {}
        self.padding_inputs = told_by(self.gm, self.sites, step=True)
        self.told = {node: holders.index(node) for nodes in self.padding_inputs for node in nodes}
        self.readings: dict[Any, Sizes] = {}
        self.positions: PositionCheck | None = None
        self.angles: Tensor | None = None
        self.validation: Validation | None = None
        self.ready = VariantCache(
            {str(symbol) for node in self.gm.graph.nodes for symbol in symbolic_shapes.symbols(walk.value(node))}
        )
        self.worked: set[tuple[int | None, ...]] = set()

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        with tensor_types.with_torch_function():
            try:
                return self._run(arguments)
            except UnsupportedGraph:
                if wrong := self._wrong_mask(arguments):
                    raise UnsupportedGraph(wrong) from None
                raise

    def _wrong_mask(self, arguments: tuple[Any, ...]) -> str | None:
        """Describe an attention mask that does not have a column for each token; None if there is no such mask."""
        tokens = arguments[self.pasts[0][0]].seen + self._queries(self._numbers(arguments))
        return wrong_mask(self.gm, arguments, tokens)

    def _run(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        caches = [self._cache(arguments, indices) for indices in self.pasts]
        check_layers(caches)
        self._check_weights(caches, arguments)
        self._check_windows(caches)
        self._check_hidden(caches)
        arguments = self.as_traced(arguments)
        for cache in caches:
            make_room(cache, 1)
        if given_pins() is not None:
            self._make_room_for_pins(caches, self._queries(self._numbers(arguments)))
        listener, step = _LISTENER.get(), kind(caches)
        known, before = self._known(caches, arguments), caches[0].seen
        others = self._others(caches, arguments, known)
        self._check_positions(caches, arguments)
        self._check_angles(caches, arguments, others)
        rewrite, results, host_inputs, compact = self.advance(caches, arguments, others, known)
        self._note_padding(caches, arguments, before)
        if listener is not None:
            listener.append(StepResult(self, caches, arguments, others, known, results, step, rewrite, before, compact))
        return self._outputs(rewrite, results, host_inputs, caches, arguments)

    def advance(
        self,
        caches: list[LayerCache],
        arguments: tuple[Any, ...],
        others: tuple[int | None, ...],
        known: frozenset[int],
    ) -> tuple[StepRewrite, Sequence[Any], list[Any], bool]:
        """Run the new tokens in Dynamo's arguments, and update the caches.

        Args:
            others: sizes of other inputs, see `_others`.
            known: argument indices, see `_known`.

        Returns:
            The rewrite of the graph, the results of the graph, the results of `StepRewrite.host_precomputed`, and
            whether the step has compacted the slots.
        """
        queries = self._queries(self._numbers(arguments))
        for cache in caches:
            make_room(cache, queries)
        calls = calls_before(caches, queries)
        kv_store = self.backend.kv_store
        for cache, told in zip(caches, self.padding_inputs, strict=True):
            kv_store.prepare(cache, functools.partial(self._valid, cache, told, arguments, queries))
        clocks: Sequence[tuple[Any, ...]] = [cache.clocks for cache in caches]
        compact = False
        if queries == 1:
            compact, clocks = self.ticked(caches, arguments)
        rewrite, host_inputs, flat, run = self._prepared(caches, arguments, others, known, compact)
        for cache in caches:
            cache.interrupted = True
        if queries == 1 and given_pins() is not None:
            self._pin_next(caches)
        regions.note_run()
        results = run(*flat)
        rewrite.count([cache.slots for cache in caches], results)
        taken = [
            kv_store.take_in(cache, site, [results[index] for index in indices])
            for cache, site, indices in zip(caches, self.sites, rewrite.chunks, strict=True)
        ]
        count(caches, queries, clocks)
        remember(caches, calls, taken)
        return rewrite, results, host_inputs, compact

    def _make_room_for_pins(self, caches: list[LayerCache], queries: int) -> None:
        """Prepare the caches for the pins of the call that is running.

        Raises:
            PolicyError: the policy allows none.
            BudgetError: they leave less of the budget than the policy needs.
        """
        for cache in caches:
            pins = pins_for(cache)
            if pins is not None:
                pins.check(cache.layout.policy, cache.layout.batch, queries)
                self.backend.kv_store.make_room(cache, pins)

    def _pin_next(self, caches: list[LayerCache]) -> None:
        """Pin the token of a decode step."""
        for cache in caches:
            pins = pins_for(cache)
            if pins is not None:
                self.backend.kv_store.pin(cache, pins)

    def bound(
        self,
        caches: list[LayerCache],
        arguments: tuple[Any, ...],
        others: tuple[int | None, ...],
        known: frozenset[int],
        compact: bool,
    ) -> Callable[[tuple[Any, ...], Sequence[tuple[Any, ...]]], Sequence[Any]]:
        """Return a callable that does what `advance` does for one token while the caches keep their slots.

        It is a `FastStep` for slots; for the eager reference it calls `advance`.
        """
        if self.backend.kv_store.whole:  # the reference needs the preparation that `FastStep` skips
            return lambda arguments, _: self.advance(caches, arguments, others, known)[1]
        rewrite, _, _, run = self._prepared(caches, arguments, others, known, compact)
        return FastStep(caches, rewrite, run)

    def ticked(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> tuple[bool, list[tuple[Any, ...]]]:
        """Return whether a decode step with these arguments compacts, and the policy clocks after the step."""
        return tick(caches, self._valid_rows(caches, arguments))

    def _valid(self, cache: LayerCache, told: tuple[fx.Node, ...], arguments: tuple[Any, ...], queries: int) -> Tensor:
        """Return bool [B, q] for a layer, False for padding among the new tokens."""
        columns = self._columns(arguments, told, cache.seen, queries)
        return ~padding_of(columns, cache.layout.batch, queries, cache.layout.device)

    def _prepared(
        self, caches: list[LayerCache], arguments: tuple[Any, ...], *how: Any
    ) -> tuple[StepRewrite, list[Any], list[Any], inductor.Compiled]:
        """Return the rewrite to run, the results of its host precomputation, its arguments and its compiled code.

        Args:
            how: the further arguments of `_ready`.
        """
        measures = ShapeKey.of(caches, self._numbers(arguments))
        ready = self._ready(caches, arguments, measures, *how)
        rewrite = ready.at(measures)
        host_inputs = rewrite.host_precomputed(arguments)
        flat = rewrite.flat([cache.slots for cache in caches], arguments, host_inputs, caches[0].seen)
        run = ready.runner(self.backend, flat, caches[0].layout.ranked, rewrite.queries > 1)
        if ready.serves(measures):
            return rewrite, host_inputs, flat, run
        return self._prepared(caches, arguments, *how)  # compiling has added guards that this call does not meet

    def _ready(
        self,
        caches: list[LayerCache],
        arguments: tuple[Any, ...],
        measures: ShapeKey,
        others: tuple[int | None, ...],
        known: frozenset[int],
        compact: bool,
    ) -> CompiledVariant:
        """Return a variant of the graph for caches that have capacity for the new tokens."""
        numbers, counters, windows = self._read_call(caches, arguments)
        how, tied = (counters, windows, known, compact), ties(others, numbers)
        call = (*how, others, numbers, tuple((cache.layout, cache.slots.capacity) for cache in caches))
        ready = self.ready.known(call, measures)
        if ready is not None:
            return ready

        def rewritten(opened: DynamicDims | None) -> StepRewrite:
            sizes = self._sizes(numbers, counters, tied if opened else others, windows, opened)
            sized = opened.by_place if opened else {}
            layouts = [measures.layout(i, cache.layout, sized) for i, cache in enumerate(caches)] if opened else []
            return self._specialise(caches, arguments, sizes, windows, known, compact, layouts)

        opens = self.backend.has_dynamic_sizes(caches[0].layout.device)
        room = tuple((measures.common(x.layout), x.slots.capacity - x.layout.capacity) for x in caches)
        with dynamo.one_at_a_time():
            ready = self.ready.made(
                call, (*how, tied, room) if opens else None, measures, self._queries(numbers) == 1, rewritten
            )
            self.worked.add(others)
        return ready

    def _read_call(
        self, caches: list[LayerCache], arguments: tuple[Any, ...]
    ) -> tuple[tuple[int, ...], tuple[Counter, ...], tuple[int | None, ...]]:
        """Return the sizes of a call, its counters, and for each layer the window that is full or None."""
        windows = tuple(cache.window if cache.stored < cache.seen else None for cache in caches)
        numbers, seen = self._numbers(arguments), caches[0].seen
        new = self._queries(numbers)
        return numbers, tuple(Counter.of(arguments[index], seen, new) for index in self.counters.values()), windows

    def _others(
        self, caches: list[LayerCache], arguments: tuple[Any, ...], known: frozenset[int]
    ) -> tuple[int | None, ...]:
        """Return the sizes of other inputs, None for sizes that follow the cache.

        A size that follows the cache equals the tokens seen, but another size, such as the length of an encoder's
        input, may equal them by chance at one step.  A reading for which the graph can be rewritten decides.
        """
        queries = self._queries(self._numbers(arguments))
        sizes = [size_at(arguments, at) for at in self.others.values()]
        readings = self._readings(sizes, lengths_of(caches, queries))
        worked = [reading for reading in readings if reading in self.worked]
        return worked[-1] if worked else self._first_that_works(caches, arguments, readings, known)

    def _first_that_works(
        self,
        caches: list[LayerCache],
        arguments: tuple[Any, ...],
        readings: list[tuple[int | None, ...]],
        known: frozenset[int],
    ) -> tuple[int | None, ...]:
        """Return the first reading of sizes for which the graph can be rewritten."""
        if len(readings) == 1:
            return readings[0]
        queries, refusals = self._queries(self._numbers(arguments)), []
        for cache in caches:
            make_room(cache, queries)
        compact, _ = tick(caches) if queries == 1 else (False, [])
        for reading in readings:
            try:
                self._ready(caches, arguments, ShapeKey.of(caches, self._numbers(arguments)), reading, known, compact)
            except UnsupportedGraph as refusal:
                refusals.append(refusal)
            else:
                return reading
        raise refusals[0]

    def _numbers(self, arguments: tuple[Any, ...]) -> tuple[int, ...]:
        return tuple(size_at(arguments, index) for index in self.sizes.values())

    def _known(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> frozenset[int]:
        """Return the argument indices of the padding inputs that agree with their earlier values for all cached tokens.

        The rewritten graph takes these inputs to be one for every cached token; of other inputs, it looks up the entry
        of each slot.  On a GPU the host does not wait for the comparison: if it fails, a later step raises the error.

        Raises:
            CacheHandleError: the mask shows a token that was left out of the cache as padding.
        """
        known, queries = set(), self._queries(self._numbers(arguments))
        for node, index in self.told.items():
            for cache in self._those_told_by(caches, node)[:1]:
                same, gone = agreement(cache, arguments[index])
                waits = not same.is_cuda or queries > 1
                if not waits:
                    cache.deferred_checks.add(same & gone)
                elif not bool(gone):
                    raise CacheHandleError(SHOWN_AGAIN)
                if not waits or bool(same):
                    known.add(index)
        return frozenset(known)

    def _check_hidden(self, caches: list[LayerCache]) -> None:
        """Check that the graph can hide padding that was left out of the cache; some models mask their prompts alone.

        Raises:
            UnsupportedGraph: padding was left out, and no input is known to mark padding in this graph.
        """
        for site, cache, told in zip(self.sites, caches, self.padding_inputs, strict=True):
            if cache.absent.shape[1] and not told:
                raise UnsupportedGraph(f"{walk.source_line(site.call)}: {HIDDEN_BEFORE}")

    def _check_positions(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> None:
        """Check that the position ids count the real tokens, if the layers use cache positions.

        Raises:
            UnsupportedGraph: the ids do not continue those of earlier tokens.
        """
        cache = caches[0]
        if not cache.layout.ranked:
            return
        if self.positions is None:
            self.positions = PositionCheck(self.gm, self.sites)
        valid = self._valid(cache, self.padding_inputs[0], arguments, self._queries(self._numbers(arguments)))
        fits = self.positions.go_on(arguments, valid, cache.first, cache.valid_seen)
        if fits.is_cuda:
            cache.deferred_checks.add(fits)
        elif not bool(fits):
            raise UnsupportedGraph(self.positions.refusal)

    def _check_angles(
        self, caches: list[LayerCache], arguments: tuple[Any, ...], others: tuple[int | None, ...]
    ) -> None:
        """Check that this graph rotates keys by the same angles as the graph that cached them.

        The check is for cache positions, where keys are rotated when they are read.

        Raises:
            UnsupportedGraph: the angles differ.
        """
        cache = caches[0]
        if not cache.layout.ranked or cache.angles is None or cache.angles is self.angles:
            return
        if self.angles is None:
            numbers, counters, windows = self._read_call(caches, arguments)
            sizes = self._sizes(numbers, counters, others, windows, None)
            self.angles = probe_rotaries(self.gm, self.sites, sizes, arguments, cache.layout.device)
        if self.angles is None or not alike(self.angles, cache.angles):
            raise UnsupportedGraph(f"{walk.source_line(self.sites[0].call)}: {OTHER_ANGLES}")
        cache.angles = self.angles

    def _note_padding(self, caches: list[LayerCache], arguments: tuple[Any, ...], before: int) -> None:
        """Add the positions of new padding to the caches, except for one token on a GPU, which the device counts."""
        queries = self._queries(self._numbers(arguments))
        for cache, padding in zip(caches, self._padding(caches, arguments, before, queries), strict=True):
            if padding is not None:
                cache.absent = torch.cat([cache.absent, places_of(padding, before)], 1)

    def _valid_rows(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> list[list[bool] | None]:
        """Return for each layer which rows of a single token are not padding, for policies with a clock.

        The entry of a layer is None if no row has padding.
        """
        if not any(cache.clocks for cache in caches):
            return [None] * len(caches)
        found = self._padding(caches, arguments, caches[0].seen, 1)
        return [None if padding is None else (~padding[:, 0]).tolist() for padding in found]

    def _padding(
        self, caches: list[LayerCache], arguments: tuple[Any, ...], before: int, queries: int
    ) -> list[Tensor | None]:
        """Return the result of `_padding_in` for each layer; layers with the same padding inputs share one result."""
        found: dict[tuple[fx.Node, ...], Tensor | None] = {}
        for cache, told in zip(caches, self.padding_inputs, strict=True):
            if told not in found:
                columns = self._columns(arguments, told, before, queries)
                found[told] = self._padding_in(columns, queries, cache.layout.batch)
        return [found[told] for told in self.padding_inputs]

    def _padding_in(self, columns: list[Tensor], queries: int, rows: int) -> Tensor | None:
        """Return bool [B, q], True for padding; None if there is no padding or if the host would have to wait."""
        if not columns or (queries == 1 and columns[0].is_cuda):
            return None
        if all(bool(column.all()) for column in columns):
            return None
        return padding_of(columns, rows, queries, columns[0].device)

    def _columns(
        self, arguments: tuple[Any, ...], told: tuple[fx.Node, ...], before: int, queries: int
    ) -> list[Tensor]:
        """Return the new tokens' entries in the inputs that mark padding, each [B or 1, q] or [q]."""
        return [of_new(arguments[self.told[node]], before, queries) for node in told]

    def _those_told_by(self, caches: list[LayerCache], node: fx.Node) -> list[LayerCache]:
        return [cache for cache, nodes in zip(caches, self.padding_inputs, strict=True) if node in nodes]

    def following(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of the step before, with the counters of tokens advanced to the present count."""
        moved = list(arguments)
        for index in self.counters.values():
            if arguments[index] == caches[0].seen - 1:
                moved[index] = caches[0].seen
        return tuple(moved)

    def lasts(self, ran: StepResult) -> Callable[[int], bool]:
        """Return a predicate that tells whether this graph's guards hold a number of tokens after a step that ran."""
        seen = ran.before
        following = {symbol for symbol, size in zip(self.others, ran.others, strict=True) if size is None}
        counting = {symbol for symbol, index in self.counters.items() if ran.arguments[index] == seen}
        now = shapes.measured(self.gm.graph, ran.arguments)
        growing = {symbol for site in self.sites for symbol in site.growing if now.get(symbol) == seen}
        return lasting(shapes.guards(self.gm.graph), now, following | counting | growing)

    def moved(self, caches: list[LayerCache], arguments: tuple[Any, ...], by: int) -> tuple[Any, ...]:
        """Return the arguments of the step before as if `by` more tokens had been seen before it."""
        counting = [index for index in self.counters.values() if arguments[index] == caches[0].seen - 1]
        return tuple(x + by if index in counting else x for index, x in enumerate(arguments))

    def _cache(self, arguments: tuple[Any, ...], indices: tuple[int, int]) -> LayerCache:
        cache = current(arguments[indices[0]], "keys", self.backend)
        if current(arguments[indices[1]], "values", self.backend) is not cache:
            raise CacheHandleError(
                "the keys and the values of a layer come from different layers or different conversations"
            )
        return cache

    def _check_weights(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> None:
        """Check that each cache belongs to the layer that reads it, by the tensors that project the layer's keys.

        The check is for models whose layers are graphs of their own.

        Raises:
            CacheHandleError: a cache is of another layer or model, or its heads are sharded differently.
        """
        for site, cache, indices in zip(self.sites, caches, self.projecting, strict=True):
            here = [arguments[index] for index in indices]
            self.backend.stepped.add(here)
            if model_identity.made_elsewhere(cache.weights, here, self.backend.stepped):
                raise CacheHandleError(
                    f"{walk.source_line(site.call)}: the caches of layers were exchanged: what was given here is of "
                    "another layer, or of another copy of the model"
                )
            if site.spread != cache.layout.spread:
                raise CacheHandleError(
                    f"{walk.source_line(site.call)}: the cache was made with its heads spread over processes as "
                    f"{cache.layout.spread}, and this step has {site.spread}; run both by the same model"
                )

    def _check_windows(self, caches: list[LayerCache]) -> None:
        """Check that each layer stores as many last tokens as in the prompt, for which its slots were planned.

        Raises:
            UnsupportedGraph: the windows differ.
        """
        for site, cache in zip(self.sites, caches, strict=True):
            if site.window != cache.window:
                here, before = (
                    "all" if count is None else f"the last {count}" for count in (site.window, cache.window)
                )
                raise UnsupportedGraph(
                    f"{walk.source_line(site.call)}: this call stores {here} of the layer's tokens, and the prompt "
                    f"stored {before}: let every call cut the cache by the same subscript, as k[:, :, -n:], or leave "
                    "the cache whole and hide old tokens in the attention mask"
                )

    def _queries(self, numbers: tuple[int, ...]) -> int:
        """Return the number of new tokens q, for the sizes of `self.sizes`."""
        if numbers not in self.queries:
            known = dict(zip(self.sizes, numbers, strict=True))
            self.queries[numbers] = shapes.number(self.sites[0].queries, known)
        return self.queries[numbers]

    def _readings(self, sizes: list[int], lengths: set[int]) -> list[tuple[int | None, ...]]:
        """Return the possible readings of input sizes, None for a size that follows the cache.

        Readings in which more sizes follow the cache come first.
        """
        unclear = [index for index, size in enumerate(sizes) if size in lengths]
        counts = range(len(unclear) + 1) if len(unclear) <= MOST_UNCLEAR else (0, len(unclear))
        fixed = [set(indices) for count in counts for indices in itertools.combinations(unclear, count)]
        return [
            tuple(None if index in unclear and index not in kept else size for index, size in enumerate(sizes))
            for kept in fixed
        ]

    def _sizes(self, *key: Any) -> Sizes:
        """Return the meaning of the graph's symbols in this call."""
        if key not in self.readings:
            self.readings[key] = self._read(*key)
        return self.readings[key]

    def _read(
        self,
        numbers: tuple[int, ...],
        counters: tuple[Counter, ...],
        others: tuple[int | SizeTie | None, ...],
        windows: tuple[int | None, ...],
        opened: DynamicDims | None,
    ) -> Sizes:
        known: dict[Any, Any] = dict(zip(self.sizes, numbers, strict=True))
        if opened:
            ours = opened.symbols
            known.update({symbol: ours[index] for index, symbol in enumerate(self.sizes) if index in ours})
        tied_to = tuple(known.values())
        new = shapes.expr(self.sites[0].queries).subs(known) if opened else self._queries(numbers)
        for symbol, counter in zip(self.counters, counters, strict=True):
            if counter.counts != "seen":
                known[symbol] = counter.number + (new if counter.counts == "new" else 0)
        for symbol, size in zip(self.others, others, strict=True):
            if size is not None:
                known[symbol] = tied_to[size.arg_index] if isinstance(size, SizeTie) else size
        lengths = [x - c.number for x, c in zip(self.counters, counters, strict=True) if c.counts == "seen"]
        for site, window in zip(self.sites, windows, strict=True):
            for past in site.pasts:
                stored = shapes.expr(walk.value(past).shape[2])
                if window is None:
                    lengths.append(stored)
                else:
                    known.update(dict.fromkeys(stored.free_symbols, window))
        least = max((window + 1 for window in windows if window is not None), default=0)
        whole = [site for site, window in zip(self.sites, windows, strict=True) if window is None]
        totals = {shapes.expr(size): size for size in (walk.value(site.grown_key).shape[2] for site in whole)}
        queries, sizes = self._queries(numbers), opened.sizes if opened else None
        if sizes:
            queries = sizes.size(new)
        return Sizes(tuple(dict.fromkeys(lengths)), known, queries, least, tuple(totals.values()), sizes)

    def _specialise(
        self,
        caches: list[LayerCache],
        arguments: tuple[Any, ...],
        sizes: Sizes,
        windows: tuple[int | None, ...],
        known: frozenset[int],
        compact: bool,
        opened: list[Layout],
    ) -> StepRewrite:
        layouts, slots = [cache.layout for cache in caches], [cache.slots for cache in caches]
        told = PaddingInputs(
            tuple(self.padding_inputs), frozenset(node for node, index in self.told.items() if index in known)
        )
        given = (self.gm, self.sites, layouts, slots, arguments, sizes, caches[0].seen, windows, told, compact)
        call = StepCall(*given, opened)
        with walk.reading(site.call for site in self.sites):
            context, rewrite = self.backend.rewrite(call)
            self._validate(context, rewrite)
        return rewrite

    def _validate(self, context: StepContext, rewrite: StepRewrite) -> None:
        """Validate the first rewrite of the graph against the graph; later rewrites differ in sizes alone."""
        if not self.backend.validates or self.validation is not None:
            return
        policy = context.layouts[0].policy
        if policy.scales_logits or policy.biases:
            context = StepContext(context.call.with_layouts(_with_plain_logits))
            rewrite = rewrite_step(context)
        call = context.call
        graphs_of = (self.model, self.gm, self.sites, context, rewrite)
        given = (call.arguments, self.pasts, self.told, call.seen, self.backend.kv_dtype)
        self.validation = validate(StepCase(*graphs_of, call.layouts, call.slots, *given))
        self.backend.note_validation("step", self.validation)

    def _outputs(
        self,
        rewrite: StepRewrite,
        results: Sequence[Any],
        host_inputs: list[Any],
        caches: list[LayerCache],
        arguments: Any,
    ) -> tuple[Any, ...]:
        outputs = [None if index is None else results[index] for index in rewrite.outputs]
        for index, result in zip(rewrite.grown, host_inputs, strict=False):
            outputs[index] = result
        for index, beyond in rewrite.lengths.items():
            outputs[index] = caches[0].seen - rewrite.queries + beyond
        for index, (past, dim) in rewrite.unread.items():
            outputs[index] = lengthened(arguments[past], dim, rewrite.queries)
        for site, cache in zip(self.sites, caches, strict=True):
            outputs[site.keys_out], outputs[site.values_out] = cache.handles()
        return tuple(outputs)


def _with_plain_logits(layout: Layout) -> Layout:
    return dataclasses.replace(layout, policy=layout.policy.with_plain_logits())


@dataclasses.dataclass(frozen=True)
class StepResult:
    """One run of a step graph.

    Attributes:
        runner: the runner of the graph.
        caches: the caches of the layers.
        arguments: Dynamo's arguments.
        others, known: as of `StepRunner.advance`.
        results: the results of the rewritten graph.
        kind: a key that is equal for two decode steps with the same code and the same buffers.
        rewrite: the rewrite of the graph.
        before: the tokens seen before the run.
        compact: whether the step has compacted the slots.
    """

    runner: StepRunner
    caches: list[LayerCache]
    arguments: tuple[Any, ...]
    others: tuple[int | None, ...]
    known: frozenset[int]
    results: Sequence[Any]
    kind: Any
    rewrite: StepRewrite
    before: int
    compact: bool


_LISTENER: contextvars.ContextVar[list[StepResult] | None] = contextvars.ContextVar("kvpass_listener", default=None)


@contextlib.contextmanager
def listening() -> Iterator[list[StepResult]]:
    """Return a context that collects the steps that run inside it."""
    ran: list[StepResult] = []
    token = _LISTENER.set(ran)
    try:
        yield ran
    finally:
        _LISTENER.reset(token)


def announce(ran: Sequence[StepResult]) -> None:
    """Tell the context of `listening`, if there is one, of steps that ran elsewhere."""
    listener = _LISTENER.get()
    if listener is not None:
        listener.extend(ran)
