"""A fact in a text that is about other things, by depth and length (needle in a haystack)."""

from __future__ import annotations

import dataclasses
import random
from typing import ClassVar

from kvpass.apps.evaluation.planted import PlantedMeasure
from kvpass.apps.evaluation.session import Session

PLACES = ("Aldermoor", "Brackwater", "Cindervale", "Dunmere", "Eastholm", "Farrowby", "Glenmarsh", "Hollowford")


@dataclasses.dataclass(frozen=True)
class Needle(PlantedMeasure):
    """The surroundings are the texts, from a place that is drawn; what counts is the number, not how it is said."""

    name: ClassVar[str] = "needle"

    def planted(self, secret: str, draw: random.Random) -> tuple[str, str]:
        place = draw.choice(PLACES)
        return f"\nThe lighthouse of {place} has {secret} steps.\n", f"\nThe lighthouse of {place} has"

    def around(self, session: Session, count: int, draw: random.Random) -> list[int]:
        return session.filler(draw.randrange(2**20), count)
