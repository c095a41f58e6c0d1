"""Test that pairs of rotary embeddings are found, and that a kernel's rotation equals the model's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpass.lowering.attend import RotaryPairs, rotary_pairs_of, weights_of

POSITIONS, WIDTH = 7, 12


def angles(width: int) -> tuple[Tensor, Tensor]:
    inverse = 100.0 ** -(torch.arange(0, width, 2) / width)
    phase = torch.arange(POSITIONS)[:, None] * inverse
    return phase.cos(), phase.sin()  # [N, width / 2]


def halves(key: Tensor) -> Tensor:
    """Rotate keys like Llama."""
    cos, sin = (torch.cat([x, x], -1) for x in angles(WIDTH))
    return key * cos + torch.cat([-key[WIDTH // 2 :], key[: WIDTH // 2]], -1) * sin


def neighbours(key: Tensor) -> Tensor:
    """Rotate keys like GPT-J, here only the first 8 dimensions."""
    cos, sin = angles(8)
    even, odd = key[:8:2], key[1:8:2]
    rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([rotated, key[8:].expand(POSITIONS, -1)], -1)


@pytest.mark.parametrize(("rotate", "pairs"), [(halves, RotaryPairs(12, False)), (neighbours, RotaryPairs(8, True))])
def test_pairs_found_in_a_rotation_rotate_as_the_model_does(rotate, pairs):
    seen = rotary_pairs_of(torch.stack([rotate(unit)[3] for unit in torch.eye(WIDTH)]))
    assert seen == pairs
    own, other = weights_of(rotate, pairs, torch.empty(WIDTH))
    key = torch.randn(WIDTH)
    ours = key * own + key[pairs.partner(torch.arange(WIDTH))] * other
    torch.testing.assert_close(ours, rotate(key))


@pytest.mark.parametrize(
    "matrix",
    [
        torch.eye(6),  # mixes nothing
        torch.ones(6, 6),  # mixes everything
        torch.eye(6).roll(1, 0),  # neighbours, but in a ring
        torch.block_diag(torch.eye(2), torch.ones(2, 2).kron(torch.eye(2))),  # only the last four
    ],
)
def test_other_mixtures_are_left_to_the_plain_form(matrix):
    assert rotary_pairs_of(matrix) is None


@pytest.mark.parametrize(
    "pairs", [RotaryPairs(8, False), RotaryPairs(6, True), RotaryPairs(12, False), RotaryPairs(2, True)]
)
def test_partners_are_mutual_and_each_pair_has_one_leader(pairs):
    index = torch.arange(WIDTH)
    partner = pairs.partner(index)
    assert torch.equal(partner[partner], index)
    mixed = partner != index
    assert mixed.sum() == pairs.width
    assert torch.equal(pairs.leads(index)[mixed], ~pairs.leads(index)[partner][mixed])
    assert pairs.leads(index)[~mixed].all()
