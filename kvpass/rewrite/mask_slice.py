"""The model's own mask, asked about slots.

No formula is recognised.  The subgraph that computes the mask from the key index is cut out and fed other tensors under
`vmap`: inside, every slot looks like the one key that was traced, so that whatever sizes the model's code spells out
stay valid.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, NoReturn

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture import sparse_index
from kvpass.capture.keys import KeyAxis
from kvpass.errors import UnsupportedGraph
from kvpass.fx import alias, op_table, splicing, walk
from kvpass.fx.shapes import Sizes, expr
from kvpass.fx.splicing import Slice
from kvpass.fx.walk import value


@dataclasses.dataclass(frozen=True)
class PerTokenInput:
    """What a mask reads of each token: its entry in a tensor that has one for every token.

    Attributes:
        node: the tensor, an input of Dynamo's or what is computed from such beside the graph.
        axis: the dimension that runs over the tokens.
        shape: of one entry, with 1 in that place.
    """

    node: fx.Node
    axis: int
    shape: tuple[Any, ...] = dataclasses.field(compare=False)

    def at(self, full: Tensor, indices: Tensor) -> Tensor:
        """The entries at places [B, H', N] of the padded sequence: [B, H', N, ...], without the axis."""
        moved = full.movedim(self.axis, 0)  # [S, ...]
        return moved[indices.clamp(0, moved.shape[0] - 1)]

    @property
    def rest(self) -> tuple[Any, ...]:
        """The shape without the axis."""
        return self.shape[: self.axis] + self.shape[self.axis + 1 :]

    def one(self, entry: Tensor) -> Tensor:
        """One token's entry as the model's code expects it."""
        return entry.unsqueeze(self.axis)


@dataclasses.dataclass(frozen=True)
class MaskSlice:
    """The mask as a function of the key.

    Attributes:
        slice: inputs are the key's index [1], counted from the first key that the model stores, the number of real
            tokens up to it [1, 1], then one tensor for each of `padding`, `entries` and `facts`.
        padding: inputs that tell padding from real tokens and do nothing else; held tokens are real.
        entries: what else it reads of each token.
        host_input: what it reads of all tokens together, such as how many of a row are padding; the slice binds it.
        facts: what it reads of the key's stored rows, see `kvpass.rewrite.computed_keys`.
    """

    slice: Slice
    padding: tuple[PerTokenInput, ...]
    entries: tuple[PerTokenInput, ...]
    host_input: tuple[fx.Node, ...]
    facts: tuple[fx.Node, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for slices that compute the same; those of the same entries, in the same graph."""
        return (self.slice.key, self.padding, self.entries)

    def on_slots(
        self,
        index: Tensor,
        position: Tensor,
        first: Tensor | int,
        heads: int,
        entries: list[Tensor],
        bound: list[Tensor],
        facts: list[Tensor],
    ) -> Tensor:
        """The mask of slots: index [B, H', N] -> [B, Hkv or 1, G or 1, q, N]; padding counts as absent.

        Args:
            position: int64 [B, H', N], the places among the real tokens.
            first: the place of the first key that the model stores, a number.
            entries: of every slot, each [B, H', N, ...], see `PerTokenInput.at`.
            facts: of every slot, each [N, ...].
        """
        valid = [torch.ones(p.shape, dtype=value(p.node).dtype, device=index.device) for p in self.padding]
        count = len(entries)

        def one(place: Tensor, position: Tensor, *read: Tensor) -> Tensor:
            place = place.clamp(min=0)[None]  # free slots look up something too
            looked_up = [entry.one(x) for entry, x in zip(self.entries, read[:count], strict=True)]
            given = (place - first, position[None, None] + 1, *valid, *looked_up, *read[count:])
            mask: Tensor = self.slice.module(*given, *bound)
            return mask.squeeze(-1) if mask.shape[-1] == 1 else _refuse_width(mask)  # [b, h, q]

        by_row = (0, 0, *[0] * count, *[None] * len(facts))
        along = torch.vmap(one, (0, 0, *[0] * (count + len(facts))))
        inner = torch.vmap(torch.vmap(along, by_row), by_row)(index, position, *entries, *facts)
        return _by_row_and_head(inner, heads).movedim(2, -1)  # from [B, H', N, b, h, q]


def _refuse_width(mask: Tensor) -> Tensor:
    raise UnsupportedGraph(f"the attention mask of one key has {mask.shape[-1]} columns: it spells its length out")


