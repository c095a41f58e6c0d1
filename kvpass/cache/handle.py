"""Define the handle, which stands in for keys or values in the model's own cache object.

A handle has the shape that the model expects, [B, Hkv, tokens seen, D], and no data: it is a zero-stride view of one
NaN that carries the layer's slots.  Values computed from the cache's shape stay right, and uncompiled attention gives
NaN instead of a plausible answer.  Operations that people apply to caches between calls act on the slots or raise
`CacheHandleError`.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from kvpass import cache_names
from kvpass.cache import history
from kvpass.cache.row_picking import Row
from kvpass.cache.slots import AnySlots, Layout
from kvpass.errors import CacheHandleError
from kvpass.policies.types import Clock
from kvpass.torch_private import dynamo, tensors

Part = Literal["keys", "values"]


@dataclasses.dataclass(frozen=True)
class _RowSelection:
    """A cache with selected rows, made for one of K and V and found by the other.

    Attributes:
        operation, argument: the selection of rows.
        seen: tokens seen at the selection.
        part: the part that was selected first.
        result: the cache with the selected rows.
    """

    operation: str
    argument: Any
    seen: int
    part: Part
    result: weakref.ref[LayerCache]

    def serves(self, operation: str, argument: Any, seen: int, part: Part) -> bool:
        """Return whether the other part of K and V makes the same selection."""
        same = (self.operation, self.seen) == (operation, seen) and self.part != part
        return same and _equal_arguments(self.argument, argument)


def _equal_arguments(one: Any, other: Any) -> bool:
    """Return whether two arguments select the same rows; tensors and lists are compared by content."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        types = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (one, other)]
        return types[0] == types[1] and torch.equal(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_equal_arguments(a, b) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and bool(one == other)


def _copy_of_lists(argument: Any) -> Any:
    """Return an argument with its lists copied, because callers may change them later."""
    return [_copy_of_lists(part) for part in argument] if isinstance(argument, list) else argument


@dataclasses.dataclass(frozen=True)
class _Cropped:
    """The cache that replaced another one when its last tokens were cropped.

    Attributes:
        tokens: the number of cropped tokens.
        left: the part of K and V that is still to be cropped.
        result: the cache that continues, on the same slots.
    """

    tokens: int
    left: Part | None
    result: LayerCache


class DeferredChecks:
    """Conditions on a GPU that the host reads only once they are computed."""

    def __init__(self) -> None:
        self.pending: list[tuple[torch.cuda.Event, Tensor]] = []

    def add(self, condition: Tensor) -> None:
        """Add a bool on a GPU that must be true."""
        answer = torch.empty((), dtype=torch.bool, pin_memory=True)
        answer.copy_(condition, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self.pending.append((event, answer))

    def settle(self) -> None:
        """Read the conditions that are computed.

        Raises:
            CacheHandleError: one of them is false.
        """
        computed = itertools.takewhile(lambda check: check[0].query(), self.pending)  # type: ignore[no-untyped-call]
        answers = [answer for _, answer in computed]
        self.pending = self.pending[len(answers) :]
        if not all(map(bool, answers)):
            raise CacheHandleError(
                "the mask of earlier tokens has changed since they were cached; on a GPU a cache "
                "cannot follow that: start again with the whole conversation, or leave its mask unchanged"
            )


@dataclasses.dataclass
class LayerCache:
    """The slots of one layer and one conversation, shared by the handles of K and V.

    Attributes:
        backend: the backend that made the cache; a backend of other settings refuses it.
        number: increases from layer to layer of a conversation in the order of the prompt's layers, also in copies.
        layout, slots: the buffers; `slots` is a ReferenceLayer with `inner="reference"`.
        seen: tokens seen, padding included; the host's copy of `slots.length`.
        heads: the KV heads of the model's cache; if keys are computed from the cache, the layout joins them to one.
        window: the number of last tokens that the model's cache stores, None for all.
        limits: the layer's budget of each row; empty with `inner="reference"`.
        clocks: the host's counts for each row, see `Policy.clock`; empty for most policies.
        interrupted: set while a step runs, so that an interrupted step is noticed.
        notes: facts to report, such as an adopted prompt.
        deferred_checks: conditions on the device that the host has not read.
        absent: int64 [B, P], the indices in the padded sequence of padding that is not cached, -1 after the last.
        first: int64 [B], the position id of each row's first real token, if keys are rotated by rank and it is known.
        angles: the cosines and sines of a few positions, if keys are rotated by rank; see `RotarySlice.probe`.
        weights: the weights that computed the layer's keys.
        output: the weight [E, Hq Dv] of the output projection, for policies that read it.
        model: the tensors of the model that made the cache, as far as its graph had them as inputs.
        calls: the last calls, as far as they can be cropped.
        cropped: the cache that replaced this one when tokens were cropped; this one can no longer be continued.
    """

    backend: Any
    number: int
    layout: Layout
    slots: Any
    seen: int
    heads: int
    window: int | None = None
    limits: tuple[int, ...] = ()
    clocks: tuple[Any, ...] = ()
    interrupted: bool = False
    notes: tuple[str, ...] = ()
    absent: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int64))
    first: Tensor | None = None
    angles: Tensor | None = None
    deferred_checks: DeferredChecks = dataclasses.field(default_factory=lambda: DeferredChecks())
    weights: tuple[weakref.ref[Any], ...] = ()
    output: weakref.ref[Any] | None = None
    model: tuple[weakref.ref[Any], ...] = ()
    calls: history.Calls = ()
    cropped: _Cropped | None = None
    _picked: list[_RowSelection] = dataclasses.field(default_factory=list)

    @property
    def valid_seen(self) -> Tensor:
        """int64 [B] on the device: real tokens seen."""
        seen: Tensor = self.slots.tensors()[5]  # a reference counts them only when read
        return seen

    @property
    def stored(self) -> int:
        """The number of tokens that the model's cache stores."""
        return self.seen if self.window is None else min(self.seen, self.window)

    def handles(self) -> tuple[Handle, Handle]:
        """Return the current handles of K and V."""
        joined = self.heads // self.layout.heads
        key, value = self.layout.key_dim // joined, self.layout.value_dim // joined
        # Dynamo refuses a region whose inputs share memory, so each handle has a NaN of its own.
        return (
            Handle.of(self, "keys", key, _nan_of(self.layout)),
            Handle.of(self, "values", value, _nan_of(self.layout)),
        )

    def select(self, operation: str, argument: Any, part: Part, apply: Callable[[Tensor], Tensor]) -> LayerCache:
        """Return the cache with other rows.  The same selection for K and then for V gives one cache.

        The same selection for the same part again gives a second copy.

        Args:
            apply: the selection as a function of batch-first tensors.
        """
        self._picked = [picked for picked in self._picked if picked.result() is not None]
        for i, picked in enumerate(self._picked):
            result = picked.result()
            if result is not None and picked.serves(operation, argument, self.seen, part):
                del self._picked[i]
                return result
        result = self.rebuilt(operation, apply)
        self._picked.append(_RowSelection(operation, _copy_of_lists(argument), self.seen, part, weakref.ref(result)))
        return result

    def crop(self, tokens: int, part: Part) -> LayerCache:
        """Return the cache without its last tokens.  The same crop of K and then of V gives one cache.

        Raises:
            CacheHandleError: so many tokens cannot be cropped.
        """
        last = self.cropped
        if last is not None and (last.tokens, last.left, last.result.seen) == (tokens, part, self.seen - tokens):
            self.cropped = dataclasses.replace(last, left=None)
            return last.result
        _check_usable(self)
        history.check(self.calls, tokens, self.backend.crop)
        shorter = self._without(tokens)
        self.cropped, self.calls = _Cropped(tokens, "values" if part == "keys" else "keys", shorter), ()
        return shorter

    def _without(self, tokens: int) -> LayerCache:
        """Return the cache without its last tokens, by undoing calls."""
        cache: LayerCache = self
        calls = self.calls
        while tokens:
            *earlier, last = calls
            cache, calls = last.before(cache), tuple(earlier)
            if last.new > tokens and last.repeat is not None:
                shorter: LayerCache = last.repeat(cache, last.new - tokens)
                return dataclasses.replace(shorter, calls=(*calls, *shorter.calls), _picked=[])
            tokens -= last.new
        return dataclasses.replace(cache, calls=calls, _picked=[])

    def rebuilt(self, operation: str, apply: Callable[[Tensor], Tensor]) -> LayerCache:
        """Return the cache with a function applied to each of its batch-first tensors."""
        if not isinstance(self.slots, AnySlots):
            raise CacheHandleError(f"{operation} on a cache that runs with inner='reference'")
        slots = self.slots.map(apply)
        batch = slots.length.shape[0]
        limits, clocks = self._counts_of(batch, apply)
        return dataclasses.replace(
            self,
            layout=dataclasses.replace(self.layout, batch=batch, device=slots.length.device),
            slots=slots,
            limits=limits,
            clocks=clocks,
            absent=apply(self.absent),
            first=None if self.first is None else apply(self.first),
            calls=(),
            _picked=[],
        )

    def _counts_of(self, batch: int, apply: Callable[[Tensor], Tensor]) -> tuple[tuple[int, ...], tuple[Clock, ...]]:
        """Return the `limits` and `clocks` of selected rows; the host waits only if they differ by row."""
        if len(set(self.limits)) <= 1 and len(set(self.clocks)) <= 1:
            return self.limits[:1] * batch, self.clocks[:1] * batch
        rows: list[int] = apply(torch.arange(self.layout.batch, device=self.layout.device)).tolist()
        clocks = tuple(self.clocks[row] for row in rows) if self.clocks else ()
        return tuple(self.limits[row] for row in rows), clocks


