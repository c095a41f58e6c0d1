"""Prove how the heads of attention calls are sharded over processes.

The graph of one process does not say that other processes have more heads.  Only the placement of DTensors is certain.
So sharding is proven from weights: linear layers compute queries, keys and values, and their weights are sharded by
rows of equal number over one mesh.  Each process then has the heads of its rows, in the order of the ranks.  Heads from
weights that every process has whole are not sharded, nor are heads from plain tensors in a graph without
collectives.  Anything else is refused if the policy reads more than positions.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NoReturn

import torch
import torch.fx as fx

from kvpass.capture.canonical import AttentionSite
from kvpass.errors import ShardingError
from kvpass.fx import op_table, walk
from kvpass.fx.walk import example_value, is_tensor
from kvpass.policies.base import Policy
from kvpass.policies.heads import HeadSharding
from kvpass.torch_private import dynamo, fx_nodes

WHAT_TO_DO = (
    "Shard the layer's query, key and value projections by rows of DTensors, with equally many KV heads in every "
    "process (transformers: DistributedConfig(tp_size=...) that divides them), or take a policy that looks at "
    "positions alone: streaming, window or full"
)
NOT_DECLARED = "and the policy's class does not declare in `shardable` that it reads heads of other processes"
_SAME_WEIGHT = op_table.tagged("keeps", "transposes") | {"to_local"}


@dataclasses.dataclass(frozen=True)
class _ShardOrigin:
    """The placement of the weights that compute heads.

    Attributes:
        kind: "whole" on every process, sharded by "rows", "plain" tensors, an "input" of the graph, or "else".
        mesh: the mesh of the shards.
        description: text for messages.
    """

    kind: Literal["whole", "rows", "plain", "input", "else"]
    mesh: Any = None
    description: str = ""


def processes() -> int:
    """Return the number of processes that could hold a part of a model."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def with_head_sharding(sites: list[AttentionSite], policy: Policy) -> list[AttentionSite]:
    """Return the sites of a graph with `sharding` set to the sharding of their heads.

    Raises:
        ShardingError: heads are sharded, or may be, so that the policy would choose other tokens than in one process.
    """
    if processes() == 1:
        return sites
    for site in sites:
        _check_local(site)
    declared = vars(type(policy)).get("shardable", "never")  # not inherited: a derived class may read more
    if declared == "always":
        return sites
    shardings = [_read_sharding(site, policy) for site in sites]
    first = shardings[0]
    if (
        len({sharding and (sharding.world_size, sharding.group) for sharding in shardings}) > 1
    ):  # they agree on shared budgets
        _refuse_sharding(sites[0], policy, "its layers are sharded over different processes")
    if first is not None and declared == "never":
        share = f"each has {first.heads // first.world_size} of {first.heads} KV heads"
        _refuse_sharding(sites[0], policy, f"{share}, {NOT_DECLARED}")
    return [dataclasses.replace(site, sharding=sharding) for site, sharding in zip(sites, shardings, strict=True)]


def _refuse_sharding(site: AttentionSite, policy: Policy, description: str) -> NoReturn:
    why = f"policy {policy.name!r} with {processes()} processes: {description}. {WHAT_TO_DO}"
    walk.refuse(site.call, why, ShardingError)


def _check_local(site: AttentionSite) -> None:
    """Refuse DTensors as queries, keys or values, because slots are local tensors."""
    for name in ("query", "key", "value"):
        if _placement(example_value(getattr(site, name))):
            why = f"the {name} of this attention call is a DTensor, and slots are of local tensors"
            advice = "have the projections give local ones (use_local_output=True)"
            walk.refuse(site.call, f"{why}; {advice}", ShardingError)


def _read_sharding(site: AttentionSite, policy: Policy) -> HeadSharding | None:
    """Return how the heads of a layer are sharded, None if all are in this process."""
    origins_of = {name: _shard_origins(getattr(site, name)) for name in ("query", "key", "value")}
    all_origins = frozenset().union(*origins_of.values())
    kinds = {origin.kind for origin in all_origins}
    if kinds == {"whole"} or (kinds == {"plain"} and not _communication(site.call.graph)):
        return None
    if kinds == {"rows"} and len({origin.mesh for origin in all_origins}) == 1 and not site.computed:
        return _sharding(site, next(iter(all_origins)).mesh)
    communication = _communication(site.call.graph) or "weights that are sharded over processes"
    weights_of = {name: " and ".join(sorted({o.description for o in each})) for name, each in origins_of.items()}
    described = "; ".join(f"its {name} by {weights or 'no weight'}" for name, weights in weights_of.items())
    problem = f"the sharding of its heads is unknown: the graph has {communication}, {described}"
    _refuse_sharding(site, policy, problem)


