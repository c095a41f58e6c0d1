"""Builds that begin before they are needed."""

from __future__ import annotations

import pytest
import torch

from kvpass.lowering import column_loops
from kvpass.torch_private import inductor


@pytest.mark.parametrize("sums", [False, True])
def test_builds_end_with_what_is_needed_later(sums: bool) -> None:
    column_loops._runs.cache_clear()
    column_loops.start_builds(torch.float32, sums).join()
    assert (column_loops._runs.cache_info().currsize > 0) == sums


@pytest.mark.filterwarnings("error")
def test_errors_are_left_to_the_caller_that_needs_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(inductor, "probe_vector_instructions", fails)
    column_loops.start_builds(torch.float32, True).join()
