"""Test builds that start before they are needed."""

from __future__ import annotations

import pytest
import torch

from kvpass.lowering import attention_tiles
from kvpass.torch_private import inductor


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_errors_are_left_to_the_caller_that_needs_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(inductor, "probe_vector_instructions", fails)
    attention_tiles.start_builds(torch.float32).join()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_attention_of_prompts_is_built_for_dtypes_that_it_multiplies(dtype: torch.dtype) -> None:
    attention_tiles._runs.cache_clear()
    attention_tiles.start_builds(dtype).join()
    assert (attention_tiles._runs.cache_info().currsize > 0) == (dtype != torch.float64)
