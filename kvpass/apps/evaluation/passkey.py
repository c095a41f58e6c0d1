"""A number among sentences that say nothing, by depth and length (passkey retrieval, arXiv:2305.16300)."""

from __future__ import annotations

import dataclasses
import random
from typing import ClassVar

from kvpass.apps.evaluation.planted import PlantedMeasure
from kvpass.apps.evaluation.session import Session

NOISE = "The road is long. The hills are low. The river runs on. We walk for a while, and then we rest. "


@dataclasses.dataclass(frozen=True)
class Passkey(PlantedMeasure):
    """The surroundings are the same few sentences again and again; the words are our own."""

    name: ClassVar[str] = "passkey"

    def planted(self, secret: str, draw: random.Random) -> tuple[str, str]:
        told = f"\nThe pass key is {secret}. Remember it. {secret} is the pass key.\n"
        return told, "\nWhat is the pass key? The pass key is"

    def around(self, session: Session, count: int, draw: random.Random) -> list[int]:
        sentences = session.encode(NOISE)
        return (sentences * (count // len(sentences) + 1))[:count]
