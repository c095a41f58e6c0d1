"""Run a real server with a small model on the loopback interface, in threads of the test process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
import uvicorn

import kvpass
from kvpass.apps import models
from kvpass.apps.serving.command import DrainingServer
from kvpass.apps.serving.conversations import Limits
from kvpass.apps.serving.routes import create_app
from kvpass.apps.serving.service import ServeSettings, Service
from tests.models import sharing_compiled_code, with_uneven_attention

NAME = "small"
BUDGET, ROWS = 24, 3
HOW: dict[str, Any] = dict(policy="h2o", budget=BUDGET, prefill_chunk=16, inner="eager")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@functools.cache
def tokenizer() -> Any:
    """Return the tokenizer of the bundled models, with a chat template."""
    made = transformers.AutoTokenizer.from_pretrained(models.BUNDLED)
    made.chat_template = TEMPLATE
    return made


def model() -> Any:
    """Return a random Llama with the vocabulary of the bundled models and clearly uneven attention."""
    sizes = dict(vocab_size=2048, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, max_position_embeddings=512, eos_token_id=0)
    return with_uneven_attention(transformers.LlamaForCausalLM(config).eval(), seed=3)


class OddLoop(kvpass.DecodeLoop):
    """A loop whose steps can be slowed down or made to fail.

    Attributes:
        pause: additional seconds for each step.
        broken: whether steps fail.
    """

    pause, broken = 0.0, False

    def step(self) -> list[kvpass.GenerationOutput]:
        if self.broken:
            raise RuntimeError("no step today")
        time.sleep(self.pause)
        return super().step()


@dataclasses.dataclass(frozen=True)
class Running:
    """A running server."""

    service: Service
    url: str
    server: uvicorn.Server

    @contextlib.contextmanager
    def slowly(self) -> Iterator[None]:
        """Slow down the steps of the server."""
        loop: Any = self.service.engine.loop
        loop.pause = 0.05
        try:
            yield
        finally:
            loop.pause = 0.0

    def client(self, **how: Any) -> Any:
        """Return an HTTP client with a timeout for a shared machine."""
        return httpx.Client(base_url=self.url, timeout=120, **how)

    def post(self, path: str, **fields: Any) -> Any:
        with self.client() as client:
            return client.post(path, json={"model": NAME, **fields})

    def completion(self, prompt: Any, **fields: Any) -> Any:
        """Return the body of a completion, greedy by default."""
        found = self.post("/v1/completions", **{"prompt": prompt, "temperature": 0, **fields})
        assert found.status_code == 200, found.text
        return found.json()

    def wait_until_idle(self) -> None:
        """Wait until neither the server nor its loop has requests."""
        end = time.monotonic() + 60
        while self.service.engine.jobs or self.service.engine.loop.pending:
            assert time.monotonic() < end
            time.sleep(0.01)


@contextlib.contextmanager
def serving(warm: bool = True, loop: Any = None, **settings: Any) -> Iterator[Running]:
    """Start a server of a model, and end it as after a signal."""
    small = model()
    loop = loop or OddLoop(small, **HOW, rows=ROWS, read_interval=4)
    loaded = models.LoadedModel(NAME, small, tokenizer(), 512, False)
    service = Service(loaded, NAME, loop, ROWS, ServeSettings(**{"context": 512, **settings}))
    if not warm:
        service.prepare = lambda: None
    config = uvicorn.Config(create_app(service), port=0, log_level="warning", lifespan="on")
    server = DrainingServer(config, service)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield Running(service, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", server)
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module", autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Override the fixture of the same name: tests of a file share one server."""
    with sharing_compiled_code():
        yield


@pytest.fixture(scope="module")
def running(fresh_dynamo: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Start a server for the tests of a file, which keeps one conversation in memory."""
    folder: Path = tmp_path_factory.mktemp("conversations")
    limits = Limits(rows=1, nbytes=2**30, count=6)
    with serving(folder=folder, conversations=limits, waiting=3, largest_body=20_000) as found:
        while found.service.status() == "starting":
            time.sleep(0.01)
        yield found
