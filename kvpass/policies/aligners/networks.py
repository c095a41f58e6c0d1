"""Define the trained networks and the tensors that they are stored as.

L layers, H KV heads, D and Dv head dimensions, N tokens, M the window.  Networks repair float32 keys [L, N, H, D] and
values [L, N, H, Dv].  `made` and `rank`, int64 [N], are the positions at which vectors were computed and the positions
that they must have.  `stored()` returns the tensors of `kvpass.policies.aligners.Aligner`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvpass.policies.aligners.scope import AlignerScope

Hidden = tuple[int, int]


class DirectNetwork(nn.Module):
    """Recipe "direct": one network for each layer, which sees the keys and values of all heads.

    [k; v] <- [k; v] + (E(rank) - E(made)) S + fc3(relu(fc2(relu(fc1[k; v; E(made); E(rank)])))),

    with all heads of a token in one vector.  Inputs are standardised and output changes scaled; `fit_scales` sets
    both, and `to_tensors` multiplies them into the weights.  fc3 starts at zero.  `fit_positions` sets E and S so that
    training starts from the part that positions alone explain: the difference of their mean vectors.
    """

    def __init__(self, scope: AlignerScope, hidden: Hidden = (96, 96), embedding: int = 144) -> None:
        super().__init__()
        layers, inner, outer = scope.layers, *hidden
        key, value = scope.heads * scope.key_dim, scope.heads * scope.value_dim
        fan = key + value + 2 * embedding
        self.on_key, self.on_value = _uniform(layers, key, inner, fan=fan), _uniform(layers, value, inner, fan=fan)
        self.on_made, self.on_rank = (_uniform(layers, embedding, inner, fan=fan) for _ in range(2))
        self.positions = nn.Parameter(torch.randn(scope.window + 1, embedding))
        self.shift = _zeros(layers, embedding, key + value)
        self.first_bias = _zeros(layers, inner)
        self.inner, self.inner_bias = _uniform(layers, inner, outer, fan=inner), _zeros(layers, outer)
        self.outer, self.outer_bias = _zeros(layers, outer, key + value), _zeros(layers, key + value)
        self.register_buffer("mean", torch.zeros(layers, 1, key + value))
        self.register_buffer("spread", torch.ones(layers, 1, key + value))
        self.register_buffer("change", torch.ones(layers, 1, key + value))
        self.mean: Tensor
        self.spread: Tensor
        self.change: Tensor

    def fit_scales(self, vectors: Tensor, targets: Tensor) -> None:
        """Set the scales from vectors [L, N, H * (D + Dv)] and their targets."""
        self.mean.copy_(vectors.mean(1, keepdim=True))
        self.spread.copy_(vectors.std(1, keepdim=True).clamp(min=1e-3))
        self.change.copy_((targets - vectors).square().mean(1, keepdim=True).sqrt().clamp(min=1e-4))

    @torch.no_grad()
    def fit_positions(self, means: Tensor) -> None:
        """Fit E and S to mean vectors by position, [L, M + 1, H * (D + Dv)]."""
        layers, count, width = means.shape
        scaled = ((means - means.mean(1, keepdim=True)) / self.change).transpose(0, 1).flatten(1)  # [M + 1, L * w]
        left, values, right = torch.linalg.svd(scaled, full_matrices=False)
        components = min(self.positions.shape[1], len(values))
        self.positions.zero_()[:, :components] = left[:, :components] * count**0.5  # each column of unit size
        shifts = (values[:components, None] / count**0.5 * right[:components]).view(components, layers, width)
        self.shift.zero_()[:, :components] = shifts.transpose(0, 1)

    def forward(self, key: Tensor, value: Tensor, made: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
        vectors = torch.cat([key.flatten(2), value.flatten(2)], -1)  # [L, N, H * (D + Dv)]
        scaled = (vectors - self.mean) / self.spread
        weight = torch.cat([self.on_key, self.on_value], 1)
        at_positions = (self.positions @ self.on_made)[:, made] + (self.positions @ self.on_rank)[:, rank]  # [L, N, h1]
        hidden = torch.relu(torch.baddbmm(at_positions + self.first_bias[:, None], scaled, weight))
        hidden = torch.relu(torch.baddbmm(self.inner_bias[:, None], hidden, self.inner))
        table = self.positions @ self.shift  # [L, M + 1, H * (D + Dv)]
        change = torch.baddbmm(self.outer_bias[:, None], hidden, self.outer) + table[:, rank] - table[:, made]
        repaired = vectors + self.change * change
        width = key[0, 0].numel()
        return repaired[..., :width].view_as(key), repaired[..., width:].view_as(value)

    @torch.no_grad()
    def to_tensors(self) -> dict[str, Tensor]:
        weight = torch.cat([self.on_key, self.on_value], 1) / self.spread.transpose(1, 2)
        width = self.on_key.shape[1]
        return {
            "fc1.key": weight[:, :width],
            "fc1.value": weight[:, width:],
            "fc1.made": self.on_made,
            "fc1.rank": self.on_rank,
            "fc1.bias": self.first_bias - (self.mean @ weight)[:, 0],
            "place": self.positions,
            "shift": self.shift * self.change,
            "fc2.weight": self.inner,
            "fc2.bias": self.inner_bias,
            "fc3.weight": self.outer * self.change,
            "fc3.bias": self.outer_bias * self.change[:, 0],
        }


class PaperNetwork(nn.Module):
    """Recipe "paper": one network for all keys and one for all values, for one head of a token.

    x <- x + fc3(relu(fc2(relu(fc1[x; E_position(rank); E_layer; E_head])))), with embeddings of 32, 4 and 8.
    """

    def __init__(self, scope: AlignerScope, keys: Hidden, values: Hidden) -> None:
        super().__init__()
        self.key = _NetworkRows(scope, scope.key_dim, keys)
        self.value = _NetworkRows(scope, scope.value_dim, values)

    def forward(self, key: Tensor, value: Tensor, made: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
        return self.key(key, rank), self.value(value, rank)

    @torch.no_grad()
    def to_tensors(self) -> dict[str, Tensor]:
        return {name.replace("_table.weight", ""): tensor for name, tensor in self.state_dict().items()}


class _NetworkRows(nn.Module):
    def __init__(self, scope: AlignerScope, dim: int, hidden: Hidden) -> None:
        super().__init__()
        self.position_table = nn.Embedding(scope.window + 1, 32)
        self.layer_table = nn.Embedding(scope.layers, 4)
        self.head_table = nn.Embedding(scope.heads, 8)
        self.fc1 = nn.Linear(dim + 32 + 4 + 8, hidden[0])
        self.fc2 = nn.Linear(*hidden)
        self.fc3 = nn.Linear(hidden[1], dim)

    def forward(self, x: Tensor, rank: Tensor) -> Tensor:
        position = self.position_table(rank)[None, :, None].expand(*x.shape[:3], -1)
        layer = self.layer_table.weight[:, None, None].expand(*x.shape[:3], -1)
        head = self.head_table.weight.expand(*x.shape[:3], -1)
        hidden = torch.relu(self.fc1(torch.cat([x, position, layer, head], -1)))
        changed: Tensor = x + self.fc3(torch.relu(self.fc2(hidden)))
        return changed


def _uniform(*shape: int, fan: int) -> nn.Parameter:
    """Return the initial weights of torch.nn.Linear for `fan` inputs."""
    return nn.Parameter(torch.empty(*shape).uniform_(-(fan**-0.5), fan**-0.5))


def _zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape))
