"""Read rotary pairs of a calibration as complex numbers, for the references of policies with a calibration."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpass.policies.calibration import Calibration


def calibrated_pairs(calibration: Calibration, layer: int, row: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pairs of a row [D] as complex [P], and their frequencies."""
    first, second = calibration.tensors["pairs"][layer]
    row = row.double()
    return torch.complex(row[first], row[second]), calibration.tensors["frequency"][layer].double()


def queries_of(calibration: Calibration, layer: int, head: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the mean, the sizes and the covariance of each query head's queries, for one KV head."""
    group = calibration.model.query_heads // calibration.model.heads
    found = []
    for query_head in range(head * group, head * group + group):
        mean, size, second = (
            calibration.tensors[name][layer, query_head].double() for name in ("mean", "size", "second")
        )
        half = len(mean) // 2
        found.append((torch.complex(mean[:half], mean[half:]), size, second))
    return found
