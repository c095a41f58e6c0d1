"""Record which positions a cache held over time."""

from __future__ import annotations

import dataclasses
from typing import Any

import kvpass


@dataclasses.dataclass(frozen=True)
class HeldSnapshot:
    """The positions that one head of row 0 held in one layer.

    Attributes:
        step: tokens that the cache had seen.
        positions: ascending.
    """

    step: int
    positions: list[int]


class HeldRecorder:
    """Takes snapshots of a cache; call it with the cache.

    Attributes:
        snapshots: what was held, in order.
    """

    def __init__(self, layer: int = 0, head: int = 0) -> None:
        """
        Args:
            layer: index of the layer, from the end if negative.
            head: index of the KV head; 0 where all heads of a layer hold the same tokens.
        """
        self.layer, self.head = layer, head
        self.snapshots: list[HeldSnapshot] = []

    def __call__(self, cache: Any) -> None:
        """Take a snapshot of a cache of kvpass."""
        report = kvpass.inspect(cache).layers[self.layer]
        row = report.positions[0]
        held: list[int] = row[min(self.head, len(row) - 1)].tolist()
        self.snapshots.append(HeldSnapshot(report.seen, sorted(position for position in held if position >= 0)))
