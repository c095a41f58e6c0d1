"""Simplify how models compute masks and the angles of rotary embeddings, which passes compute in other places.

Models multiply frequencies and positions by a product of matrices over a dimension of size 1.  torch 2.11 cannot map
such a product over a symbolic number of positions.  Attention may write its products as equations (torch.einsum).

transformers evaluates mask functions of its users by torch.vmap, for one query and one key at a time.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from kvpass.capture import products
from kvpass.fx import alias, op_table, propagation, splicing, walk
from kvpass.fx.walk import example_value, is_tensor
from kvpass.torch_private import fx_nodes


def multiply_outer_products(graph: fx.Graph) -> None:
    """Replace products of float32 matrices [..., m, 1] and [..., 1, n] by multiplications, with equal results.

    The product of one token's probabilities and value stays, because attention is read from its products.
    """
    for node in filter(_is_outer_product, graph.nodes):
        node.target, node.op = operator.mul, "call_function"


def multiply_equations(graph: fx.Graph) -> None:
    """Replace torch.einsum by a product of matrices, where they are equal: "bhqd,bhkd->bhqk" or "bhqk,bhkd->bhqd".

    The second operand may lack dimensions of the first, as in "bhgqd,bhkd->bhgqk" for groups of query heads, but not
    the rows, which weights lack.
    """
    for node in list(graph.nodes):
        operands, letters, result = op_table.equation(node)
        if len(operands) != 2 or len(letters[0]) < 2:
            continue
        first, second = letters
        batch, row, inner, column = first[:-2], first[-2], first[-1], result[-1:]
        if len({*batch, row, inner, column}) != len(batch) + 3 or result != batch + row + column:
            continue
        shared = "".join(letter for letter in batch if letter in second)
        if second not in (shared + column + inner, shared + inner + column) or shared[:1] != batch[:1]:
            continue
        for dim in (dim for dim, letter in enumerate(batch) if letter not in second):
            operands[1] = splicing.emit_before(node, torch.unsqueeze, operands[1], dim)
        if second == shared + column + inner:
            operands[1] = splicing.emit_before(node, torch.transpose, operands[1], -1, -2)
        node.op, node.target, node.args, node.kwargs = "call_function", operator.matmul, tuple(operands), {}


def _is_outer_product(node: fx.Node) -> bool:
    if op_table.operator_name(node) != "matmul" or len(node.args) != 2 or node.kwargs:
        return False
    one, other = (example_value(argument) if isinstance(argument, fx.Node) else None for argument in node.args)
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or min(one.ndim, other.ndim) < 2:
        return False
    if example_value(node).dtype != torch.float32:  # under autocast the product is rounded
        return False
    if one.dtype != torch.float32 or other.dtype != torch.float32 or one.shape[-1] != 1 or other.shape[-2] != 1:
        return False
    return not products.is_from_product(products.required_tensor(node.args[0]))


def replace_vmap(graph: fx.Graph) -> None:
    """Replace every torch.vmap of a graph by broadcasting, or none if one cannot be replaced.

    Each mapped axis becomes a dimension of ordinary operators.

        increment_nesting(n, 'error')                     r = rows[:, None]
        r = add_batch_dim(rows, 0, 1)                     k = keys[None, :]
        increment_nesting(m, 'error')                     y = r >= k
        k = add_batch_dim(keys, 0, 2)                     w = y.expand(n, m)
        y = r >= k
        z = remove_batch_dim(y, 2, m, 0)
        decrement_nesting()
        w = remove_batch_dim(z, 1, n, 0)
        decrement_nesting()

    The replacement is exact if all mapped values are scalars.  Each level then has its own dimension, and pointwise
    operators and lookups by a full set of indices give equal results on broadcast tensors.  Any other graph stays
    unchanged.
    """
    calls = [node for node in graph.nodes if fx_nodes.is_batching(node)]
    if not calls:
        return
    before = set(graph.nodes)
    levels: list[Any] = [node.args[2] for node in calls if _is_batching_call(node, "_add_batch_dim")]
    broadcaster = _Broadcaster(graph, max(levels, default=0))
    try:
        for node in list(graph.nodes):
            broadcaster.rewrite(node)
    except _NotBroadcastable:
        _erase(graph, set(graph.nodes) - before)
        return
    for node, replacement in broadcaster.results.items():
        node.replace_all_uses_with(replacement)
    _erase(graph, {*calls, *broadcaster.mapped})


class _NotBroadcastable(Exception):
    """An operation may differ on broadcast tensors."""


class _Broadcaster:
    """Rewriter of mapped nodes to tensors with one dimension per level.

    Attributes:
        mapped: the replacement of each mapped node, with a dimension for every level or with none.
        leaving: for each node with some levels removed, the replacement without these, and the sizes of the levels.
        results: the replacement of each node with all levels removed.
    """

    def __init__(self, graph: fx.Graph, levels: int) -> None:
        self.graph, self.levels = graph, levels
        self.mapped: dict[fx.Node, fx.Node] = {}
        self.leaving: dict[fx.Node, tuple[fx.Node, list[Any]]] = {}
        self.results: dict[fx.Node, fx.Node] = {}

    def rewrite(self, node: fx.Node) -> None:
        """Rewrite a node if it is mapped, or raise `_NotBroadcastable`."""
        if _is_batching_call(node, "_add_batch_dim"):
            self._enter(node)
        elif _is_batching_call(node, "_remove_batch_dim"):
            self._leave(node)
        elif self.leaving.keys() & node.all_input_nodes:
            raise _NotBroadcastable
        elif self.mapped.keys() & node.all_input_nodes:
            self._rewrite_scalar(node)

    def _enter(self, node: fx.Node) -> None:
        tensor, dim, level = _arguments(node)
        if dim != 0 or not is_tensor(tensor) or tensor in self.mapped or example_value(tensor).ndim != 1:
            raise _NotBroadcastable
        subscript = tuple(slice(None) if axis == level else None for axis in range(1, self.levels + 1))
        self.mapped[node] = splicing.emit_before(node, operator.getitem, tensor, subscript)

    def _leave(self, node: fx.Node) -> None:
        """Remove the innermost vmap level; its dimension becomes the first one of the result."""
        tensor, level, size, dim = _arguments(node)
        first = level == self.levels and tensor in self.mapped
        inside, sizes = (self.mapped[tensor], []) if first else self.leaving.get(tensor, (None, []))
        if inside is None or dim != 0 or len(sizes) != self.levels - level:
            raise _NotBroadcastable
        self.leaving[node] = inside, [size, *sizes]
        if level == 1:
            inside, sizes = self.leaving.pop(node)
            value = example_value(node)  # all levels, also those that no operand has
            self.results[node] = splicing.emit_before(node, "expand", inside, *sizes, value=value)

    def _rewrite_scalar(self, node: fx.Node) -> None:
        """Rewrite an operation on scalars of the mapped axes."""
        scalars = all(
            example_value(each).ndim == 0 for each in node.all_input_nodes if each in self.mapped and is_tensor(each)
        )
        if not is_tensor(node) or example_value(node).ndim != 0 or not scalars or alias.writes(node):
            raise _NotBroadcastable
        replacement = self._rewrite_lookup(node) if node.target in _LOOKUPS else self._rewrite_pointwise(node)
        # Dtype promotion ranks scalars below tensors with dimensions.
        if example_value(replacement).dtype != example_value(node).dtype:
            raise _NotBroadcastable
        self.mapped[node] = replacement

    def _rewrite_lookup(self, node: fx.Node) -> fx.Node:
        base, indices = _arguments(node)
        indices = indices if isinstance(indices, (tuple, list)) else (indices,)
        if base in self.mapped or len(indices) != example_value(base).ndim or not all(map(_is_scalar, indices)):
            raise _NotBroadcastable
        subscript = tuple(self.mapped.get(each, each) for each in indices)
        return splicing.emit_before(node, operator.getitem, base, subscript)

    def _rewrite_pointwise(self, node: fx.Node) -> fx.Node:
        unmapped = [each for each in node.all_input_nodes if each not in self.mapped and is_tensor(each)]
        makes_scalar = op_table.operator_name(node) in ("new_zeros", "new_ones") and _arguments(node)[1] in ((), [])
        if not (op_table.is_pointwise(node) or makes_scalar) or not all(map(_is_scalar, unmapped)):
            raise _NotBroadcastable
        with self.graph.inserting_before(node):
            copy = self.graph.node_copy(node, lambda each: self.mapped.get(each, each))
        values = {each: example_value(each) for each in copy.all_input_nodes}
        return splicing.with_value(copy, propagation.SmallSizes([copy]).run(copy, values))


_LOOKUPS = (operator.getitem, torch.ops.aten.index, torch.ops.aten.index.Tensor)


def _is_batching_call(node: fx.Node, name: str) -> bool:
    return fx_nodes.is_batching(node) and walk.target_name(node) == name


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.args)


def _is_scalar(node: object) -> bool:
    return is_tensor(node) and example_value(node).ndim == 0


def _erase(graph: fx.Graph, nodes: set[fx.Node]) -> None:
    for node in reversed([each for each in graph.nodes if each in nodes]):
        graph.erase_node(node)
