"""Reduce over the heads of a layer, number them, and gather values of every head.

The heads of a layer may be sharded over processes; each process holds only its own heads.  Policies call these
functions in both cases: in one process a call is a reduction over dimensions, in several one collective of the
reduced tensor.

Shapes: B rows, h KV heads of this process, H of the layer, G query heads per KV head, N tokens.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Literal

import torch
from torch import Tensor

from kvpass.torch_private import operators

Reduce = Literal["mean", "max", "median"]


@dataclasses.dataclass(frozen=True)
class HeadSharding:
    """The KV heads of this process, and the group of processes that share a layer.

    All processes have equally many heads, in the order of their ranks.

    Attributes:
        first_head: the index of this process's first KV head.
        heads: KV heads of the layer.
        world_size: the number of processes.
        group: the name of the group of processes.
    """

    first_head: int
    heads: int
    world_size: int
    group: str

    def to_text(self) -> str:
        """Return the sharding as text, for operators, which take no objects; `from_text` is the inverse."""
        return json.dumps(dataclasses.astuple(self))

    @staticmethod
    def from_text(text: str | None) -> HeadSharding | None:
        """Return the sharding of a text that `to_text` returned; None for None."""
        return None if text is None else HeadSharding(*json.loads(text))


def reduce_heads(x: Tensor, reduction: Reduce, sharding: HeadSharding | None) -> Tensor:
    """Reduce over all query heads of the layer: [B, h, G, ...] to [B, 1, ...].

    Heads on several processes cost one collective of the result, or of all heads for the median.
    """
    heads = x.flatten(1, 2)  # [B, h G, ...]
    if reduction == "median":
        return gather_heads(heads, sharding, 1).median(1, keepdim=True).values
    local = heads
    if heads.shape[1] > 1:  # a single head is its own mean, without a copy
        local = heads.mean(1, keepdim=True) if reduction == "mean" else heads.amax(1, keepdim=True)
    if sharding is None:
        return local
    if reduction == "max":
        return operators.all_reduce(local, "max", sharding.group)
    return operators.all_reduce(local, "sum", sharding.group) / sharding.world_size


def gather_heads(x: Tensor, sharding: HeadSharding | None, dim: int = 0) -> Tensor:
    """Concatenate the tensors of all processes along a dimension of heads; one collective if heads are sharded."""
    if sharding is None:
        return x
    process, size = sharding.first_head // (sharding.heads // sharding.world_size), x.shape[dim]
    whole = x.new_zeros((*x.shape[:dim], size * sharding.world_size, *x.shape[dim + 1 :]))
    whole.narrow(dim, process * size, size).copy_(x)
    return operators.all_reduce(whole, "sum", sharding.group)


def head_indices(position: Tensor, sharding: HeadSharding | None) -> Tensor:
    """Return the indices of the KV heads in the layer, int64 [h, 1], for metadata [B, h, N]."""
    local = torch.arange(position.shape[1], device=position.device)[:, None]
    return local if sharding is None else local + sharding.first_head
