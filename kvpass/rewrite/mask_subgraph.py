"""Evaluate the model's own mask on slots.

No formula is recognised.  The subgraph that computes the mask from the key index is cut out and evaluated under `vmap`.
Inside, every slot looks like the one key that was traced, so numeric sizes in the model's code stay valid.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture import sparse_index
from kvpass.capture.key_axis import KeyAxis, MaskContext
from kvpass.errors import UnsupportedGraph
from kvpass.fx import alias, op_table, splicing, walk
from kvpass.fx.shapes import SizeResolver, expr
from kvpass.fx.splicing import Subgraph
from kvpass.fx.walk import example_value


@dataclasses.dataclass(frozen=True)
class PerTokenInput:
    """A tensor with an entry for every token, from which a mask reads the entry of each key's token.

    Attributes:
        node: an input of Dynamo's graph, or a node that the host precomputes from such inputs.
        axis: the dimension that runs over the tokens.
        shape: the shape of one entry, with 1 at `axis`.
    """

    node: fx.Node
    axis: int
    shape: tuple[Any, ...] = dataclasses.field(compare=False)

    def gather(self, tensor: Tensor, indices: Tensor) -> Tensor:
        """Return the entries [B, H', N, ...], without `axis`, at indices [B, H', N] of the padded sequence."""
        moved = tensor.movedim(self.axis, 0)  # [S, ...]
        return moved[indices.clamp(0, moved.shape[0] - 1)]

    @property
    def entry_shape(self) -> tuple[Any, ...]:
        return self.shape[: self.axis] + self.shape[self.axis + 1 :]


@dataclasses.dataclass(frozen=True)
class MaskSubgraph:
    """A mask that is computed from a key's index and the entries of the key's token.

    Attributes:
        subgraph: inputs are the key's index [1], counted from the first key that the model stores, the number of real
            tokens up to it [1, 1], then one tensor for each of `padding`, `entries` and `key_features`.
        padding: inputs that only mark padding; cached tokens are real.
        entries: the other tensors from which it reads an entry for each token.
        host_values: nodes that read all tokens together, such as the amount of padding in a row; `subgraph` binds them.
        key_features: tensors that it reads from the key's stored vectors, see `kvpass.rewrite.computed_keys`.
        query_len: q.
        shifted: whether the model counts keys from the first that it stores; the first node is the index of that key.
        nodes: the nodes that it reads for a layer.
    """

    subgraph: Subgraph
    padding: tuple[PerTokenInput, ...]
    entries: tuple[PerTokenInput, ...]
    host_values: tuple[fx.Node, ...]
    key_features: tuple[fx.Node, ...]
    query_len: Any
    shifted: bool
    nodes: list[fx.Node] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for subgraphs of the same graph that compute the same function of the same entries."""
        return (self.subgraph.key, self.padding, self.entries, self.shifted)

    def on_slots(
        self, index: Tensor, position: Tensor, heads: int, tensors: list[Tensor], key_features: list[Tensor]
    ) -> Tensor:
        """Return the mask of slots, [B, Hkv or 1, G or 1, q, N]; padding counts as missing.

        Args:
            index, position: int64 [B, H', N], in the padded sequence and among the real tokens.
            heads: Hkv.
            tensors: the values of `nodes`.
            key_features: of every slot, each [N, ...].
        """
        start, count = int(self.shifted), len(self.entries)
        first = tensors[0] if self.shifted else 0
        length, inputs, bound = tensors[start], tensors[start + 1 :][:count], tensors[start + 1 + count :]
        entries = [_entries_of_slots(x, index, length, self.query_len) for x in inputs]
        valid = [torch.ones(p.shape, dtype=example_value(p.node).dtype, device=index.device) for p in self.padding]

        def mask_of_slot(index: Tensor, position: Tensor, *values: Tensor) -> Tensor:
            index = index.clamp(min=0)[None]  # free slots also need a valid index
            own_entries = [x.unsqueeze(entry.axis) for entry, x in zip(self.entries, values[:count], strict=True)]
            inputs = (index - first, position[None, None] + 1, *valid, *own_entries, *values[count:])
            mask: Tensor = self.subgraph.run(*inputs, *bound)
            if mask.shape[-1] != 1:
                fixed = "the model fixes the number of keys; let it follow the length of the cache"
                raise UnsupportedGraph(f"the mask of one key has {mask.shape[-1]} columns: {fixed}")
            return mask.squeeze(-1)  # [b, h, q]

        in_dims = (0, 0, *[0] * count, *[None] * len(key_features))
        over_slots = torch.vmap(mask_of_slot, (0, 0, *[0] * (count + len(key_features))))
        masks = torch.vmap(torch.vmap(over_slots, in_dims), in_dims)(index, position, *entries, *key_features)
        return _own_masks(masks, heads).movedim(2, -1)  # from [B, H', N, b, h, q]


