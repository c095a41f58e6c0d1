"""Test which inputs a rotation is proven to depend on."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture import rotary
from tests.lowering.layer_dedup.test_segments import Recorder


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_are_followed_past_a_size_that_is_read_from_them(dim: int) -> None:
    """Test `size()` calls, which Dynamo writes into graphs with a dynamic number of rows."""

    def angles(position: Tensor, frequencies: Tensor) -> Tensor:
        expanded = frequencies[None, :, None].expand(position.size()[0], -1, 1)
        return (expanded * position[:, None, :].float()).transpose(1, 2)

    gm = fx.symbolic_trace(angles)
    Recorder(gm).run(torch.zeros(3, 1, dtype=torch.int64), torch.ones(8))
    position, *_ = gm.graph.nodes
    assert rotary._is_followed(position, dim, set(gm.graph.nodes) - {gm.graph.output_node()})
