"""Define the handle, which stands in for keys or values in the model's own cache object.

A handle has the shape that the model expects, [B, Hkv, tokens seen, D] or [B, tokens seen, Hkv, D].  It has no data: it
is a zero-stride view of one NaN that carries the layer's slots.  Values computed from the cache's shape stay right, and
uncompiled attention gives NaN instead of a plausible answer.  Operations that people apply to caches between calls act
on the slots or raise `CacheHandleError`.

A `DetachedRow` stands in for a single row that a caller takes out of a cache, as Whisper's `generate` does per input.
It does not carry its slots: it can be moved, unsqueezed and stacked; reading or growing it is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from kvpass.cache.layer_cache import CacheOwner, KeyOrValue, LayerCache, check_usable
from kvpass.errors import CacheHandleError
from kvpass.torch_private import dynamo, tensors


class Handle(Tensor):
    """NaN that carries a `LayerCache`, with its stored tokens along `token_dim`; see the module's docstring."""

    cache: LayerCache
    length: int
    kv: KeyOrValue
    token_dim: int

    @staticmethod
    def of(cache: LayerCache, kv: KeyOrValue, token_dim: int) -> Handle:
        """Return the current handle of a layer's keys or values, a view of one NaN."""
        dynamo.never_compile_alone(Handle.__torch_function__)
        dim = {"keys": cache.layout.key_dim, "values": cache.layout.value_dim}[kv]
        dim = dim * cache.layout.heads // cache.model_heads  # a layout may have all heads joined to one
        # Dynamo refuses a region whose inputs share memory, so each handle has its own NaN.
        nan = torch.full((1,), torch.nan, dtype=cache.layout.dtype, device=cache.layout.device)
        handle = nan.expand(*_shape_of(cache, token_dim), dim).as_subclass(Handle)
        handle.cache, handle.length, handle.kv, handle.token_dim = cache, cache.length, kv, token_dim
        if cache.stored_tokens == cache.length:
            dynamo.mark_dynamic_dim(handle, token_dim)
        return handle

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not dynamo.is_traced():
            name = getattr(func, "__name__", "")
            if name in _ACTIONS:
                return _ACTIONS[name](*args, **(kwargs or {}))
            if name not in _METADATA:
                leaves: list[Any] = optree.tree_leaves((args, kwargs))  # type: ignore[arg-type]
                lengths = (f"{each.length} " for each in leaves if isinstance(each, Handle))
                raise CacheHandleError(
                    f"{name or func} on a cache of kvpass: its {next(lengths, '')}tokens live in slots and not in this "
                    "tensor. Reorder rows, copy or move the cache, or read it with kvpass.inspect(cache). If the "
                    "model does this, torch ran it uncompiled: TORCH_LOGS=graph_breaks says why."
                )
        with tensors.without_torch_functions():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        _check_current(self)
        key = id(self.cache)
        if key not in memo:
            memo[key] = self.cache.map_rows(torch.clone)
        return handle_like(self, memo[key])

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CacheHandleError("a cache of kvpass cannot be pickled: kvpass.save_cache writes it to a file")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # mypy drops the name
        layout = self.cache.layout
        return f"Handle(shape={tuple(self.shape)}, policy={layout.policy}, capacity={layout.capacity})"


def handles_of(cache: LayerCache, token_dims: tuple[int, int]) -> tuple[Handle, Handle]:
    """Return the current handles of K and V, with the dimension of the tokens in each."""
    return Handle.of(cache, "keys", token_dims[0]), Handle.of(cache, "values", token_dims[1])


def with_heads_first(arguments: Sequence[Any], tokens_first: Collection[int]) -> tuple[Any, ...]:
    """Return arguments with some that are [B, S, H, D], handles among them, as [B, H, S, D]."""
    if not tokens_first:
        return tuple(arguments)
    return tuple(_exchanged(x) if index in tokens_first else x for index, x in enumerate(arguments))


def _exchanged(x: Tensor) -> Tensor:
    """Return a tensor or a handle with dimensions 1 and 2 exchanged."""
    with tensors.without_torch_functions():
        result = x.transpose(1, 2)
        if isinstance(x, Handle):
            result = result.as_subclass(Handle)
            result.cache, result.length, result.kv, result.token_dim = x.cache, x.length, x.kv, 3 - x.token_dim
    return result


def _shape_of(cache: LayerCache, token_dim: int) -> tuple[int, int, int]:
    """Return the shape of a handle without its last dimension."""
    heads, stored = cache.model_heads, cache.stored_tokens
    return (cache.layout.batch, heads, stored) if token_dim == 2 else (cache.layout.batch, stored, heads)


