"""Test which lookups need no bounds check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from kvpass.lowering.graph_passes import look_up_unchecked
from kvpass.torch_private import inductor

aten = torch.ops.aten


def padding(mask: Tensor) -> Tensor:
    """Look up a mask like transformers."""
    rows = torch.arange(mask.shape[0])[:, None, None, None]
    return mask[rows, (torch.arange(mask.shape[1]) + 0)[None, None, None, :]]


def lowered(function: Callable[..., Tensor], *examples: Tensor, sizes: str) -> list[Any]:
    """Return the operators of a function after the pass, and check that its result is unchanged."""
    as_lowered = get_decompositions([aten.arange.start_step, aten.arange.start, aten.arange.default])
    gm = make_fx(function, as_lowered, tracing_mode=sizes)(*examples)
    look_up_unchecked(gm.graph)
    gm.recompile()
    assert torch.equal(gm(*examples), function(*examples))
    return [node.target for node in gm.graph.nodes]


def unchecked(function: Callable[..., Tensor], *examples: Tensor, sizes: str) -> bool:
    """True if the only lookup of a function has no check."""
    (target,) = [target for target in lowered(function, *examples, sizes=sizes) if "index" in str(target)]
    return target is aten._unsafe_index.Tensor


@pytest.mark.parametrize("sizes", ["fake", "symbolic"])
@pytest.mark.parametrize(
    "function",
    [
        padding,
        lambda mask: mask[:, torch.arange(mask.shape[1])],
        lambda mask: mask[torch.arange(mask.shape[0]).view(1, -1).expand(2, -1)],
    ],
)
def test_an_arange_over_the_dimension_is_not_bounds_checked(function: Callable[[Tensor], Tensor], sizes: str) -> None:
    assert unchecked(function, torch.rand(3, 7), sizes=sizes)


@pytest.mark.parametrize("sizes", ["fake", "symbolic"])
@pytest.mark.parametrize(
    "function",
    [
        lambda table: table[torch.arange(table.shape[0] - 1) + 1],
        lambda table: table[torch.arange(0, table.shape[0], 2)],
        lambda table: table[torch.arange(1, table.shape[0])],
        lambda table: table[torch.arange(table.shape[1])],
        lambda table: table[torch.arange(table.shape[0]), torch.zeros(7, dtype=torch.long)],
        lambda table: table[-torch.arange(table.shape[0])],
    ],
)
def test_other_indices_are_bounds_checked(function: Callable[[Tensor], Tensor], sizes: str) -> None:
    assert not unchecked(function, torch.rand(7, 3), sizes=sizes)


@pytest.mark.parametrize("sizes", ["fake", "symbolic"])
@pytest.mark.parametrize("early", [True, False])
def test_an_arange_that_inductor_checks_too_early_is_read_from_memory(
    early: bool, sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor, "CHECKS_TOO_EARLY", early)
    called = lowered(lambda table: table[torch.arange(table.shape[0] - 1)], torch.rand(7, 3), sizes=sizes)
    assert (aten.as_strided.default in called) == early
    assert aten.index.Tensor in called
