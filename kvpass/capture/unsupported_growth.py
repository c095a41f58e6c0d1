"""Caches that grow in a way that capture does not read: they must not stay as they are without a word.

However a model's code joins a past and new tokens, and in whatever layout, it hands in a tensor and gets back a longer
one.  That much can be seen from the shapes: an output that is made from an input without a projection in between, and
is longer along one of its dimensions.  What stays as long as it was, as the last states of a convolution, is bounded
already.
"""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from kvpass.fx import walk
from kvpass.fx.shapes import expr
from kvpass.fx.walk import is_tensor, name_of, value

_MIXING = frozenset(
    {
        "linear", "addmm", "matmul", "bmm", "baddbmm", "mm", "einsum", "embedding", "conv1d", "conv2d", "layer_norm",
        "rms_norm", "softmax", "scaled_dot_product_attention", "topk", "scatter",
    }
)  # fmt: skip
"""What makes new features, or a choice, of what it is given, so that its result is no longer the tensor itself."""


def unread(graph: fx.Graph, read: set[int]) -> list[tuple[fx.Node, str]]:
    """The outputs that are an input and more, and why each is refused.

    Args:
        read: the places of outputs that are known to be caches.
    """
    outputs = [node for index, node in enumerate(walk.results(graph)) if index not in read and _holds_states(node)]
    found = []
    for node in dict.fromkeys(outputs):
        made_of = _inputs_of(node)
        if any(_is_as_long(node, given) for given in made_of):
            continue
        past = next((given for given in made_of if _is_longer(node, given)), None)
        if past is not None:
            found.append((node, f"{past.name!r} grows here, and it is not read as a cache: {_LAYOUT}"))
    return found


_LAYOUT = (
    "caches that are attended to grow by torch.cat([past, new], -2) of [B, H, S, D]; let the model keep them so, or "
    "run it uncompiled"
)


def stays_as_long(node: fx.Node) -> bool:
    """Whether a tensor is an input of the same shape in which some elements were replaced: a cache of a fixed size."""
    parents = node.all_input_nodes if _holds_states(node) else []
    return any(_is_as_long(node, given) for parent in parents for given in _inputs_of(parent))


def _holds_states(node: Any) -> bool:
    """Whether an output is a tensor of numbers for rows, tokens and features at least, and no input itself."""
    if not is_tensor(node) or node.op == "placeholder":
        return False
    return bool(value(node).ndim >= 3 and value(node).is_floating_point())


def _inputs_of(node: fx.Node) -> list[fx.Node]:
    """The inputs of three dimensions and more that a tensor is another arrangement of, or a part."""
    seen, found, todo = set[fx.Node](), list[fx.Node](), [node]
    while todo:
        current = todo.pop()
        if current in seen or name_of(current) in _MIXING:
            continue
        seen.add(current)
        if current.op == "placeholder":
            found += [current] if _is_state(current) else []
        else:
            todo.extend(current.all_input_nodes)
    return found


def _is_state(holder: fx.Node) -> bool:
    given = value(holder)
    tensor = isinstance(given, torch.Tensor) and not isinstance(given, torch.nn.Parameter)
    return bool(tensor and given.ndim >= 3 and given.is_floating_point())


def _is_as_long(node: fx.Node, given: fx.Node) -> bool:
    return list(map(expr, value(node).shape)) == list(map(expr, value(given).shape))


def _is_longer(node: fx.Node, past: fx.Node) -> bool:
    """Whether a tensor has the shape of another, but for one dimension that is longer."""
    one, other = value(node).shape, value(past).shape
    if len(one) != len(other):
        return False
    apart = [sympy.simplify(expr(a) - expr(b)) for a, b in zip(one, other, strict=True) if expr(a) != expr(b)]
    return len(apart) == 1 and not bool(apart[0].is_negative)