class Handle(Tensor):
    """NaN [B, Hkv, tokens stored, D] that carries a `LayerCache`; see the module's docstring."""

    cache: LayerCache
    seen: int
    part: Part

    @staticmethod
    def of(cache: LayerCache, part: Part, dim: int, nan: Tensor) -> Handle:
        """Return the current handle of a layer's keys or values, a view of one NaN."""
        handle = nan.expand(cache.layout.batch, cache.heads, cache.stored, dim).as_subclass(Handle)
        handle.cache, handle.seen, handle.part = cache, cache.seen, part
        if cache.stored == cache.seen:
            dynamo.mark_growing(handle)
        return handle

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.compiler.is_compiling():
            action = _ACTIONS.get(getattr(func, "__name__", ""))
            if action is not None:
                return action(*args, **(kwargs or {}))
            if not _reads_metadata(func):
                given = optree.tree_leaves((args, kwargs or {}))
                seen = next(each.seen for each in given if isinstance(each, Handle))
                raise CacheHandleError(
                    f"{getattr(func, '__name__', func)} on a cache of kvpass: its {seen} tokens live in slots and not "
                    "in this tensor. Reordering rows, copying and moving work; anything else needs "
                    "kvpass.inspect(cache) or an uncompiled model."
                )
        with tensors.without_torch_functions():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        _check_current(self)
        key = id(self.cache)
        if key not in memo:
            memo[key] = self.cache.rebuilt("deepcopy", torch.clone)
        return moved(self, memo[key])

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CacheHandleError("a cache of kvpass cannot be pickled: kvpass.save_cache writes it to a file")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # mypy drops the name
        layout = self.cache.layout
        return f"Handle(shape={tuple(self.shape)}, policy={layout.policy}, capacity={layout.capacity})"