_METADATA = tensors.METADATA_METHODS | {"__get__", "__set__", "__delete__", "as_subclass", "requires_grad_"}
"""Names of functions that read only shape, dtype and the like."""


def handle_like(handle: Handle, cache: LayerCache) -> Handle:
    """Return the handle of the keys or values of another cache, whichever this one is for."""
    return Handle.of(cache, handle.kv, handle.token_dim)


def _check_current(handle: Handle) -> None:
    if handle.cache.cropped is not None:
        check_usable(handle.cache)
    if handle.length != handle.cache.length:
        raise CacheHandleError(
            f"this cache object is out of date: it was returned after {handle.length} tokens, and its conversation has "
            f"{handle.cache.length} now: copy a cache (copy.deepcopy) before continuing it in two ways"
        )


def _select_rows(operation: str, handle: Handle, argument: Any, apply: Callable[[Tensor], Tensor]) -> Handle:
    _check_current(handle)
    return handle_like(handle, handle.cache.select(operation, argument, handle.kv, apply))


def _index_select(input: Handle, dim: int, index: Tensor) -> Handle:
    if dim != 0:
        raise CacheHandleError(f"index_select over dimension {dim} of a cache: only rows (dimension 0) can be picked")
    return _select_rows("index_select", input, index, lambda tensor: tensor.index_select(0, index.to(tensor.device)))


def _getitem(handle: Handle, index: Any) -> Handle | DetachedRow:
    count = _kept_tokens(handle, index)
    if count is not None:
        return _crop(handle, count)
    if isinstance(index, tuple) and not index:
        index = Ellipsis
    rows = index[0] if isinstance(index, tuple) else index
    rest = index[1:] if isinstance(index, tuple) else ()
    if isinstance(index, int) and not isinstance(index, bool):
        with tensors.without_torch_function():
            return DetachedRow.like(handle[index])
    picks_rows = rows.ndim == 1 if isinstance(rows, Tensor) else isinstance(rows, (slice, list))
    if picks_rows and all(part is Ellipsis or part == slice(None) for part in rest):
        # A slice is a view, and a step on one cache would write to the other.
        return _select_rows("getitem", handle, rows, lambda tensor: tensor[rows].clone())
    raise CacheHandleError(
        f"cache[{index}]: only whole rows of a cache of kvpass can be picked, and its last tokens cropped; tokens of a "
        "layer that has seen more tokens than its sliding window cannot be cropped"
    )


def _kept_tokens(handle: Handle, index: Any) -> int | None:
    """Return how many tokens a subscript keeps, if it keeps the first tokens of all rows and heads, else None."""
    if not isinstance(index, tuple) or any(part is not Ellipsis and not isinstance(part, slice) for part in index):
        return None
    slices = [part for part in index if part is not Ellipsis]
    ellipsis_index = index.index(Ellipsis) if Ellipsis in index else len(index)
    slices[ellipsis_index:ellipsis_index] = [slice(None)] * (handle.ndim - len(slices))
    tokens = slices.pop(handle.token_dim)
    if tokens == slice(None) or slices != [slice(None)] * (handle.ndim - 1):
        return None
    start, stop, step = tokens.indices(handle.shape[handle.token_dim])
    return stop if (start, step) == (0, 1) else None


def _crop(handle: Handle, kept: int) -> Handle:
    """Return the handle without its last tokens, which are removed from the slots."""
    cache, stored = handle.cache, handle.shape[handle.token_dim]
    if kept >= stored:
        return handle
    if cache.cropped is None:
        _check_current(handle)
    if stored < handle.length:
        raise CacheHandleError(
            f"cannot crop {stored - kept} tokens: a layer with its own sliding window stores {stored} of the "
            f"{handle.length} tokens that it has seen; copy the cache (copy.deepcopy) before these tokens instead"
        )
    return handle_like(handle, cache.crop(stored - kept, handle.kv))


def _repeat_interleave(handle: Handle, repeats: Any, dim: int | None = None, **_: Any) -> Handle:
    if dim != 0:
        raise CacheHandleError("repeat_interleave of a cache: only rows (dim=0) can be repeated")
    return _select_rows("repeat_interleave", handle, repeats, lambda tensor: tensor.repeat_interleave(repeats, 0))


def _to(handle: Handle, *args: Any, **kwargs: Any) -> Handle:
    with tensors.without_torch_function():
        target = torch.empty(0, dtype=handle.dtype, device=handle.device).to(*args, **kwargs)
    if target.dtype != handle.dtype:
        raise CacheHandleError(f"a cache of kvpass in {handle.dtype} cannot be converted to {target.dtype}")
    if target.device == handle.device:
        return handle
    return _select_rows("to", handle, str(target.device), lambda tensor: tensor.to(target.device))


