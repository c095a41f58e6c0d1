"""Make prompts of random keys and values, as a prompt graph hands them over for admission."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.backend import Backend
from kvpass.cache.admission import TokensToAdmit
from kvpass.cache.layer_cache import LayerCache
from kvpass.capture.canonical import SiteFacts
from kvpass.lowering.attention_statistics import StatisticsOperands
from kvpass.policies.pinned_tokens import Pins
from kvpass.runtime.prompt_admission import PendingPrompt, PromptLayer

LONGEST, HEADS, DIM = 32, 2, 4


def valid_rows(length: int, padding: Sequence[int]) -> Tensor:
    """Return bool [B, length], false for each row's padding on the left."""
    return torch.arange(length) >= torch.tensor(list(padding))[:, None]


def rows_of(layer: int, length: int, padding: Sequence[int], seed: int = 0) -> list[Tensor]:
    """Return queries, keys and values [B, H, length, D] of a layer.

    A real token's vectors depend on its layer, row and position only, not on padding or the prompt's length.
    """
    tensors = []
    for part in range(3):
        by_row = []
        for row, left in enumerate(padding):
            generator = torch.Generator().manual_seed(hash((seed, layer, part, row)) % 2**31)
            vectors = torch.randn(HEADS, LONGEST, DIM, generator=generator)
            by_row.append(torch.nn.functional.pad(vectors, (0, 0, left, 0))[:, :length])
        tensors.append(torch.stack(by_row))
    return tensors


def pending_prompt(
    backend: Backend,
    length: int,
    padding: Sequence[int] = (0,),
    windows: Sequence[int | None] = (None, None),
    only_row: int | None = None,
    pins: Tensor | None = None,
    on_top: bool = False,
) -> PendingPrompt:
    """Return a prompt that has run, with one layer for each of `windows`.

    Args:
        windows: the last tokens that each layer of the model stores, None for all.
        only_row: makes a prompt of this row alone, without its padding.
        pins: bool [B, length], the tokens to pin.
    """
    policy, layers = backend.policy, []
    for index, window in enumerate(windows):
        valid, vectors = valid_rows(length, padding), rows_of(index, length, padding)
        if only_row is not None:
            row, first = slice(only_row, only_row + 1), padding[only_row]
            valid, vectors = valid[row, first:], [tensor[row, :, first:] for tensor in vectors]
        query, key, value = vectors
        mask = torch.ones(valid.shape[1], valid.shape[1]).tril().bool() & valid[:, None, None]
        spec = StatisticsOperands(query, key, mask, False, 0.5, heads=HEADS, sharding=None)
        pinned = None if pins is None else Pins(pins, on_top, torch.zeros(len(valid), dtype=torch.int64))
        attention = spec.attention(policy, valid, backend.budget)
        tokens = TokensToAdmit(key, value, valid, attention, pinned, operands=(spec,))
        site = SiteFacts(2 * index, 2 * index + 1, computed=False, window=window)
        chosen = policy.for_layer(index, len(windows))
        layers.append(PromptLayer(chosen, HEADS, site, tokens, (), None))
    raw = backend.positions == "cache"
    new = layers[0].tokens.valid.shape[1]
    return PendingPrompt(backend, raw, (), None, None, (), layers, new)


def admitted(*arguments: Any, **options: Any) -> list[LayerCache]:
    """Admit the prompt of `pending_prompt`, and return the cache of each layer."""
    return list(pending_prompt(*arguments, **options).admit_layers())


def content(cache: LayerCache) -> list[list[tuple[Any, ...]]]:
    """Return for each row and head of a cache its tokens by position, each with its key and value."""
    slots = cache.slots
    key, value = (vectors.read() for vectors in (slots.key, slots.value))
    rows = []
    for row, head in itertools.product(range(cache.layout.batch), range(HEADS)):
        own = slots.position[row, min(head, slots.position.shape[1] - 1)].tolist()
        by_position = sorted((position, slot) for slot, position in enumerate(own) if position >= 0)
        rows.append([(at, key[row, head, slot].tolist(), value[row, head, slot].tolist()) for at, slot in by_position])
    return rows


def positions(cache: LayerCache) -> list[list[int]]:
    """Return the positions of the cached tokens of each row and head."""
    return [[token[0] for token in tokens] for tokens in content(cache)]
