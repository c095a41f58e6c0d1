"""Replace arithmetic on the cache's length, a symbolic size that grows, and replace positions by ranks.

    before   past = past_k.size(2)                        after    position = arange(q) + length
             position = arange(past, past + q)
             row = table[past : past + q]                          row = index_select(table, 0, arange(q) + length)

With positions="cache" queries follow the cached tokens, and keys get their rotary embedding when they are read.  First,
every layer's rotary embedding is cut out as a function of a rank, for the pass that attends.

    before   angles = cos(position * inv_freq)            after    ranks = rank_of_first + arange(q)
             query, key = rotate(query, angles), ...                 angles = cos(ranks * inv_freq)

For policies that renumber, position ids count the cached tokens, see `kvpass.rewrite.renumber`.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.slots import next_rank
from kvpass.capture.canonical import attention_calls
from kvpass.capture.key_axis import key_index_aranges
from kvpass.capture.rotary import (
    KEY_ROTATED_BY_OTHERS,
    QUERY_ROTATED_BY_OTHERS,
    ROWS_SHARE_POSITIONS,
    Rotary,
    find_rotary,
    positions_of,
    rotates_each_token_alone,
    rows_come_first,
    strip_reshapes,
)
from kvpass.errors import UnsupportedGraph
from kvpass.fx import alias, op_table, shapes, splicing, walk
from kvpass.fx.walk import example_value
from kvpass.rewrite.context import Lengths, PassRecord, RotaryResults, StepContext
from kvpass.rewrite.renumber import find_readers, fits_step, subtract_by_row
from kvpass.rewrite.rotary_subgraph import cut_rotaries

BOTH_WAYS = "a mask reads the positions through the same operation as the rotary embedding"
_ARITHMETIC = ("compares", "adds", "multiplies", "bounds")
_FUNCTIONS: dict[str, Any] = {
    "Add": operator.add, "Mul": operator.mul, "Max": torch.clamp_min, "Min": torch.clamp_max
}  # fmt: skip


def put_length_on_device(context: StepContext) -> PassRecord:
    """Rewrite the tensors computed from the length, and record the nodes that hold key indices, which masks rewrite."""
    arithmetic = _LengthArithmetic(context)
    lookups = arithmetic.slices()
    key_indices = {
        w: [*key_index_aranges(context.graph.nodes, context.sizes, w), *lookups] for w in set(context.windows)
    }
    arithmetic.positions()
    context.lengths = Lengths(arithmetic.computed, key_indices)
    unchanged = {node.name: "it counts the keys" for nodes in key_indices.values() for node in nodes}
    return PassRecord(arithmetic.rewritten, unchanged)


class _LengthArithmetic:
    """Rewrite the values that a step graph computes from the length.

    Attributes:
        computed: the new nodes that depend on the length, each with its expression.
        rewritten: the names of the rewritten nodes.
    """

    def __init__(self, context: StepContext) -> None:
        self.graph, self.sizes, self.length = context.graph, context.sizes, context.length
        self.number = context.size_nodes.number_or_node
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
            if op_table.operator_name(node) == "arange":
                self._arange_on_length(node)
            elif any(walk.is_tensor(arg) for arg in node.args) and op_table.has_tag(node, *_ARITHMETIC):
                self.rewritten.append(node.name)
                with self.graph.inserting_before(node):
                    node.args = tuple(self._on_length(arg) if arg in growing else arg for arg in node.args)

    def _on_length(self, size: Any) -> Any:
        """Emit nodes that compute a size from the length, and record the last one; return it, or a number."""
        expression = self.sizes.in_length(size)
        result = self._emit(expression)
        if isinstance(result, fx.Node):
            self.computed[result] = expression
        return result

    def _emit(self, part: sympy.Expr) -> Any:
        if part == shapes.LENGTH:
            return self.length
        if part.is_integer and shapes.LENGTH not in part.free_symbols:
            return self.number(self.sizes.resolved_part(part))
        function = _FUNCTIONS.get(part.func.__name__)
        if function is None:
            raise UnsupportedGraph(
                f"position arithmetic {part} on the cache's length is not a sum, product, maximum or minimum"
            )
        result, *terms = sorted(map(self._emit, part.args), key=lambda term: not walk.is_tensor(term))
        for term in terms:
            result = splicing.emit(self.graph, function, result, term, value=example_value(self.length))
        return result

    def slices(self) -> list[fx.Node]:
        """Replace slices of tables whose ends grow by lookups; return the key indices of these lookups."""
        key_indices: list[fx.Node] = []
        for node in list(self.graph.nodes):
            if op_table.operator_name(node) != "getitem" or not walk.is_tensor(node.args[0]):
                continue
            base, parts = node.args[0], op_table.subscript(node)
            growing = self._growing_slices(node, parts)
            if not any(growing) or self.sizes.growing_dims(example_value(base)):
                continue
            with self.graph.inserting_before(node):
                for dim, part in enumerate(parts):
                    if growing[dim]:
                        base, new_indices = self._lookup(base, dim, part.start or 0, example_value(node).shape[dim])
                        key_indices += new_indices
                    elif part != slice(None):
                        subscript = (*[slice(None)] * dim, self._fixed_slice(part))
                        base = splicing.emit(self.graph, operator.getitem, base, subscript)
            self.rewritten.append(node.name)
            node.replace_all_uses_with(base)
        return key_indices

    def _fixed_slice(self, part: slice) -> slice:
        ends = (part.start, part.stop)
        start, stop = (None if end is None else self.number(self.sizes.resolved_size(end)) for end in ends)
        return slice(start, stop)

    def _growing_slices(self, node: fx.Node, parts: tuple[Any, ...]) -> list[bool]:
        """Return for each slice whether an end grows; [False] if a slice cannot become a lookup."""
        if not all(isinstance(part, slice) and part.step is None for part in parts):
            return [False]
        ends = [any(walk.is_size(end) and self.sizes.grows(end) for end in (p.start, p.stop)) for p in parts]
        sizes = [example_value(node).shape[dim] for dim, grows in enumerate(ends) if grows]
        return ends if all(self.sizes.is_total(size) or not self.sizes.grows(size) for size in sizes) else [False]

    def _lookup(self, table: fx.Node, dim: int, start: Any, size: Any) -> tuple[fx.Node, list[fx.Node]]:
        """Replace x[..., start : start + size] by a lookup; return also the nodes that index keys."""
        counts_keys = self.sizes.is_total(size)
        count = 1 if counts_keys else self.number(self.sizes.resolved_size(size))
        indices = example_value(table).new_empty((size,), dtype=torch.int64)
        index = splicing.emit(self.graph, torch.arange, count, value=indices)
        key_indices = [index] if counts_keys else []
        if start != 0:
            index = splicing.emit(self.graph, operator.add, index, self._on_length(start), value=indices)
        return splicing.emit(self.graph, torch.index_select, table, dim, index), key_indices

    def _arange_on_length(self, node: fx.Node) -> None:
        """Rewrite arange(past, past + q) as past + arange(q), in int64 until after the addition."""
        if len(node.args) != 2:
            return
        start, end = node.args
        count = self.sizes.in_length(end) - self.sizes.in_length(start)
        if self.sizes.grows_in(count):
            return
        dtype = example_value(node).dtype
        if count != 1 and not op_table.counts_exactly(dtype):
            walk.refuse(node, f"positions are counted in {dtype}, which rounds them: count them in int64")
        value = example_value(node).new_empty(example_value(node).shape, dtype=torch.int64)
        options: dict[str, Any] = {**node.kwargs, "dtype": torch.int64}
        steps = self.number(self.sizes.resolved_part(count))
        steps = splicing.emit_before(node, torch.arange, steps, value=value, **options)
        with self.graph.inserting_before(node):
            offset = self._emit(self.sizes.in_length(start))
        shifted = splicing.emit_before(node, operator.add, steps, offset, value=value)
        if dtype != torch.int64:
            shifted = splicing.emit_before(node, "to", shifted, dtype, value=example_value(node))
        self.rewritten.append(node.name)
        node.replace_all_uses_with(shifted)


def rank_positions(context: StepContext) -> PassRecord:
    """Replace positions by ranks, and record keys before their rotation.

    Raises:
        UnsupportedGraph: a layer has no rotary embedding, or its positions cannot be replaced.
    """
    if not context.stores_unrotated_keys:
        context.rotations = RotaryResults()
        return PassRecord(left={"keys": "they are stored as attention reads them"})
    alias_sets = alias.AliasSets(context.step_gm.graph)
    rotaries = [_rotary(context, layer, alias_sets) for layer in range(len(context.sites))]
    subgraphs = cut_rotaries(context.step_gm, zip(context.sites, rotaries, strict=True), context.sizes, alias_sets)
    positions = list(
        dict.fromkeys(p for layer, rotary in enumerate(rotaries) for p in _positions(context, layer, rotary))
    )
    position_inputs = [origin for origin in map(strip_reshapes, positions) if origin in context.placeholders]
    replaced = tuple(dict.fromkeys(map(context.placeholders.index, position_inputs)))
    first = _rank_of_first(context)
    for position in positions:
        _replace_by_ranks(context, position, first)
    context.rotations = RotaryResults(subgraphs, [rotary.raw for rotary in rotaries], replaced)
    return PassRecord([position.name for position in positions])


def _rotary(context: StepContext, layer: int, alias_sets: alias.AliasSets) -> Rotary:
    rotary, call = find_rotary(context.sites[layer]), context.sites[layer].call
    if rotary is None:
        walk.refuse(call, "the keys have a rotary embedding in the prompt, but not in this step")
    if not rotates_each_token_alone(rotary, context.sites[layer], alias_sets):
        walk.refuse(call, f"{KEY_ROTATED_BY_OTHERS}; use positions='absolute'")
    return rotary


def _positions(context: StepContext, layer: int, rotary: Rotary) -> list[fx.Node]:
    """Return the positions that rotate the layer's key and query."""
    positions = positions_of(rotary, context.sites[layer])
    if not positions:
        walk.refuse(context.sites[layer].call, f"{QUERY_ROTATED_BY_OTHERS}; use positions='absolute'")
    return positions


