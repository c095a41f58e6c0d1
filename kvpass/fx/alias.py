"""Find the nodes of a graph that write to memory, and the nodes that share memory."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from kvpass.fx.op_table import has_tag, leaves, tagged
from kvpass.fx.vmap_regions import MappedRegions
from kvpass.fx.walk import example_value, reach, target_name
from kvpass.torch_private import fx_nodes, tensors


class AliasSets:
    """Groups of nodes that may share memory, as a graph was when this object was made.

    Args:
        aliased: returns the nodes whose memory a node shares; by default the operands of writes and views.
    """

    def __init__(self, graph: fx.Graph, aliased: Callable[[fx.Node], Iterable[fx.Node]] | None = None) -> None:
        self._owner: dict[fx.Node, fx.Node] = {}
        self._writers: dict[fx.Node, list[fx.Node]] = {}
        written = {node: operands for node in graph.nodes if (operands := written_operands(node))}
        storages = {} if aliased else {node: _storages(node) for node in graph.nodes}
        for node in graph.nodes:
            own = aliased(node) if aliased else (*written.get(node, ()), *_viewed_operands(node, storages))
            for parent in own:
                self._unite(self.root(node), self.root(parent))
        for node, operands in written.items():
            for owner in dict.fromkeys(map(self.root, operands)):
                self._writers.setdefault(owner, []).append(node)

    def _unite(self, one: fx.Node, other: fx.Node) -> None:
        """Join two groups; an input of the graph stands for the group if it has one."""
        if one is not other:
            inputs = [node for node in (other, one) if node.op in ("placeholder", "get_attr")]
            owner = inputs[0] if inputs else other
            self._owner[one if owner is other else other] = owner

    def root(self, node: fx.Node) -> fx.Node:
        """Return the node that stands for all nodes that may share memory with a node."""
        while self._owner.get(node, node) is not node:
            node = self._owner[node]
        return node

    def writers(self, node: fx.Node) -> Sequence[fx.Node]:
        """Return the nodes that write in place to the memory of a node, in order."""
        return self._writers.get(self.root(node), ())


def _viewed_operands(node: fx.Node, storages: Mapping[fx.Node, set[int]]) -> Iterator[fx.Node]:
    """Yield the operands that a node is a view of, by its name or by the storages of recorded tensors."""
    if node.args and isinstance(node.args[0], fx.Node) and has_tag(node, "view"):
        yield node.args[0]
    if storages[node]:
        yield from (parent for parent in node.all_input_nodes if not storages[node].isdisjoint(storages[parent]))


def _storages(node: fx.Node) -> set[int]:
    """Return numbers for the storages of a node's fake tensors; none for other values, which may stand for others."""
    example = node.meta.get("example_value")
    parts = example if isinstance(example, (tuple, list)) else (example,)
    return {tensors.storage_number(x) for x in parts if isinstance(x, torch.Tensor) and tensors.is_fake(x)}


def ancestors_with_writes(
    results: Sequence[fx.Node],
    stop: Iterable[fx.Node] = (),
    reader: fx.Node | None = None,
    through: Mapping[fx.Node, fx.Node] | None = None,
    alias_sets: AliasSets | None = None,
) -> set[fx.Node]:
    """Return the results and all nodes that they are computed from, in-place writes included.

    Args:
        stop: nodes at which the walk ends; they are not returned.
        reader: the node that reads the results; later writes do not matter.  The last of the results by default.
        through: for some nodes, the one operand that the walk follows.
        alias_sets: the graph's, if the caller has them.
    """
    alias_sets = alias_sets or AliasSets(results[0].graph)
    last = reader or max(results)

    def following(node: fx.Node) -> list[fx.Node]:
        operands = [through[node]] if through and node in through else node.all_input_nodes
        writers = alias_sets.writers(node)
        return [*operands, *(writer for writer in writers if writer < last)] if writers else operands

    return set(reach(results, following, stop))


def writes(node: fx.Node) -> bool:
    """Return whether a node of Dynamo's graph writes to an argument in place."""
    return bool(written_operands(node))


