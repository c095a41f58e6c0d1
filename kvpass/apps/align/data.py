"""Training pairs: the same tokens in a whole window and in one that has lost some."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kvpass import cache_names
from kvpass.errors import AlignerError
from kvpass.policies.aligners.signature import cached_rows, device_of, rows_of


@dataclasses.dataclass(frozen=True)
class TrainingPairs:
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

    def some(self, rows: Tensor) -> TrainingPairs:
        """Those of some rows, int64 [n]."""
        key, value, wanted_key, wanted_value = (
            x[:, rows] for x in (self.key, self.value, self.wanted_key, self.wanted_value)
        )
        return TrainingPairs(key, value, wanted_key, wanted_value, self.made[rows], self.rank[rows])


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


@dataclasses.dataclass(frozen=True)
class WholeRows:
    """Windows [B, M + 1 + n] that nothing is missing from, n tokens beyond the last that is held.

    Attributes:
        ids: int64 [B, M + 1 + n].
        key, value: float32 [L, B, H, M + 1, D] and [L, B, H, M + 1, Dv].
        logits: of the n tokens, [B, n, V]; None without any.
    """

    ids: Tensor
    key: Tensor
    value: Tensor
    logits: Tensor | None

    @property
    def held(self) -> Tensor:
        """The ids that are held, int64 [B, M + 1]."""
        return self.ids[:, : self.key.shape[3]]


@torch.no_grad()
def whole(model: Any, ids: Tensor, ahead: int = 0) -> WholeRows:
    """Run the model on windows of which the last `ahead` tokens are only asked what they make of the rest."""
    ids = ids.to(device_of(model))
    held = ids.shape[1] - ahead
    if not ahead:
        return WholeRows(ids, *_stacked(cached_rows(model, ids)), None)
    out = model(input_ids=ids, use_cache=True)
    key, value = _stacked(rows_of(model, cache_names.returned(out)))
    return WholeRows(ids, key[:, :, :, :held], value[:, :, :, :held], out.logits[:, held:])


def pair(model: Any, windows: WholeRows, dropped: int, sinks: int) -> TrainingPairs:
    """What deleting tokens behind the sinks does to the rows of those behind them."""
    ids = windows.held
    shortened = _stacked(cached_rows(model, torch.cat([ids[:, :sinks], ids[:, sinks + dropped :]], 1)))
    old = [_flat(rows[:, :, :, sinks + dropped :]) for rows in (windows.key, windows.value)]
    new = [_flat(rows[:, :, :, sinks:]) for rows in shortened]
    count = ids.shape[1] - sinks - dropped
    made = torch.arange(sinks + dropped, sinks + dropped + count, device=ids.device).repeat(len(ids))
    return TrainingPairs(old[0], old[1], new[0], new[1], made, made - dropped)


@torch.no_grad()
def mean_rows(model: Any, block: Tensor, most: int = 512, batch: int = 16) -> Tensor:
    """The mean row at each position, float32 [L, n, H * (D + Dv)], for a block of text int64 [n].

    The mean is over the block rotated by every number of tokens (over `most` of these, if there are more): each
    position then sees the same tokens, and their means differ by what the position does.
    """
    turns = torch.unique(torch.linspace(0, len(block) - 1, min(len(block), most)).long())
    total: Any = 0.0
    for some in turns.split(batch):
        ids = torch.stack([block.roll(int(turn)) for turn in some]).to(device_of(model))
        rows = torch.cat([x.transpose(2, 3).flatten(3) for x in _stacked(cached_rows(model, ids))], -1)
        total = total + rows.sum(1)  # [L, n, H * (D + Dv)]
    return torch.as_tensor(total / len(turns))


def continued(model: Any, windows: WholeRows, key: Tensor, value: Tensor, sinks: int) -> Tensor:
    """Logits [B, n, V] of the tokens ahead on the sinks and repaired rows [L, B * m, H, D], as far as they go."""
    from transformers import DynamicCache

    cache, rows, held = DynamicCache(), len(windows.ids), windows.key.shape[3]
    for layer in range(len(key)):
        parts = [
            torch.cat([first[layer][:, :, :sinks], rest[layer].view(rows, -1, *rest.shape[2:]).transpose(1, 2)], 2)
            for first, rest in ((windows.key, key), (windows.value, value))
        ]
        cache.update(parts[0], parts[1], layer)
    ids = windows.ids[:, held:]
    place = cache.get_seq_length() + torch.arange(ids.shape[1], device=ids.device)
    past = cache_names.arguments(model, cache)
    logits: Tensor = model(input_ids=ids, **past, position_ids=place[None], use_cache=True).logits
    return logits


def _stacked(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Keys [L, B, H, n, D] and values."""
    return torch.stack([key for key, _ in rows]).float(), torch.stack([value for _, value in rows]).float()


def _flat(rows: Tensor) -> Tensor:
    """[L, B, H, n, D] -> [L, B * n, H, D]."""
    return rows.transpose(2, 3).flatten(1, 2)