def _entries_of_slots(entries: Tensor, index: Tensor, length: Tensor, query_len: int) -> Tensor:
    """Select the entries of slots [B, H', N, ...] among entries [B, H', C + q, ...].

    A chunk is attended to in addition to the slots, N = C + q.  A single token is written to one of them, N = C.
    """
    if index.shape[-1] == entries.shape[2]:
        return entries
    cached, new = entries[:, :, :-query_len], entries[:, :, -query_len:]
    is_new = (index == length).view(*index.shape, *[1] * (entries.ndim - 3))
    return torch.where(is_new, new, cached)


def _own_masks(masks: Tensor, heads: int) -> Tensor:
    """Select each row's and head's own mask.

    The masks are [B, H', N, b, h, ...], where b is 1 or B, and h is 1, Hkv or Hq; the result is [B, Hkv or 1, N,
    G or 1, ...].  The model's code computes all rows and heads at the index of each row and head.
    Only the diagonals are needed, and a compiler computes only these.
    """
    rows, metadata_heads = masks.shape[:2]
    masks = masks[:, :, :, 0] if masks.shape[3] == 1 else masks.diagonal(0, 0, 3).movedim(-1, 0)  # [B, H', N, h, ...]
    assert masks.shape[0] == rows
    if masks.shape[3] == 1:
        return masks
    masks = torch.unflatten(masks, 3, (heads, -1))  # [B, H', N, Hkv, G, ...]
    if metadata_heads == 1:
        return masks[:, 0].movedim(2, 1)
    return masks.diagonal(0, 1, 3).movedim(-1, 1)


def cut_mask(step_gm: fx.GraphModule, mask: fx.Node, sizes: SizeResolver, context: MaskContext) -> MaskSubgraph:
    """Cut the mask out as a function of the key index and of the entries of the key's token.

    Raises:
        UnsupportedGraph: an operation cannot be evaluated for one key; the message names it and its line.
    """
    sparse_indices = sparse_index.sparse_indices(mask)
    subgraph = walk.ancestors(mask, [*context.stored, context.length, *(each.node for each in sparse_indices)])
    index_nodes, alias_sets = [*context.key_indices, *context.inputs], alias.AliasSets(step_gm.graph)
    dependent = alias.dependents(subgraph, index_nodes, alias_sets)
    check_not_overwritten(dependent, subgraph - set(context.inputs), mask, alias_sets)
    key_features = _key_features(step_gm.graph, mask, context.stored, index_nodes)
    cutter = _KeyCutter(step_gm, sizes, context, subgraph, key_features, sparse_indices)
    mask_subgraph = cutter.cut(mask)
    padding = tuple(cutter.entry_of(node, example_value(node).ndim - 1) for node in cutter.padding)
    parts = (tuple(cutter.entries), tuple(cutter.host_values), tuple(key_features))
    return MaskSubgraph(mask_subgraph, padding, *parts, query_len=sizes.query_len, shifted=context.window is not None)


