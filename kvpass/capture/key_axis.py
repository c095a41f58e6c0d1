"""Prove which dimension of each tensor of a mask runs over the keys.

The rewritten step evaluates a mask for one slot at a time.  This is exact for tensors that are computed *slice by
slice*: the part of a key from the parts of the operands of the same key.  `KeyAxis` follows the keys' dimension through
the operators of the table.  The dimension begins at a key index, an input with an entry for every token, or a tensor
computed from stored vectors.  Any other tensor is *precomputed on the host*, by the model's own code from the arguments
of the call.  If it has an entry for every token, the entry of each slot's token is looked up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx

from kvpass.fx import alias, op_table, propagation, walk
from kvpass.fx.shapes import LENGTH, SizeResolver, expr
from kvpass.fx.walk import example_value, is_tensor, operand_of


def key_index_aranges(nodes: Iterable[fx.Node], sizes: SizeResolver, window: int | None) -> list[fx.Node]:
    """Return the aranges that index the keys, past and new, from zero.

    Args:
        window: the number of past tokens that the model stores, if it is fewer than the tokens seen.  The key index is
            then an arange of fixed size, shifted by a size that grows.
    """
    aranges = [n for n in nodes if op_table.operator_name(n) == "arange" and len(n.args) == 1]
    if window is None:
        return [n for n in aranges if sizes.is_total(n.args[0])]
    fixed = [
        n for n in aranges if not sizes.grows(n.args[0]) and sizes.resolved_size(n.args[0]) == window + sizes.query_len
    ]
    return [n for n in fixed if any(_adds_growing_size(user, sizes) for user in n.users)]


def _adds_growing_size(node: fx.Node, sizes: SizeResolver) -> bool:
    """Return whether a node adds a size that grows with the cache."""
    growing = [arg for arg in node.args if walk.is_size(arg) and sizes.grows(arg)]
    return bool(growing) and op_table.operator_name(node) == "add"


def token_inputs(nodes: set[fx.Node], actual: dict[fx.Node, Any], sizes: SizeResolver) -> dict[fx.Node, int]:
    """Return the inputs that may have an entry for every token, each with its dimension over the tokens.

    An input qualifies if it grows along exactly one dimension.  The users prove whether entries belong to tokens: a
    lookup by key index, or an operation that aligns the dimension with the keys.

    Args:
        actual: the value of each placeholder in this call.
    """
    growing = {node: sizes.growing_dims(example_value(node)) for node in nodes if _is_input(node, actual)}
    return {node: dims[0] for node, dims in growing.items() if len(dims) == 1}


def _is_input(node: fx.Node, actual: dict[fx.Node, Any]) -> bool:
    tensor = actual.get(node)
    return node.op == "placeholder" and isinstance(tensor, torch.Tensor) and not isinstance(tensor, torch.nn.Parameter)


Dependence = Literal["independent", "independent_of_padded", "per_key", "per_key_lookup", "padded", "needs_all_tokens"]


@dataclasses.dataclass(frozen=True)
class KeyDependence:
    """The dependence of a tensor on the keys.

    Attributes:
        dependence: one of

            - "independent": it does not depend on the keys;
            - "independent_of_padded": it does not depend on the keys, and is computed from a "padded" tensor;
            - "per_key": one slice for each key, computed from that key alone;
            - "per_key_lookup": the entry of a table at each key's own index;
            - "padded": a tensor without keys, padded to the number of keys;
            - "needs_all_tokens": not proven to be any of these.
        axis: the dimension that follows the keys, None if there is none.
    """

    dependence: Dependence
    axis: int | None

    @property
    def is_on_keys(self) -> bool:
        return self.dependence not in ("independent", "independent_of_padded")


INDEPENDENT, INDEPENDENT_OF_PADDED = KeyDependence("independent", None), KeyDependence("independent_of_padded", None)


@dataclasses.dataclass(frozen=True)
class MaskContext:
    """The nodes and sizes of a step graph from which masks are computed.

    Attributes:
        key_indices: the nodes that hold key indices, see `key_index_aranges`.
        inputs: inputs with an entry for every token, and the tokens' dimension, see `token_inputs`.
        padding: inputs that mark padding, if cached tokens are known to be real.
        stored: the grown keys and values of the site.
        length: the node with the cache's length, a copy of a counter that the step increases.
        length_nodes: nodes of arithmetic on it, see `rewrite.passes.positions`.
        window: how many tokens the model stores, None for all.
    """

    key_indices: list[fx.Node]
    inputs: dict[fx.Node, int]
    padding: list[fx.Node]
    stored: list[fx.Node]
    length: fx.Node
    length_nodes: dict[fx.Node, sympy.Expr]
    window: int | None


class KeyAxis:
    """The dependence on the keys of all tensors that a mask is computed from."""

    def __init__(
        self,
        graph: fx.Graph,
        among: set[fx.Node],
        sizes: SizeResolver,
        context: MaskContext,
        key_features: dict[fx.Node, int],
    ) -> None:
        """
        Args:
            among: the nodes that the mask is computed from.
            key_features: the tensors computed from stored vectors, each with its dimension over the tokens.
        """
        self.sizes, self.lengths = sizes, context.length_nodes
        self.first = sympy.Integer(0) if context.window is None else LENGTH - context.window  # index of the first key
        self.padding = {node for node in context.padding if node in among}
        entries = {node: axis for node, axis in context.inputs.items() if node in among}
        entries |= {
            node: example_value(node).ndim - 1 for node in self.padding if sizes.growing_dims(example_value(node))
        }
        integer_indices = [node for node in context.key_indices if op_table.holds_indices(example_value(node).dtype)]
        self.offsets: dict[fx.Node, sympy.Expr] = dict.fromkeys(integer_indices, sympy.Integer(0))
        roots = {**dict.fromkeys(context.key_indices, 0), **entries, **key_features}
        self.known = {node: KeyDependence("per_key", axis) for node, axis in roots.items()}
        alias_sets = alias.AliasSets(graph)
        self._overwritten = {node for node in among if not among.issuperset(alias_sets.writers(node))}
        for node in graph.nodes:
            if node in among and node not in self.known and not _is_size_or_shape(node):
                self.known[node] = self._find_dependence(node)
                self._record_offset(node)

    def dependence_of(self, node: fx.Node) -> KeyDependence:
        """Return how a node depends on the keys."""
        return self.known.get(node, INDEPENDENT)

    def _find_dependence(self, node: fx.Node) -> KeyDependence:
        growing = self.sizes.growing_dims(example_value(node))
        followers = [operand for operand in node.all_input_nodes if self.dependence_of(operand).is_on_keys]
        if not followers and not growing:
            reads_padded = INDEPENDENT_OF_PADDED in map(self.dependence_of, node.all_input_nodes)
            return INDEPENDENT_OF_PADDED if reads_padded else INDEPENDENT
        axis = self._growing_axis(node)
        if node in self._overwritten:  # a slice of it would lack the writes of other nodes
            return KeyDependence("needs_all_tokens", axis)
        if is_lengthened(node, self.sizes):
            return KeyDependence("padded", axis)
        lookup = propagation.lookup(node)
        if lookup is not None:
            return self._look_up(node, *lookup) or KeyDependence("needs_all_tokens", axis)
        propagated = self._propagate(node, followers) if followers else self._expanded_dim(node)
        if propagated is None or (growing and growing != [propagated]):
            return KeyDependence("needs_all_tokens", axis)
        return KeyDependence("per_key", propagated)

    def _growing_axis(self, node: fx.Node) -> int | None:
        """Return the one dimension that grows, if it has an entry for every key."""
        growing = self.sizes.growing_dims(example_value(node))
        return growing[0] if len(growing) == 1 and self.sizes.is_total(example_value(node).shape[growing[0]]) else None

    def _propagate(self, node: fx.Node, followers: list[fx.Node]) -> int | None:
        """Return the dimension of the result at which the key axes of all operands meet, or None."""
        axes = {operand: axis for operand in followers if (axis := self.dependence_of(operand).axis) is not None}
        if len(axes) < len(followers) or any(
            self.dependence_of(operand).dependence == "padded" for operand in followers
        ):
            return None
        return propagation.common_dim(propagation.propagate_dim(node, operand, axis) for operand, axis in axes.items())

    def _expanded_dim(self, node: fx.Node) -> int | None:
        """Return the dimension along which a tensor that is equal for all keys is expanded to them, or None."""
        if not op_table.has_tag(node, "expands", "fills"):
            return None
        axis, source = self._growing_axis(node), node.args[0] if node.args else None
        if axis is None or not op_table.has_tag(node, "expands") or not is_tensor(source):
            return axis
        source_dim = axis - example_value(node).ndim + example_value(source).ndim
        return axis if source_dim < 0 or expr(example_value(source).shape[source_dim]) == 1 else None

    # -- lookups -------------------------------------------------------------------------------------------------------

    def _look_up(self, node: fx.Node, base: fx.Node, index_of_dim: dict[int, object]) -> KeyDependence | None:
        """Follow a lookup by an index that follows the keys, or of each key's own entry; else return None."""
        indices = {index for index in index_of_dim.values() if isinstance(index, fx.Node) and is_tensor(index)}
        followers = [index for index in indices if self.dependence_of(index).is_on_keys]
        following = {index: axis for index in followers if (axis := self.dependence_of(index).axis) is not None}
        if len(following) < len(followers):
            return None
        dim = propagation.common_dim(propagation.index_axis(node, index, axis) for index, axis in following.items())
        base_keys = self.dependence_of(base)
        if base_keys.dependence == "padded" and not following:
            return INDEPENDENT_OF_PADDED
        if not base_keys.is_on_keys or base_keys.dependence == "padded":
            return None if dim is None else KeyDependence("per_key", dim)
        index = None if base_keys.axis is None else index_of_dim.get(base_keys.axis)
        if not isinstance(index, fx.Node):
            return None
        if base in self.padding and index in self.offsets and not self.is_key_index(index):
            walk.refuse(node, "the mask looks up padding at other indices than the keys' own")
        is_own_entry = self.is_key_index(index) and set(following) == {index}
        return KeyDependence("per_key_lookup", dim) if is_own_entry and dim is not None else None

    def is_key_index(self, index: fx.Node) -> bool:
        """Return whether an index is each key's index in the padded sequence."""
        offset = self.offsets.get(index)
        return offset is not None and bool(sympy.expand(offset - self.first) == 0)

    def _record_offset(self, node: fx.Node) -> None:
        """Record by how much a tensor exceeds the key index."""
        parents = [operand for operand in node.all_input_nodes if operand in self.offsets]
        if (
            len(parents) != 1
            or self.dependence_of(node).dependence != "per_key"
            or not op_table.holds_indices(example_value(node).dtype)
        ):
            return
        name, offset = op_table.operator_name(node), self.offsets[parents[0]]
        if op_table.has_tag(node, "moves", "keeps"):
            self.offsets[node] = offset
        others = [arg for arg in node.args if arg is not parents[0]]
        if name == "add" and len(others) == 1 and not node.kwargs:
            addend = self._length_of(others[0])
            if addend is not None:
                self.offsets[node] = offset + addend

    def _length_of(self, argument: object) -> sympy.Expr | None:
        """Return a number or arithmetic on the cache's length as an expression, else None."""
        if isinstance(argument, fx.Node) and argument in self.lengths:
            return self.lengths[argument]
        return self.sizes.in_length(argument) if isinstance(argument, int) or walk.is_size(argument) else None


def _is_size_or_shape(node: fx.Node) -> bool:
    """Return whether a node stands for a size or a whole shape, which depends on no values."""
    return walk.is_size(node) or isinstance(example_value(node), torch.Size)


def is_lengthened(node: fx.Node, sizes: SizeResolver) -> bool:
    """Return whether a node pads a tensor that does not grow to the number of keys along its last dimension."""
    if (
        op_table.operator_name(node) != "pad"
        or not is_tensor(node)
        or not sizes.is_total(example_value(node).shape[-1])
    ):
        return False
    return not sizes.growing_dims(example_value(operand_of(node)))
