"""Test masks, keys and values that are computed from the number of keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.adversary.models import Small, WithoutPadding, additive, causal, keys, sdpa, seen
from tests.adversary.oracle import Case, judge

MARKS = torch.ones(2, 20, dtype=torch.int64)


def biased(bias: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return attention with a bias computed from the indices i and j of queries and keys."""
    return sdpa(lambda i, j, marks: additive(causal(i, j) & keys(marks).bool()) + bias(i, j)[None, None])


def scaled_keys(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, marks: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k * 30.0 / k.shape[2], v, attn_mask=causal(i, j) & keys(marks).bool())


def values_with_their_number(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, marks: Tensor) -> Tensor:
    number = torch.full((v.shape[2], 1), v.shape[2])
    return F.scaled_dot_product_attention(q, k, v + number, attn_mask=causal(i, j) & keys(marks).bool())


VALUES: dict[str, Callable[..., Tensor]] = {
    "divisor": biased(lambda i, j: (j - i) * 6.0 / j.shape[0]),
    "keyword": biased(lambda i, j: torch.add(torch.zeros(()), (j - i) * 0.02, alpha=j.shape[0])),
    "remainder": biased(lambda i, j: -0.5 * torch.remainder(j + 1, j.shape[0])),
    "fill value": biased(lambda i, j: (j - i) / torch.full((j.shape[0],), j.shape[0])),
    "index": biased(lambda i, j: (j - i) * torch.arange(40.0)[j.shape[0]]),
    "keys": scaled_keys,
    "values": values_with_their_number,
}


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("model", [Small, WithoutPadding])
@pytest.mark.parametrize("name", VALUES)
def test_a_value_made_of_the_number_of_keys_is_refused(name: str, model: type[Small], validate: bool) -> None:
    """Check that no validation is needed for it, as a model may not run on synthetic conversations."""
    found = judge(Case(model(VALUES[name]), {"marks": seen(MARKS)}, (5, 1, 1, 1, 1)), validate=validate)
    assert found.kind == "refused"


SIZES: dict[str, Callable[..., Tensor]] = {
    "quotient, on the host": biased(lambda i, j: (j - i) * (6.0 / j.shape[0])),
    "start of a slice, on the host": biased(lambda i, j: F.pad((j - i) * 0.3, (0, j.shape[0]))[..., j.shape[0] :]),
    "expand": biased(lambda i, j: (i * 0.1).expand(-1, j.shape[0])),
    "repeat": biased(lambda i, j: (i * 0.1).repeat(1, j.shape[0])),
    "full": biased(lambda i, j: torch.full((i.shape[0], j.shape[0]), 0.5) * j),
    "view": biased(lambda i, j: ((i - j) * 0.1).view(1, -1, j.shape[0])[0]),
    "end of a slice": biased(lambda i, j: ((i - j) * 0.1)[:, : j.shape[0]]),
}


@pytest.mark.parametrize("model", [Small, WithoutPadding])
@pytest.mark.parametrize("name", SIZES)
def test_the_number_of_keys_may_be_a_size_or_a_value_of_the_host(name: str, model: type[Small]) -> None:
    assert judge(Case(model(SIZES[name]), {"marks": seen(MARKS)}, (5, 1, 1, 1, 1))).kind == "held"
