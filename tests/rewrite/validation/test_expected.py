"""Test attention in double precision, and the tolerance that follows from dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpass.rewrite.validation.expected import ExactAttention, attend_exactly, equal_up_to_rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_tolerance_follows_from_the_dtype(dtype: torch.dtype) -> None:
    """Check that attention by any kernel is within the tolerance, and a scale off by 200 units is not."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, n, 16).to(dtype) for heads, n in ((4, 3), (2, 40), (2, 40)))
    call = dict(query=query, key=key, value=value, mask=None, scale=0.25)
    exact = attend_exactly(call)

    def excess(factor: float, spelled: Any = None) -> float:
        attended = torch.ops.kvpass.attention.default(
            query, key, value, None, None, 0.25 * factor, **dict.fromkeys(SPELLED, spelled)
        )
        return float(exact.excess(attended))

    assert excess(1) < 1
    assert excess(1, dtype) < 1
    assert excess(1 + 200 * torch.finfo(dtype).eps) > 1


LOWEST = torch.finfo(torch.float32).min
SPELLED = dict(product_dtype=torch.float32, logit_dtype=torch.float32, output_dtype=torch.float32)
HALF = dict.fromkeys(SPELLED, torch.bfloat16)


@pytest.mark.parametrize("low", [None, -torch.inf, LOWEST, -1e9, -1e4])
@pytest.mark.parametrize("dtypes", [{}, SPELLED, HALF], ids=["library", "spelled", "spelled in half precision"])
@pytest.mark.parametrize("fills", [False, True])
def test_a_query_that_sees_no_key_is_compared_as_well(low: float | None, dtypes: Any, fills: bool) -> None:
    """Check a query without visible keys: it attends to hidden keys or gives zero; NaN is not compared."""
    torch.manual_seed(1)
    dtype = dtypes.get("output_dtype", torch.float32)
    low = torch.finfo(dtype).min if low == LOWEST else low
    query, key = (torch.randn(1, 1, n, 4).to(dtype) for n in (2, 3))
    allowed = torch.tensor([[True, True, False], [False, False, False]])[None, None]
    call: dict[str, Any] = dict(query=query, key=key, value=key, sink_logit=None, scale=1.0, mask=allowed, **dtypes)
    if low is not None and fills and dtypes:
        call["hidden_logit"] = low
    elif low is not None:
        call["mask"] = torch.zeros(()).masked_fill(~allowed, low).to(dtype)
    exact = attend_exactly(call)
    assert exact.sees.flatten().tolist() == [True, False]
    right = torch.ops.kvpass.attention.default(**call)
    known = bool(right.isfinite().all())
    assert known == (low not in (None, -torch.inf) or not dtypes)
    assert exact.excess(right, right.isfinite().all(-1)) <= 1
    moved = right + torch.tensor([0.0, 0.05])[:, None]
    assert exact.excess(moved, moved.isfinite().all(-1)) > 1 or not known


def test_a_key_of_its_own_that_is_hidden_is_noticed() -> None:
    query, key = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 3, 4)
    for below, hides in ((2, False), (1, True)):
        mask = torch.ones(2, 3, dtype=torch.bool).tril(below - 1)[None, None]
        exact = attend_exactly(dict(query=query, key=key, value=key, mask=mask, scale=1.0))
        assert exact.hides_new_keys() == hides


def test_a_mask_on_slots_is_compared_by_token() -> None:
    query, key = torch.randn(1, 2, 1, 4), torch.randn(1, 1, 3, 4)
    bias = torch.tensor([0.0, 0.5, -1e9])
    exact: ExactAttention = attend_exactly(
        dict(query=query, key=key, value=key, mask=bias[None, None, None], scale=1.0)
    )
    order = torch.tensor([[[2, -1, 0, 1]]])
    mask = torch.tensor([True, False, True, True]).view(1, 1, 1, 1, 4)
    given = torch.tensor([-1e9, 7.0, 0.0, 0.5]).view(1, 1, 1, 1, 4)
    assert exact.matches_mask(mask, given, order)
    assert not exact.matches_mask(mask, given, order.roll(1, -1))
    assert not exact.matches_mask(torch.ones_like(mask), given, order)
    assert not exact.matches_mask(mask, given * 1.01, order)


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 3e-8), (torch.bfloat16, 3e-8), (torch.float64, 1e-16)])
def test_a_bias_is_compared_up_to_the_rounding_of_its_largest_terms(dtype: torch.dtype, off: float) -> None:
    """Compare a bias that is a sum, whose terms cancel for one key."""
    query, key = torch.randn(1, 1, 1, 4, dtype=dtype), torch.randn(1, 1, 3, 4, dtype=dtype)
    bias = torch.tensor([[[[0.5, off / 2, -1e9]]]], dtype=dtype)
    exact = attend_exactly(dict(query=query, key=key, value=key, mask=bias, scale=1.0))
    order, mask = torch.tensor([[[0, 1, 2]]]), torch.ones(1, 1, 1, 1, 3, dtype=torch.bool)
    changes = [(off, True), (1e4 * off, False)]
    for change, expected in changes:
        given = bias[:, :, None] + torch.tensor([0.0, change, 0.0], dtype=dtype)
        assert exact.matches_mask(mask, given, order) == expected


def test_equal_up_to_rounding_by_dtype() -> None:
    x = torch.randn(50).to(torch.bfloat16)
    assert equal_up_to_rounding(x, x)
    assert equal_up_to_rounding(x * (1 + 2**-8), x)
    assert not equal_up_to_rounding(x * 1.2, x)
    assert not equal_up_to_rounding(torch.where(x > 1, torch.nan, x), x)
    assert not equal_up_to_rounding(x.long(), x.long() + 1)
