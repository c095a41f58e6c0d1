"""Find the key indices and the inputs with an entry per token in a graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.fx as fx

from kvpass.fx import shapes, walk
from kvpass.fx.walk import value


def iotas(nodes: Iterable[fx.Node], sizes: shapes.Sizes, window: int | None = None) -> list[fx.Node]:
    """Return the aranges that index the keys, past and new, from zero.

    Args:
        window: the number of past tokens that the model stores, if it is fewer than the tokens seen.  The key index is
            then an arange of fixed size, shifted by a size that grows.
    """
    aranges = [n for n in nodes if n.target is torch.arange and len(n.args) == 1]
    if window is None:
        return [n for n in aranges if sizes.is_total(n.args[0])]
    fixed = [n for n in aranges if not sizes.grows(n.args[0]) and sizes.fixed(n.args[0]) == window + sizes.queries]
    return [n for n in fixed if any(_adds_growing_size(user, sizes) for user in n.users)]


def _adds_growing_size(node: fx.Node, sizes: shapes.Sizes) -> bool:
    """Return whether a node adds a size that grows with the cache."""
    growing = [arg for arg in node.args if walk.is_size(arg) and sizes.grows(arg)]
    return bool(growing) and walk.name_of(node) in ("add", "iadd")


def token_inputs(nodes: set[fx.Node], actual: dict[fx.Node, Any], sizes: shapes.Sizes) -> dict[fx.Node, int]:
    """Return the inputs that may have an entry for every token, each with its dimension over the tokens.

    An input qualifies if it grows along exactly one dimension.  The users prove whether entries belong to tokens: a
    lookup by key index, or an operation that aligns the dimension with the keys.

    Args:
        actual: the value of each placeholder in this call.
    """
    found: dict[fx.Node, int] = {}
    for node in nodes:
        growing = (
            [d for d, size in enumerate(value(node).shape) if sizes.grows(size)] if _is_input(node, actual) else []
        )
        if len(growing) == 1:
            found[node] = growing[0]
    return found


def _is_input(node: fx.Node, actual: dict[fx.Node, Any]) -> bool:
    tensor = actual.get(node)
    return node.op == "placeholder" and isinstance(tensor, torch.Tensor) and not isinstance(tensor, torch.nn.Parameter)
