"""What goes over the heads of a layer: reductions, which head is which, and numbers that every head has.

The heads of a layer may be spread over processes, each of which then sees its own alone.  Policies ask here, so they do
not know: the same call is a mean over dimensions in one process, and one collective of the reduced tensor in several.

Shapes: B rows, h KV heads of this process, H of the layer, G query heads per KV head, N tokens.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Literal

import torch
from torch import Tensor

from kvpass.torch_private import fx_nodes

Reduce = Literal["mean", "max", "median"]


@dataclasses.dataclass(frozen=True)
class HeadSharding:
    """Where the heads of a layer are, if each of some processes has as many of them, in the order of their ranks.

    Attributes:
        first: the number of this process's first KV head.
        heads: KV heads of the layer.
        ranks: processes.
        group: the name of their process group.
    """

    first: int
    heads: int
    ranks: int
    group: str

    def written(self) -> str:
        """As text, for operators, which take no objects; `read` is the inverse."""
        return json.dumps(dataclasses.astuple(self))

    @staticmethod
    def read(text: str | None) -> HeadSharding | None:
        """What `written` gave; None for None."""
        return None if text is None else HeadSharding(*json.loads(text))


def reduced(x: Tensor, how: Reduce, spread: HeadSharding | None) -> Tensor:
    """Over all query heads of the layer: [B, h, G, ...] to [B, 1, ...]; of an even number the lower median.

    Costs one collective of the result if the heads are spread, and of all heads for the median.
    """
    heads = x.flatten(1, 2)  # [B, h G, ...]
    if how == "median":
        return gathered(heads, spread, 1).median(1, keepdim=True).values
    here = heads.mean(1, keepdim=True) if how == "mean" else heads.amax(1, keepdim=True)
    if spread is None:
        return here
    if how == "max":
        return fx_nodes.all_reduced(here, "max", spread.group)
    return fx_nodes.all_reduced(here, "sum", spread.group) / spread.ranks


def gathered(x: Tensor, spread: HeadSharding | None, dim: int = 0) -> Tensor:
    """What all processes have along a dimension of heads, in their order; one collective if the heads are spread."""
    if spread is None:
        return x
    mine, size = spread.first // (spread.heads // spread.ranks), x.shape[dim]
    whole = x.new_zeros((*x.shape[:dim], size * spread.ranks, *x.shape[dim + 1 :]))
    whole.narrow(dim, mine * size, size).copy_(x)
    return fx_nodes.all_reduced(whole, "sum", spread.group)


def numbers(position: Tensor, spread: HeadSharding | None) -> Tensor:
    """The numbers of the KV heads in the layer, int64 [h, 1], of metadata [B, h, N]."""
    here = torch.arange(position.shape[1], device=position.device)[:, None]
    return here if spread is None else here + spread.first