def written_operands(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node of Dynamo's graph writes to in place.

    The schema of an operator names them.  A function writes to its first argument, or to the tensors in its first list,
    if its name ends with an underscore or it is called with `inplace=True`.  It also writes to arguments passed as
    `out`.
    """
    if node.op not in ("call_function", "call_method"):
        return []
    of_schema = fx_nodes.written_arguments(node)
    if of_schema is not None:
        return of_schema
    name, written = target_name(node), [node.kwargs["out"]] if "out" in node.kwargs else []
    of_operators = node.op == "call_function" and getattr(operator, name, None) is node.target  # and_, or_, not_
    in_place = name.endswith("_") and not name.endswith("__") and not of_operators
    if node.args and (in_place or name in tagged("augments") or _is_called_in_place(node)):
        written.append(node.args[0])
    return [each for each in leaves(written) if isinstance(each, fx.Node)] if written else []


def _is_called_in_place(node: fx.Node) -> bool:
    """Return whether a function gets a true argument `inplace`, by name or by position."""
    index = _index_of_inplace(node.target)
    return node.kwargs.get("inplace") is True or (index is not None and node.args[index : index + 1] == (True,))


@functools.lru_cache(maxsize=1024)
def _index_of_inplace(target: Any) -> int | None:
    """Return the position of a function's parameter `inplace`, or None."""
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a method's name, or a function of torch's own that states no signature
        return None
    return names.index("inplace") if "inplace" in names else None


def writers_to(nodes: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes that write in place to the memory of any of `nodes`, views included, in order."""
    if not nodes:
        return []
    alias_sets = AliasSets(next(iter(nodes)).graph)
    return sorted({writer for node in nodes for writer in alias_sets.writers(node)})


def overwriting_node(nodes: set[fx.Node], alias_sets: AliasSets, since: fx.Node | None = None) -> fx.Node | None:
    """Return the first node outside `nodes` that writes to their memory, after `since` if that is given, or None.

    Such a write means that `nodes` alone do not determine the computed values.
    """
    others = {writer for node in nodes for writer in alias_sets.writers(node)} - nodes
    return min((writer for writer in others if since is None or since < writer), default=None)


def eliminate_dead(graph: fx.Graph, among: set[fx.Node] | None = None) -> None:
    """Remove nodes whose results are not needed.

    An in-place write is needed if a later node reads the memory, and a check of a condition always.  torch.fx's own
    pass removes every write without users and keeps every setitem.

    Args:
        among: the nodes that may be removed; all nodes by default.
    """
    alias_sets = AliasSets(graph)
    needed: set[fx.Node] = set()
    read: set[fx.Node] = set()
    mapped = MappedRegions()
    for node in reversed(graph.nodes):
        owner = alias_sets.root(node)
        stays = among is not None and node not in among
        lasting = stays or node.op in ("placeholder", "output") or fx_nodes.mutates(node)
        lasting = lasting or fx_nodes.has_side_effect(node)
        written = writes(node) and (owner in read or owner.op in ("placeholder", "get_attr"))
        if lasting or written or needed.intersection(node.users):
            needed.add(node)
            read.update(map(alias_sets.root, node.all_input_nodes))
        needed.update(mapped.markers(node, node in needed))
    for node in reversed(list(graph.nodes)):
        if node not in needed and not node.users:
            graph.erase_node(node)


def may_alias(node: fx.Node, parent: fx.Node) -> bool:
    """Return whether the result of a call may share memory with one of its arguments.

    An operator states aliases in its schema; for other calls the fake tensors that Dynamo recorded share storage.  For
    nodes that kvpass inserted, the recorded value may be any tensor of the right shape, so the names of view methods
    count too.
    """
    if fx_nodes.is_operator(node):
        return parent in fx_nodes.aliased_arguments(node)
    result, taken = example_value(node), example_value(parent)
    if isinstance(taken, (torch.SymInt, int)):
        return False
    if not isinstance(result, torch.Tensor) or not isinstance(taken, torch.Tensor):
        return True
    recorded = tensors.is_fake(result) and tensors.is_fake(taken)
    return tensors.share_memory(result, taken) or (not recorded and (writes(node) or has_tag(node, "view")))


def dependents(among: set[fx.Node], roots: Sequence[fx.Node], alias_sets: AliasSets | None = None) -> set[fx.Node]:
    """Return the roots and the nodes of `among` computed from them, including memory that these nodes write to."""
    found, todo = set(roots), list(roots)
    while todo:
        following = [user for user in todo.pop().users if user in among and user not in found]
        for node in filter(writes, list(following)):
            alias_sets = alias_sets or AliasSets(node.graph)
            owner = alias_sets.root(node)
            following += [owner] if owner in among and owner not in found else []
        found.update(following)
        todo += following
    return found
