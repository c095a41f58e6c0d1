"""Draw training pairs: rows of the same tokens in a whole window, and in a window without some tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kvpass.errors import AlignerError
from kvpass.model_access import device_of
from kvpass.policies.aligners.scope import cached_vectors


@dataclasses.dataclass(frozen=True)
class TrainingPairs:
    """N rows of every layer, as the model makes them in whole windows and in shortened ones."""

    key: Tensor  # float32 [L, N, H, D]
    value: Tensor  # float32 [L, N, H, Dv]
    target_key: Tensor
    target_value: Tensor
    position: Tensor  # int64 [N], the positions in the whole windows
    rank: Tensor  # int64 [N], the positions in the shortened windows

    def select(self, rows: Tensor) -> TrainingPairs:
        """Return the pairs of some rows, int64 [n]."""
        inputs = self.key[:, rows], self.value[:, rows]
        targets = self.target_key[:, rows], self.target_value[:, rows]
        return TrainingPairs(*inputs, *targets, self.position[rows], self.rank[rows])


def windows(stream: Tensor, count: int, tokens: int, sinks: int, generator: torch.Generator) -> Tensor:
    """Return random windows int64 [count, tokens] of a text int64 [T].

    In every second window the sinks come from elsewhere in the text, as in a long stream.
    """
    if len(stream) <= tokens:
        raise AlignerError(f"a text of {len(stream)} tokens has no window of {tokens}: give more text")
    starts = torch.randint(len(stream) - tokens, (2, count), generator=generator)
    ids = stream[starts[0][:, None] + torch.arange(tokens)]
    distant_sinks = stream[starts[1][:, None] + torch.arange(sinks)]
    ids[::2, :sinks] = distant_sinks[::2]
    return ids


def lengths(window: int, sinks: int, generator: torch.Generator) -> int:
    """Return a random length to train on: the largest in a third of draws, else uniform in its logarithm."""
    shortest = min(sinks + 4, window)
    uniform = torch.rand(2, generator=generator).tolist()
    return window if uniform[0] < 1 / 3 else round(shortest * (window / shortest) ** uniform[1])


@dataclasses.dataclass(frozen=True)
class WholeRows:
    """Complete windows [B, M + 1] and their rows."""

    ids: Tensor  # int64 [B, M + 1]
    key: Tensor  # float32 [L, B, H, M + 1, D]
    value: Tensor  # float32 [L, B, H, M + 1, Dv]


@torch.no_grad()
def run_windows(model: Any, ids: Tensor) -> WholeRows:
    """Run the model on windows."""
    ids = ids.to(device_of(model))
    return WholeRows(ids, *_stack_layers(cached_vectors(model, ids)))


def pair(model: Any, windows: WholeRows, dropped: int, sinks: int) -> TrainingPairs:
    """Return the rows after tokens deleted after the sinks, as they were and as computed without these tokens."""
    ids = windows.ids
    shortened = _stack_layers(cached_vectors(model, torch.cat([ids[:, :sinks], ids[:, sinks + dropped :]], 1)))
    inputs = [_flat(rows[:, :, :, sinks + dropped :]) for rows in (windows.key, windows.value)]
    targets = [_flat(rows[:, :, :, sinks:]) for rows in shortened]
    position = torch.arange(sinks + dropped, ids.shape[1], device=ids.device).repeat(len(ids))
    return TrainingPairs(inputs[0], inputs[1], targets[0], targets[1], position, position - dropped)


@torch.no_grad()
def mean_rows(model: Any, block: Tensor) -> Tensor:
    """Return the mean row at each position of a block int64 [n]: float32 [L, n, H * (D + Dv)].

    The mean is over rotations of the block by every number of tokens, or by 512 numbers.  So each position sees the
    same tokens, and the means differ by the position alone.
    """
    shifts = torch.unique(torch.linspace(0, len(block) - 1, min(len(block), 512)).long())
    row_sum: Any = 0.0
    for shift_batch in shifts.split(16):
        ids = torch.stack([block.roll(int(shift)) for shift in shift_batch]).to(device_of(model))
        rows = torch.cat(
            [stacked.transpose(2, 3).flatten(3) for stacked in _stack_layers(cached_vectors(model, ids))], -1
        )
        row_sum = row_sum + rows.sum(1)  # [L, n, H * (D + Dv)]
    return torch.as_tensor(row_sum / len(shifts))


def _stack_layers(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return keys and values of all layers, [L, B, H, n, D] each."""
    return torch.stack([key for key, _ in rows]).float(), torch.stack([value for _, value in rows]).float()


def _flat(rows: Tensor) -> Tensor:
    """Return rows [L, B, H, n, D] as [L, B * n, H, D]."""
    return rows.transpose(2, 3).flatten(1, 2)