def _type(handle: Handle, dtype: Any = None, *_: Any, **__: Any) -> str:
    """Return the name of the tensor's type; a cache is not converted to another one."""
    if dtype is not None:
        raise CacheHandleError(f"a cache of kvpass in {handle.dtype} cannot be converted to {dtype}")
    with tensors.without_torch_function():
        return str(handle.type())


def _cuda(handle: Handle, device: Any = None, *_: Any, **__: Any) -> Handle:
    """Move to a GPU, by its index, or to the current one."""
    if device is None:
        return _to(handle, "cuda")
    return _to(handle, torch.device("cuda", device) if isinstance(device, int) else device)


_ACTIONS: dict[str, Callable[..., Any]] = {
    "index_select": _index_select,
    "__getitem__": _getitem,
    "repeat_interleave": _repeat_interleave,
    "clone": lambda handle, **_: _select_rows("clone", handle, None, torch.clone),
    "contiguous": lambda handle, *_, **__: handle,
    "detach": lambda handle, *_, **__: handle,
    "to": _to,
    "type": _type,
    "cpu": lambda handle, **_: _to(handle, "cpu"),
    "cuda": _cuda,
}


def current_cache(value: Any, kv: KeyOrValue, backend: CacheOwner) -> LayerCache:
    """Return the cache of a layer from its handle, or raise CacheHandleError if the cache cannot be continued."""
    if not isinstance(value, Handle):
        raise CacheHandleError("a layer's cache was replaced by an ordinary tensor in the middle of a conversation")
    if value.kv != kv:
        raise CacheHandleError(
            f"the cache of a layer has its keys and values exchanged: its {value.kv} were passed as its {kv}"
        )
    _check_current(value)
    cache = value.cache
    cache.deferred_checks.raise_if_failed()
    check_usable(cache)
    with tensors.without_torch_function():
        shape = tuple(value.shape)
    if shape[:3] != _shape_of(cache, value.token_dim):
        raise CacheHandleError(
            f"a layer's cache has the shape {shape}, not {_shape_of(cache, value.token_dim)} and D as kvpass made it: "
            "pass the cache that the model returned"
        )
    if cache.backend is not backend and cache.backend.cache_settings != backend.cache_settings:
        raise CacheHandleError(
            f"this cache was made by {cache.backend} and cannot be continued by {backend}: use the same settings"
        )
    return cache


def check_order_and_lengths(caches: list[LayerCache]) -> None:
    """Raise CacheHandleError if a graph's caches, in the order of its layers, are exchanged or differ in length."""
    if len({cache.number for cache in caches}) < len(caches):
        raise CacheHandleError("one layer's cache was passed for two layers: pass each layer its own cache")
    for index, (cache, following) in enumerate(itertools.pairwise(caches)):
        if cache.number > following.number:
            raise CacheHandleError(
                f"the caches of layers were exchanged: the cache for layer {index} of the graph is of a later layer "
                f"than the cache for layer {index + 1}"
            )
    counts = sorted({cache.length for cache in caches})
    if len(counts) > 1:
        raise CacheHandleError(f"the layers' caches hold {counts} tokens: they come from different conversations")


_MOVES = frozenset(
    {"__getitem__", "unsqueeze", "squeeze", "stack", "cpu", "cuda", "to", "detach", "as_subclass", "__get__", "__set__"}
)


class DetachedRow(Tensor):
    """A tensor of NaN in the shape of a row of keys or values, at first [Hkv, tokens stored, D]."""

    @staticmethod
    def like(row: Tensor) -> DetachedRow:
        """Return a row with the shape, dtype and device of a tensor."""
        dynamo.never_compile_alone(DetachedRow.__torch_function__)
        return row.new_full((1,), torch.nan).expand(row.shape).as_subclass(DetachedRow)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation that only moves the row, or raise CacheHandleError for one that reads or grows it."""
        name = getattr(func, "__name__", "")
        allowed = name in _MOVES | tensors.METADATA_METHODS or (name == "cat" and _adds_nothing(*args))
        if not dynamo.is_traced() and not allowed:
            refuse_row_operation(name)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _adds_nothing(parts: Sequence[Tensor], *_: Any) -> bool:
    """Return whether a concatenation adds nothing, as when a row becomes the first of an empty cache."""
    return sum(part.numel() > 0 for part in parts) == 1


def refuse_row_operation(operation: str) -> None:
    """Raise CacheHandleError for an operation on a row."""
    raise CacheHandleError(
        f"{operation} on a row that was taken out of a cache of kvpass, as Whisper's generate does: its tokens live in "
        "slots that it no longer has. Continue from the cache that the model returns, or generate again"
    )
