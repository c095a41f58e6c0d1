"""What was rewritten and what is held, for people and for tests."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class SiteReport:
    """One attention call, or a cache update that feeds none.

    Attributes:
        graph: number of the graph it is in, from 1.
        line: file, line and code of the user's source.
        verdict: "rewritten", "left alone" or "refused".
        reason: why, unless it was rewritten.
    """

    graph: int
    line: str
    verdict: str
    reason: str


@dataclasses.dataclass
class Recorder:
    """Collects what a backend finds while it compiles."""

    graphs: list[str] = dataclasses.field(default_factory=list)
    sites: list[SiteReport] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
