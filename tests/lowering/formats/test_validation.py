"""Test validation of steps on stored vectors, which passes through the same steps on plain vectors."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import kvpass
from kvpass.capture import capture
from kvpass.lowering.formats.base import StoredTensors
from kvpass.lowering.formats.integers import Int8
from kvpass.runtime.recorder import Recorder
from tests.models import build
from tests.rewrite.test_validate import notes, run, values_for_keys
from tests.traces import Traced


def test_a_step_is_validated_and_a_call_that_is_read_wrongly_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recorder = Traced(build("Llama")), Recorder()
    run(model, recorder, policy="h2o", budget=12, kv_dtype="int4")
    assert notes(recorder)
    assert all("passed" in note for note in notes(recorder))
    monkeypatch.setattr(capture, "_site", values_for_keys(capture._site))
    with pytest.raises(kvpass.UnsupportedGraph, match="is not the model's"):
        run(model, policy="full", kv_dtype="int4")


@pytest.mark.slow
def test_a_format_that_multiplies_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break a product of the format, which no comparison of plain rows with the model would show."""
    right = Int8.weighted_sum

    def wrong(self: Int8, probs: Tensor, parts: StoredTensors, dtype: Any) -> Tensor:
        return right(self, probs, (parts[0], parts[1] * 3), dtype)

    monkeypatch.setattr(Int8, "weighted_sum", wrong)
    with pytest.raises(kvpass.UnsupportedGraph, match="is not the model's"):
        run(Traced(build("Llama")), policy="full", kv_dtype="int8")
