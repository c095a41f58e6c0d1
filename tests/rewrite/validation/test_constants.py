"""Test the search for token counts at which a graph's behaviour may change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpass.rewrite.validation import coverage
from tests.adversary.models import Small
from tests.rewrite.stages import staged


def test_constants_are_found_in_comparisons_slices_tables_and_narrow_dtypes() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, table: Tensor, **_: Any) -> Tensor:
        near = j > i - 77
        narrow = torch.arange(k.shape[2], dtype=torch.uint8)
        mask = near & (j // 33 == i // 33) & (narrow >= 0) & (table[: k.shape[2]] > -9)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None])

    calls = staged(Small(attend, tables={"table": torch.zeros(501)}), budget=12).calls
    found = coverage.length_constants(calls[-1].canonical_gm.graph)
    assert {33, 77, 256, 501} <= set(found)
