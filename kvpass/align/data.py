"""Training pairs: the same tokens in a whole window and in one that has lost some."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kvpass.align.signature import cached_rows, device_of
from kvpass.errors import AlignerError


@dataclasses.dataclass(frozen=True)
class Pairs:
    """N rows of every layer, as they were made and as they must become.

    Attributes:
        key, value: float32 [L, N, H, D] and [L, N, H, Dv], from the whole windows.
        wanted_key, wanted_value: likewise, of the same tokens in the shortened windows.
        made, rank: int64 [N], their positions there and here.
    """

    key: Tensor
    value: Tensor
    wanted_key: Tensor
    wanted_value: Tensor
    made: Tensor
    rank: Tensor


def windows(stream: Tensor, count: int, tokens: int, sinks: int, generator: torch.Generator) -> Tensor:
    """Random windows int64 [count, tokens] of a text int64 [T].

    In every second one the sinks come from another place, as they do when a stream has gone on for long.

    Raises:
        AlignerError: the text is too short.
    """
    if len(stream) <= tokens:
        raise AlignerError(f"a text of {len(stream)} tokens has no window of {tokens}: give more text")
    starts = torch.randint(len(stream) - tokens, (2, count), generator=generator)
    ids = stream[starts[0][:, None] + torch.arange(tokens)]
    far = stream[starts[1][:, None] + torch.arange(sinks)]
    ids[::2, :sinks] = far[::2]
    return ids


def lengths(window: int, sinks: int, generator: torch.Generator) -> int:
    """A window to train on: the largest one a third of the time, else one of any order of magnitude below it."""
    least = min(sinks + 4, window)
    drawn = torch.rand(2, generator=generator).tolist()
    return window if drawn[0] < 1 / 3 else round(least * (window / least) ** drawn[1])


def pairs(model: Any, ids: Tensor, dropped: list[int], sinks: int) -> list[Pairs]:
    """What deleting tokens does to the rows of those behind them.

    Args:
        ids: int64 [B, M + 1], windows as they stand when the next token has been written.
        dropped: how many tokens to delete behind the sinks, one number for each element of the result.
    """
    ids = ids.to(device_of(model))
    whole = _stacked(cached_rows(model, ids))
    return [_pair(whole, _stacked(cached_rows(model, _without(ids, sinks, n))), n, sinks) for n in dropped]


def _without(ids: Tensor, sinks: int, dropped: int) -> Tensor:
    return torch.cat([ids[:, :sinks], ids[:, sinks + dropped :]], 1)


def _stacked(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Keys [L, B, H, n, D] and values."""
    return torch.stack([key for key, _ in rows]).float(), torch.stack([value for _, value in rows]).float()


def _pair(whole: tuple[Tensor, Tensor], shortened: tuple[Tensor, Tensor], dropped: int, sinks: int) -> Pairs:
    old = [_flat(rows[:, :, :, sinks + dropped :]) for rows in whole]
    new = [_flat(rows[:, :, :, sinks:]) for rows in shortened]
    rows, count = whole[0].shape[1], whole[0].shape[3] - sinks - dropped
    made = torch.arange(sinks + dropped, sinks + dropped + count, device=old[0].device).repeat(rows)
    return Pairs(old[0], old[1], new[0], new[1], made, made - dropped)


def _flat(rows: Tensor) -> Tensor:
    """[L, B, H, n, D] -> [L, B * n, H, D]."""
    return rows.transpose(2, 3).flatten(1, 2)
