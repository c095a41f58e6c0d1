"""Repeat decode steps with all state on the device: `DecodeState` and `RepeatedStep`."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import operator
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from kvpass import model_access
from kvpass.arguments import short_text
from kvpass.backend import Backend
from kvpass.cache.handle import Handle
from kvpass.cache.model_cache import caches_in, layers_of, other_integers, refresh_handles
from kvpass.decoding.model_call import ModelCall
from kvpass.decoding.sampling import Sampling
from kvpass.errors import CacheHandleError, KVPassWarning, UnsupportedGraph
from kvpass.runtime import cache_changes, clocks
from kvpass.runtime.backend_base import BackendBase
from kvpass.runtime.call_context import collect_runs
from kvpass.runtime.calling.model_arguments import with_dynamic_length
from kvpass.runtime.step_execution import StepExecutor, StepInputs, StepKey, StepResult, step_key
from kvpass.torch_private import dynamo, tensors
from kvpass.torch_private.operators import autocast_state

F = TypeVar("F", bound=Callable[..., Any])

COMPUTED_OUTSIDE = (
    "this model computes {} outside of the graph of its decode step, so its Python code runs at every step, which "
    "takes longer: see what breaks the graph with TORCH_LOGS=graph_breaks"
)
INTERRUPTED = (
    "a prompt or a step of this loop was interrupted by an error, or its cache was continued outside of the loop: call "
    "reset() and start again from the prompt"
)
NO_LOGITS = (
    "the logits of this model are not computed in the graph of its attention, which is all that a decode loop repeats: "
    "see what breaks the graph with TORCH_LOGS=graph_breaks, or use model.generate"
)


class ModelFingerprint:
    """The parameters, buffers, modules and other attributes of a model, to see whether one was replaced.

    Objects are compared by identity, and tensors also by memory, dtype, sizes and strides, which `Module.to` changes.
    Values in dictionaries, lists, sets and plain objects, such as a configuration, are compared in the same way.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.record()

    def record(self) -> None:
        """Record the present objects of the model."""
        self._tables = dynamo.tables_of_modules(self._model)
        self._containers = _containers(self._tables)
        self._known, self._autocast = list(self._current()), autocast_state()
        self._tensors = [inner for x in self._known if isinstance(x, Tensor) for inner in tensors.strided_tensors(x)]
        self._tensor_facts = self._read_tensors()

    def has_changed(self) -> bool:
        """Return whether an object, or the data of a tensor, was replaced, added or removed since the last `record`."""
        same_objects = all(itertools.starmap(operator.is_, itertools.zip_longest(self._current(), self._known)))
        return not same_objects or self._read_tensors() != self._tensor_facts or self._autocast != autocast_state()

    def _read_tensors(self) -> list[list[Any]]:
        read = (Tensor.data_ptr, operator.attrgetter("dtype"), Tensor.size, Tensor.stride)
        return [list(map(function, self._tensors)) for function in read]

    def _current(self) -> Iterator[Any]:
        return itertools.chain.from_iterable((*map(dict.values, self._tables), *map(_held_by, self._containers)))


MAX_CONTAINERS = 10_000
"""The most dictionaries, lists and objects among a model's attributes that are compared."""


