"""Identify models and layers by the module tensors among the arguments of a call.

One graph may serve several models, or several layers of one model, so the graph itself does not identify them.  All
tensors are held by weak references: a tensor that is made later, even at the same address, is another tensor.  A copy
of a model, and a model in another process, is recognised by samples of its weights (`weight_digest`), and there by its
configuration too.
"""

from __future__ import annotations

import functools
import hashlib
import reprlib
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.torch_private.tensors import tensor_bytes

WeightRefs = tuple["weakref.ref[Any]", ...]


def weak_references(tensors: Iterable[Any]) -> WeightRefs:
    return tuple(weakref.ref(tensor) for tensor in tensors)


def belongs_to_other_layer(weights: WeightRefs, tensors: Sequence[Tensor]) -> bool:
    """Return whether a cache made with `weights` belongs to another layer, or model, than the layer with these tensors.

    A copy of the model has other tensors with the same numbers.  Only matrices are compared: vectors, and tables of
    angles, may be equal in different layers.
    """
    alive = [tensor for tensor in (weight() for weight in weights) if tensor is not None]
    if any(one is other for one in alive for other in tensors):
        return False
    made, here = (digests(each for each in group if each.ndim > 1) for group in (alive, tensors))
    return bool(made and here) and made.isdisjoint(here)


SAMPLES = 1024  # numbers of a tensor that its digest reads, at even distances
_RUN_SETTINGS = ("transformers_version", "use_cache", "dtype", "torch_dtype", "architectures", "name_or_path")
"""Entries of a configuration, and attributes of modules, that do not change what a model computes."""


def weight_digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's shape and dtype, and of samples of its numbers if it has storage."""
    result = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    try:
        flat = tensor.detach().reshape(-1)
        count = min(SAMPLES, flat.numel())
        indices = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64).round().long().to(flat.device)
        result.update(tensor_bytes(flat[indices]))
    except (RuntimeError, NotImplementedError, TypeError):  # subclasses of packed weights may have no numbers to pick
        result.update(type(tensor).__name__.encode())
    return result.hexdigest()[:32]


def digests(tensors: Iterable[Any]) -> set[str]:
    """Return the digests of weights; buffers are left out, as a model may change them while it runs."""
    return {weight_digest(each) for each in tensors if isinstance(each, torch.nn.Parameter)}


def settings_of(model: Any) -> dict[str, Any]:
    """Return the plain values in a model's configuration, at any depth, by dotted names; empty without one."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
    return dict(_plain_values(to_dict(), ""))


def _plain_values(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield plain values, and texts of functions, in nested dictionaries and lists, with their dotted names."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if str(key).startswith("_") or key in _RUN_SETTINGS:
            continue
        if isinstance(inner, (dict, list, tuple)):
            yield from _plain_values(inner, f"{prefix}{key}.")
        elif isinstance(inner, (str, int, float, type(None))):
            yield f"{prefix}{key}", inner
        elif text := _text(inner):
            yield f"{prefix}{key}", _digest(text) if callable(inner) else text


def module_settings(model: torch.nn.Module) -> dict[str, Any]:
    """Return the name of each module's class, and its plain values and functions, by dotted names."""
    return {
        f"{prefix}.{name}".removeprefix("."): value
        for prefix, module in model.named_modules()
        for name, value in _plain_values({"class": type(module).__name__, **vars(module)}, "")
    }


def method_digests(model: torch.nn.Module) -> dict[str, str]:
    """Return a digest of the methods of each class of modules, by its name; torch's own classes are left out."""
    texts: dict[str, str] = {}
    for cls in {type(module): None for module in model.modules()}:
        bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]
        methods = [(name, each) for base in bases for name, each in vars(base).items() if callable(each)]
        if methods:
            texts[cls.__name__] = texts.get(cls.__name__, "") + _text(methods)
    return {f"methods of {name}": _digest(text) for name, text in texts.items()}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@reprlib.recursive_repr("")
def _text(value: object) -> str:
    """Return a text with the content of a value or function, the same in every process.

    It is empty for other objects, and for a value within itself.
    """
    match value:
        case types.CodeType():
            return f"{value.co_code.hex()} {value.co_names} {_text(value.co_consts)}"
        case types.FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            return f"{value.__qualname__} {_text([value.__code__, value.__defaults__, value.__kwdefaults__, cells])}"
        case types.MethodType():
            return _text(value.__func__)
        case functools.partial():
            return f"partial {_text([value.func, value.args, value.keywords])}"
        case types.BuiltinFunctionType():
            return f"{value.__module__}.{value.__qualname__}"
        case dict():
            return _text(list(value.items()))
        case list() | tuple():
            return f"[{', '.join(map(_text, value))}]"
        case set() | frozenset():
            return f"{{{', '.join(sorted(map(_text, value)))}}}"
        case int() | float() | complex() | str() | bytes() | None | torch.dtype():
            return repr(value)
        case _:
            return ""


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Describe the entries in which two configurations differ; entries that one of them lacks are left out."""
    return [
        f"{name} is {current[name]!r}, not {value!r}"
        for name, value in saved.items()
        if current.get(name, value) != value
    ]
