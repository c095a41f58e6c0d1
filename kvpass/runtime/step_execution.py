"""Run prepared steps on slots, and advance the counts of their caches."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvpass.cache.layer_cache import LayerCache
from kvpass.capture.canonical import SiteFacts
from kvpass.policies.pinned_tokens import Pins
from kvpass.rewrite.pipeline import HostValues, StepSignature
from kvpass.runtime.backend_base import BackendBase
from kvpass.runtime.call_context import call_pins
from kvpass.runtime.clocks import advance_counts, next_clocks
from kvpass.runtime.cropping import store_undo_records, undo_records_before
from kvpass.runtime.padding_tracker import PaddingTracker
from kvpass.runtime.sizes import SizeInterpretation
from kvpass.runtime.variants import CompiledVariant
from kvpass.torch_private import dynamo, inductor, regions


@dataclasses.dataclass(frozen=True, eq=False)
class StepInputs:
    """The inputs of one run of a step graph."""

    caches: list[LayerCache]  # with capacity for the new tokens
    arguments: tuple[Any, ...]  # Dynamo's
    other_sizes: SizeInterpretation = ()
    ones_for_cached: frozenset[int] = frozenset()  # see `PaddingTracker.ones_for_cached`
    compact: bool = False  # whether the step compacts the slots


class StepKey(NamedTuple):
    """A key that is equal for two decode steps with the same code and the same buffers."""

    compacts: bool
    windows: tuple[bool, ...]  # whether each layer with its own window is full
    slots: tuple[int, ...]  # id() of each layer's slots
    hooks: int  # the number of hooks that were registered on modules


def step_key(caches: list[LayerCache]) -> StepKey:
    """Return the key of the next decode step."""
    compact, _ = next_clocks(caches)
    windows = tuple(cache.stored_tokens < cache.length for cache in caches if cache.window is not None)
    return StepKey(compact, windows, tuple(id(cache.slots) for cache in caches), dynamo.registered_hooks())


class PreparedStep(NamedTuple):
    """A step that is ready to run."""

    signature: StepSignature
    host_values: HostValues
    flat: list[Any]  # the arguments of the compiled code
    run: inductor.Compiled
    variant: CompiledVariant | None = None  # None for code of an artifact


class StepExecutor(abc.ABC):
    """Run the new tokens of a call on the slots of caches, and update the caches.

    Attributes:
        backend: the settings, and the storage of cached tokens.
        sites: the attention on each layer's cache.
        padding: the inputs that mark padding.
        counters: the indices of the arguments that may count tokens.
    """

    def __init__(
        self, backend: BackendBase, sites: Sequence[SiteFacts], counters: Sequence[int], padding: PaddingTracker
    ) -> None:
        self.backend, self.sites, self.counters, self.padding = backend, sites, counters, padding

    def advance(self, inputs: StepInputs) -> StepResult:
        """Run the new tokens in Dynamo's arguments, compact the slots if a policy's clock is due, update the caches."""
        caches, arguments = inputs.caches, inputs.arguments
        query_len = self.query_len(arguments)
        key, before = step_key(caches), caches[0].length
        undo_records, kv_store = undo_records_before(caches, query_len), self.backend.kv_store
        clocks: Sequence[tuple[Any, ...]] = [cache.clocks for cache in caches]
        if query_len == 1:
            compact, clocks = self.next_clocks(caches, arguments)
            inputs = dataclasses.replace(inputs, compact=compact)
        prepared = self._prepare_step(inputs)
        for cache in caches:
            cache.interrupted = True
        if query_len == 1:
            for cache, pins in self._caches_with_pins(caches):
                kv_store.pin(cache, pins)
        regions.note_run()
        results = prepared.run(*prepared.flat)
        prepared.signature.count_tokens([cache.slots for cache in caches], results)
        admitted = [
            kv_store.admit_step(cache, site, [results[index] for index in indices])
            for cache, site, indices in zip(caches, self.sites, prepared.signature.admitted_outputs, strict=True)
        ]
        advance_counts(caches, query_len, clocks)
        store_undo_records(caches, undo_records, admitted)
        signature, host_values, _, _, variant = prepared
        return StepResult(self, inputs, results, host_values, key, signature, before, variant)

    def _caches_with_pins(self, caches: list[LayerCache]) -> list[tuple[LayerCache, Pins]]:
        """Return the caches in which the running call pins tokens, each with its pins."""
        pins = call_pins()
        return [(cache, pins) for cache in caches if pins is not None and cache.layout.policy is cache.backend.policy]

    def next_clocks(self, caches: list[LayerCache], arguments: tuple[Any, ...]) -> tuple[bool, list[tuple[Any, ...]]]:
        """Return whether a decode step with these arguments compacts, and the policy clocks after the step."""
        return next_clocks(caches, self.padding.valid_rows(caches, arguments))

    def bind_step(self, inputs: StepInputs) -> BoundStep:
        """Return a callable that advances by one token, as `advance` does, while the caches keep their slots."""
        prepared = self._prepare_step(inputs)
        return BoundStep(inputs.caches, prepared.signature, prepared.run)

    def arguments_after(self, caches: list[LayerCache], arguments: tuple[Any, ...], by: int) -> tuple[Any, ...]:
        """Return the arguments of the last step as they would be `by` tokens later."""
        seen = caches[0].length - 1
        counting = [index for index in self.counters if arguments[index] == seen]
        return tuple(x + by if index in counting else x for index, x in enumerate(arguments))

    @abc.abstractmethod
    def query_len(self, arguments: tuple[Any, ...]) -> int:
        """Return the number of new tokens q."""

    @abc.abstractmethod
    def holds_after(self, result: StepResult) -> Callable[[int], bool]:
        """Return a predicate of n: whether the code serves a step n tokens after one that ran."""

    @abc.abstractmethod
    def _prepare_step(self, inputs: StepInputs) -> PreparedStep:
        """Return the code and the arguments of a step."""


@dataclasses.dataclass(frozen=True)
class StepResult:
    """One run of a step graph."""

    executor: StepExecutor
    inputs: StepInputs
    graph_results: Sequence[Any]  # of the rewritten graph
    host_values: HostValues
    key: StepKey
    signature: StepSignature
    length_before: int  # tokens
    variant: CompiledVariant | None

    @property
    def caches(self) -> list[LayerCache]:
        return self.inputs.caches

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.inputs.arguments


class BoundStep:
    """A decode step of one token on fixed slots and fixed compiled code.

    It does what `StepExecutor.advance` does, as long as the slots are the same objects.
    """

    def __init__(self, caches: list[LayerCache], signature: StepSignature, run: inductor.Compiled) -> None:
        self.caches, self.signature, self.run = caches, signature, run
        self.slots = [cache.slots for cache in caches]
        self.fixed_arguments = signature.fixed_arguments(self.slots)

    def __call__(self, arguments: tuple[Any, ...], clocks: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """Run the step and return the results of the graph; `clocks` are each layer's after this token."""
        call_arguments = self.signature.call_arguments(arguments, HostValues(), self.slots, self.caches[0].length)
        for cache in self.caches:
            cache.interrupted = True  # an error before `advance_counts` leaves slots that contradict the counts
        results = self.run(*self.fixed_arguments, *call_arguments)
        self.signature.count_tokens(self.slots, results)
        advance_counts(self.caches, 1, clocks)
        return results
