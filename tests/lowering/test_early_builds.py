"""Test builds that start before they are needed."""

from __future__ import annotations

import pytest
import torch

from kvpass.lowering import attention_tiles
from kvpass.torch_private import inductor


@pytest.mark.parametrize("sums", [False, True])
def test_early_builds_compile_the_tiles_if_sums_are_needed(sums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "has_matrix_tiles", lambda: True)
    attention_tiles._runs.cache_clear()
    attention_tiles.start_builds(torch.float32, sums).join()
    assert (attention_tiles._runs.cache_info().currsize > 0) == sums


@pytest.mark.filterwarnings("error")
def test_errors_are_left_to_the_caller_that_needs_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(inductor, "probe_vector_instructions", fails)
    attention_tiles.start_builds(torch.float32, True).join()


def test_attention_of_prompts_is_built_where_the_library_has_no_matrix_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "has_matrix_tiles", lambda: False)
    attention_tiles._runs.cache_clear()
    attention_tiles.start_builds(torch.float32, False).join()
    assert attention_tiles._runs.cache_info().currsize > 0


def test_nothing_is_built_for_a_dtype_whose_prompts_attend_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "has_matrix_tiles", lambda: False)
    attention_tiles._runs.cache_clear()
    attention_tiles.start_builds(torch.float64, False).join()
    assert attention_tiles._runs.cache_info().currsize == 0
