"""Force the compiler to write values to memory once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from kvpass.fx.splicing import call_aten


def write_out(graph: fx.Graph, node: fx.Node, shape: Sequence[Any], strides: Sequence[Any]) -> None:
    """Make the readers of a dense aten node read its value from memory.

    The compiler allocates a buffer for the value under a strided view.
    """
    with graph.inserting_after(node):
        view = call_aten(graph, torch.ops.aten.as_strided.default, node, list(shape), list(strides))
    node.replace_all_uses_with(view, delete_user_cb=lambda user: user is not view)
