"""Recognise the model that made a cache, in another process, by samples of its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kvpass.fx.constants import tensor_bytes

SAMPLES = 1024  # numbers of a tensor that its digest reads, at even distances
_OF_A_RUN = ("transformers_version", "use_cache", "dtype", "torch_dtype", "architectures")
"""Entries of a configuration that do not change what a model computes."""


def digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's shape, dtype and samples of its numbers; no numbers of a tensor without storage."""
    made = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    try:
        flat = tensor.detach().reshape(-1)
        count = min(SAMPLES, flat.numel())
        indices = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64).round().long().to(flat.device)
        made.update(tensor_bytes(flat[indices]))
    except (RuntimeError, NotImplementedError, TypeError):  # subclasses of packed weights may have no numbers to pick
        made.update(type(tensor).__name__.encode())
    return made.hexdigest()[:32]


def digests(tensors: Iterable[Any]) -> set[str]:
    """Return the digests of weights; buffers are left out, as a model may change them while it runs."""
    return {digest(each) for each in tensors if isinstance(each, torch.nn.Parameter)}


def settings_of(model: Any) -> dict[str, Any]:
    """Return the entries of a model's configuration that plain JSON can hold; empty without a configuration."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
    entries: dict[str, Any] = to_dict()
    plain = {name: value for name, value in entries.items() if isinstance(value, (str, int, float, type(None)))}
    return {name: value for name, value in plain.items() if not name.startswith("_") and name not in _OF_A_RUN}


def differences(saved: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Return what differs between two configurations, by name; entries that one of them lacks are left out."""
    return [
        f"{name} is {here[name]!r}, not {value!r}" for name, value in saved.items() if here.get(name, value) != value
    ]
