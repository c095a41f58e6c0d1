"""Put a load on a server: concurrent clients that ask, close connections, and send invalid requests."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

PATIENCE = 300.0  # seconds, on a shared machine
WRONG: tuple[tuple[str, bytes, int], ...] = (
    ("/v1/completions", b"{", 400),
    ("/v1/completions", b'{"prompt": "a", "logprobs": 5}', 400),
    ("/v1/completions", b'{"prompt": [99999999]}', 400),
    ("/v1/completions", b'{"prompt": "a", "model": "other"}', 404),
    ("/v1/chat/completions", b'{"messages": []}', 400),
    ("/v1/nonsense", b"{}", 404),
)


@dataclasses.dataclass(frozen=True)
class Question:
    """A request, and its answer when no other request is running."""

    fields: dict[str, Any]
    text: str


async def asked_alone(url: str, requests: Sequence[dict[str, Any]]) -> list[Question]:
    """Send requests one after another, and return them with their answers."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        return [Question(fields, await whole(client, fields)) for fields in requests]


async def bombard(url: str, questions: Sequence[Question], clients: int, rounds: int) -> collections.Counter[str]:
    """Let clients send requests at the same time, and count the outcomes.

    Every answer must equal the answer to the request alone.
    """
    tally: collections.Counter[str] = collections.Counter()
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        await asyncio.gather(*(_ask(client, questions, rounds, number, tally) for number in range(clients)))
    return tally


async def _ask(
    client: httpx.AsyncClient, questions: Sequence[Question], rounds: int, number: int, tally: collections.Counter[str]
) -> None:
    drawn = random.Random(number)
    for _ in range(rounds):
        question = drawn.choice(questions)
        kind = drawn.choices(("whole", "stream", "closed", "wrong"), (4, 3, 2, 1))[0]
        if kind == "wrong":
            path, body, status = drawn.choice(WRONG)
            assert (await client.post(path, content=body)).status_code == status
        elif kind == "closed":
            await _closed(client, question, drawn.randrange(4))
        else:
            ask = whole if kind == "whole" else stream
            assert await ask(client, question.fields, tally) == question.text, question.fields
        tally[kind] += 1


async def whole(client: httpx.AsyncClient, fields: dict[str, Any], tally: Any = None) -> str:
    """Return the text of an answer; a request that the server defers is sent again."""
    while True:
        found = await client.post("/v1/completions", json=fields)
        if found.status_code != 429:
            assert found.status_code == 200, found.text
            text: str = found.json()["choices"][0]["text"]
            return text
        tally["later"] += 1
        await asyncio.sleep(min(0.2, float(found.headers["retry-after"])))


async def stream(client: httpx.AsyncClient, fields: dict[str, Any], tally: Any) -> str:
    """Return the text of a streamed answer."""
    while True:
        async with client.stream("POST", "/v1/completions", json={**fields, "stream": True}) as response:
            if response.status_code == 429:
                tally["later"] += 1
                await asyncio.sleep(0.1)
                continue
            assert response.status_code == 200
            lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        return "".join(piece["choices"][0]["text"] for piece in pieces)


async def _closed(client: httpx.AsyncClient, question: Question, events: int) -> None:
    """Close the connection after a few events."""
    async with client.stream("POST", "/v1/completions", json={**question.fields, "stream": True}) as response:
        lines = response.aiter_lines()
        for _ in range(events):
            await anext(lines, "")


def resident(process: int) -> float:
    """Return the MiB that a process has in memory."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * 4096 / 2**20