def _key_features(graph: fx.Graph, mask: fx.Node, stored: list[fx.Node], index_nodes: list[fx.Node]) -> list[fx.Node]:
    """Return the last tensors on the way to a mask that depend on stored vectors and no key index."""
    subgraph = walk.ancestors(mask, stored) | set(stored)
    stored_only = alias.dependents(subgraph, stored) - alias.dependents(subgraph, index_nodes)
    stored_only = {node for node in stored_only & subgraph if walk.is_tensor(node)}
    return [
        n for n in graph.nodes if n in stored_only and (n is mask or any(u in subgraph - stored_only for u in n.users))
    ]


def check_not_overwritten(
    moved: set[fx.Node], behind: set[fx.Node], result: fx.Node, alias_sets: alias.AliasSets
) -> None:
    """Refuse in-place writes that a copy of a subgraph would miss.

    Args:
        moved: the nodes that are copied.
        behind: all nodes that the result is computed from.
        alias_sets: the alias sets of the graph.

    Raises:
        UnsupportedGraph: a node writes to the memory of `moved`, or after `result` to the memory of `behind`.
    """
    for writer in (alias.overwriting_node(moved, alias_sets), alias.overwriting_node(behind, alias_sets, result)):
        if writer is not None:
            why = "an input of an attention mask or a rotary embedding, so the computation cannot be moved onto slots"
            walk.refuse(writer, f"{walk.target_name(writer)!r} writes in place to {why}")