def _nan_of(layout: Layout) -> Tensor:
    """Return the NaN [1] of which a layer's handles are views."""
    dynamo.never_a_frame_of_its_own(Handle.__torch_function__)
    return torch.full((1,), torch.nan, dtype=layout.dtype, device=layout.device)


def _reads_metadata(func: Any) -> bool:
    """Return whether a function reads only shape, dtype and the like."""
    name = getattr(func, "__name__", "")
    return name in tensors.QUESTIONS or name in (
        "__get__",
        "__set__",
        "__delete__",
        "as_subclass",
        "requires_grad_",
    )


def moved(handle: Handle, cache: LayerCache) -> Handle:
    """Return the handle of the same part of another cache."""
    return Handle.of(cache, handle.part, handle.shape[-1], _nan_of(cache.layout))


def renewed(handle: Handle) -> Handle:
    """Return the handle at the current length, if its conversation continued without it."""
    return moved(handle, handle.cache)


def _check_usable(cache: LayerCache) -> None:
    if cache.interrupted:
        raise CacheHandleError("an earlier step on this cache was interrupted by an error; start again from the prompt")
    if cache.cropped is not None:
        raise CacheHandleError(
            f"{cache.cropped.tokens} tokens of this cache have since been cropped, so the state that it stood for is "
            "gone: copy a cache (copy.deepcopy) before cropping it"
        )


