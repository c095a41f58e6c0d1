"""What runs over the tokens of a cache: indices that count keys, and inputs with an entry for each of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.fx as fx

from kvpass.fx import shapes, walk
from kvpass.fx.walk import value


def iotas(nodes: Iterable[fx.Node], sizes: shapes.Sizes, window: int | None = None) -> list[fx.Node]:
    """The aranges that count the keys: past and new tokens, from zero.

    Args:
        window: the past tokens that the model stores, if they are fewer than it has seen.  Its keys are then
            counted by an arange of a fixed size that is moved by a size that grows.
    """
    counts = [n for n in nodes if n.target is torch.arange and len(n.args) == 1]
    if window is None:
        return [n for n in counts if sizes.is_total(n.args[0])]
    fixed = [n for n in counts if not sizes.grows(n.args[0]) and sizes.fixed(n.args[0]) == window + sizes.queries]
    return [n for n in fixed if any(_moves(user, sizes) for user in n.users)]


def _moves(node: fx.Node, sizes: shapes.Sizes) -> bool:
    """Adds a size that grows with the cache."""
    sums = [arg for arg in node.args if walk.is_size(arg) and sizes.grows(arg)]
    return bool(sums) and walk.name_of(node) in ("add", "iadd")


def token_inputs(nodes: set[fx.Node], actual: dict[fx.Node, Any], sizes: shapes.Sizes) -> dict[fx.Node, int]:
    """The inputs among the nodes that may have an entry for every token, and the dimension that runs over them.

    That is what grows along one dimension.  Whether the entries are the tokens' is for the uses to show: a lookup by
    each key's place, or an operation that aligns the dimension with the keys.

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
    given = actual.get(node)
    return node.op == "placeholder" and isinstance(given, torch.Tensor) and not isinstance(given, torch.nn.Parameter)
