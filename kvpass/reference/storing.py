"""The numbers that storage keeps of a row, computed from the definitions, one group at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.cache.slots import Layout
from kvpass.fx.precision import upcast

GROUP = 32


def stored(layout: Layout, row: Tensor, key: bool = True) -> Tensor:
    """Return a key or a value [..., D] as attention reads it back from storage, [..., D]."""
    if layout.kv_dtype is None:
        return row.to(layout.dtype)
    kind, _, transform = layout.kv_dtype.partition("-")
    transforms = key and transform == "hadamard"
    made = _rounded(_hadamard(upcast(row)) if transforms else upcast(row), kind)
    return _hadamard(made) if transforms else made


def _rounded(row: Tensor, kind: str) -> Tensor:
    if kind == "int8":
        return _symmetric(row)
    return torch.cat([_between(group) for group in torch.split(row, group_size(row.shape[-1]), -1)], -1)


def _hadamard(row: Tensor) -> Tensor:
    """Transform a row by sums and differences of numbers 1, 2, 4, ... apart, while that divides the row."""
    made, apart = row.double(), 1
    while row.shape[-1] % (2 * apart) == 0:
        one, other = torch.unflatten(made, -1, (-1, 2, apart)).unbind(-2)
        made = torch.stack([one + other, one - other], -2).flatten(-3)
        apart *= 2
    result: Tensor = (made / apart**0.5).to(row.dtype)
    return result


def group_size(dim: int) -> int:
    """Return how many numbers of a row share a scale in four bits.

    32, or else half of the row; a short row is one group.
    """
    half = dim // 2
    return GROUP if half % GROUP == 0 else half if half >= GROUP else dim


def _symmetric(row: Tensor) -> Tensor:
    scale = (row.abs().amax(-1, keepdim=True).float() / 127).to(torch.bfloat16).to(row.dtype)
    steps = torch.nan_to_num(row / scale).round().clamp(-127, 127)  # 0 / 0 for a row of zeros
    return steps * scale


def _between(group: Tensor) -> Tensor:
    """Round a group of numbers to 16 levels between its minimum and its maximum."""
    least, most = group.amin(-1, keepdim=True), group.amax(-1, keepdim=True)
    size = torch.maximum((most - least) / 15, group.abs().amax(-1, keepdim=True) / 127)
    scale = size.float().to(torch.bfloat16).to(group.dtype)
    zero = torch.nan_to_num(least / scale).round().clamp(-127, 127)
    steps = (torch.nan_to_num(group / scale).round() - zero).clamp(0, 15)
    return (steps + zero) * scale