def _check_current(handle: Handle) -> None:
    if handle.cache.cropped is not None:
        _check_usable(handle.cache)
    if handle.seen != handle.cache.seen:
        raise CacheHandleError(
            f"this cache stood at {handle.seen} tokens and has since gone on to {handle.cache.seen}: "
            "copy a cache (copy.deepcopy) before continuing it in two ways"
        )


def _rows(operation: str, handle: Handle, argument: Any, apply: Callable[[Tensor], Tensor]) -> Handle:
    _check_current(handle)
    return moved(handle, handle.cache.select(operation, argument, handle.part, apply))


def _index_select(handle: Handle, dim: int, index: Tensor) -> Handle:
    if dim != 0:
        raise CacheHandleError(f"index_select over dimension {dim} of a cache: only rows (dimension 0) can be picked")
    return _rows("index_select", handle, index, lambda tensor: tensor.index_select(0, index.to(tensor.device)))


def _getitem(handle: Handle, index: Any) -> Handle | Row:
    count = _first_tokens(handle, index)
    if count is not None:
        return _crop(handle, count)
    first = index[0] if isinstance(index, tuple) else index
    rest = index[1:] if isinstance(index, tuple) else ()
    if isinstance(index, int) and not isinstance(index, bool):
        with tensors.without_torch_function():
            return Row.like(handle[index])
    picks_rows = first.ndim == 1 if isinstance(first, Tensor) else isinstance(first, (slice, list))
    if picks_rows and all(part is Ellipsis or part == slice(None) for part in rest):
        return _rows("getitem", handle, first, lambda tensor: tensor[first].clone())
    raise CacheHandleError(
        f"cache[{index}]: only whole rows of a cache of kvpass can be picked, and its last tokens cropped; those of a "
        "layer that has seen more tokens than its sliding window cannot be"
    )


def _first_tokens(handle: Handle, index: Any) -> int | None:
    """Return how many tokens a subscript keeps, if it keeps the first ones of all rows and heads, else None."""
    if not isinstance(index, tuple) or any(part is not Ellipsis and not isinstance(part, slice) for part in index):
        return None
    rows, heads, tokens, *rest = _by_dimension(index, handle.ndim)
    if tokens == slice(None) or [rows, heads, *rest] != [slice(None)] * (handle.ndim - 1):
        return None
    start, stop, step = tokens.indices(handle.shape[2])
    return stop if (start, step) == (0, 1) else None


def _by_dimension(index: tuple[Any, ...], ndim: int) -> list[slice]:
    """Return a subscript of slices with one slice per dimension."""
    ellipsis_index = index.index(Ellipsis) if Ellipsis in index else len(index)
    slices = [part for part in index if part is not Ellipsis]
    return [*slices[:ellipsis_index], *[slice(None)] * (ndim - len(slices)), *slices[ellipsis_index:]]


def _crop(handle: Handle, kept: int) -> Handle:
    """Return the handle without its last tokens, which are removed from the slots."""
    cache, stored = handle.cache, handle.shape[2]
    if kept >= stored:
        return handle
    if cache.cropped is None:
        _check_current(handle)
    if stored < handle.seen:
        raise CacheHandleError(
            f"{stored - kept} tokens were to be cropped from a layer with a sliding window of its own, which stores "
            f"{stored} of the {handle.seen} that it has seen"
        )
    return moved(handle, cache.crop(stored - kept, handle.part))


def _repeat_interleave(handle: Handle, repeats: Any, dim: int | None = None, **_: Any) -> Handle:
    if dim != 0:
        raise CacheHandleError("repeat_interleave of a cache: only rows (dim=0) can be repeated")
    return _rows("repeat_interleave", handle, repeats, lambda tensor: tensor.repeat_interleave(repeats, 0))


def _clone(handle: Handle, **_: Any) -> Handle:
    return _rows("clone", handle, None, torch.clone)


def _same(handle: Handle, *_: Any, **__: Any) -> Handle:
    return handle


