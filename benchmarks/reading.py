"""Time the lower bound of a step: reading its bytes once at the memory bandwidth of this machine.

A step reads all weights, and the cached keys and values. The readers sum a buffer of as many bytes, by torch and by
Inductor, with the threads of the step; the fastest counts. Sums use float32 for every dtype, because half precision
would be converted, which costs more than reading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.bounded import layers
from benchmarks.timing import Local

LANES = 8  # independent sums, so that the loop waits for memory and not for the previous sum
NAMES = ("reading the floor's bytes, torch.sum", "reading the floor's bytes, compiled", "the same, several sums a loop")


def bytes_read(model: Any, cache: Any) -> int:
    """Return the bytes of the weights and of the cached keys and values, which a step reads once."""
    held = [part for layer in layers(cache) for part in (*layer.slots.key.parts, *layer.slots.value.parts)]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *held))


def readers(count: int) -> list[Local]:
    """Return contenders that read `count` bytes in different ways."""
    buffer = torch.zeros(LANES, count // 4 // LANES)
    ways: list[Callable[[Tensor], Tensor]] = [torch.sum, _compiled(_total), _compiled(_in_lanes)]
    made = []
    for name, way in zip(NAMES, ways, strict=True):
        way(buffer)
        made.append(Local(name, lambda way=way: way(buffer)))
    return made


def _compiled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    made: Callable[[Tensor], Tensor] = torch.compile(function, dynamic=False)
    return made


def _total(buffer: Tensor) -> Tensor:
    return buffer.sum()


def _in_lanes(buffer: Tensor) -> Tensor:
    """Sum both halves of the lanes in one loop, [LANES]."""
    first, second = buffer.chunk(2)
    return torch.cat([first.sum(-1), second.sum(-1)])
