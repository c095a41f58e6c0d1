"""Test `kvpass serve` with the checkpoint and third-party clients, each in a separate process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.checkpoint.server_process import ServerProcess

CLIENT = Path(__file__).with_name("openai_client.py")
NAME = "SmolLM2-135M-Instruct"
NEEDED = ("starlette", "uvicorn", "sse_starlette", "prometheus_client", "openai")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason="the extras serve and clients are not installed"),
]


@pytest.fixture(scope="module")
def server(installed: None) -> Iterator[ServerProcess]:
    from tests.checkpoint.server_process import started

    with started(NAME, "--budget", "256", "--rows", "4", "--prefill-chunk", "64", "--dtype", "float32") as found:
        yield found


def test_the_client_of_openai(server: ServerProcess) -> None:
    made = subprocess.run([sys.executable, str(CLIENT), server.url], check=True, capture_output=True, text=True)
    found = json.loads(made.stdout)
    assert found["models"] == [NAME]
    assert found["streamed"] == found["whole"]
    assert len(found["whole"]) > 10
    assert found["streamed usage"] == found["usage"]
    assert 0 < found["usage"]["completion_tokens"] <= 24
    assert found["drawn"][0] == found["drawn"][1]
    assert found["drawn"][0][0] != found["drawn"][0][1]
    assert "\n" not in found["completion"]
    assert found["turns"][1] == found["resent"]  # nothing is evicted so far
    assert found["cached"] > 30
    assert found["refused"] == [
        ["BadRequestError", 400, "unsupported_field", "logprobs"],
        ["NotFoundError", 404, "model_not_found", "model"],
        ["BadRequestError", 400, None, "temperature"],
    ]


def test_a_terminal_client(server: ServerProcess) -> None:
    """Compare `transformers chat` with the server's direct answers to the same messages."""
    import httpx

    messages: list[dict[str, str]] = []
    typed: list[str] = []
    for question in ("Say hello.", "Name two colours."):
        messages.append({"role": "user", "content": question})
        fields = {"messages": messages, "max_tokens": 12, "temperature": 0}
        found = httpx.post(f"{server.url}/v1/chat/completions", json=fields, timeout=300).json()
        messages.append({"role": "assistant", "content": found["choices"][0]["message"]["content"]})
        cut_off = found["choices"][0]["finish_reason"] == "length"  # the client then asks whether to continue
        typed += [question, "n"] if cut_off else [question]
    command = [str(Path(sys.executable).with_name("transformers")), "chat", NAME, f"{server.url}/v1"]
    made = subprocess.run(
        [*command, "max_new_tokens=12", "do_sample=False"],
        input="\n".join([*typed, "!exit\n"]), capture_output=True, text=True, timeout=300,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    for answer in messages[1::2]:
        assert " ".join(answer["content"].split()) in " ".join(made.stdout.split())


def test_a_load(server: ServerProcess) -> None:
    """Run eight clients on four rows: each answer equals that of a single request, and memory stays constant."""
    from tests.apps.serving.load import asked_alone, bombard, resident

    words = "The quick brown fox jumps over the lazy dog and runs into the deep green forest. "
    lengths = ((1, 40), (4, 10), (12, 30), (20, 8), (2, 60))
    requests = [
        {"prompt": words * times, "max_tokens": most, "temperature": 0.7 * (i % 2), "seed": i}
        for i, (times, most) in enumerate(lengths)
    ]
    questions = asyncio.run(asked_alone(server.url, requests))
    tally = asyncio.run(bombard(server.url, questions, clients=8, rounds=3))
    memory = resident(server.process.pid)
    again = asyncio.run(bombard(server.url, questions, clients=8, rounds=3))
    for found in (tally, again):
        assert sum(found[kind] for kind in ("whole", "stream", "closed", "wrong")) == 24
    assert resident(server.process.pid) < memory + 64