def _by_row_and_head(inner: Tensor, heads: int) -> Tensor:
    """[B, H', N, b, h, ...] with b in (1, B) and h in (1, Hkv, Hq) -> [B, Hkv or 1, N, G or 1, ...].

    The rows and heads that the model's code made inside and those that the slots have outside are the
    same ones, so only the diagonals are taken; a compiler computes no more than those.
    """
    rows, groups = inner.shape[:2]
    inner = inner[:, :, :, 0] if inner.shape[3] == 1 else inner.diagonal(0, 0, 3).movedim(-1, 0)  # [B, H', N, h, ...]
    assert inner.shape[0] == rows
    if inner.shape[3] == 1:
        return inner
    inner = torch.unflatten(inner, 3, (heads, -1))  # [B, H', N, Hkv, G, ...]
    if groups == 1:
        return inner[:, 0].movedim(2, 1)
    return inner.diagonal(0, 1, 3).movedim(-1, 1)


@dataclasses.dataclass(frozen=True)
class MaskContext:
    """What a step graph has that masks are computed from.

    Attributes:
        counts: the key indices, see `kvpass.capture.tokens.iotas`.
        inputs: inputs with an entry for every token, and its dimension, see `kvpass.capture.tokens.token_inputs`.
        padding: those that tell padding from real tokens, if held tokens are known to be real.
        stored: the grown keys and values of the site.
        lengths: nodes of arithmetic on the cache's length, see `put_length_on_device`.
        first: the place of the first key that the model stores.
        last: how many tokens the model stores, None for all.
    """

    counts: list[fx.Node]
    inputs: dict[fx.Node, int]
    padding: list[fx.Node]
    stored: list[fx.Node]
    lengths: dict[fx.Node, sympy.Expr]
    first: sympy.Expr
    last: int | None


def cut_mask(gm: fx.GraphModule, mask: fx.Node, sizes: Sizes, around: MaskContext) -> MaskSlice:
    """Cut the mask out as a function of the key index, and of what belongs to the key's token.

    Raises:
        UnsupportedGraph: it cannot be had for one key, by name and line.
    """
    chosen = sparse_index.find(mask)
    behind = walk.ancestors(mask, [*around.stored, *(each.node for each in chosen)])
    roots = [*around.counts, *around.inputs]
    moved = alias.dependent(gm.graph, behind, roots)
    check_not_overwritten(moved, behind - set(around.inputs), mask)
    facts = _facts(gm.graph, mask, around.stored, roots)
    cutter = _KeyCutter(gm, sizes, around, behind, facts, chosen)
    made = cutter.cut(mask)
    padding = tuple(cutter.entry_of(node, value(node).ndim - 1) for node in cutter.padding)
    return MaskSlice(made, padding, tuple(cutter.entries), tuple(cutter.host_input), tuple(facts))


def _facts(graph: fx.Graph, mask: fx.Node, stored: list[fx.Node], roots: list[fx.Node]) -> list[fx.Node]:
    """The last tensors on the way to a mask that are computed from stored rows and from no key index."""
    behind = walk.ancestors(mask, stored) | set(stored)
    stored_only = alias.dependent(graph, behind, stored) - alias.dependent(graph, behind, roots)
    stored_only = {node for node in stored_only & behind if walk.is_tensor(node)}
    return [
        n for n in graph.nodes if n in stored_only and (n is mask or any(u in behind - stored_only for u in n.users))
    ]


def check_not_overwritten(moved: set[fx.Node], behind: set[fx.Node], result: fx.Node) -> None:
    """Refuse writes in place that a copy of `moved` would miss, or that come after what is read of `behind`."""
    for writer in (alias.overwritten(moved), alias.overwritten(behind, since=result)):
        if writer is not None:
            raise UnsupportedGraph(
                f"{walk.source_line(writer)}: {walk.name_of(writer)!r} writes in place to what an attention mask "
                "or a rotary embedding is computed from, and such a computation cannot be moved onto slots"
            )


