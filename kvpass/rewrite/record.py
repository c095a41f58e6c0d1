"""Record what a pass did to a graph."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Record:
    """What a pass did to one graph.

    Attributes:
        matched: the nodes that it rewrote or inserted.
        left: the nodes that it left unchanged, each with the reason.
        name: the name of the pass.
        milliseconds: its duration.
    """

    matched: list[str] = dataclasses.field(default_factory=list)
    left: dict[str, str] = dataclasses.field(default_factory=dict)
    name: str = ""
    milliseconds: float = 0.0

    def __str__(self) -> str:
        unchanged = "".join(f"; left {name}, as {why}" for name, why in self.left.items())
        return f"{self.name}: {len(self.matched)} rewritten in {self.milliseconds:.1f} ms{unchanged}"
