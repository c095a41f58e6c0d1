"""How the heads of a graph's attention are spread over processes, read off the tensors that make them.

A process of several sees a graph in which nothing says that there are more heads elsewhere.  What is known for sure is
the placement of DTensors, so a spread is proven like this: queries, keys and values are made by linear layers whose
weights are shared out among the processes of one mesh, by rows of equal number.  Then each process has the heads of
its rows, in the order of the ranks.  Heads that are made by weights that every process has whole are not spread, and
neither are those of a graph of plain tensors in which no processes talk to each other.  All else is refused as soon as
a policy looks at more than positions.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
import torch.fx as fx

from kvpass.capture.sites import AttentionSite
from kvpass.errors import ShardingError
from kvpass.fx import walk
from kvpass.fx.walk import is_tensor, value
from kvpass.policies.base import Policy
from kvpass.policies.heads import HeadSharding
from kvpass.torch_private import dynamo, fx_nodes

WHAT_TO_DO = (
    "Share the layer's query, key and value projections out by rows of DTensors, with as many KV heads for every "
    "process (transformers: DistributedConfig(tp_size=...) that divides them), or take a policy that looks at "
    "positions alone: streaming, window or full"
)
UNSAID = "and the policy's class does not say of itself that it asks kvpass.policies.heads about the others (`spreads`)"
_SAME_WEIGHT = frozenset({"to_local", "detach", "to", "float", "contiguous", "t", "transpose", "permute"})


@dataclasses.dataclass(frozen=True)
class _ShardOrigin:
    """Where heads are made: by weights that are whole, shared out by rows, plain tensors, elsewhere, or otherwise.

    Attributes:
        mesh: whom the rows are shared out to.
        what: for messages.
    """

    kind: Literal["whole", "rows", "plain", "given", "else"]
    mesh: Any = None
    what: str = ""


def processes() -> int:
    """How many processes there are that could hold a part of a model."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def with_spreads(sites: list[AttentionSite], policy: Policy, held_apart: bool = True) -> list[AttentionSite]:
    """The sites of a graph, each with where its other heads are.

    Args:
        held_apart: what holds the tokens can do with some of a layer's heads; the eager reference cannot.

    Raises:
        ShardingError: heads are spread, or may be, in a way in which the policy would choose otherwise than in one
            process.
    """
    if processes() == 1:
        return sites
    for site in sites:
        _check_local(site)
    says = vars(type(policy)).get("spreads", "never")  # a class derived from another may look at more than that does
    if says == "always":
        return sites
    found = [_spread(site, policy) for site in sites]
    if any(found):
        _check_alike(sites, found, policy)
        _check_asks(sites[0], found[0], policy, says, held_apart)
    return [dataclasses.replace(site, spread=each) for site, each in zip(sites, found, strict=True)]


def _check_alike(sites: list[AttentionSite], found: list[HeadSharding | None], policy: Policy) -> None:
    """Layers share budgets, which one group of processes has to agree on."""
    groups = {each and (each.ranks, each.group) for each in found}
    if len(groups) > 1:
        raise _refused(sites[0], policy, "the heads of its layers are spread over different processes")


def _check_asks(site: AttentionSite, spread: HeadSharding | None, policy: Policy, says: str, held_apart: bool) -> None:
    if says == "never" and spread is not None:
        here = f"each has {spread.heads // spread.ranks} of {spread.heads} KV heads"
        raise _refused(site, policy, f"{here}, {UNSAID}")
    if not held_apart:
        raise _refused(site, policy, "inner='reference' sees the heads of its own process; run it in one process")


def _refused(site: AttentionSite, policy: Policy, what: str) -> ShardingError:
    line = walk.source_line(site.call)
    return ShardingError(f"{line}: policy {policy.name!r} with {processes()} processes: {what}. {WHAT_TO_DO}")


def _check_local(site: AttentionSite) -> None:
    for name in ("query", "key", "value"):
        if _placed(value(getattr(site, name))):
            raise ShardingError(
                f"{walk.source_line(site.call)}: the {name} of this attention call is a DTensor, and slots are of "
                "local tensors; have the projections give local ones (use_local_output=True)"
            )


def _spread(site: AttentionSite, policy: Policy) -> HeadSharding | None:
    """Where the heads of a layer are, None if all are here."""
    made = {name: _origins(getattr(site, name)) for name in ("query", "key", "value")}
    every = frozenset().union(*made.values())
    kinds = {origin.kind for origin in every}
    if kinds == {"whole"} or (kinds == {"plain"} and not _talks(site.call.graph)):
        return None
    if kinds == {"rows"} and len({origin.mesh for origin in every}) == 1 and not site.computed:
        return _shared_out(site, next(iter(every)).mesh)
    talks = _talks(site.call.graph) or "weights that are shared out among processes"
    told = "; ".join(f"its {name} by {_told(origins)}" for name, origins in made.items())
    raise _refused(site, policy, f"where its heads are cannot be known: the graph has {talks}, {told}")


def _told(origins: frozenset[_ShardOrigin]) -> str:
    return " and ".join(sorted({origin.what for origin in origins})) or "nothing that is a weight"


