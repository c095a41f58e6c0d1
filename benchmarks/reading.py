"""What a step cannot go below: the time in which as many bytes are read once, at the bandwidth of this machine.

A step reads all weights and the held keys and values.  What reads as many bytes here are sums over one buffer, by torch
and by Inductor, with as many threads as the step has; what counts is the fastest.  A sum is of float32 whatever the
bytes mean in the step: numbers in half precision would be converted, which is no reading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.bounded import layers
from benchmarks.timing import Local

LANES = 8  # sums of one loop, so that it waits for memory and not for the sum before
NAMES = ("reading the floor's bytes, torch.sum", "reading the floor's bytes, compiled", "the same, several sums a loop")


def bytes_read(model: Any, cache: Any) -> int:
    """What a step reads: the weights, each once, and the keys and values that a conversation's cache holds."""
    held = [part for layer in layers(cache) for part in (*layer.slots.key.parts, *layer.slots.value.parts)]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *held))


def readers(count: int) -> list[Local]:
    """Contenders that read so many bytes, each in another way."""
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
    """Both halves of the lanes in one loop: [LANES / 2] twice."""
    first, second = buffer.chunk(2)
    return torch.cat([first.sum(-1), second.sum(-1)])
