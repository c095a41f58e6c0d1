"""Nearest neighbours: of one key in a step and of many in a prompt, by the same cosines."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from kvpass.policies.nearest import BLOCK, nearest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 3, 2 * BLOCK + 1])
def test_the_most_similar_slot_that_holds_a_token(count, dtype):
    drawn = torch.Generator().manual_seed(count)
    key, held = (torch.randn(2, 3, size, 8, generator=drawn).to(dtype) for size in (count, 20))
    position = torch.arange(20).expand(2, 3, 20).clone()
    position[..., 5:9] = -1
    exact = torch.cosine_similarity(key.double()[..., None, :], held.double()[:, :, None], dim=-1)
    best = exact.masked_fill(position[:, :, None] < 0, -torch.inf).max(-1)
    cosine, slot = nearest(key, held, position)
    assert torch.equal(slot, best.indices)
    torch.testing.assert_close(cosine, best.values.float(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 2])
def test_of_equals_the_one_of_lower_position(count):
    held = torch.ones(1, 1, 4, 8)
    assert nearest(held[:, :, :count], held, torch.tensor([[[3, 1, -1, 2]]]))[1].unique().tolist() == [1]


def test_rows_of_nothing_are_like_nothing():
    held, position = (
        torch.stack([torch.zeros(8), torch.ones(8), -torch.ones(8)])[None, None],
        torch.arange(3)[None, None],
    )
    cosine, slot = nearest(torch.zeros(1, 1, 1, 8), held, position)
    assert (cosine.item(), slot.item()) == (0, 0)
    assert nearest(-torch.ones(1, 1, 1, 8), held, position)[1].item() == 2


def test_a_step_goes_through_the_slots_once():
    """Products and norms are sums of one loop: no second one reads the keys."""
    key, held = torch.randn(1, 4, 1, 64), torch.randn(1, 4, 33, 64)
    position = torch.arange(33).expand(1, 4, 33)
    _, codes = run_and_get_code(torch.compile(nearest), key, held, position)
    sums = [loop for loop in codes[-1].split("#pragma GCC ivdep") if "x2<static_cast<int64_t>(64L)" in loop]
    assert len(sums) == 1
    assert "tmp_acc1_vec" in sums[0]


def test_what_a_step_compares_with_is_made_once():
    """The key that goes is not scaled anew, nor its length taken again, for every slot."""
    key, held = torch.randn(1, 4, 1, 64), torch.randn(1, 4, 33, 64)
    _, codes = run_and_get_code(torch.compile(nearest), key, held, torch.arange(33).expand(1, 4, 33))
    (over_slots,) = [loop for loop in codes[-1].split("#pragma GCC ivdep") if "tmp_acc1_vec" in loop]
    assert "sqrt" not in over_slots.partition("vec_reduce_all")[0]