class _KeyCutter:
    """Copy the mask's subgraph for one key, with the key index and the cache's length of that key.

    It copies nodes that provably compute slice by slice (`kvpass.capture.key_axis`).  The host precomputes the others.
    """

    def __init__(
        self,
        step_gm: fx.GraphModule,
        sizes: SizeResolver,
        context: MaskContext,
        subgraph: set[fx.Node],
        key_features: list[fx.Node],
        sparse_indices: list[sparse_index.SparseIndex],
    ) -> None:
        self.step_gm, self.sizes, self.context = step_gm, sizes, context
        self.totals = {expr(example_value(node).shape[2]) for node in context.stored}
        self.graph = fx.Graph()
        index, self.count = self.roots = (self.graph.placeholder("index"), self.graph.placeholder("count"))
        self.key_features = key_features
        self.env: dict[fx.Node, Any] = {
            node: self._index_in(example_value(node).dtype, index) for node in context.key_indices
        }
        self.padding, self.entries = [n for n in context.padding if n in subgraph], list[PerTokenInput]()
        self.env.update({node: self.graph.placeholder(node.name) for node in [*self.padding, *key_features]})
        self.env.update({each.node: sparse_index.select_all(each, self.graph) for each in sparse_indices})
        axes = {
            node: next(d for d, size in enumerate(example_value(node).shape) if expr(size) in self.totals)
            for node in key_features
        }
        axes |= {each.node: example_value(each.node).ndim - 1 for each in sparse_indices}
        self.axes = KeyAxis(step_gm.graph, subgraph, sizes, context, axes)
        self.on_features = set(key_features) | alias.dependents(subgraph, [*key_features, *context.stored])
        self.bound, self.host_values = list[fx.Node](), list[fx.Node]()

    def _index_in(self, dtype: torch.dtype, index: fx.Node) -> fx.Node:
        """Return the key index in the dtype in which the model counts keys, which may round it."""
        return index if dtype == torch.int64 else self.graph.call_method("to", (index, dtype))

    def cut(self, mask: fx.Node) -> Subgraph:
        self.graph.output(self.copy(mask))
        axis = self.axes.dependence_of(mask).axis
        if axis is not None and axis != example_value(mask).ndim - 1:
            walk.refuse(mask, "the keys are not the mask's last dimension")
        inputs = [*self.padding, *(entry.node for entry in self.entries), *self.key_features, *self.bound]
        splicing.put_first(self.graph, [*self.roots, *(self.env[node] for node in inputs)])
        return Subgraph(fx.GraphModule(self.step_gm, self.graph), tuple(self.bound))

    def copy(self, node: fx.Node) -> Any:
        """Return the node's copy for one key; each node is copied once."""
        if node not in self.env:
            self.env[node] = self._copy_node(node)
        return self.env[node]

    def _copy_node(self, node: fx.Node) -> Any:
        if walk.is_size(node):
            return 1 if self._counts_keys(node) else self._number_or_bound(node)
        if isinstance(example_value(node), torch.Size):
            return tuple(self._size(node, size) for size in example_value(node))
        keys = self.axes.dependence_of(node)
        if op_table.operator_name(node) == "cumsum" and self._counts_valid(node):
            return self._index_in(example_value(node).dtype, self.count)
        if keys.dependence == "independent":
            return self._bind(node)
        if node in self.context.inputs:
            return self._entry(node, self.context.inputs[node])
        if keys.dependence == "needs_all_tokens":
            return self._precompute(node, keys.axis)
        if keys.dependence == "padded":
            return walk.refuse(node, "a padded tensor is not indexed by the key index")
        return self._copy_per_key(node, by_own_index=keys.dependence == "per_key_lookup")

    def _counts_keys(self, size: Any) -> bool:
        """Return whether a size is the number of keys, which is constant if a layer stores its last tokens only."""
        return self.sizes.is_total(size) or (bool(expr(size).free_symbols) and expr(size) in self.totals)

    def _has_key_count(self, node: fx.Node) -> bool:
        """Return whether a node is the number of keys, or a shape with it."""
        sizes = (
            [node] if walk.is_size(node) else example_value(node) if isinstance(example_value(node), torch.Size) else ()
        )
        return any(map(self._counts_keys, sizes))

    def _size(self, node: fx.Node, size: Any) -> int:
        """Return one of the sizes of a shape, for one key."""
        if self._counts_keys(size):
            return 1
        fixed = None if self.sizes.grows(size) else self.sizes.resolved_size(size)
        if not isinstance(fixed, int):
            walk.refuse(node, "the mask depends on a shape that is not a number")
        return fixed

    def _number_or_bound(self, node: fx.Node) -> Any:
        if self.sizes.grows(node):
            walk.refuse(node, f"the mask uses the cache's length as a size, {example_value(node)}")
        number = self.sizes.resolved_size(node)
        return number if isinstance(number, int) else self._bind(node)

    def _bind(self, node: fx.Node) -> fx.Node:
        self.bound.append(node)
        return self.graph.placeholder(node.name)

    def _entry(self, node: fx.Node, axis: int) -> fx.Node:
        """Add an input with each slot's entry of a tensor that has an entry for every token."""
        self.entries.append(self.entry_of(node, axis))
        return self.graph.placeholder(node.name)

    def entry_of(self, node: fx.Node, axis: int) -> PerTokenInput:
        shape = tuple(
            1 if d == axis else self._fixed_size(node, size) for d, size in enumerate(example_value(node).shape)
        )
        return PerTokenInput(node, axis, shape)

    def _fixed_size(self, node: fx.Node, size: Any) -> Any:
        if self.sizes.grows(size):
            walk.refuse(node, "a tensor grows with the cache along more than one dimension")
        return self.sizes.resolved_size(size)

    def _precompute(self, node: fx.Node, axis: int | None) -> fx.Node:
        """Precompute a node on the host, from the arguments of the call."""
        if node.op == "placeholder":
            walk.refuse(node, f"the mask is computed from {node.name!r}, which grows without an entry for each token")
        problem = f"the attention mask is computed by {walk.target_name(node)!r}, not proven to treat keys one by one"
        if node in self.on_features:
            walk.refuse(node, f"{problem}, from cached vectors")
        if axis is not None:
            if self.context.window is not None:
                walk.refuse(node, f"{problem}, in a layer that stores its last tokens only")
            return self._entry(node, axis)
        if self.sizes.growing_dims(example_value(node)) or self.context.window is not None:
            walk.refuse(node, problem)
        self.host_values.append(node)
        return self._bind(node)

    def _copy_per_key(self, node: fx.Node, by_own_index: bool) -> fx.Node:
        base, is_item = node.args[0], op_table.operator_name(node) == "getitem"
        if is_item and isinstance(base, fx.Node) and self.axes.dependence_of(base).dependence == "padded":
            return self._padded_lookup(node)
        for parent in node.all_input_nodes:
            if self._has_key_count(parent) and not op_table.uses_only_as_size(node, parent):
                walk.refuse(node, "a mask is computed from the number of keys, which is different on slots")
            self.copy(parent)
        env = dict(self.env)
        if by_own_index:  # the copy of the tensor has one entry
            for parent in node.all_input_nodes:
                if parent is not base and self.axes.is_key_index(parent):
                    env[parent] = self.graph.call_function(torch.zeros_like, (self.env[parent],))
        copied = self.graph.node_copy(node, lambda parent: env[parent])
        if op_table.operator_name(node) == "expand":
            copied.args = _expand_arguments(node, copied)
        return copied

    def _padded_lookup(self, node: fx.Node) -> fx.Node:
        """Emit a lookup in a tensor that was padded with a number at its end."""
        base, indices = node.args
        arguments = op_table.named_arguments(base)  # type: ignore[arg-type]
        x, fill = arguments["input"], arguments.get("value")
        if arguments.get("mode", "constant") != "constant" or not isinstance(fill, (int, float, type(None))):
            walk.refuse(node, "a tensor is padded with a value that is not a number")
        if not isinstance(indices, tuple) or len(indices) != example_value(x).ndim or not walk.is_tensor(indices[-1]):
            walk.refuse(node, "a padded tensor is not indexed by the key index")
        if [*arguments["pad"][:1]] != [0] or any(arguments["pad"][2:]):
            walk.refuse(node, "a tensor is not padded at its end")
        *other_indices, last = (self.copy(p) if isinstance(p, fx.Node) else p for p in indices)
        count = self.sizes.resolved_size(example_value(x).shape[-1])
        end = count - 1
        if not isinstance(count, int):  # dynamic: read from the tensor
            count = self.graph.call_method("size", (self.copy(x), -1))
            end = self.graph.call_function(operator.sub, (count, 1))
        clamped = self.graph.call_function(torch.clamp_max, (last, end))
        looked_up = self.graph.call_function(operator.getitem, (self.copy(x), (*other_indices, clamped)))
        in_range = self.graph.call_function(operator.lt, (last, count))
        return self.graph.call_function(torch.where, (in_range, looked_up, fill or 0))

    def _counts_valid(self, node: fx.Node) -> bool:
        """Return whether a node counts the real tokens up to a key, by a running sum over padding marks."""
        arguments, dtype = op_table.named_arguments(node), example_value(node).dtype
        if not op_table.counts_exactly(dtype):  # the sum is rounded on the way, so the model's own code computes it
            return False
        column = walk.chain(arguments["input"], lambda each: op_table.has_tag(each, "keeps"))[-1]
        return column in self.padding and example_value(column).ndim == 2 and arguments.get("dim") in (-1, 1)


def _expand_arguments(node: fx.Node, copied: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a copied expand, with -1 where nothing is expanded: the key dimension has size 1 here."""
    base, *sizes = copied.args
    sizes = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    old_shape, new_shape = example_value(node.args[0]).shape, example_value(node).shape  # type: ignore[arg-type]
    added = len(new_shape) - len(old_shape)
    unchanged = [i >= added and expr(old_shape[i - added]) == expr(size) for i, size in enumerate(new_shape)]
    return (base, *(-1 if same else size for same, size in zip(unchanged, sizes, strict=True)))
