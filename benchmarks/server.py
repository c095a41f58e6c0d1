"""Time `kvpass serve` with one and with several clients, and its loop with and without the server.

python -m benchmarks.server [--rows 8] [--budget 1024] [--tokens 128] [--rounds 3] [--threads 2]

A real checkpoint (kvpass.apps.checkpoint) runs in bfloat16. The server runs in this process, and its clients in
another one. "loop" steps the same loop in the same thread of the process, without HTTP, for the same requests. Only
steps in which every client's row decodes are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import httpx
import torch
import uvicorn

import kvpass
from benchmarks.report import Row
from kvpass.apps import corpus, models
from kvpass.apps.checkpoint import NAME
from kvpass.apps.evaluation.tables import markdown
from kvpass.apps.serving.routes import create_app
from kvpass.apps.serving.service import ServeSettings, Service

PROMPT = 200  # tokens
PATIENCE = 600


class TimedLoop(kvpass.DecodeLoop):
    """A loop that records the time of its steps.

    Attributes:
        steps: seconds, requests with new tokens and tokens of each step.
    """

    steps: list[tuple[float, int, int]]

    def step(self) -> list[kvpass.GenerationOutput]:
        start = time.perf_counter()
        made = super().step()
        counts = [len(output.new_tokens) for output in made]
        self.steps.append((time.perf_counter() - start, len(made), sum(counts)))
        return made

    def milliseconds(self, clients: int) -> float:
        """Return the milliseconds of a decode step of all clients' rows, and forget the steps."""
        full = [(seconds, tokens) for seconds, count, tokens in self.steps if count == clients and tokens > count]
        self.steps = []
        return 1e3 * clients * sum(seconds for seconds, _ in full) / sum(tokens for _, tokens in full)


def prompts(count: int) -> list[list[int]]:
    tokenizer = models.load(NAME).tokenizer
    ids = tokenizer(corpus.read(corpus.held_out_files())[0])["input_ids"]
    return [ids[PROMPT * i : PROMPT * (i + 1)] for i in range(count)]


async def ask(client: httpx.AsyncClient, ids: list[int], tokens: int) -> dict[str, float]:
    """Return the seconds to the first token and to the last one."""
    start, first = time.perf_counter(), 0.0
    fields = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=fields) as response:
        async for line in response.aiter_lines():
            first = first or time.perf_counter() - start if line.startswith("data: ") else first
    return {"first": first, "last": time.perf_counter() - start}


async def all_at_once(url: str, several: list[list[int]], tokens: int) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        start = time.perf_counter()
        found = await asyncio.gather(*(ask(client, ids, tokens) for ids in several))
        return {"seconds": time.perf_counter() - start, "first": [each["first"] for each in found]}


def in_another_process(url: str, several: list[list[int]], tokens: int) -> dict[str, Any]:
    given = json.dumps([url, several, tokens])
    made = subprocess.run([sys.executable, "-m", "benchmarks.server", "--client"], input=given, text=True,
                          stdout=subprocess.PIPE, check=True)  # fmt: skip
    found: dict[str, Any] = json.loads(made.stdout)
    return found


def directly(service: Service, several: list[list[int]], tokens: int) -> float:
    """Return the seconds in which the engine's thread serves requests that do not use HTTP."""
    done, loop = threading.Event(), service.engine.loop
    taken: list[float] = []

    def run() -> None:
        start = time.perf_counter()
        for ids in several:
            loop.add(ids, max_new_tokens=tokens)
        while loop.pending:
            loop.step()
        taken.append(time.perf_counter() - start)
        done.set()

    service.engine._commands.put(run)
    assert done.wait(PATIENCE)
    return taken[0]


def rows(loop: TimedLoop, service: Service, url: str, tokens: int, rounds: int) -> list[Row]:
    table: list[Row] = []
    count = service.engine.rows
    for clients in (1, count):
        several, found = prompts(clients), []
        loop.steps = []
        for _ in range(rounds):
            alone = directly(service, several, tokens)
            step = loop.milliseconds(clients)
            served = in_another_process(url, several, tokens)
            found.append((alone, step, served["seconds"], loop.milliseconds(clients), max(served["first"])))
        alone, step, seconds, served_step, first = (statistics.median(column) for column in zip(*found, strict=True))
        made = clients * tokens
        table.append({"clients": clients, "way": "loop", "tokens/s": made / alone, "step, ms": step})
        table.append({"clients": clients, "way": "server", "tokens/s": made / seconds, "step, ms": served_step,
                      "first token of the last, s": first})  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--read-interval", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        print(json.dumps(asyncio.run(all_at_once(*json.load(sys.stdin)))))
        return
    torch.set_num_threads(given.threads)
    loaded = models.load(NAME, torch.bfloat16)
    how: dict[str, Any] = dict(budget=given.budget, read_interval=given.read_interval, prefill_chunk=512)
    loop = TimedLoop(loaded.model, "h2o", rows=given.rows, **how)
    loop.steps = []
    service = Service(loaded, NAME, loop, given.rows, ServeSettings())
    server = uvicorn.Server(uvicorn.Config(create_app(service), port=0, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not service.engine.ready:
        assert thread.is_alive()
        time.sleep(0.5)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        print(markdown(rows(loop, service, url, given.tokens, given.rounds)))
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()