def _containers(tables: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the dictionaries, lists, sets and plain objects that attributes of modules hold, at any depth."""
    own, found = vars(torch.nn.Module()).keys(), dict[int, Any]()
    todo = [value for table in tables for name, value in table.items() if name not in own]
    while todo and len(found) < MAX_CONTAINERS:
        value = todo.pop()
        if id(value) in found or not _is_container(value):
            continue
        found[id(value)] = value
        todo += _held_by(value)
    return list(found.values())


def _held_by(container: Any) -> Iterable[Any]:
    """Return the values in a dictionary, list or set, or the attributes of an object."""
    if isinstance(container, (list, tuple, set, frozenset)):
        return container
    return (container if isinstance(container, dict) else vars(container)).values()


def _is_container(value: Any) -> bool:
    """Return whether an object may hold state of a model: a container, a configuration, or one of a user's class."""
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return True
    ours = type(value).__module__.partition(".")[0] in ("kvpass", "torch", "functools")
    return hasattr(value, "__dict__") and not ours and not isinstance(value, _NO_STATE)


_NO_STATE = (torch.nn.Module, Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)


class LoopContext(Protocol):
    """Settings that states and requests take from their loop; see `DecodeLoop`."""

    model: torch.nn.Module
    backend: Backend
    device: torch.device
    in_inference_mode: bool
    prefill_chunk: int | None
    fingerprint: ModelFingerprint
    read_interval: int
    pad: int
    stop: Tensor
    sampling: Sampling
    generator: torch.Generator
    model_call: ModelCall
    lock: threading.RLock

    @property
    def takes_positions(self) -> bool:
        """See `DecodeLoop.takes_positions`."""


def in_mode_of_weights(function: F) -> F:
    """Decorate a method of a loop: run it without gradients, in inference mode if the weights are inference tensors.

    Steps write in place to tensors of earlier calls, and torch allows that for tensors of inference mode only there.
    Calls from several threads take turns.  After a refusal, new loops are traced again.
    """

    @functools.wraps(function)
    def run(first: Any, *arguments: Any, **named: Any) -> Any:
        loop = getattr(first, "loop", first)
        with loop.lock, torch.inference_mode(loop.in_inference_mode), torch.no_grad():
            try:
                return function(first, *arguments, **named)
            except UnsupportedGraph:
                BackendBase.refused_loops += 1
                raise

    return cast(F, run)


class DecodeState(abc.ABC):
    """State of B rows that decode together; all tensors keep their addresses from step to step.

    Attributes:
        ids: int64 [B, 1], the last token of each row, which the model has not seen yet.
        position: int64 [B, 1], its position among the real tokens; in a row that has stopped, the position of the token
            before it, as a model may have no further positions.
        stopped: bool [B], whether each row has stopped.
        token_buffer: int64 [read_interval, B], the tokens since the host read them last.
        cursor: int64 [1], the number of these tokens.
        unread_count: the same number on the host.
        can_stop: whether a row can stop.
        caches: the cache of each layer.
        seen: the number of tokens that the caches had seen when `ids` was chosen, padding included.
    """

    can_stop = True

    def __init__(self, loop: LoopContext, cache: Any, position: Tensor) -> None:
        self.loop, self.cache, self.position = loop, cache, position
        self.ids = torch.zeros_like(position)
        self.stopped = torch.zeros_like(position[:, 0], dtype=torch.bool)
        self.token_buffer = position.new_full((loop.read_interval, len(position)), loop.pad)
        self.cursor, self.unread_count = position.new_zeros(1), 0
        self.caches = caches_in(cache)
        self.seen = self.caches[0].length if self.caches else 0
        self.step: RepeatedStep | None = None

    @abc.abstractmethod
    def mask(self) -> Tensor:
        """Return the padding mask of the tokens that the cache has seen, [B, tokens seen]."""

    @abc.abstractmethod
    def sample_and_record(self, logits: Tensor) -> None:
        """Sample the next tokens from logits [B, 1, vocabulary] and advance the state, all on the device."""

    @abc.abstractmethod
    def _stops(self, tokens: Tensor) -> Tensor:
        """Return bool [B], true where a row ends with its token."""

    def mark_new_tokens(self, mask: Tensor) -> None:
        """Write into a padding mask [B, tokens seen] which new tokens are real, if rows can stop."""
        if self.can_stop:
            mask[:, -1:] = (~self.stopped)[:, None]

    @property
    def variant(self) -> Any:
        """Facts on which a CUDA graph of a step depends, in addition to the key of the step."""
        return None

    def invalidate_if_model_changed(self) -> None:
        """Run the next step through the model if a parameter, a module or another attribute of it was replaced.

        The user's code runs only while the host holds the tokens, so one check between two batches of steps is enough.
        """
        if self.step is not None and self.loop.fingerprint.has_changed():
            self.step.invalidate()

    def check_not_interrupted(self) -> None:
        """Raise CacheHandleError if the caches are not as they were when the last tokens were chosen."""
        if any(cache.interrupted or cache.length != self.seen for cache in self.caches):
            raise CacheHandleError(INTERRUPTED)

    def advance(self) -> None:
        """Generate one token for every row."""
        self.check_not_interrupted()
        if not self.unread_count:
            self.cursor.zero_()
        if self.step is None or not self.step.run():
            self._run_model()
        self.unread_count, self.seen = self.unread_count + 1, self.seen + 1

    def unread_tokens(self) -> Tensor:
        """Return the tokens that the host has not read, int64 [n, B] on the CPU.

        The caller sets `unread_count` to zero when it has them.
        """
        return self.token_buffer[: self.unread_count].to("cpu", copy=True)  # waits for the device

    def _run_model(self) -> None:
        """Run a decode step through the model: Dynamo traces it or the runtime specialises it, for repeated steps."""
        mask = self.mask()
        mask = torch.cat([mask, (~self.stopped)[:, None].to(mask.dtype)], 1)
        self.refresh_cache_object()
        self.loop.fingerprint.record()
        counts = self._other_counts()
        expected = () if self.step is None else self.step.next_arguments()
        with collect_runs() as found:
            out = self.loop.model_call(self.ids, with_dynamic_length(mask), self.position, self.cache)
        ran = [each for each in found if isinstance(each, StepResult)]
        if len(ran) != 1:
            raise UnsupportedGraph(
                f"the model ran its decode step in {len(ran)} graphs of kvpass, and a decode loop repeats one: see "
                "what breaks the graph with TORCH_LOGS=graph_breaks, or use model.generate"
            )
        if not ran[0].signature.is_repeatable:
            raise UnsupportedGraph(
                "a mask of this model is computed from all tokens in every step, which a decode loop does not repeat; "
                "use model.generate"
            )
        self.cache = model_access.cache_of_output(out)
        self.step = self.step or RepeatedStep(self)
        logits = self.loop.model_call.logits(out)
        self.step.adopt(ran[0], logits, mask, expected)
        # The model's code sets attributes, its own attributes or its cache's, so it has to run at every step.
        if self.loop.fingerprint.has_changed() or self._other_counts() != counts:
            self.step.invalidate()
        self.sample_and_record(logits)

    def _other_counts(self) -> list[dict[str, int]]:
        """Return the integers in the model's cache object that repeated steps would leave as they are."""
        return [other_integers(holder) for holder in (self.cache, *layers_of(self.cache))]

    def _record(self, drawn: Tensor) -> None:
        """Record the next tokens [B] of rows that have not stopped, and advance the state."""
        if self.can_stop:
            running = ~self.stopped
            self.token_buffer.index_copy_(0, self.cursor, torch.where(running, drawn, self.loop.pad)[None])
            self.ids.copy_(torch.where(running[:, None], drawn[:, None], self.ids))
            self.stopped.logical_or_(self._stops(drawn))
            self.position.add_((~self.stopped)[:, None])
        else:
            self.position.add_(1)
            self.token_buffer.index_copy_(0, self.cursor, drawn[None])
            self.ids.copy_(drawn[:, None])
        self.cursor.add_(1)

    def current_cache(self) -> Any:
        """Return the model's own cache object, at the present count of tokens."""
        self.refresh_cache_object()
        return self.cache

    def refresh_cache_object(self) -> None:
        """Update the model's own cache object to the present count of tokens."""
        if self.step is not None:
            steps, self.step.steps_since_refresh = self.step.steps_since_refresh, 0
            self.cache = refresh_handles(self.cache, steps)


@dataclasses.dataclass
class AdoptedStep:
    """The last step through the model, with the arguments of the step that ran last."""

    executor: StepExecutor
    inputs: StepInputs
    arguments: tuple[Any, ...]
    mask: Tensor
    logits_index: int
    length_before: int  # tokens
    holds_after: Callable[[int], bool]
    is_repeatable: bool  # its arguments were those of the step before, advanced by one token

    def arguments_after(self, by: int) -> tuple[Any, ...]:
        """Return the arguments as they would be `by` tokens later."""
        return self.executor.arguments_after(self.inputs.caches, self.arguments, by)


class RepeatedStep:
    """A decode step that is repeated without Dynamo and without the model's Python.

    The loop repeats the arguments of the second step in a row through the model, because Dynamo may have specialised
    the first on its number of tokens, and because two steps show that the arguments are repeatable: the second step's
    arguments must be the first step's, advanced by one token.  Otherwise every step runs through the model, because
    code outside of the graph computes an argument again.  The loop repeats them only as long as all guards on sizes
    hold.
    """

    def __init__(self, state: DecodeState) -> None:
        self.state = state
        self.steps_since_refresh = 0  # steps since the last update of the cache object
        self.slots_by_key: dict[StepKey, Any] = {}  # the slots of steps that have run, so that their ids stay in use
        self.callables: dict[tuple[StepKey, bool], Callable[..., Sequence[Any]]] = {}  # and whether the step compacts
        self.graphs: dict[tuple[StepKey, Any], torch.cuda.CUDAGraph] = {}  # and `DecodeState.variant`
        self.adopted: AdoptedStep | None = None

    def next_arguments(self) -> tuple[Any, ...]:
        """Return the arguments that the next step would have if it were repeated; none if no step has run."""
        return self.adopted.arguments_after(1) if self.adopted else ()

    def adopt(self, result: StepResult, logits: Tensor, mask: Tensor, expected: tuple[Any, ...]) -> None:
        """Take over from a step that ran through the model, with its logits and padding mask.

        Args:
            expected: the result of `next_arguments` before the step.
        """
        is_repeatable = self.adopted is not None and result.executor is self.adopted.executor
        changed = self._changed_arguments(result, expected, mask) if is_repeatable else []
        if changed:
            warnings.warn(COMPUTED_OUTSIDE.format(short_text(changed[0])), KVPassWarning, stacklevel=2)
        if changed or not is_repeatable:
            self.invalidate()
        index = index_of_tensor(result.graph_results, logits)
        if index is None:
            raise UnsupportedGraph(NO_LOGITS)
        self.adopted = AdoptedStep(
            executor=result.executor,
            inputs=result.inputs,
            arguments=result.arguments,
            mask=mask,
            logits_index=index,
            length_before=result.length_before,
            holds_after=result.executor.holds_after(result),
            is_repeatable=is_repeatable and not changed,
        )
        if any(key.hooks != result.key.hooks for key in self.slots_by_key):  # their keys never occur again
            self._drop_steps()
        self.slots_by_key[result.key] = [cache.slots for cache in result.caches]

    def _changed_arguments(self, result: StepResult, expected: tuple[Any, ...], mask: Tensor) -> list[Any]:
        """Return the arguments that a repeated step would have had otherwise.

        Caches and tensors of the loop follow by themselves, and so do numbers that are sizes and do not count tokens.
        """
        of_loop, counters = (self.state.ids, self.state.position, mask), result.executor.counters
        changed = []
        for index, (argument, wanted) in enumerate(zip(result.arguments, expected, strict=True)):
            if not isinstance(argument, Tensor):
                follows = index not in counters or argument == wanted
            elif tensors.is_wrapper(argument) or tensors.is_wrapper(wanted):  # these have no own memory
                follows = argument is wanted
            else:
                follows = isinstance(argument, Handle) or index_of_tensor((wanted, *of_loop), argument) is not None
            if not follows:
                changed.append(argument)
        return changed

    def invalidate(self) -> None:
        """Drop all earlier steps and the tensors that were passed to them."""
        self.adopted = None
        self._drop_steps()

    def _drop_steps(self) -> None:
        for kinds in (self.slots_by_key, self.callables, self.graphs):
            kinds.clear()

    def run(self) -> bool:
        """Run one step, by replay on a GPU; return False if no step of this key has run yet."""
        step = self.adopted
        if step is None or not step.is_repeatable:
            return False
        caches = step.inputs.caches
        cache_changes.grow_for(caches, 1)
        key = step_key(caches)
        if key not in self.slots_by_key or not step.holds_after(caches[0].length - step.length_before):
            return False
        if step.mask.device.type == "cuda":
            self._replay(step, key)
        else:
            self._call(step, key)
        self.steps_since_refresh += 1
        return True

    def shift_counts(self, by: int) -> None:
        """Prepare the arguments for caches whose count of seen tokens is about to change by `by`."""
        if self.adopted:
            self.adopted.arguments = self.adopted.arguments_after(by)
        self.steps_since_refresh += by

    def _call(self, step: AdoptedStep, key: StepKey) -> None:
        """Run the device work of a step."""
        self.state.mark_new_tokens(step.mask)
        step.arguments = step.arguments_after(1)
        compact, ticked = step.executor.next_clocks(step.inputs.caches, step.arguments)
        if (key, compact) not in self.callables:
            inputs = dataclasses.replace(step.inputs, arguments=step.arguments, compact=compact)
            self.callables[key, compact] = step.executor.bind_step(inputs)
        results = self.callables[key, compact](step.arguments, ticked)
        self.state.sample_and_record(results[step.logits_index])

    def _replay(self, step: AdoptedStep, key: StepKey) -> None:
        graph_key, caches = (key, self.state.variant), step.inputs.caches
        if graph_key in self.graphs:
            _, ticked = clocks.next_clocks(caches)
            clocks.advance_counts(caches, 1, ticked)
        else:
            self.graphs[graph_key] = self._capture(step, key)  # the capture itself advances the host's counts
        self.graphs[graph_key].replay()

    def _capture(self, step: AdoptedStep, key: StepKey) -> torch.cuda.CUDAGraph:
        """Return the step as a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.state.loop.generator)
        with torch.cuda.graph(graph):
            self._call(step, key)
        return graph


def index_of_tensor(values: Sequence[Any], wanted: Tensor) -> int | None:
    """Return the index of a tensor among values, or of a view with its shape and start; None without one."""
    for index, value in enumerate(values):
        if value is wanted:
            return index
        if isinstance(value, Tensor) and value.shape == wanted.shape and value.data_ptr() == wanted.data_ptr():
            return index
    return None
