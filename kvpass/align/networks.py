"""The networks that are trained, and what they are stored as.

L layers, H KV heads, D and Dv head dimensions, N rows, M the window.  `stored()` gives an aligner's tensors.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from kvpass.align.aligner import Signature

Hidden = tuple[int, int]


class Network(Protocol):
    """What training needs of either network; it is a module."""

    def __call__(self, key: Tensor, value: Tensor, made: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
        """Repaired rows.

        Args:
            key, value: float32 [L, N, H, D] and [L, N, H, Dv].
            made, rank: int64 [N], the positions that the rows were made at and must have.
        """

    def stored(self) -> dict[str, Tensor]:
        """The tensors of `kvpass.align.Aligner`."""


class DirectNetwork(nn.Module):
    """Recipe "direct": one network for each layer, which sees the keys and values of all heads.

    [k; v] <- [k; v] + fc3(relu(fc2(relu(fc1[k; v; E(made); E(rank)])))), all heads of a token in one row.

    Rows are standardised on the way in and changes scaled on the way out; `fit_scales` sets both, and
    `stored` multiplies them into fc1 and fc3.  fc3 starts at zero, so training starts from doing nothing.
    """

    def __init__(self, signature: Signature, hidden: Hidden = (160, 160), embedding: int = 64) -> None:
        super().__init__()
        layers, inner, outer = signature.layers, *hidden
        key, value = signature.heads * signature.key_dim, signature.heads * signature.value_dim
        fan = key + value + 2 * embedding
        self.on_key, self.on_value = _uniform(layers, key, inner, fan=fan), _uniform(layers, value, inner, fan=fan)
        self.on_made, self.on_rank = (_uniform(layers, embedding, inner, fan=fan) for _ in range(2))
        self.register_buffer("waves", _waves(signature.window + 1), persistent=False)
        self.waves: Tensor
        self.made_waves, self.rank_waves = (_uniform(self.waves.shape[1], embedding, fan=4) for _ in range(2))
        self.made_own, self.rank_own = (_zeros(signature.window + 1, embedding) for _ in range(2))
        self.first_bias = _zeros(layers, inner)
        self.inner, self.inner_bias = _uniform(layers, inner, outer, fan=inner), _zeros(layers, outer)
        self.outer, self.outer_bias = _zeros(layers, outer, key + value), _zeros(layers, key + value)
        self.register_buffer("mean", torch.zeros(layers, 1, key + value))
        self.register_buffer("spread", torch.ones(layers, 1, key + value))
        self.register_buffer("change", torch.ones(layers, 1, key + value))
        self.mean: Tensor
        self.spread: Tensor
        self.change: Tensor

    def fit_scales(self, rows: Tensor, targets: Tensor) -> None:
        """Set the scales from rows [L, N, H * (D + Dv)] and what they ought to become."""
        self.mean.copy_(rows.mean(1, keepdim=True))
        self.spread.copy_(rows.std(1, keepdim=True).clamp(min=1e-3))
        self.change.copy_((targets - rows).square().mean(1, keepdim=True).sqrt().clamp(min=1e-4))

    def forward(self, key: Tensor, value: Tensor, made: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.cat([key.flatten(2), value.flatten(2)], -1)  # [L, N, H * (D + Dv)]
        scaled = (rows - self.mean) / self.spread
        first = torch.cat([self.on_key, self.on_value], 1)
        made_table, rank_table = (
            table @ on for table, on in zip(self._tables(), (self.on_made, self.on_rank), strict=True)
        )
        places = made_table[:, made] + rank_table[:, rank]  # [L, N, h1]
        hidden = torch.relu(torch.baddbmm(places + self.first_bias[:, None], scaled, first))
        hidden = torch.relu(torch.baddbmm(self.inner_bias[:, None], hidden, self.inner))
        moved = rows + self.change * torch.baddbmm(self.outer_bias[:, None], hidden, self.outer)
        width = key[0, 0].numel()
        return moved[..., :width].view_as(key), moved[..., width:].view_as(value)

    def _tables(self) -> tuple[Tensor, Tensor]:
        """E(made) and E(rank), [M + 1, embedding]: waves, so that neighbours are alike, and what each learns itself."""
        return self.waves @ self.made_waves + self.made_own, self.waves @ self.rank_waves + self.rank_own

    @torch.no_grad()
    def stored(self) -> dict[str, Tensor]:
        made, rank = self._tables()
        first = torch.cat([self.on_key, self.on_value], 1) / self.spread.transpose(1, 2)
        width = self.on_key.shape[1]
        return {
            "fc1.key": first[:, :width],
            "fc1.value": first[:, width:],
            "fc1.made": self.on_made,
            "fc1.rank": self.on_rank,
            "fc1.bias": self.first_bias - (self.mean @ first)[:, 0],
            "made": made,
            "rank": rank,
            "fc2.weight": self.inner,
            "fc2.bias": self.inner_bias,
            "fc3.weight": self.outer * self.change,
            "fc3.bias": self.outer_bias * self.change[:, 0],
        }


class PaperNetwork(nn.Module):
    """Recipe "paper": one network for all keys and one for all values, a head of a token at a time.

    x <- x + fc3(relu(fc2(relu(fc1[x; E_position(rank); E_layer; E_head])))), with embeddings of 32, 4 and 8.
    """

    def __init__(self, signature: Signature, keys: Hidden = (256, 64), values: Hidden = (64, 128)) -> None:
        super().__init__()
        self.key = _Rows(signature, signature.key_dim, keys)
        self.value = _Rows(signature, signature.value_dim, values)

    def forward(self, key: Tensor, value: Tensor, made: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
        return self.key(key, rank), self.value(value, rank)

    @torch.no_grad()
    def stored(self) -> dict[str, Tensor]:
        return {name.replace("_table.weight", ""): tensor for name, tensor in self.state_dict().items()}


class _Rows(nn.Module):
    def __init__(self, signature: Signature, dim: int, hidden: Hidden) -> None:
        super().__init__()
        self.position_table = nn.Embedding(signature.window + 1, 32)
        self.layer_table = nn.Embedding(signature.layers, 4)
        self.head_table = nn.Embedding(signature.heads, 8)
        self.fc1 = nn.Linear(dim + 32 + 4 + 8, hidden[0])
        self.fc2 = nn.Linear(*hidden)
        self.fc3 = nn.Linear(hidden[1], dim)

    def forward(self, x: Tensor, rank: Tensor) -> Tensor:
        place = self.position_table(rank)[None, :, None].expand(*x.shape[:3], -1)
        layer = self.layer_table.weight[:, None, None].expand(*x.shape[:3], -1)
        head = self.head_table.weight.expand(*x.shape[:3], -1)
        hidden = torch.relu(self.fc1(torch.cat([x, place, layer, head], -1)))
        changed: Tensor = x + self.fc3(torch.relu(self.fc2(hidden)))
        return changed


def _waves(count: int, frequencies: int = 32) -> Tensor:
    """Sines and cosines of positions 0 .. count - 1, from a turn in 4 positions to one in 4 * count: [count, 64]."""
    turns = 4 * torch.logspace(0, 1, frequencies, base=count)
    angles = 2 * torch.pi * torch.arange(count)[:, None] / turns
    return torch.cat([angles.sin(), angles.cos()], 1)


def _uniform(*shape: int, fan: int) -> nn.Parameter:
    """As torch.nn.Linear starts, for `fan` inputs."""
    return nn.Parameter(torch.empty(*shape).uniform_(-(fan**-0.5), fan**-0.5))


def _zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape))
