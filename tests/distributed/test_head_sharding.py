"""Test head sharding, its communication and its refusals; one process acts as one of eight."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import kvpass
from benchmarks.ranks import SHOWN, Model, exchanged, sent, table
from kvpass.cache.model_cache import caches_in
from kvpass.errors import ShardingError
from kvpass.fx import walk
from kvpass.policies import resolve
from kvpass.policies.base import Policy
from kvpass.policies.heads import HeadSharding, gather_heads, head_indices, reduce_heads
from kvpass.policies.tova import Tova
from kvpass.torch_private import fx_nodes
from tests.aligners import random_aligner
from tests.distributed.small import BUDGET, DIM, HEAD, HEADS, KV_HEADS, SPREAD, Small, one_of, run, small

RANKS, RANK, LAYERS = 8, 3, 2

shown_sharding = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12),
    reason="graphs of torch 2.11 do not show how DTensors are sharded, and kvpass refuses them",
)


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with one_of(RANKS, RANK):
        yield


def exchanges(model: nn.Module, **settings: Any) -> list[list[int]]:
    """Return the numbers of elements exchanged in each compiled graph: the prompt's, then the step's."""
    found: list[list[int]] = []

    def inner(gm: fx.GraphModule, examples: Any) -> Any:
        found.append([walk.example_value(node).numel() for node in gm.graph.nodes if fx_nodes.is_collective(node)])
        return gm.forward

    run(model, 2, inner=inner, **settings)
    return found


@shown_sharding
@pytest.mark.few(3)
@pytest.mark.parametrize(("policy", "options"), SHOWN, ids=str)
def test_a_layer_of_a_step_exchanges_once_where_heads_choose_together(policy: str, options: dict[str, Any]) -> None:
    prompt, step = exchanges(small(RANKS), policy=policy, budget=12, **options)
    own = exchanged(resolve(policy, options), Model(LAYERS, HEADS, DIM, 1, 12))
    assert prompt == []  # the model's own exchanges are inside DTensors
    assert step == [own] * LAYERS * (own > 0)


def test_exchanged_bytes_are_those_of_a_ring() -> None:
    assert sent(100, 4, 3, 2) == 1200
    assert sent(100, 4, 3, 8) == 2100
    assert "| tova | 1 | 574.0 | 645.8 |" in table(Model(), [8, 64])


def spreads_of(model: nn.Module) -> list[HeadSharding | None]:
    """Return the head sharding of each layer, from its cache after a prompt."""
    compiled = torch.compile(model, backend=kvpass.backend("random", budget=BUDGET, inner="eager"))
    with torch.no_grad():
        _, pasts = compiled(torch.arange(20)[None])
    return [cache.layout.sharding for cache in caches_in(pasts)]


@shown_sharding
def test_a_layer_knows_its_first_head() -> None:
    spreads = spreads_of(small(RANKS))
    assert [(each.first_head, each.heads, each.world_size) for each in spreads if each] == [
        (RANK, KV_HEADS, RANKS)
    ] * LAYERS


# -- reduction over heads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["mean", "max", "median"])
def test_in_one_process_a_reduction_is_that_of_torch(how: Literal["mean", "max", "median"]) -> None:
    x = torch.rand(2, 3, 4, 5)
    flat = x.flatten(1, 2)
    wanted = {"mean": flat.mean(1), "max": flat.amax(1), "median": flat.median(1).values}[how]
    assert torch.equal(reduce_heads(x, how, None), wanted[:, None])


def test_gathered_heads_stand_at_their_ranks_offset() -> None:
    sharding = HeadSharding(4, 8, 4, dist.group.WORLD.group_name)
    assert gather_heads(torch.tensor([[1.0, 2.0]]), sharding, 1).tolist() == [[0, 0, 0, 0, 1, 2, 0, 0]]
    assert head_indices(torch.zeros(1, 2, 3), sharding).tolist() == [[4], [5]]
    assert HeadSharding.from_text(sharding.to_text()) == sharding


# -- refusals ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plain(Policy):
    """A policy like tova that does not declare whether it is distributed."""

    name: ClassVar[str] = "plain_for_spread"
    statistics: ClassVar[Any] = frozenset({"last"})

    def state(self) -> dict[str, torch.dtype]:
        return {"score": torch.float32}

    def observe(self, tokens: Any, attention: Any) -> Any:
        return {"score": attention.last.mean((1, 2))[:, None]}

    def score(self, tokens: Any) -> Tensor:
        return tokens.state["score"]


@dataclasses.dataclass(frozen=True)
class Derived(Tova):
    """A derived policy, which does not inherit the declaration of its base."""

    name: ClassVar[str] = "derived_for_spread"


ALIGNER = random_aligner("direct", layers=LAYERS, heads=KV_HEADS, dim=HEAD)


@shown_sharding
@pytest.mark.parametrize("policy", [Plain(), Derived(), resolve("kv_align", {"aligner": ALIGNER})])
def test_a_policy_that_says_nothing_of_processes_is_refused(policy: Policy) -> None:
    with pytest.raises(ShardingError, match=r"each has 1 of 8 KV heads.*shardable.*streaming"):
        run(small(RANKS), 1, policy=policy, budget=BUDGET)


@shown_sharding
def test_kv_heads_that_every_process_has_are_refused() -> None:
    plan = {"q": ColwiseParallel(), "o": RowwiseParallel()}
    model = small(RANKS, plan, kv_heads=1)
    found = "its query by weights that are sharded by rows; its key by plain weights"
    for policy in ("h2o", "tova", "random"):
        with pytest.raises(ShardingError, match=found):
            run(model, 0, policy=policy, budget=BUDGET)
    run(model, 1, policy="streaming", budget=BUDGET)


@shown_sharding
def test_layers_that_are_spread_differently_are_refused() -> None:
    model = small()
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = {name: ColwiseParallel(output_layouts=Replicate()) for name in "qkv"}
    for layer, plan in zip(model.layers, (SPREAD, whole), strict=True):
        parallelize_module(layer, mesh, plan, src_data_rank=None)
    with pytest.raises(ShardingError, match="layers are sharded over different processes"):
        run(model, 0, policy="tova", budget=BUDGET)


@pytest.mark.slow
def test_queries_that_are_spread_over_one_latent_cache_are_refused() -> None:
    from tests.distributed.processes import model, spread_out

    sharded = spread_out(model("DeepseekV2"), RANKS)
    for policy in ("h2o", "tova"):
        torch._dynamo.reset()
        compiled = torch.compile(sharded, backend=kvpass.backend(policy, budget=BUDGET, inner="eager"))
        with (
            torch.no_grad(),
            pytest.raises(ShardingError, match="its query by weights that are sharded by rows; its key"),
        ):
            compiled(torch.arange(20)[None])


class ByHand(Small):
    """A model that shards heads without DTensors: only the exchange shows it."""

    def forward(self, ids: Tensor, pasts: Any = None) -> Any:
        logits, grown = super().forward(ids, pasts)
        dist.all_reduce(logits)
        return logits, grown


def test_plain_tensors_beside_an_exchange_are_refused() -> None:
    for policy in ("h2o", "tova", "random"):
        with pytest.raises(ShardingError, match=r"all_reduce.*plain weights"):
            run(ByHand().eval(), 0, policy=policy, budget=BUDGET)
    run(ByHand().eval(), 1, policy="window", budget=BUDGET)


def test_heads_of_plain_tensors_in_a_graph_that_exchanges_nothing_are_all_here() -> None:
    assert spreads_of(small()) == [None] * LAYERS


@shown_sharding
def test_heads_that_every_process_has_whole_are_all_here() -> None:
    plan = {name: ColwiseParallel(output_layouts=Replicate()) for name in "qkv"}
    assert spreads_of(small(RANKS, plan)) == [None] * LAYERS


class Spelled(nn.Module):
    """Decomposed attention of one layer, an operator that DTensors have on some devices only."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, KV_HEADS * HEAD) for _ in range(3))

    def forward(self, x: Tensor, past: Any = None) -> Any:
        q, k, v = (each(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        return torch.softmax(q @ k.transpose(2, 3), -1) @ v, (k, v)


def test_caches_that_are_dtensors_are_refused() -> None:
    plan = {name: ColwiseParallel(use_local_output=False) for name in "qkv"}
    model = parallelize_module(Spelled().eval(), init_device_mesh("cpu", (RANKS,)), plan)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=kvpass.backend("window", budget=BUDGET, inner="eager"))
    with torch.no_grad(), pytest.raises(ShardingError, match="query of this attention call is a DTensor"):
        compiled(torch.rand(1, 20, DIM))
