"""Define a model in plain torch with heads sharded by torch's API, and run it; imports no transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import kvpass

DIM, WORDS, HEADS, KV_HEADS, HEAD = 32, 96, 16, 8, 4
PROMPT, STEPS, BUDGET = 20, 8, 10
Past = list[tuple[Tensor, Tensor]]


class Attention(nn.Module):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, n * HEAD) for n in (HEADS, kv_heads, kv_heads))
        self.o = nn.Linear(HEADS * HEAD, DIM, bias=False)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (each(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        causal = past is None
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2)), (k, v)


class Small(nn.Module):
    """Two layers of attention; tokens are their embeddings."""

    def __init__(self, kv_heads: int = KV_HEADS) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, DIM), nn.ModuleList(Attention(kv_heads) for _ in range(2))

    def forward(self, ids: Tensor, pasts: Past | None = None) -> tuple[Tensor, Past]:
        x, grown = self.words(ids), []
        for number, layer in enumerate(self.layers):
            made, past = layer(nn.functional.layer_norm(x, (DIM,)), pasts[number] if pasts else None)
            x = x + made
            grown.append(past)
        return x @ self.words.weight.T, grown


SPREAD = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}


def small(ranks: int = 1, plan: dict[str, Any] | None = None, kv_heads: int = KV_HEADS) -> Small:
    """Return this process's share of a model with fixed weights, whose queries and keys differ clearly."""
    torch.manual_seed(0)
    made = Small(kv_heads).eval()
    for layer in made.layers:
        layer.q.weight.data.mul_(4)
        layer.k.weight.data.mul_(4)
        if ranks > 1:
            mesh = init_device_mesh("cpu", (ranks,))
            parallelize_module(layer, mesh, SPREAD if plan is None else plan, src_data_rank=None)  # no communication
    return made


@torch.no_grad()
def run(model: nn.Module, steps: int = STEPS, **settings: Any) -> tuple[Tensor, list[Tensor]]:
    """Return logits [1, PROMPT + steps, WORDS], and the final tokens of each layer, [1, local heads, n]."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=kvpass.backend(**{"inner": "eager", **settings}))
    ids = torch.randperm(WORDS, generator=torch.Generator().manual_seed(1))[None, : PROMPT + steps]
    logits, pasts = compiled(ids[:, :PROMPT])
    said = [logits]
    for index in range(PROMPT, PROMPT + steps):
        logits, pasts = compiled(ids[:, index : index + 1], pasts)
        said.append(logits)
    return torch.cat(said, 1), [layer.positions for layer in kvpass.inspect(pasts).layers]


@cache
def fake_group(ranks: int, rank: int) -> dist.ProcessGroup:
    """Return the group that acts as one process of several; it returns this process's own data.

    A process makes it once and never destroys it, because torch keeps meshes together with their groups: a mesh of a
    second group would be taken for that of the first.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    return distributed_c10d._get_default_group()


@contextmanager
def one_of(ranks: int, rank: int) -> Iterator[None]:
    """Act as one process of several; before and after, this process is the only one."""
    distributed_c10d._update_default_pg(fake_group(ranks, rank))
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(None)


def work(rank: int, ranks: int, settings: list[dict[str, Any]], folder: str) -> None:
    """Run one process of `torch.multiprocessing.spawn`, and save the results of `run`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    torch.save([run(small(ranks), **each) for each in settings], Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