class _KeyCutter:
    """Copies the mask's subgraph, with the key index, and the cache's length standing at one key.

    What is proven to be made slice by slice is copied (`kvpass.capture.keys`); what is not is computed beside the
    graph, and each slot's entry is looked up if it has one.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        sizes: Sizes,
        around: MaskContext,
        behind: set[fx.Node],
        facts: list[fx.Node],
        chosen: list[sparse_index.SparseIndex],
    ) -> None:
        self.gm, self.sizes, self.around = gm, sizes, around
        self.totals = {expr(value(node).shape[2]) for node in around.stored}
        self.graph = fx.Graph()
        index, self.count = self.roots = (self.graph.placeholder("index"), self.graph.placeholder("count"))
        self.facts = facts
        self.env: dict[fx.Node, Any] = {node: self._as(value(node).dtype, index) for node in around.counts}
        self.padding, self.entries = [n for n in around.padding if n in behind], list[PerTokenInput]()
        self.env.update({node: self.graph.placeholder(node.name) for node in [*self.padding, *facts]})
        self.env.update({each.node: sparse_index.select_all(each, self.graph) for each in chosen})
        axes = {node: self._axis_of(node) for node in facts}
        axes |= {each.node: value(each.node).ndim - 1 for each in chosen}
        given = {node: axis for node, axis in around.inputs.items() if node in behind}
        self.axes = KeyAxis(
            gm.graph, behind, sizes, around.counts, given, self.padding, axes, around.lengths, around.first
        )  # fmt: skip
        self.on_fact = set(facts) | alias.dependent(gm.graph, behind, [*facts, *around.stored])
        self.bound, self.host_input = list[fx.Node](), list[fx.Node]()

    def _as(self, dtype: torch.dtype, index: fx.Node) -> fx.Node:
        """An int64 index in the dtype of the model's own, which may round it."""
        return index if dtype == torch.int64 else self.graph.call_method("to", (index, dtype))

    def _axis_of(self, fact: fx.Node) -> int:
        return next(d for d, size in enumerate(value(fact).shape) if expr(size) in self.totals)

    def cut(self, mask: fx.Node) -> Slice:
        made = self.copy(mask)
        self._check_axis(mask)
        self.graph.output(made)
        inputs = [*self.padding, *(entry.node for entry in self.entries), *self.facts, *self.bound]
        splicing.put_first(self.graph, [*self.roots, *(self.env[node] for node in inputs)])
        return Slice(fx.GraphModule(self.gm, self.graph), tuple(self.bound))

    def _check_axis(self, mask: fx.Node) -> None:
        """The keys must lie along the mask's last dimension."""
        axis = self.axes.of(mask).axis
        if axis is not None and axis != value(mask).ndim - 1:
            raise UnsupportedGraph(f"{walk.source_line(mask)}: the keys are not the mask's last dimension")

    def copy(self, node: fx.Node) -> Any:
        """The node's copy, for one key."""
        if node not in self.env:
            self.env[node] = self._copied(node)
        return self.env[node]

    def _copied(self, node: fx.Node) -> Any:
        if walk.is_size(node):
            return 1 if self.sizes.is_total(node) or self.spells_total(node) else self._number_or_bound(node)
        if isinstance(value(node), torch.Size):
            return tuple(self._size(node, size) for size in value(node))
        followed = self.axes.of(node)
        if op_table.known_name(node) == "cumsum" and self._counts_valid(node):
            return self._as(value(node).dtype, self.count)
        if followed.way == "free":
            return self._bind(node)
        if node in self.around.inputs:
            return self._entry(node, self.around.inputs[node])
        if followed.way == "host_precomputed":
            return self._beside(node, followed.axis)
        if followed.way == "lengthened":
            return self._refuse(node, "a lengthened tensor is not looked up by a key index")
        return self._sliced(node, by_place=followed.way == "own entry")

    def _size(self, node: fx.Node, size: Any) -> int:
        """One of the sizes of a shape."""
        if self.sizes.is_total(size) or (expr(size).free_symbols and expr(size) in self.totals):
            return 1
        fixed = None if self.sizes.grows(size) else self.sizes.fixed(size)
        return fixed if isinstance(fixed, int) else self._refuse(node, "the mask is made of a shape that is no number")

    def _number_or_bound(self, node: fx.Node) -> Any:
        number = self.number(node)
        return number if isinstance(number, int) else self._bind(node)

    def _bind(self, node: fx.Node) -> fx.Node:
        self.bound.append(node)
        return self.graph.placeholder(node.name)

    def _entry(self, node: fx.Node, axis: int) -> fx.Node:
        """Each slot's entry in a tensor that has one for every token."""
        self.entries.append(self.entry_of(node, axis))
        return self.graph.placeholder(node.name)

    def entry_of(self, node: fx.Node, axis: int) -> PerTokenInput:
        shape = tuple(1 if d == axis else self._fixed(node, size) for d, size in enumerate(value(node).shape))
        return PerTokenInput(node, axis, shape)

    def _fixed(self, node: fx.Node, size: Any) -> Any:
        if self.sizes.grows(size):
            self._refuse(node, "it grows with the cache along more than one dimension")
        return self.sizes.fixed(size)

    def _beside(self, node: fx.Node, axis: int | None) -> fx.Node:
        """What is computed beside the graph, from the arguments of the call."""
        if node.op == "placeholder":
            self._refuse(node, f"the mask is computed from {node.name!r}, which grows and has no entry for each token")
        what = f"the attention mask is computed by {walk.name_of(node)!r}, not proven to treat keys one by one"
        if node in self.on_fact:
            self._refuse(node, f"{what}, from what the cache holds")
        if axis is not None:
            if self.around.last is not None:
                self._refuse(node, f"{what}, in a layer that stores its last tokens only")
            return self._entry(node, axis)
        if self.sizes.grown(value(node)) or self.around.last is not None:
            self._refuse(node, what)
        self.host_input.append(node)
        return self._bind(node)

    def _refuse(self, node: fx.Node, why: str) -> NoReturn:
        raise UnsupportedGraph(f"{walk.source_line(node)}: {why}")

    def _sliced(self, node: fx.Node, by_place: bool) -> fx.Node:
        base = node.args[0]
        if walk.name_of(node) == "getitem" and isinstance(base, fx.Node) and self.axes.of(base).way == "lengthened":
            return self.filled(node)
        for parent in node.all_input_nodes:
            self.copy(parent)
        there = dict(self.env)
        if by_place:  # a tensor of one entry is at hand
            for parent in node.all_input_nodes:
                if parent is not base and self.axes.is_key_index(parent):
                    there[parent] = self.graph.call_function(torch.zeros_like, (self.env[parent],))
        copied = self.graph.node_copy(node, lambda parent: there[parent])
        if walk.name_of(node) == "expand":
            copied.args = _expanded(node, copied)
        return copied

    def spells_total(self, node: fx.Node) -> bool:
        """Whether a size is the number of keys, which stays the same where the model stores the last few only."""
        return bool(expr(node).free_symbols) and expr(node) in self.totals

    def filled(self, node: fx.Node) -> fx.Node:
        """A lookup in a tensor that was lengthened with some number."""
        base, indices = node.args
        given = op_table.signature(_pad, base)  # type: ignore[arg-type]
        x, filling = given["input"], given["value"]
        if given["mode"] != "constant" or not isinstance(filling, (int, float, type(None))):
            self._refuse(node, "a tensor is lengthened with something else than a number")
        if not isinstance(indices, tuple) or len(indices) != value(x).ndim or not walk.is_tensor(indices[-1]):
            self._refuse(node, "a lengthened tensor is not looked up by a key index")
        if [*given["pad"][:1]] != [0] or any(given["pad"][2:]):
            self._refuse(node, "a tensor is lengthened elsewhere than at its end")
        *others, last = (self.copy(p) if isinstance(p, fx.Node) else p for p in indices)
        count = self.sizes.fixed(value(x).shape[-1])
        end = count - 1
        if not isinstance(count, int):  # open: it is asked of the tensor
            count = self.graph.call_method("size", (self.copy(x), -1))
            end = self.graph.call_function(operator.sub, (count, 1))
        inside = self.graph.call_function(torch.clamp_max, (last, end))
        found = self.graph.call_function(operator.getitem, (self.copy(x), (*others, inside)))
        within = self.graph.call_function(operator.lt, (last, count))
        return self.graph.call_function(torch.where, (within, found, filling or 0))

    def _counts_valid(self, node: fx.Node) -> bool:
        """A running sum over an input that tells padding, which counts the real tokens up to a key.

        A sum in half precision is rounded on the way, so that the model's own code has to compute it.
        """
        given, dtype = op_table.bound(node), value(node).dtype
        if not op_table.counts_exactly(dtype):
            return False
        column = given.get("input")
        while isinstance(column, fx.Node) and op_table.known_name(column) in op_table.SAME_VALUE:
            column = column.args[0]
        return column in self.padding and value(column).ndim == 2 and given.get("dim") in (-1, 1)

    def number(self, node: fx.Node) -> Any:
        if self.sizes.grows(node):
            self._refuse(node, f"the mask uses the cache's length as a size, {value(node)}")
        return self.sizes.fixed(node)


def _pad(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> None:
    """The signature of torch.nn.functional.pad."""


def _expanded(node: fx.Node, copied: fx.Node) -> tuple[Any, ...]:
    """The arguments of a copied expand with -1 where nothing is expanded: the key dimension is one long here."""
    base, *sizes = copied.args
    sizes = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    before, after = value(node.args[0]).shape, value(node).shape  # type: ignore[arg-type]
    added = len(after) - len(before)
    kept = [i >= added and expr(before[i - added]) == expr(size) for i, size in enumerate(after)]
    return (base, *(-1 if same else size for same, size in zip(kept, sizes, strict=True)))
