"""Numbers that the compiler is to write to memory once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass import compat
from kvpass.graphs import call_aten


def written_out(x: Tensor) -> Tensor:
    """The same numbers, which the compiler computes once and reads from memory.

    It would else compute pointwise expressions, such as the cosines of an embedding, anew wherever they are
    read: in the innermost loop over slots, heads and dimensions.
    """
    x = x.contiguous()
    if compat.symbols(x):  # a strided view is of whatever strides the compiler chose, which are others then
        return compat.with_strides(x, x.stride())
    return x.as_strided(x.shape, x.stride())


def write_out(graph: fx.Graph, node: fx.Node, shape: Sequence[Any], strides: Sequence[Any]) -> None:
    """Have the readers of a dense node of aten's operators read what the compiler wrote to memory.

    It makes a buffer of what is under a strided view.
    """
    with graph.inserting_after(node):
        view = call_aten(graph, torch.ops.aten.as_strided.default, node, list(shape), list(strides))
    node.replace_all_uses_with(view, delete_user_cb=lambda user: user is not view)
