"""Steps of the reference model under kvpress; runs in kvpress's environment, which knows no kvpass.

Reads one JSON object a line, {"press": name, "seen": tokens, "count": steps}, and answers with the seconds of each
step.  Its DecodingPress evicts at every step, as kvpass does.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import sys
from typing import Any

import kvpress
import torch

from benchmarks.model import Conversation, build, dynamic
from benchmarks.timing import timed

PRESSES = {"knorm": kvpress.KnormPress, "streaming": kvpress.StreamingLLMPress, "tova": kvpress.TOVAPress}


class Loop:
    """Conversations under one press each; the hooks of a press are on the model only while it is its turn."""

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


def main(given: str) -> None:
    settings = json.loads(given)
    torch.set_num_threads(settings["threads"])
    logging.disable(logging.WARNING)
    loop, answers = Loop(settings["dtype"], settings["budget"]), sys.stdout
    versions = {name: importlib.metadata.version(name) for name in ("kvpress", "transformers", "torch")}
    print(json.dumps(versions), file=answers, flush=True)
    with contextlib.redirect_stdout(sys.stderr), torch.inference_mode():
        for line in sys.stdin:
            print(json.dumps(loop.seconds(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
