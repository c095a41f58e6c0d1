"""What a pass says that it did."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Record:
    """What a pass did to one graph.

    Attributes:
        matched: the nodes that it rewrote, or made.
        left: what it looked at and left alone, and why.
        name: of the pass.
        milliseconds: how long it took.
    """

    matched: list[str] = dataclasses.field(default_factory=list)
    left: dict[str, str] = dataclasses.field(default_factory=dict)
    name: str = ""
    milliseconds: float = 0.0

    def __str__(self) -> str:
        left = "".join(f"; left {what}, as {why}" for what, why in self.left.items())
        return f"{self.name}: {len(self.matched)} rewritten in {self.milliseconds:.1f} ms{left}"
