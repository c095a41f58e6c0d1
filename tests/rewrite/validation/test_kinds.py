"""Test which layers are equivalent to an earlier layer."""

from __future__ import annotations

from torch import Tensor

from kvpass.rewrite.validation.coverage import last_new_kind
from tests.adversary.models import Small, plain, sdpa
from tests.rewrite.stages import staged


def windowed(i: Tensor, j: Tensor) -> Tensor:
    return ((j <= i) & (j > i - 6))[None, None]


def test_layers_of_one_kind_are_told_from_others() -> None:
    alike = [plain] * 4
    calls = staged(Small(alike), budget=12).calls[-1]
    names = [site.call for site in calls.sites]
    assert last_new_kind(calls.canonical_gm.graph, calls.sites) is names[2]  # the first two layers read the embedding
    other = staged(Small([plain, plain, plain, sdpa(windowed)]), budget=12).calls[-1]
    assert last_new_kind(other.canonical_gm.graph, other.sites) is other.sites[3].call
