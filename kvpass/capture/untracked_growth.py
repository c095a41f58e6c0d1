"""Find caches that grow or are written outside of attention as capture reads it.

A cache may be updated outside of the graph: after a graph break, or in an uncompiled function.  Or it may grow in a
way that capture does not read.  Whatever the code and layout, a model takes a tensor and returns a longer one.  So an
output is refused if it is computed from an input without a projection in between and is longer along exactly one
dimension.  A tensor of constant length, such as the last states of a convolution, is bounded.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from kvpass.capture.origins import LAYOUT
from kvpass.fx import shapes, walk
from kvpass.fx.op_table import has_tag
from kvpass.fx.shapes import expr
from kvpass.fx.walk import example_value, is_tensor
from kvpass.torch_private import symbolic_shapes


def untracked_growth(graph: fx.Graph, read: set[int]) -> list[tuple[fx.Node, str]]:
    """Return the outputs that extend an input and are not `read` as caches, each with the reason of the refusal."""
    others = [node for index, node in enumerate(walk.results(graph)) if index not in read and _is_state(node)]
    found = []
    for node in dict.fromkeys(node for node in others if node.op != "placeholder"):
        sources = source_inputs(node)
        if any(shapes.same_shape(example_value(node).shape, example_value(source).shape) for source in sources):
            continue
        past = next((source for source in sources if _is_longer(node, source)), None)
        if past is not None:
            found.append((node, f"{past.name!r} grows here, and it is not read as a cache: {LAYOUT}"))
    return found


def is_fixed_size_update(node: fx.Node) -> bool:
    """Return whether a tensor is an input of the same shape with some elements replaced: a cache of fixed size."""
    parents = node.all_input_nodes if _is_state(node) and node.op != "placeholder" else []
    return any(
        shapes.same_shape(example_value(node).shape, example_value(source).shape)
        for parent in parents
        for source in source_inputs(parent)
    )


def source_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of at least three dimensions that a tensor rearranges or selects from."""
    mixing = ("projects", "contracts", "normalizes", "mixes")
    sources = walk.reach([node], lambda each: () if has_tag(each, *mixing) else each.all_input_nodes)
    return [source for source in sources if source.op == "placeholder" and _is_state(source)]


def _is_state(node: object) -> bool:
    """Return whether a node is a floating-point tensor of at least three dimensions, and not a parameter."""
    if not is_tensor(node) or isinstance(example_value(node), torch.nn.Parameter):
        return False
    return bool(example_value(node).ndim >= 3 and example_value(node).is_floating_point())


def _is_longer(node: fx.Node, past: fx.Node) -> bool:
    """Return whether a tensor has the shape of another except for one dimension, which may be longer."""
    shape, past_shape = example_value(node).shape, example_value(past).shape
    if len(shape) != len(past_shape):
        return False
    others = [sizes for sizes in zip(shape, past_shape, strict=True) if expr(sizes[0]) != expr(sizes[1])]
    return len(others) == 1 and not symbolic_shapes.known_at_most(*others[0])
