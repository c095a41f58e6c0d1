"""Replace arithmetic on the cache's length, a symbolic size that grows, by arithmetic on a device counter.

before   past = past_k.size(2)                        after    position = arange(q) + length
         position = arange(past, past + q)
         row = table[past : past + q]                          row = index_select(table, 0, arange(q) + length)
"""

from __future__ import annotations

import operator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from kvpass.capture import keys
from kvpass.errors import UnsupportedGraph
from kvpass.fx import op_table, splicing, walk
from kvpass.fx.walk import value
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.logs import Record


def put_length_on_device(step: StepContext) -> Record:
    """Rewrite the tensors computed from the length, and record the nodes that hold key indices, which masks rewrite."""
    arithmetic = _LengthArithmetic(step)
    lookups = arithmetic.slices()
    for window in set(step.windows):
        step.key_indices[window] = [*keys.iotas(step.graph.nodes, step.sizes, window), *lookups]
    arithmetic.positions()
    step.length_nodes = arithmetic.computed
    unchanged = {node.name: "it counts the keys" for nodes in step.key_indices.values() for node in nodes}
    return Record(arithmetic.rewritten, unchanged)


class _LengthArithmetic:
    """Rewrite what a step graph computes from the length.

    Attributes:
        computed: the new nodes that depend on the length, each with its expression.
        rewritten: the names of the rewritten nodes.
    """

    def __init__(self, step: StepContext) -> None:
        self.graph, self.sizes, self.length, self.number = step.graph, step.sizes, step.length, step.size_nodes.of
        self.computed: dict[fx.Node, sympy.Expr] = {}
        self.rewritten: list[str] = []

    def positions(self) -> None:
        """Replace symbolic sizes by the device counter in arithmetic of tensors."""
        for node in list(self.graph.nodes):
            if not walk.is_tensor(node) or node.op == "placeholder":
                continue
            growing = [arg for arg in node.args if walk.is_size(arg) and self.sizes.grows(arg)]
            if not growing:
                continue
            if node.target is torch.arange:
                self._arange_on_length(node)
            elif any(walk.is_tensor(arg) for arg in node.args) and walk.name_of(node) in _ARITHMETIC:
                self.rewritten.append(node.name)
                with self.graph.inserting_before(node):
                    node.args = tuple(self._on_length(arg) if arg in growing else arg for arg in node.args)

    def _on_length(self, size: Any) -> Any:
        made = self.sizes.on_length(size, self.length, self.graph, self.number)
        if isinstance(made, fx.Node):
            self.computed[made] = self.sizes.in_length(size)
        return made

    def slices(self) -> list[fx.Node]:
        """Replace slices of tables whose ends grow by lookups; return the key indices of these lookups."""
        key_indices: list[fx.Node] = []
        for node in list(self.graph.nodes):
            if walk.name_of(node) != "getitem" or not walk.is_tensor(node.args[0]):
                continue
            base, parts = node.args[0], op_table.subscript(node)
            growing = self._growing_slices(node, parts)
            if not any(growing) or self.sizes.grown(value(base)):
                continue
            with self.graph.inserting_before(node):
                for dim, part in enumerate(parts):
                    if growing[dim]:
                        base, new_indices = self._lookup(base, dim, part.start or 0, value(node).shape[dim])
                        key_indices += new_indices
                    elif part != slice(None):
                        base = splicing.emit(
                            self.graph, operator.getitem, base, (slice(None),) * dim + (self._fixed_slice(part),)
                        )
            self.rewritten.append(node.name)
            node.replace_all_uses_with(base)
        return key_indices

    def _fixed_slice(self, part: slice) -> slice:
        ends = (part.start, part.stop)
        start, stop = (None if end is None else self.number(self.sizes.fixed(end)) for end in ends)
        return slice(start, stop)

    def _growing_slices(self, node: fx.Node, parts: tuple[Any, ...]) -> list[bool]:
        """Return for each slice whether an end grows; [False] if a slice cannot become a lookup."""
        if not all(isinstance(part, slice) and part.step is None for part in parts):
            return [False]
        ends = [any(walk.is_size(end) and self.sizes.grows(end) for end in (p.start, p.stop)) for p in parts]
        sizes = [size for size, grows in zip(value(node).shape, ends, strict=False) if grows]
        return ends if all(self.sizes.is_total(size) or not self.sizes.grows(size) for size in sizes) else [False]

    def _lookup(self, table: fx.Node, dim: int, start: Any, size: Any) -> tuple[fx.Node, list[fx.Node]]:
        """Replace x[..., start : start + size] by a lookup; its index counts the keys if the size grows with them."""
        counts_keys = self.sizes.is_total(size)
        index = self.graph.call_function(torch.arange, (1 if counts_keys else self.number(self.sizes.fixed(size)),))
        index.meta["example_value"] = value(table).new_empty((size,), dtype=torch.int64)
        key_indices = [index] if counts_keys else []
        if start != 0:
            offset = self._on_length(start)
            shifted = self.graph.call_function(operator.add, (index, offset))
            shifted.meta["example_value"] = index.meta["example_value"]
            index = shifted
        return splicing.emit(self.graph, torch.index_select, table, dim, index), key_indices

    def _arange_on_length(self, node: fx.Node) -> None:
        """Rewrite arange(past, past + q) as past + arange(q), in int64 until after the addition."""
        if len(node.args) != 2:
            return
        start, end = node.args
        count = self.sizes.in_length(end) - self.sizes.in_length(start)
        if self.sizes.grows_in(count):
            return
        dtype = value(node).dtype
        if count != 1 and not op_table.counts_exactly(dtype):
            raise UnsupportedGraph(
                f"{walk.source_line(node)}: positions are counted in {dtype}, which rounds them: count them in int64"
            )
        with self.graph.inserting_before(node):
            steps = self.graph.call_function(
                torch.arange, (self.number(self.sizes.fixed_part(count)),), {**node.kwargs, "dtype": torch.int64}
            )
            offset = self.sizes.on_length(start, self.length, self.graph, self.number)
            shifted = self.graph.call_function(operator.add, (steps, offset))
            for new in (steps, shifted):
                new.meta.update(node.meta, example_value=value(node).new_empty(value(node).shape, dtype=torch.int64))
            if dtype != torch.int64:
                shifted = self.graph.call_method("to", (shifted, dtype))
                shifted.meta.update(node.meta)
        self.rewritten.append(node.name)
        node.replace_all_uses_with(shifted)


_ARITHMETIC = op_table.tagged("compares", "adds") | {"mul", "clamp", "maximum", "minimum"}
