"""Build tiny random models, one configuration for each architecture, and run them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

import kvpass
from tests import on_reference
from tests.traces import Traced

transformers.utils.logging.set_verbosity_error()

_WIDE = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
_LONG = dict(_WIDE, max_position_embeddings=16384)
_GROUPED = dict(_LONG, num_key_value_heads=2)

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", _GROUPED),
    "Mistral": ("MistralForCausalLM", dict(_GROUPED, sliding_window=None)),
    "Qwen2": ("Qwen2ForCausalLM", _GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", dict(_GROUPED, head_dim=16)),
    "GPT2": ("GPT2LMHeadModel", dict(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=512)),
    "GPTNeoX": ("GPTNeoXForCausalLM", _LONG),
    "Phi": ("PhiForCausalLM", _LONG),
    "Gemma": ("GemmaForCausalLM", dict(_GROUPED, head_dim=16)),
    "Cohere": ("CohereForCausalLM", _GROUPED),
}
HEADS_OF_64: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-64": ("LlamaForCausalLM", dict(_GROUPED, hidden_size=256)),
    "Cohere-64": ("CohereForCausalLM", dict(_GROUPED, hidden_size=256)),  # its rotary embedding pairs neighbours
}


@functools.cache
def _built(architecture: str, layers: int) -> torch.nn.Module:
    name, config = (ARCHITECTURES | HEADS_OF_64)[architecture]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model_config = model_class.config_class(**config, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model_config.num_hidden_layers = layers
    return model_class(model_config).eval()


def build(architecture: str, dtype: torch.dtype = torch.float32, layers: int = 2) -> Any:
    """Return a fresh copy of a tiny model."""
    return copy.deepcopy(_built(architecture, layers)).to(dtype)


def with_uneven_attention(model: Any, seed: int = 1) -> Any:
    """Draw larger matrices for a model, so that its layers and heads attend differently and clearly unevenly."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.3, generator=generator)
    return model


def model_with_unequal_layers(layers: int) -> Any:
    """Return a Llama to whose layers d2o gives different budgets."""
    return with_uneven_attention(build("Llama", layers=layers))


@functools.lru_cache(maxsize=1)
def traced(architecture: str, *way: object, dtype: torch.dtype = torch.float32, layers: int = 2) -> Traced:
    """Return a model whose Dynamo traces are shared by consecutive tests with the same arguments.

    Args:
        way: values that identify how the model is called, for example rows and lengths of pieces.
    """
    return Traced(build(architecture, dtype, layers))


def prompt(rows: int = 3, tokens: int = 9, padding: Sequence[int] = (3, 1, 0)) -> tuple[Tensor, Tensor]:
    """Return token ids and a left-padded attention mask, both [rows, tokens]."""
    ids = torch.randint(3, 128, (rows, tokens), generator=torch.Generator().manual_seed(tokens))
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding[:rows]):
        mask[row, :count] = 0
    return ids, mask


@dataclasses.dataclass
class Run:
    """Logits [B, T, vocabulary] of a teacher-forced run, the cached positions after each step, and the cache."""

    logits: Tensor
    positions: list[list[Tensor]]
    cache: Any


@torch.no_grad()
def teacher_forced(
    model: Any, ids: Tensor, mask: Tensor, steps: Sequence[int], *, inspect: bool = True, **backend: Any
) -> Run:
    """Feed `ids` in pieces of the given lengths, starting from an empty cache.

    Backends that compile a prompt at its second run get the first piece twice.

    Args:
        model: a module, which is compiled anew, or a `Traced` model.
    """
    compiling_backend = on_reference.backend(**backend)
    if isinstance(model, Traced):
        compiled = model.under(compiling_backend)
    else:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=compiling_backend)
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)

    def feed(start: int, end: int, cache: Any) -> Any:
        return compiled(
            ids[:, start:end].contiguous(),
            attention_mask=mask[:, :end].contiguous(),
            position_ids=position_ids[:, start:end].contiguous(),
            past_key_values=cache,
            use_cache=True,
        )

    if compiling_backend.inner == "inductor":
        feed(0, steps[0], None)
    logits, positions, cache, fed = [], [], None, 0
    for count in steps:
        out = feed(fed, fed + count, cache)
        cache, fed = out.past_key_values, fed + count
        logits.append(out.logits)
        if inspect:
            positions.append([layer.positions for layer in kvpass.inspect(cache).layers])
    return Run(torch.cat(logits, 1), positions, cache)


@contextlib.contextmanager
def sharing_compiled_code() -> Iterator[None]:
    """Keep compiled code until the context ends, and discard it then."""
    discard_compiled_code()
    with many_graphs():
        yield
    discard_compiled_code()


def many_graphs() -> Any:
    """Return a config patch that raises the recompile limit of torch.compile, in the current thread only."""
    return torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=100000)


def discard_compiled_code() -> None:
    """Discard all traces, compiled code and counters of Dynamo."""
    traced.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    """Return the number of Dynamo graphs since the last reset."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def breaks() -> int:
    """Return the number of graph breaks since the last reset."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())