def _to(handle: Handle, *args: Any, **kwargs: Any) -> Handle:
    with tensors.without_torch_function():
        target = torch.empty(0, dtype=handle.dtype, device=handle.device).to(*args, **kwargs)
    if target.dtype != handle.dtype:
        raise CacheHandleError(f"a cache of kvpass in {handle.dtype} cannot be converted to {target.dtype}")
    if target.device == handle.device:
        return handle
    return _rows("to", handle, str(target.device), lambda tensor: tensor.to(target.device))


def _cuda(handle: Handle, device: Any = None, *_: Any, **__: Any) -> Handle:
    """Move to a GPU, by default the present one; an index is that of a GPU."""
    if device is None:
        return _to(handle, "cuda")
    return _to(handle, torch.device("cuda", device) if isinstance(device, int) else device)


_ACTIONS: dict[str, Callable[..., Any]] = {
    "index_select": _index_select,
    "__getitem__": _getitem,
    "repeat_interleave": _repeat_interleave,
    "clone": _clone,
    "contiguous": _same,
    "detach": _same,
    "to": _to,
    "cpu": lambda handle, **_: _to(handle, "cpu"),
    "cuda": _cuda,
}


def current(value: Any, part: Part, backend: Any) -> LayerCache:
    """Return the layer's cache from the handle that a graph receives for keys or values.

    Raises:
        CacheHandleError: the argument is no handle, or its cache cannot be continued.
    """
    if not isinstance(value, Handle):
        raise CacheHandleError("a layer's cache was replaced by an ordinary tensor in the middle of a conversation")
    if value.part != part:
        raise CacheHandleError(
            f"the {value.part} of a layer were given back where its {part} belong: keep the parts of a cache apart"
        )
    _check_current(value)
    cache = value.cache
    cache.deferred_checks.settle()
    _check_usable(cache)
    with tensors.without_torch_function():
        shape = tuple(value.shape)
    if shape[:3] != (cache.layout.batch, cache.heads, cache.stored):
        raise CacheHandleError(f"a cache handle of shape {shape} does not fit its slots {cache.layout}")
    if cache.backend is not backend and cache.backend.family != backend.family:
        raise CacheHandleError(f"this cache was made by {cache.backend} and cannot go on under {backend}")
    return cache


def check_layers(caches: list[LayerCache]) -> None:
    """Check that the caches that a graph receives, in the order of its layers, belong to these layers.

    Raises:
        CacheHandleError: one cache stands in two layers, layers are exchanged, or their lengths differ.
    """
    if len({cache.number for cache in caches}) < len(caches):
        raise CacheHandleError("one layer's cache was given back for two layers: every layer has a cache of its own")
    for index, (cache, following) in enumerate(itertools.pairwise(caches)):
        if cache.number > following.number:
            raise CacheHandleError(
                f"the caches of layers were exchanged: the cache for layer {index} of the graph is of a later layer "
                f"than the cache for layer {index + 1}"
            )
    counts = sorted({cache.seen for cache in caches})
    if len(counts) > 1:
        raise CacheHandleError(f"the layers' caches stand at {counts} tokens: they come from different conversations")


def caches_in(cache: Any) -> list[LayerCache]:
    """Return the caches of all layers in a DecodeLoop, a model's cache object or nested containers."""
    return list({id(handle.cache): handle.cache for handle in _handles(cache)}.values())


def usable_caches_in(cache: Any, backend: Any) -> list[LayerCache]:
    """Return the caches of all layers, as `caches_in`, which a call is about to continue.

    Raises:
        CacheHandleError: one of them cannot be continued, or not under this backend.
    """
    return list({id(each): each for each in (current(x, x.part, backend) for x in _handles(cache))}.values())


_INNER = ("self_attention_cache", "layers")
"""Attributes by which cache objects hold the decoder's cache, or one cache per layer."""


def _handles(cache: Any) -> Iterator[Handle]:
    """Yield every handle in a DecodeLoop, a cache object with `layers` that have `keys`, or nested containers."""
    if not isinstance(cache, Tensor):  # a handle has a `cache` of its own
        for inner in (cache_names.returned(cache), *(getattr(cache, name, None) for name in _INNER)):
            if inner is not None:
                yield from _handles(inner)
                return
    for leaf in optree.tree_leaves(cache):
        keys = leaf if isinstance(leaf, Tensor) else getattr(leaf, "keys", None)
        if isinstance(keys, Handle):
            yield keys
