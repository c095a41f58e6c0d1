"""Rotary embeddings are seen to mix pairs, and applied as a kernel does it turn as the model's code does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpass.graphs import Slice
from kvpass.lowering.rope import Pairs, pairs_of, weights_of
from kvpass.rewrite.rotary_slice import RotarySlice

POSITIONS, WIDTH = 7, 12


def angles(width: int) -> tuple[Tensor, Tensor]:
    inverse = 100.0 ** -(torch.arange(0, width, 2) / width)
    phase = torch.arange(POSITIONS)[:, None] * inverse
    return phase.cos(), phase.sin()  # [N, width / 2]


def halves(key: Tensor) -> Tensor:
    """As Llama turns keys."""
    cos, sin = (torch.cat([x, x], -1) for x in angles(WIDTH))
    return key * cos + torch.cat([-key[WIDTH // 2 :], key[: WIDTH // 2]], -1) * sin


def neighbours(key: Tensor) -> Tensor:
    """As GPT-J does, here in the first 8 numbers only."""
    cos, sin = angles(8)
    even, odd = key[:8:2], key[1:8:2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([turned, key[8:].expand(POSITIONS, -1)], -1)


@pytest.mark.parametrize(("turn", "pairs"), [(halves, Pairs(12, False)), (neighbours, Pairs(8, True))])
def test_what_is_seen_turns_as_the_model_does(turn, pairs):
    seen = pairs_of(torch.stack([turn(unit)[3] for unit in torch.eye(WIDTH)]))
    assert seen == pairs
    own, other = weights_of(turn, pairs, torch.empty(WIDTH))
    key = torch.randn(WIDTH)
    ours = key * own + key[pairs.partner(torch.arange(WIDTH))] * other
    torch.testing.assert_close(ours, turn(key))


@pytest.mark.parametrize(
    "matrix",
    [
        torch.eye(6),  # nothing is mixed
        torch.ones(6, 6),  # everything is
        torch.eye(6).roll(1, 0),  # neighbours, but in a ring
        torch.block_diag(torch.eye(2), torch.ones(2, 2).kron(torch.eye(2))),  # the last four
    ],
)
def test_other_mixtures_are_left_to_the_plain_form(matrix):
    assert pairs_of(matrix) is None


@pytest.mark.parametrize("pairs", [Pairs(8, False), Pairs(6, True), Pairs(12, False), Pairs(2, True)])
def test_partners_are_mutual_and_each_pair_has_one_leader(pairs):
    place = torch.arange(WIDTH)
    partner = pairs.partner(place)
    assert torch.equal(partner[partner], place)
    mixed = partner != place
    assert mixed.sum() == pairs.width
    assert torch.equal(pairs.leads(place)[mixed], ~pairs.leads(place)[partner][mixed])
    assert pairs.leads(place)[~mixed].all()


def sliced(turn, *bound: tuple[int, ...], dtype: torch.dtype = torch.float32) -> RotarySlice:
    """Keys [2, 3, 1, 12] turned by the model's own code, as it is cut out of a graph."""

    def of_positions(position, inverse):
        phase = position[..., None] * torch.cat([inverse, inverse])
        return phase.cos()[:, None].to(dtype), phase.sin()[:, None].to(dtype)

    pieces = [Slice(torch.fx.symbolic_trace(function), ()) for function in (of_positions, turn)]
    likes = [(shape, dtype) for shape in ((2, 3, 1, WIDTH), *bound)]
    return RotarySlice(*pieces, (2, 1), (((WIDTH // 2,), torch.float32),), tuple(likes))


def llama(key, cos, sin):
    half = WIDTH // 2
    return key * cos + torch.cat([-key[..., half:], key[..., :half]], -1) * sin


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_pairs_of_a_model_are_seen(dtype):
    assert sliced(llama, dtype=dtype).pairs() == Pairs(12, False)
    assert sliced(lambda key, cos, sin, scale: llama(key, cos, sin) * scale, (1,), dtype=dtype).pairs()


def normed(key, cos, sin):
    turned = llama(key, cos, sin)
    return turned * torch.rsqrt(turned.square().mean(-1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("turn", "bound"),
    [
        (normed, ()),  # not linear
        (lambda key, cos, sin: llama(key, cos, sin) + 1, ()),
        (lambda key, cos, sin, scale: llama(key, cos, sin) * scale, ((3, 1, WIDTH),)),  # heads differ
        (lambda key, cos, sin, scale: llama(key, cos, sin) * scale, ((2, 1, 1, 1),)),  # rows do
        (lambda key, cos, sin, matrix: llama(key, cos, sin) @ matrix, ((WIDTH, WIDTH),)),
    ],
    ids=["normed", "shifted", "heads", "rows", "multiplied"],
)
def test_what_else_follows_an_embedding_is_left_to_the_plain_form(turn, bound, dtype):
    assert sliced(turn, *bound, dtype=dtype).pairs() is None
