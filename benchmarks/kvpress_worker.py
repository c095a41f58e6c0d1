"""Decode with the reference model under kvpress, in an environment for kvpress.

A question {"press": name, "seen": tokens, "count": steps} is answered with the seconds of each step. Its DecodingPress
evicts at every step, like kvpass.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import kvpress
import torch

from benchmarks.model import Conversation, build, dynamic
from benchmarks.timing import timed
from benchmarks.worker import serve

PRESSES = {"knorm": kvpress.KnormPress, "streaming": kvpress.StreamingLLMPress, "tova": kvpress.TOVAPress}


class Loop:
    """Conversations under one press each; the hooks of a press are on the model only during its turn."""

    def __init__(self, dtype: str, budget: int) -> None:
        self.model, self.budget = build(dtype), budget
        self.talks: dict[str, tuple[Any, Conversation]] = {}
        self.place = 0

    def seconds(self, press: str, seen: int, count: int) -> list[float]:
        if press not in self.talks:
            talk = Conversation(self._forward, dynamic(self.model, self.budget))
            self.talks[press] = (self._press(press), talk)
        made, talk = self.talks[press]
        self.place = seen
        with made(self.model):
            return [timed(talk.step) for _ in range(count)]

    def _press(self, name: str) -> Any:
        return kvpress.DecodingPress(base_press=PRESSES[name](), compression_interval=1, target_size=self.budget)

    def _forward(self, ids: torch.Tensor, **arguments: Any) -> Any:
        self.place += 1
        position = torch.tensor([self.place])
        return self.model(ids, position_ids=position[None], cache_position=position, **arguments)


def start(dtype: str, threads: int, budget: int) -> Callable[..., list[float]]:
    """Return the function that times steps."""
    torch.set_num_threads(threads)
    logging.disable(logging.WARNING)
    return torch.inference_mode()(Loop(dtype, budget).seconds)


if __name__ == "__main__":
    serve(lambda: start(**json.loads(sys.argv[1])))
