"""Run processes that answer questions over pipes, so that contenders in separate environments can take turns.

A worker that waits for a question uses no processor time. The module needs only the standard library, because one end
of a pipe runs in an environment without torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.environments import Unavailable


class Worker:
    """A process that runs `serve`; it starts at once, and the first answer waits until it is ready."""

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path | None = None) -> None:
        """
        Args:
            log: the file for what the process writes to stderr; None for the stderr of this process.
        """
        self.name, self.log, self._ready = command[-2], log, False
        with open(log, "wb") if log else open(os.dup(2), "wb") as errors:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()

    def ask(self, **question: Any) -> Any:
        """Return the answer of the process to one question.

        Raises:
            Unavailable: the question raised an error in the process, the process did not start, or it has ended.
        """
        self.send(**question)
        return self.answer()

    def send(self, **question: Any) -> None:
        """Send a question without waiting for its answer."""
        assert self.process.stdin is not None
        try:
            print(json.dumps(question), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return  # `answer` reports it

    def answer(self) -> Any:
        """Wait for the next answer.

        Raises:
            Unavailable: see `ask`.
        """
        if not self._ready:
            self._ready = True
            self._line()
        return self._line()

    def _line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Unavailable(f"{self.name}: the process ended with code {self.process.wait()}{self._last_words()}")
        found = json.loads(line)
        if isinstance(found, dict) and "error" in found:
            raise Unavailable(found["error"])
        return found

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n") if self.log else []
        said = [line.strip() for line in lines if line.strip()]
        return f", {said[-1]}" if said else ""


def serve(start: Callable[[], Callable[..., Any]]) -> None:
    """Answer questions, one JSON object on each line, from stdin until it is closed.

    All other output of the process goes to stderr, including that of libraries in C++.

    Args:
        start: returns the function that is called with each question as keyword arguments.
    """
    with open(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)

        def say(make: Callable[[], Any]) -> None:
            try:
                found = make()
            except Exception as error:  # the other end decides how to continue without this contender
                found = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(found), file=answers, flush=True)

        functions: list[Callable[..., Any]] = []
        say(lambda: functions.append(start()))
        for line in sys.stdin if functions else ():
            question = json.loads(line)
            say(lambda question=question: functions[0](**question))