def _sharding(site: AttentionSite, mesh: Any) -> HeadSharding | None:
    ranks, heads = mesh.size(), int(example_value(site.grown_key).shape[1])
    if ranks == 1:
        return None
    return HeadSharding(mesh.get_local_rank() * heads, ranks * heads, ranks, str(mesh.get_group().group_name))


def _communication(graph: fx.Graph) -> str:
    """Describe the operations of a graph that share work between processes; "" without any."""
    for node in graph.nodes:
        if fx_nodes.is_collective(node):
            return f"{walk.target_name(node)} in {walk.module_of(node) or 'it'}"
    has_dtensor = any(is_tensor(node) and _placement(example_value(node)) for node in graph.nodes)
    return "tensors that are sharded over processes" if has_dtensor else ""


def _shard_origins(node: fx.Node) -> frozenset[_ShardOrigin]:
    """Return the origins of a query's, key's or value's heads: the last projections before it."""

    def following(each: fx.Node) -> list[fx.Node]:
        if _shard_origin(each):
            return []
        return [parent for parent in each.all_input_nodes if not (walk.is_size(parent) or _is_vector(parent))]

    shard_origins = {origin for origin in map(_shard_origin, walk.reach([node], following)) if origin}
    projections = {origin for origin in shard_origins if origin.kind != "input"}
    return frozenset(projections or shard_origins)  # inputs that only multiply heads, such as cosines, do not count


def _is_vector(node: fx.Node) -> bool:
    """Return whether a node is a weight that scales or shifts features."""
    weight = _weight(node)
    return weight is not None and example_value(weight).ndim < 2


def _shard_origin(node: fx.Node) -> _ShardOrigin | None:
    """Return the origin of the heads that a node computes, None if it only passes heads on."""
    if fx_nodes.is_collective(node):
        return _ShardOrigin("else", description=f"a collective, {walk.target_name(node)}")
    if node.op == "placeholder":
        return _ShardOrigin("input", description=f"an input of the graph, {node.name}")
    if walk.target_name(node) == "to_local":
        return _of_dtensor(node.all_input_nodes[0])
    weights = [weight for weight in map(_weight, node.all_input_nodes) if weight and example_value(weight).ndim > 1]
    weight_origins = {_of_weight(node, weight) for weight in weights}
    if len(weight_origins) > 1:
        return _ShardOrigin("else", description="several weights")
    return next(iter(weight_origins), None)


def _weight(node: fx.Node) -> fx.Node | None:
    """Return the module's tensor that a node copies, views or casts, or None."""
    while walk.target_name(node) in _SAME_WEIGHT and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node if is_tensor(node) and (dynamo.is_of_module(node) or node.op == "get_attr") else None


def _of_dtensor(node: fx.Node) -> _ShardOrigin:
    """Return the origin of features whose local part the graph takes from a DTensor that a module computes."""
    producer = node
    while walk.target_name(producer) == "redistribute":
        producer = producer.all_input_nodes[0]
    return _of_placement(
        example_value(node), example_value(node).ndim - 1, walk.target_name(producer) == "linear", "a DTensor"
    )


def _of_weight(node: fx.Node, weight: fx.Node) -> _ShardOrigin:
    """Return the origin of features that a node computes with a weight."""
    if not _placement(example_value(weight)):
        return _ShardOrigin("plain", description="plain weights")
    factor = node.args[1] if walk.target_name(node) == "linear" else None
    is_local = (
        isinstance(factor, fx.Node) and walk.target_name(factor) == "to_local" and factor.all_input_nodes == [weight]
    )
    return _of_placement(example_value(weight), 0, is_local, f"weights of {tuple(example_value(weight).shape)}")


def _of_placement(tensor: Any, dim: int, of_linear: bool, described: str) -> _ShardOrigin:
    """Return the origin of features that a DTensor has, or that a product with it computes.

    Args:
        dim: the dimension of the features, or of the rows of a weight.
        of_linear: whether a linear layer computes the features of all rows in order.
        described: the tensor, for messages.
    """
    from torch.distributed.tensor import Replicate, Shard

    placement = _placement(tensor)
    if placement is None:
        return _ShardOrigin("else", description=f"{described} with placements none")
    mesh, parts = placement
    if all(type(part) is Replicate for part in parts):
        return _ShardOrigin("whole", description="weights that are replicated")
    # Exactly Shard: a derived placement may order the parts in another way.
    by_rows = of_linear and mesh.ndim == 1 and type(parts[0]) is Shard and parts[0].dim % tensor.ndim == dim
    if by_rows and tensor.shape[dim] % mesh.size() == 0:
        return _ShardOrigin("rows", mesh, "weights that are sharded by rows")
    return _ShardOrigin("else", description=f"{described} with placements {list(parts)}")


def _placement(tensor: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the mesh and the placements of a DTensor, or None for any other tensor."""
    from torch.distributed.tensor import DTensor

    return (tensor.device_mesh, tuple(tensor.placements)) if isinstance(tensor, DTensor) else None