def _rank_of_first(context: StepContext) -> fx.Node:
    """Return the node int64 [B] of the first new token's rank, computed before the first layer's step writes."""

    def function(position: Tensor, free: Tensor) -> list[Tensor]:
        return [next_rank(position, free, context.decodes)]

    metadata = [context.slot(0, "position"), context.slot(0, "free")]
    rank = context.compute(function, metadata, context.length.next, "kvpass_first_rank")[0]
    return splicing.with_value(rank, context.empty_of_shape((context.batch,), torch.int64))


def _replace_by_ranks(context: StepContext, position: fx.Node, first: fx.Node) -> None:
    """Replace positions by ranks, live slots + 0, 1, ..., for the nodes that rotate queries and keys."""
    shape, rows, query_len, dtype = (
        context.shape(position),
        context.batch,
        context.query_len,
        example_value(position).dtype,
    )
    along = shapes.token_dim(shape, query_len)
    padded = bool(context.padding_inputs.by_layer[0])
    if rows > 1 and padded and not _may_differ_by_row(context, position):
        walk.refuse(context.sites[0].call, f"{ROWS_SHARE_POSITIONS}; use positions='absolute'")
    users = _rotating_users(context, position)
    valid = [context.inputs.valid(0)] if padded and not context.decodes else []  # padding has no rank

    def function(first: Tensor, *valid: Tensor) -> list[Tensor]:
        steps = [(new.cumsum(-1) - 1).clamp(min=0) for new in valid] or [torch.arange(query_len, device=first.device)]
        ranks = first[:, None] + steps[0]  # [B, q]
        if len(shape) == 1:
            return [ranks[0]]
        full = [1] * len(shape)
        full[0], full[along] = rows, query_len
        return [ranks.view(full).to(dtype)]

    after = max(first, position)  # positions may be an argument
    ranks = context.compute(function, [first, *valid], after.next, f"kvpass_rank_{position.name}")[0]
    for user in users:
        user.replace_input_with(position, splicing.with_value(ranks, example_value(position)))


