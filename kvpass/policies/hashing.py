"""Draw numbers without a generator: hashes of a position, a head, a seed and a round.

A decode graph has no generator state, and a row must draw the same numbers in a batch as alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PRIME = 2**31 - 1
_FACTORS = ((16807, 15), (39373, 13), (742938, 16))


def draw(position: Tensor, head: Tensor, seed: int | Tensor) -> Tensor:
    """Return int64 from 0 to PRIME - 1 for each position and head, which broadcast with the seed."""
    return mix(position * 48271 + head * 69621 + seed)


def seed_of_round(seed: int, number: Tensor) -> Tensor:
    """Return another seed for each number of a round, int64 like `number`."""
    return mix(number * 950706376 + seed)


def mix(number: Tensor) -> Tensor:
    """Return a pseudo-random hash from 0 to PRIME - 1 of each integer."""
    number = number % PRIME
    for factor, shift in _FACTORS:
        number = (number ^ (number >> shift)) * factor % PRIME  # below 2**51: no overflow
    return number


def to_uniform(number: Tensor) -> Tensor:
    """Return float32 inside of (0, 1) for numbers that `draw` returned: the middles of 2**23 equal parts."""
    return ((number >> 8).float() + 0.5) * 2.0**-23


def normal(rows: int, columns: int, seed: Tensor) -> Tensor:
    """Return standard normal numbers [*seed.shape, rows, columns], float32, by the transform of Box and Muller."""
    row = torch.arange(rows, device=seed.device)[:, None]
    column, seed = torch.arange(columns, device=seed.device), seed[..., None, None]
    radius, angle = (to_uniform(draw(row, 2 * column + part, seed)) for part in range(2))
    return (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()
