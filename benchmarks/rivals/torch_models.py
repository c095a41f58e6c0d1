"""Run the model of transformers: uncompiled with a growing cache, and compiled with a StaticCache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.rivals.engine import Engine, Setup


def load(setup: Setup) -> Any:
    """Return the model in evaluation mode, in float32 or bfloat16; its weights are torchao's for int8."""
    torch.set_num_threads(setup.threads)
    dtype = torch.float32 if setup.precision == "float32" else torch.bfloat16
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(setup.weights, dtype=dtype)
    if setup.precision == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())
    return model.eval()


class Uncompiled(Engine):
    """The uncompiled model, with a cache that grows by concatenation."""

    def __init__(self, setup: Setup) -> None:
        self.model = load(setup)
        # The name without kvpass.model_access: importing kvpass would count as the start of this engine.
        named = inspect.signature(type(self.model).forward).parameters
        self.name = "past_key_values" if "past_key_values" in named else "cache"
        self.forward: Callable[..., Any] = self.model

    def prompt(self, ids: list[list[int]], room: int) -> list[int]:
        return self._call(self.model, torch.tensor(ids), self._cache(len(ids[0]) + room))

    def steps(self, count: int) -> list[list[int]]:
        made = [self._call(self.forward, self.next, self.held) for _ in range(count)]
        return [list(row) for row in zip(*made, strict=True)]

    def _cache(self, most: int) -> Any:
        """Return an empty cache for at most this many tokens, None if the model makes one itself."""
        return None

    @torch.inference_mode()
    def _call(self, forward: Callable[..., Any], ids: Tensor, cache: Any) -> list[int]:
        out = forward(ids, **{self.name: cache}, use_cache=True, logits_to_keep=1)
        self.held, self.next = getattr(out, self.name), out.logits[:, -1:].argmax(-1)
        return [int(token) for token in self.next]


class Static(Uncompiled):
    """The model under torch.compile, with a StaticCache of the required size; prompts run uncompiled."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        torch._dynamo.config.recompile_limit = 64  # one compilation for each size of the cache

    def prompt(self, ids: list[list[int]], room: int) -> list[int]:
        first = super().prompt(ids, room)
        self.forward = self._compiled()
        return first

    def _compiled(self) -> Callable[..., Any]:
        return torch.compile(self.model, fullgraph=True, dynamic=False)

    def _cache(self, most: int) -> Any:
        return transformers.StaticCache(config=self.model.config, max_cache_len=most)
