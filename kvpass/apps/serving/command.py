"""Run the command `kvpass serve`."""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import math
import os
import socket
from pathlib import Path
from typing import Any

import torch
import uvicorn

from kvpass import policies
from kvpass.apps import models
from kvpass.apps.serving.conversations import Limits
from kvpass.apps.serving.routes import create_app
from kvpass.apps.serving.service import ERROR_TIMEOUT, ServeSettings, Service
from kvpass.backend import backend
from kvpass.decoding import artifacts
from kvpass.decoding.loop import DecodeLoop
from kvpass.errors import ArtifactError
from kvpass.policies.base import Policy

KEY = "KVPASS_API_KEY"
"""The environment variable of an API key, which a command line shows to every user of the machine."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")

log = logging.getLogger("kvpass.serve")


def main(parsed: argparse.Namespace) -> None:
    """Load a model and serve it until a signal ends the process.

    Raises:
        KVPassError: the model cannot be loaded or rewritten, or an option has no valid value.
    """
    log.addHandler(logging.StreamHandler())  # not the root's, to which torch writes every graph
    service = service_of(parsed)
    if parsed.host not in LOOPBACK and not service.settings.api_keys:
        log.warning("everybody who reaches %s may use the model: set --api-key or %s", parsed.host, KEY)
    server = DrainingServer(config_of(parsed, service), service)

    def leave() -> None:
        server.should_exit = True

    service.engine.on_failure = leave
    failed: SystemExit | None = None
    try:
        server.run()
    except KeyboardInterrupt:
        pass  # uvicorn raises it again when all is done
    except SystemExit as error:  # uvicorn cannot listen, and has logged the reason
        failed = error
    if service.engine.failure is not None:
        raise service.engine.failure
    if service.engine.is_running:
        # The interpreter would end the thread inside of C++ code, which aborts the process.
        logging.shutdown()
        os._exit(1 if failed else 0)
    if failed is not None:
        raise failed


class DrainingServer(uvicorn.Server):
    """A server that answers requests which outlast the drain with an error; uvicorn alone would cancel them."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        service.draining = lambda: self.should_exit

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish running requests, and end the others after the drain."""
        asyncio.get_running_loop().call_later(self._service.settings.drain, self._service.engine.interrupt)
        await super().shutdown(sockets)


def config_of(parsed: argparse.Namespace, service: Service) -> uvicorn.Config:
    """Return the configuration of uvicorn, under which running requests are finished at the end."""
    return uvicorn.Config(
        create_app(service),
        host=parsed.host,
        port=parsed.port,
        timeout_graceful_shutdown=math.ceil(parsed.drain + ERROR_TIMEOUT),
        log_level="info",
        access_log=parsed.access_log,
        lifespan="on",
    )


def service_of(parsed: argparse.Namespace) -> Service:
    """Return the service that a command line describes."""
    policy = policies.parse(parsed.policy)
    loaded = models.load(parsed.model, parsed.dtype, parsed.device)
    if not policy.renumbers:
        loaded.check_positions(parsed.context or 0, f"--context {parsed.context}")
    loop = _loop_of(parsed, policy, loaded.model)
    # A text may be longer than the trained range if cached tokens are numbered anew, but not with a learned table.
    is_unlimited = policy.renumbers or (loop.backend.prefers_cache_positions and not loaded.has_position_table)
    serve_settings = ServeSettings(
        api_keys=(*parsed.api_key, *filter(None, [os.environ.get(KEY)])),
        waiting=parsed.queue,
        max_tokens=parsed.max_tokens,
        context=parsed.context or (None if is_unlimited else loaded.trained_length),
        drain=parsed.drain,
        conversations=Limits(parsed.kept_rows or 2 * parsed.rows, parsed.kept_bytes, parsed.conversations),
        folder=parsed.folder,
    )
    service = Service(loaded, parsed.name or Path(loaded.name).resolve().name, loop, parsed.rows, serve_settings)
    if parsed.artifact is not None and not isinstance(loop, artifacts.LoadedLoop):
        artifacts.check_exportable(loop, parsed.artifact)
        service.prepare = functools.partial(_export, loop, parsed.artifact)
    return service


def _export(loop: DecodeLoop, path: Path) -> None:
    """Compile a loop and write its artifact; a server serves without one if it cannot be written."""
    try:
        artifacts.export_loop(loop, path)
    except ArtifactError as error:
        log.warning("the server has compiled its code, and writes no artifact: %s", error)
        loop.reset()


def _loop_of(parsed: argparse.Namespace, policy: Policy, model: torch.nn.Module) -> DecodeLoop:
    """Return the loop of the artifact, if it fits the other options, else a loop that compiles."""
    settings: dict[str, Any] = {name: getattr(parsed, name) for name in ("budget", "kv_dtype", "inner")}
    sizes: dict[str, Any] = {name: getattr(parsed, name) for name in ("rows", "prefill_chunk")}
    if parsed.artifact is not None and parsed.artifact.exists():
        try:
            loaded = artifacts.load(parsed.artifact, model, read_interval=parsed.read_interval)
            artifacts.check_loop_settings(loaded, backend(policy, **settings), **sizes)
        except ArtifactError as error:
            log.warning("the model is compiled, and --artifact written again: %s", error)
        else:
            return loaded
    return DecodeLoop(model, policy, read_interval=parsed.read_interval, **sizes, **settings)
