"""Test Inductor's CPU code after export and reassembly."""

from __future__ import annotations

import ast
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpass.torch_private import exported_code, inductor


class Computation(torch.nn.Module):
    """A model with a weight, a buffer, a constant, two kernels, a library product, and a view of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))
        self.register_buffer("table", torch.arange(8.0))
        self.constant = torch.tensor([3.0, 5.0, 7.0, 11.0, 13.0, 17.0, 19.0, 23.0])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(torch.sin(x) @ self.weight + self.table) * self.constant, x.t()


@torch.no_grad()
def test_code_comes_back_without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, x = torch.fx.symbolic_trace(Computation()), torch.randn(5, 8)
    run = inductor.inductor(gm, [x], {})
    code = exported_code.export_code(run)
    assert code is not None
    assert code.kernels
    assert "async_compile" not in code.text
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", None)
    expected, found = run(x), exported_code.import_code(code, "code")([x])
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert found[1].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("run", [len, lambda arguments: arguments, torch.relu])
def test_other_callables_are_no_generated_code(run: Any) -> None:
    assert exported_code.export_code(run) is None


SOURCE = """
from far import unused
import torch as needed
helper = needed.add
text = "not read"
kernel = async_compile.cpp_pybinding([], '''code''')
class Runner:
    def call(self, args):
        local = [number for number in args]
        return helper(kernel, constant0)
runner = Runner()
call = runner.call
"""


def test_statements_that_the_call_does_not_need_are_dropped() -> None:
    kept, free = exported_code._needed_statements(ast.parse(SOURCE), {"kernel"})
    assert [line for line in ast.unparse(ast.Module(kept, [])).splitlines() if line and line[0] not in " "] == [
        "import torch as needed",
        "helper = needed.add",
        "class Runner:",
        "runner = Runner()",
        "call = runner.call",
    ]
    assert free == {"kernel", "constant0"}
