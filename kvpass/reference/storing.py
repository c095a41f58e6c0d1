"""What storing a row makes of its numbers, written down from the definitions and one group at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.layer.slots import Layout
from kvpass.precision import wide

GROUP = 32


def stored(layout: Layout, row: Tensor) -> Tensor:
    """A key or value [..., D] as it is attended to once it is stored: [..., D]."""
    if layout.kv_dtype is None:
        return row.to(layout.dtype)
    whole = wide(row)
    if layout.kv_dtype == "int8":
        return _symmetric(whole)
    return torch.cat([_between(group) for group in torch.split(whole, group_size(whole.shape[-1]), -1)], -1)


def group_size(dim: int) -> int:
    """Numbers of a row that share a scale in four bits: 32, or else a half of the row; all of a short one."""
    half = dim // 2
    return GROUP if half % GROUP == 0 else half if half >= GROUP else dim


def _symmetric(row: Tensor) -> Tensor:
    scale = (row.abs().amax(-1, keepdim=True).float() / 127).to(torch.bfloat16).to(row.dtype)
    steps = torch.nan_to_num(row / scale).round().clamp(-127, 127)  # 0 / 0 for a row of zeros
    return steps * scale


def _between(group: Tensor) -> Tensor:
    """A group of numbers on 16 places between its least and its largest."""
    least, most = group.amin(-1, keepdim=True), group.amax(-1, keepdim=True)
    size = torch.maximum((most - least) / 15, group.abs().amax(-1, keepdim=True) / 127)
    scale = size.float().to(torch.bfloat16).to(group.dtype)
    zero = torch.nan_to_num(least / scale).round().clamp(-127, 127)
    steps = (torch.nan_to_num(group / scale).round() - zero).clamp(0, 15)
    return (steps + zero) * scale
