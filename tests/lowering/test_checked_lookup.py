"""Test that token ids and positions outside their tables raise Python exceptions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kvpass import LookupRangeError
from kvpass.lowering.graph_passes import check_table_indices

aten = torch.ops.aten


def lowered(function: Callable[..., Tensor], *examples: Tensor) -> Any:
    gm = make_fx(function, tracing_mode="fake")(*examples)
    check_table_indices(gm.graph)
    gm.recompile()
    return gm


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("look_up", "negative"),
    [
        (lambda table, index: torch.nn.functional.embedding(index, table), False),
        (lambda table, index: table[index], True),
        (lambda table, index: table[:, 0][index], True),
    ],
)
def test_rows_are_checked_before_they_are_read(
    look_up: Callable[[Tensor, Tensor], Tensor], negative: bool, dtype: torch.dtype
) -> None:
    """Check that every such lookup uses one operator, so that no check stays inside a loop."""
    table = torch.randn(7, 3)
    gm = lowered(look_up, table, torch.zeros(2, 4, dtype=dtype))
    called = [node.target for node in gm.graph.nodes]
    assert not {aten.embedding.default, aten.index.Tensor} & {*called}
    right = torch.tensor([[0, 6, -1 if negative else 3]], dtype=dtype)
    assert torch.equal(gm(table, right), look_up(table, right))
    for wrong in (7, -8, *([] if negative else [-1])):
        with pytest.raises(LookupRangeError, match=f"index {wrong} .* table of 7 rows"):
            gm(table, torch.tensor([[0, wrong]], dtype=dtype))


@pytest.mark.parametrize(
    "function",
    [
        lambda table, index: table[:, index],  # not by rows
        lambda table, index: table[index, index],
        lambda table, index: table[None].expand(2, -1, -1)[index],  # not a table of rows
        lambda table, index: table.long()[index],  # not a lookup of features
    ],
)
def test_other_lookups_stay(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    gm = lowered(function, torch.randn(3, 3), torch.zeros(2, dtype=torch.int64))
    assert torch.ops.kvpass.checked_table_index.default not in [node.target for node in gm.graph.nodes]


SCRIPT = """
import sys, torch, transformers, kvpass

inner, where, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(2)
torch.manual_seed(0)
config = transformers.GPT2Config(vocab_size=64, n_positions=48, n_embd=256, n_layer=1, n_head=4)
model = transformers.GPT2LMHeadModel(config).eval()
ids = torch.randint(0, 64, (rows, 40))
if where == "position":
    loop = kvpass.DecodeLoop(model, "h2o", budget=16, inner=inner, read_interval=1)
    loop.prompt(ids)
    run = lambda: loop.generate(20)
else:
    compiled = torch.compile(model, backend=kvpass.backend("h2o", budget=16, inner=inner))
    with torch.no_grad():
        for _ in range(2):  # the first prompt runs uncompiled
            compiled(ids)
    ids[0, 3] = 64
    run = lambda: compiled(ids)
try:
    with torch.no_grad():
        run()
except (kvpass.KVPassError, IndexError) as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["token", pytest.param("position", marks=pytest.mark.slow)])
def test_a_lookup_outside_of_a_table_ends_no_process(inner: str, where: str, rows: int) -> None:
    """Test two threads, where an exception in a shared loop would end the process."""
    command = [sys.executable, "-c", SCRIPT, inner, where, str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["LookupRangeError" if inner == "inductor" else "IndexError"]
