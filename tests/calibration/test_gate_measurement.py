"""Test measured gates: they are the shares of attention to far tokens, read from eager attention."""

from __future__ import annotations

import pytest
import torch

from kvpass.calibration.gate_measurement import measure_gates
from kvpass.errors import CalibrationError
from tests.models import build


@torch.no_grad()
def test_measured_gates_are_the_share_of_far_attention() -> None:
    model, text = build("Llama"), torch.randint(3, 128, (60,), generator=torch.Generator().manual_seed(0))
    found = measure_gates(model, text, window=48, sinks=2, recent=8)
    model.set_attn_implementation("eager")  # eager attention returns probabilities
    total = torch.zeros(2, 4)
    for part in (text[:24], text[24:48]):
        whole = torch.cat([part, part])[None]
        for layer, probs in enumerate(model(whole, output_attentions=True).attentions):
            for t in range(24, 48):
                total[layer] += probs[0, :, t, 2 : t - 7].sum(-1) / 48
    torch.testing.assert_close(found.gates, total.view(2, 2, 2).amax(-1), atol=1e-5, rtol=1e-4)
    assert found.architecture == "llama"
    with pytest.raises(CalibrationError, match="at least half a window, and a window above 513"):
        measure_gates(model, text, window=512)
