"""Test a model's rotary embedding on slots: which pairs it mixes, and that it treats rows and queries separately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import kvpass
from kvpass.fx.splicing import Subgraph
from kvpass.lowering.attend import RotaryPairs
from kvpass.lowering.formats import Sections
from kvpass.rewrite.rotary_subgraph import RotarySubgraph, for_one_key

WIDTH = 12


def sliced(
    rotate: Callable[..., Tensor],
    *bound: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    rows: int = 2,
    query_len: int = 1,
) -> RotarySubgraph:
    """Cut the model's rotation of keys [B, 3, q, 12] out of a graph."""

    def of_positions(position, inverse):
        phase = position[..., None] * torch.cat([inverse, inverse])
        return phase.cos()[:, None].to(dtype), phase.sin()[:, None].to(dtype)

    slices = [Subgraph(torch.fx.symbolic_trace(function), ()) for function in (of_positions, rotate)]
    likes = [(shape, dtype) for shape in ((rows, 3, query_len, WIDTH), *bound)]
    return RotarySubgraph(*slices, (rows, query_len), (dtype, dtype), (((WIDTH // 2,), torch.float32),), tuple(likes))


def llama(key, cos, sin):
    half = WIDTH // 2
    return key * cos + torch.cat([-key[..., half:], key[..., :half]], -1) * sin


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_pairs_of_a_model_are_seen(dtype):
    assert sliced(llama, dtype=dtype).pairs() == RotaryPairs(12, False)
    assert sliced(lambda key, cos, sin, scale: llama(key, cos, sin) * scale, (1,), dtype=dtype).pairs()


def normed(key, cos, sin):
    rotated = llama(key, cos, sin)
    return rotated * torch.rsqrt(rotated.square().mean(-1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rotate", "bound"),
    [
        (normed, ()),  # not linear
        (lambda key, cos, sin: llama(key, cos, sin) + 1, ()),
        (lambda key, cos, sin, scale: llama(key, cos, sin) * scale, ((3, 1, WIDTH),)),  # different for each head
        (lambda key, cos, sin, scale: llama(key, cos, sin) * scale, ((2, 1, 1, 1),)),  # different for each row
        (lambda key, cos, sin, matrix: llama(key, cos, sin) @ matrix, ((WIDTH, WIDTH),)),
    ],
    ids=["normed", "shifted", "heads", "rows", "multiplied"],
)
def test_other_operations_after_the_embedding_have_no_pairs(rotate, bound, dtype):
    assert sliced(rotate, *bound, dtype=dtype).pairs() is None


def on_slots(rotary: RotarySubgraph, groups: int, *bound: Tensor) -> Tensor:
    """Rotate keys of 5 slots at random positions, which all heads may share: [B, 3, 5, 12]."""
    drawn = torch.Generator().manual_seed(1)
    rows = 4
    keys = torch.randn(rows, 3, 5, WIDTH, generator=drawn)
    rank = torch.randint(0, 7, (rows, groups, 5), generator=drawn)
    table = rotary.table(7, [torch.linspace(1, 0.1, WIDTH // 2)], keys.device)
    return torch.cat(rotary.on_slots(Sections((keys,)), rank, table, list(bound)), -1)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("groups", [1, 3])
def test_keys_rotated_for_one_row_and_query_are_those_rotated_for_all(queries, groups):
    whole = sliced(llama, rows=4, query_len=queries)
    (alone,) = for_one_key([whole])
    assert alone.key_shape == (1, 3, 1, WIDTH)
    assert all(rows.shape == (7, 1, 1, 1, WIDTH) for rows in alone.table(7, [torch.ones(WIDTH // 2)], "cpu"))
    assert torch.equal(on_slots(alone, groups), on_slots(whole, groups))
    assert alone.pairs() == whole.pairs()


def test_a_slice_for_one_key_includes_what_follows_the_embedding():
    scaled = sliced(lambda key, cos, sin, scale: llama(key, cos, sin) * scale, (3, 1, WIDTH), rows=4)
    alone = for_one_key([sliced(normed, rows=4, query_len=3), scaled, scaled])
    assert [cut.key_shape for cut in alone] == [(1, 3, 1, WIDTH)] * 3
    scale = torch.rand(3, 1, WIDTH)
    assert torch.equal(on_slots(alone[2], 3, scale), on_slots(scaled, 3, scale))


@pytest.mark.parametrize(
    ("rotate", "bound"),
    [
        (lambda key, cos, sin: llama(key, cos, sin) + key.mean(2, keepdim=True), ()),  # mixes queries
        (lambda key, cos, sin: llama(key, cos, sin) - key.flip(0), ()),  # mixes rows
        (lambda key, cos, sin, scale: llama(key, cos, sin) * scale, ((4, 1, 1, 1),)),  # different for each row
        (lambda key, cos, sin, scale: llama(key, cos, sin) * scale, ((3, 3, 1),)),  # different for each query
        (lambda key, cos, sin: llama(key.reshape(4, 3, 3, WIDTH), cos, sin), ()),  # has literal sizes
        (lambda key, cos, sin, size: llama(key, cos, sin) * size, ((),)),  # has a dynamic size
    ],
    ids=["queries mix", "rows mix", "rows differ", "queries differ", "spelled out", "open"],
)
def test_keys_that_are_not_rotated_alone_are_rotated_for_all(rotate, bound):
    whole = sliced(rotate, *bound, rows=4, query_len=3)
    assert for_one_key([whole]) == [whole]


@torch.no_grad()
def test_keys_that_are_rotated_before_heads_come_first() -> None:
    """Test a prompt with as many tokens as heads, where shapes are ambiguous: keys are already rotated."""
    sizes: dict[str, Any] = dict(vocab_size=128, n_embd=32, n_layer=1, n_head=4, n_positions=64, rotary_dim=8)
    model = transformers.GPTJForCausalLM(transformers.GPTJConfig(**sizes)).eval()
    ids = torch.randint(3, 128, (1, 7), generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    run = torch.compile(model, backend=kvpass.backend("streaming", budget=16, inner="eager"))
    logits, cache = [], None
    for start, stop in ((0, 4), (4, 5), (5, 6), (6, 7)):
        out = run(ids[:, start:stop].contiguous(), past_key_values=cache)
        logits, cache = [*logits, out.logits], out.past_key_values
    assert torch.allclose(torch.cat(logits, 1), model(ids).logits, atol=1e-5)
