"""Build the reference model of the benchmark, fill its caches, and decode with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from kvpass import model_access

LAYERS, WIDTH, HEADS, KV_HEADS, DIM, VOCABULARY = 8, 512, 8, 4, 64, 4096
LONGEST = 1 << 17  # positions that the configuration allows
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build(dtype: str = "float32", layers: int = LAYERS) -> Any:
    """Return a Llama of 25.7 million random parameters (with 8 layers), in evaluation mode."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=1408, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=LONGEST,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(DTYPES[dtype]).eval()


def tokens(count: int, seed: int = 0) -> Tensor:
    """Return random tokens, int64 [1, count]."""
    return torch.randint(3, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def filled(cache: Any, model: Any, count: int) -> Any:
    """Fill a cache of transformers with random keys and values of `count` tokens."""
    generator = torch.Generator().manual_seed(1)
    for layer in range(model.config.num_hidden_layers):
        shape = (1, KV_HEADS, count, DIM)
        key, value = (torch.randn(shape, generator=generator).to(model.dtype) for _ in range(2))
        cache.update(key, value, layer)
    return cache


def dynamic(model: Any, count: int) -> Any:
    """Return a filled cache that grows by concatenation."""
    return filled(transformers.DynamicCache(), model, count)


def static(model: Any, count: int, room: int) -> Any:
    """Return a preallocated cache of `count` tokens, the last `room` of which are free."""
    return filled(transformers.StaticCache(config=model.config, max_cache_len=count), model, count - room)


@dataclasses.dataclass
class Conversation:
    """A conversation that decodes greedily, one token in each call, through the model's forward.

    Attributes:
        forward: the model, compiled or not.
        after: a function that is called with the cache after each step, for example to evict.
    """

    forward: Callable[..., Any]
    cache: Any
    after: Callable[[Any], object] = lambda cache: None
    ids: Tensor = dataclasses.field(default_factory=lambda: tokens(1))

    def __post_init__(self) -> None:
        self._name = model_access.cache_keyword(self.forward)  # looked up once, because steps are timed

    def step(self) -> None:
        out = self.forward(self.ids, **{self._name: self.cache}, use_cache=True)
        self.cache = model_access.cache_of_output(out)
        self.after(self.cache)
        self.ids = out.logits[:, -1:].argmax(-1)
