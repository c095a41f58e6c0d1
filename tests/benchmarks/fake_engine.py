"""Define an engine that counts instead of decoding, for the tests of `benchmarks.rivals`."""

from __future__ import annotations

import sys
import time

from benchmarks.rivals.engine import Engine, Setup


class Counting(Engine):
    """An engine whose tokens count on from the prompt's length, modulo the budget if there is one."""

    def __init__(self, setup: Setup) -> None:
        if setup.weights == "missing":
            print("looked everywhere", file=sys.stderr)
            raise FileNotFoundError("no such weights")
        self.setup = setup
        print("a library greets")  # must not be read as an answer

    def prompt(self, ids: list[list[int]], room: int) -> list[int]:
        if self.setup.weights == "short" and len(ids[0]) + room > 1000:
            raise ValueError(f"a prompt of {len(ids[0])} tokens is too long")
        if self.setup.weights == "dying" and len(ids[0]) + room > 1000:
            sys.exit(3)
        self.seen = [len(row) for row in ids]
        return [self._token(count) for count in self.seen]

    def steps(self, count: int) -> list[list[int]]:
        time.sleep(0.001 * count)
        made = [[self._token(seen + step + 1) for step in range(count)] for seen in self.seen]
        self.seen = [seen + count for seen in self.seen]
        return made

    def _token(self, count: int) -> int:
        return count if self.setup.budget is None else count % self.setup.budget
