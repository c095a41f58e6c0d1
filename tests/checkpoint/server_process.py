"""Run `kvpass serve` in a separate process, for tests, examples and measurements."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx

STARTED = re.compile(r"running on (http://\S+)")
PATIENCE = 600.0  # seconds for compilation on a shared machine


@dataclasses.dataclass
class ServerProcess:
    """A server process, its address, and the lines that it has written."""

    process: subprocess.Popen[str]
    lines: list[str]
    url: str = ""

    def read(self) -> None:
        """Read the server's output, and find its address."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := STARTED.search(line):
                self.url = found[1]

    def healthy(self) -> bool:
        return bool(self.url) and httpx.get(f"{self.url}/health").status_code == 200


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[ServerProcess]:
    """Start a server, wait until it is ready, and end it with SIGTERM, which it handles."""
    command = [sys.executable, "-m", "kvpass.apps.cli", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    found = ServerProcess(process, [])
    reading = threading.Thread(target=found.read, daemon=True)
    reading.start()
    try:
        end = time.monotonic() + PATIENCE
        while not found.healthy():
            assert process.poll() is None, "".join(found.lines)
            assert time.monotonic() < end, "".join(found.lines)
            time.sleep(0.2)
        yield found
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM, "".join(found.lines)  # uvicorn raises the signal again
    finally:
        process.kill()
        process.wait()
        reading.join()