def _shared_out(site: AttentionSite, mesh: Any) -> HeadSharding | None:
    ranks, here = mesh.size(), int(value(site.grown_key).shape[1])
    if ranks == 1:
        return None
    return HeadSharding(mesh.get_local_rank() * here, ranks * here, ranks, str(mesh.get_group().group_name))


def _talks(graph: fx.Graph) -> str:
    """What in a graph says that processes share work; empty if nothing does."""
    for node in graph.nodes:
        if fx_nodes.is_collective(node):
            return f"{walk.name_of(node)} in {walk.module_of(node) or 'it'}"
    placed = any(is_tensor(node) and _placed(value(node)) for node in graph.nodes)
    return "tensors that are spread over processes" if placed else ""


def _origins(node: fx.Node) -> frozenset[_ShardOrigin]:
    """What makes the heads of a query, key or value: the last projections before it."""
    found, seen, todo = set(), set(), [node]
    while todo:
        here = todo.pop()
        if here in seen:
            continue
        seen.add(here)
        origin = _origin(here)
        if origin is None:
            todo.extend(parent for parent in here.all_input_nodes if not (walk.is_size(parent) or _is_vector(parent)))
        else:
            found.add(origin)
    made = {origin for origin in found if origin.kind != "given"}
    return frozenset(made or found)  # what only multiplies heads, such as cosines, makes none


def _is_vector(node: fx.Node) -> bool:
    """Whether a node is a weight that scales or shifts features, and makes none."""
    weight = _weight(node)
    return weight is not None and value(weight).ndim < 2


def _origin(node: fx.Node) -> _ShardOrigin | None:
    """What a node makes heads by, None if it only passes them on."""
    if fx_nodes.is_collective(node):
        return _ShardOrigin("else", what=f"a collective of their own, {walk.name_of(node)}")
    if node.op == "placeholder":
        return _ShardOrigin("given", what=f"an input of the graph, {node.name}")
    if walk.name_of(node) == "to_local":
        return _of_dtensor(node.all_input_nodes[0])
    weights = [weight for weight in map(_weight, node.all_input_nodes) if weight and value(weight).ndim > 1]
    made = {_of_weight(node, weight) for weight in weights}
    return None if not made else made.pop() if len(made) == 1 else _ShardOrigin("else", what="several weights at once")


def _weight(node: fx.Node) -> fx.Node | None:
    """The module's tensor that a node is, moved or converted."""
    while walk.name_of(node) in _SAME_WEIGHT and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node if is_tensor(node) and (dynamo.is_of_module(node) or node.op == "get_attr") else None


def _of_dtensor(node: fx.Node) -> _ShardOrigin:
    """Of features that a module made as a DTensor and gives as the local part of it."""
    made, placed = node, _placed(value(node))
    while walk.name_of(made) == "redistribute":
        made = made.all_input_nodes[0]
    if _is_whole(placed):
        return _ShardOrigin("whole", what="weights that every process has whole")
    if walk.name_of(made) == "linear" and _is_by(placed, value(node).ndim - 1, value(node)):
        return _ShardOrigin("rows", placed[0], "weights that are shared out by rows")
    return _ShardOrigin("else", what=f"a DTensor that is placed as {list(placed[1]) if placed else 'nothing'}")


def _of_weight(node: fx.Node, weight: fx.Node) -> _ShardOrigin:
    """Of the features that a node makes with a weight."""
    placed = _placed(value(weight))
    if not placed:
        return _ShardOrigin("plain", what="plain weights")
    if _is_whole(placed):
        return _ShardOrigin("whole", what="weights that every process has whole")
    if walk.name_of(node) == "linear" and _is_local_part(node.args[1], weight) and _is_by(placed, 0, value(weight)):
        return _ShardOrigin("rows", placed[0], "weights that are shared out by rows")
    return _ShardOrigin("else", what=f"weights of {tuple(value(weight).shape)} that are placed as {list(placed[1])}")


def _is_local_part(node: Any, weight: fx.Node) -> bool:
    """Whether a node is what this process has of a weight, as it lies there."""
    return isinstance(node, fx.Node) and walk.name_of(node) == "to_local" and node.all_input_nodes == [weight]


def _placed(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    """The mesh and the placements of a DTensor; () for a tensor that is none."""
    from torch.distributed.tensor import DTensor

    return (tensor.device_mesh, tuple(tensor.placements)) if isinstance(tensor, DTensor) else ()  # type: ignore[return-value]


def _is_whole(placed: tuple[Any, tuple[Any, ...]]) -> bool:
    from torch.distributed.tensor import Replicate

    return bool(placed) and all(type(each) is Replicate for each in placed[1])


def _is_by(placed: tuple[Any, tuple[Any, ...]], dim: int, tensor: Any) -> bool:
    """Whether a DTensor is shared out along a dimension among a row of processes, in parts of equal size."""
    from torch.distributed.tensor import Shard

    if not placed or placed[0].ndim != 1 or type(placed[1][0]) is not Shard:
        return False
    return bool(placed[1][0].dim % tensor.ndim == dim and tensor.shape[dim] % placed[0].size() == 0)
