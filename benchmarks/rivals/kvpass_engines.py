"""Run kvpass: the compiled model, called like `generate` does, and `DecodeLoop`."""

from __future__ import annotations

from typing import Any

import torch

import kvpass
from benchmarks.rivals.engine import Engine, Setup
from benchmarks.rivals.torch_models import load
from kvpass import model_access


class Forward(Engine):
    """`kvpass.compile`, and one call of the model for each token."""

    def __init__(self, setup: Setup) -> None:
        self.model = kvpass.compile(load(setup), setup.policy or "full", budget=setup.budget)
        self.cache: Any = None

    def prompt(self, ids: list[list[int]], room: int) -> list[int]:
        self.cache, self.ids = None, torch.tensor(ids)
        return self._call()

    def steps(self, count: int) -> list[list[int]]:
        return [list(row) for row in zip(*(self._call() for _ in range(count)), strict=True)]

    @torch.inference_mode()
    def _call(self) -> list[int]:
        out = model_access.call_model(self.model, self.ids, self.cache, logits_to_keep=1)
        self.cache, self.ids = model_access.cache_of_output(out), out.logits[:, -1:].argmax(-1)
        return [int(token) for token in self.ids]


class Loop(Engine):
    """`kvpass.DecodeLoop`; the host reads the tokens once for all steps of a call."""

    def __init__(self, setup: Setup) -> None:
        self.model, self.setup = load(setup), setup
        self.loop: kvpass.DecodeLoop | None = None

    def prompt(self, ids: list[list[int]], room: int) -> list[int]:
        self.loop = self.loop or kvpass.DecodeLoop(self.model, self.setup.policy or "full", budget=self.setup.budget)
        self.loop.reset()  # a further prompt would continue the conversation
        self.loop.prompt(torch.tensor(ids))
        return [row[0] for row in self.steps(1)]

    def steps(self, count: int) -> list[list[int]]:
        assert self.loop is not None
        made: list[list[int]] = self.loop.generate(count).tolist()
        return made