def _may_differ_by_row(context: StepContext, position: fx.Node) -> bool:
    """Return whether positions have, or may have, a dimension for the rows of the tensor that they rotate."""
    rotated = [node for each in attention_calls(context.sites) for node in (each.query, each.key)]
    return example_value(position).ndim > 1 and all(rows_come_first(position, node) for node in rotated)


def _rotating_users(context: StepContext, position: fx.Node) -> list[fx.Node]:
    """Return the nodes that read positions to rotate queries and keys; masks still compare positions with indices."""
    sites = attention_calls(context.sites)
    calls = {site.call for site in sites}
    masks = {node for site in sites if site.mask for node in walk.ancestors(site.mask, calls)}
    rotating = {node for site in sites for node in walk.ancestors(site.query, calls)}
    users = [user for user in context.graph.nodes if user in position.users]
    if any(user in masks and user in rotating for user in users):
        walk.refuse(context.sites[0].call, f"{BOTH_WAYS}; use positions='absolute'")
    return [user for user in users if user not in masks]


def renumber_ids(context: StepContext) -> PassRecord:
    """Replace position ids by the ids of cached tokens for all nodes that read them.

    Raises:
        UnsupportedGraph: no node can be shown to read position ids.
    """
    if not context.layouts[0].policy.renumbers:
        return PassRecord(left={"position ids": "the policy does not renumber"})
    names, tensors = context.slots[0].names, context.slots[0].tensors()
    seen, length = (tensors[names.index(name)] for name in ("seen", "length"))
    readers = find_readers(context.step_gm, context.sites, context.argument_of, fits_step(seen, length))
    # The first layer's step writes to its slots.
    late = any(context.sites[0].call < reader.node for reader in readers)
    nodes = context.copy_slots(0) if late else context.slot_inputs[0]
    metadata = [nodes[names.index("position")], nodes[names.index("seen")]]
    for i, reader in enumerate(readers):
        inputs = [reader.ids, *metadata]
        function = functools.partial(
            _count_cached, reader.along, context.query_len, context.layouts[0].policy.last_position()
        )
        ids = context.compute(function, inputs, reader.node, f"kvpass_ids_{i}")[0]
        reader.node.replace_input_with(reader.ids, splicing.with_value(ids, example_value(reader.ids)))
    return PassRecord([reader.node.name for reader in readers])


def _count_cached(along: int, query_len: int, last: int, ids: Tensor, position: Tensor, seen: Tensor) -> list[Tensor]:
    """Subtract the number of evicted tokens from the ids of new tokens (see `Reader`), and limit them to `last`."""
    cached = (position[:, 0] >= 0).sum(-1)  # [B]
    rank = cached[:, None] + torch.arange(query_len, device=ids.device)
    shift = (seen - cached)[:, None] + (rank - last).clamp(min=0)  # [B, q]
    return [subtract_by_row(ids, along, shift)]
