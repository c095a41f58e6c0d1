"""Which inputs are proven to tell padding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture.padding_analysis import hiding_inputs
from tests.capture.traced import answered, result

ROWS, TOKENS = 2, 6
LOWEST = torch.finfo(torch.float32).min
Mask = Callable[[Tensor, Tensor, Tensor], Tensor]


def told(mask: Mask) -> bool:
    """Whether `column` tells padding in mask(column [B, S], i [S, 1], j [S])."""

    def function(column: Tensor) -> Tensor:
        j = torch.arange(TOKENS)
        return mask(column, j[:, None], j)

    def question(gm: fx.GraphModule) -> bool:
        return [node.op for node in hiding_inputs(gm, result(gm), step=False)] == ["placeholder"]

    return answered(function, (torch.ones(ROWS, TOKENS, dtype=torch.int64),), question)


def causal(i: Tensor, j: Tensor) -> Tensor:
    return (j <= i)[None, None]


TELLS: dict[str, Mask] = {
    "and": lambda p, i, j: causal(i, j) & p.bool()[:, None, None],
    "compared": lambda p, i, j: causal(i, j) & (p == 1)[:, None, None],
    "looked up": lambda p, i, j: causal(i, j) & p.bool()[torch.arange(2)[:, None, None, None], j[None, None, None]],
    "where": lambda p, i, j: torch.where(p[:, None, None] != 0, causal(i, j).float(), LOWEST),
    "filled": lambda p, i, j: torch.zeros(2, 1, 6, 6).masked_fill(p[:, None, None] == 0, LOWEST),
    "product": lambda p, i, j: (1.0 - p[:, None, None]) * LOWEST + causal(i, j).float(),
    "product of 1e9": lambda p, i, j: (1.0 - p[:, None, None].float()) * -1e9 + torch.zeros(2, 1, 6, 6),
    "expanded": lambda p, i, j: (causal(i, j) & p.bool()[:, None, None]).expand(2, 4, 6, 6),
}
TELLS_NOT: dict[str, Mask] = {
    "of queries": lambda p, i, j: causal(i, j) & p.bool()[:, None, :, None],
    "or": lambda p, i, j: causal(i, j) | p.bool()[:, None, None],
    "itself": lambda p, i, j: (causal(i, j) & p.bool()[:, None, None]) | (i == j),
    "segments": lambda p, i, j: causal(i, j) & (p[:, None, :, None] == p[:, None, None]),
    "weights": lambda p, i, j: causal(i, j).float() + p[:, None, None],
    "hidden a little": lambda p, i, j: (1.0 - p[:, None, None]) * -10.0 + causal(i, j).float(),
    "the other way round": lambda p, i, j: causal(i, j) & (p == 0)[:, None, None],
    "for one head": lambda p, i, j: (
        causal(i, j) & (p.bool()[:, None, None] | torch.tensor([True, False])[:, None, None])
    ),
    "flipped": lambda p, i, j: causal(i, j) & p.bool().flip(1)[:, None, None],
    "of the other row": lambda p, i, j: causal(i, j) & p.bool().flip(0)[:, None, None],
    "of the next token": lambda p, i, j: (
        causal(i, j) & p.bool()[torch.arange(2)[:, None, None, None], j[None, None, None] - 1]
    ),
    "summed": lambda p, i, j: causal(i, j) & (p.cumsum(-1) > 0)[:, None, None],
    "written over": lambda p, i, j: (causal(i, j) & p.bool()[:, None, None]).fill_(True),
}


@pytest.mark.parametrize("name", TELLS)
def test_a_zero_hides(name: str) -> None:
    assert told(TELLS[name])


@pytest.mark.parametrize("name", TELLS_NOT)
def test_what_may_be_seen_is_no_padding(name: str) -> None:
    assert not told(TELLS_NOT[name])
