"""Round vectors as the storage formats do, from the formats' definitions, one group at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.cache.layout import Layout
from kvpass.errors import PolicyError
from kvpass.fx.precision import upcast

GROUP = 32


def store_and_read(layout: Layout, vector: Tensor, key: bool = True) -> Tensor:
    """Return a key or a value [..., D] as attention reads it back from storage, [..., D].

    Raises:
        PolicyError: the format is not transcribed here.
    """
    if layout.kv_dtype is None:
        return vector.to(layout.dtype)
    width, _, transform = layout.kv_dtype.partition("-")
    if width not in _ROUNDINGS or transform not in ("", "hadamard"):
        raise PolicyError(f"the reference has no rounding for kv_dtype={layout.kv_dtype!r}: add it to {__name__}")
    transforms = key and transform == "hadamard"
    rounded = _ROUNDINGS[width](_hadamard(upcast(vector)) if transforms else upcast(vector))
    return _hadamard(rounded) if transforms else rounded


def _hadamard(vector: Tensor) -> Tensor:
    """Transform a vector by sums and differences of numbers at distances 1, 2, 4, ... that divide half of D."""
    transformed, distance = vector.double(), 1
    while vector.shape[-1] % (2 * distance) == 0:
        left, right = torch.unflatten(transformed, -1, (-1, 2, distance)).unbind(-2)
        transformed = torch.stack([left + right, left - right], -2).flatten(-3)
        distance *= 2
    result: Tensor = (transformed / distance**0.5).to(vector.dtype)
    return result


def group_size(dim: int) -> int:
    """Return how many numbers share a scale in four bits: 32, else half of a vector, or a short vector."""
    half = dim // 2
    return GROUP if half % GROUP == 0 else half if half >= GROUP else dim


def _symmetric(vector: Tensor) -> Tensor:
    """Round a vector to 255 levels that are symmetric around zero."""
    scale = (vector.abs().amax(-1, keepdim=True).float() / 127).to(torch.bfloat16).to(vector.dtype)
    steps = torch.nan_to_num(vector / scale).round().clamp(-127, 127)  # 0 / 0 for a vector of zeros
    return steps * scale


def _asymmetric(vector: Tensor) -> Tensor:
    """Round each group of a vector to 16 levels between its minimum and maximum."""
    return torch.cat([_round_group(group) for group in torch.split(vector, group_size(vector.shape[-1]), -1)], -1)


def _round_group(group: Tensor) -> Tensor:
    """Round a group of numbers to 16 levels between its minimum and maximum."""
    low, high = group.amin(-1, keepdim=True), group.amax(-1, keepdim=True)
    size = torch.maximum((high - low) / 15, group.abs().amax(-1, keepdim=True) / 127)
    scale = size.float().to(torch.bfloat16).to(group.dtype)
    zero = torch.nan_to_num(low / scale).round().clamp(-127, 127)
    steps = (torch.nan_to_num(group / scale).round() - zero).clamp(0, 15)
    return (steps + zero) * scale


_ROUNDINGS = {"int8": _symmetric, "int4": _asymmetric}
