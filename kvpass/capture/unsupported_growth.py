"""Detect caches that grow in a way that capture does not read, so that they are refused.

Whatever the code and layout, a model takes a tensor and returns a longer one.  So an output is refused if it is
computed from an input without a projection in between and is longer along exactly one dimension.  A tensor of constant
length, such as the last states of a convolution, is bounded already.
"""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from kvpass.fx import shapes, walk
from kvpass.fx.op_table import tagged
from kvpass.fx.shapes import expr
from kvpass.fx.walk import is_tensor, name_of, value

_MIXING = tagged("projects", "contracts", "normalizes") | {
    "softmax", "scaled_dot_product_attention", "topk", "scatter"
}  # fmt: skip
"""Operators that compute new features or a selection, so that the result is not their operand rearranged."""


def unread(graph: fx.Graph, read: set[int]) -> list[tuple[fx.Node, str]]:
    """Return the outputs that extend an input, each with the reason of the refusal.

    Args:
        read: the output indices of known caches.
    """
    outputs = [node for index, node in enumerate(walk.results(graph)) if index not in read and _holds_states(node)]
    found = []
    for node in dict.fromkeys(outputs):
        sources = _inputs_of(node)
        if any(shapes.same(value(node).shape, value(source).shape) for source in sources):
            continue
        past = next((source for source in sources if _is_longer(node, source)), None)
        if past is not None:
            found.append((node, f"{past.name!r} grows here, and it is not read as a cache: {_LAYOUT}"))
    return found


_LAYOUT = (
    "caches that are attended to grow by torch.cat([past, new], -2) of [B, H, S, D]; let the model keep them so, or "
    "run it uncompiled"
)


def is_fixed_size_update(node: fx.Node) -> bool:
    """Return whether a tensor is an input of the same shape with some elements replaced: a cache of fixed size."""
    parents = node.all_input_nodes if _holds_states(node) else []
    return any(
        shapes.same(value(node).shape, value(source).shape) for parent in parents for source in _inputs_of(parent)
    )


def _holds_states(node: Any) -> bool:
    """Return whether a node is a floating-point tensor of at least three dimensions, and no input."""
    return _is_state(node) and node.op != "placeholder"


def _inputs_of(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of at least three dimensions that a tensor rearranges or selects from."""
    sources = walk.reach([node], lambda each: () if name_of(each) in _MIXING else each.all_input_nodes)
    return [source for source in sources if source.op == "placeholder" and _is_state(source)]


def _is_state(node: Any) -> bool:
    if not is_tensor(node) or isinstance(value(node), torch.nn.Parameter):
        return False
    return bool(value(node).ndim >= 3 and value(node).is_floating_point())


def _is_longer(node: fx.Node, past: fx.Node) -> bool:
    """Return whether a tensor has the shape of another except for one dimension, which is longer."""
    shape, past_shape = value(node).shape, value(past).shape
    if len(shape) != len(past_shape):
        return False
    diffs = [sympy.simplify(expr(a) - expr(b)) for a, b in zip(shape, past_shape, strict=True) if expr(a) != expr(b)]
    return len(diffs) == 1 and not bool(diffs[0].is_negative)
