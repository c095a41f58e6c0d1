"""Made-up calibrations, for tests of the policies that read one."""

from __future__ import annotations

import torch

from kvpass.policies.calibration import CalibratedModel, Calibration

CALIBRATED = ("expected_attention", "tri_attention")


def random_calibration(
    layers: int = 2, query_heads: int = 4, heads: int = 2, dim: int = 8, seed: int = 0, theta: float = 100.0
) -> Calibration:
    """The statistics of normal queries around a mean, for a model of that shape that rotates halves of a row."""
    drawn = torch.Generator().manual_seed(seed)
    half, mean = dim // 2, torch.randn(layers, query_heads, dim, generator=drawn)
    factor = torch.randn(layers, query_heads, dim, dim, generator=drawn) / dim**0.5
    size = (mean[..., :half].square() + mean[..., half:].square()).sqrt()
    return Calibration(
        CalibratedModel("random", layers, query_heads, heads, dim),
        dict(
            mean=mean,
            second=factor @ factor.mT,
            size=size + torch.rand(layers, query_heads, half, generator=drawn),
            frequency=(theta ** -(torch.arange(half).double() / half)).repeat(layers, 1),
            pairs=torch.arange(dim).view(2, half).repeat(layers, 1, 1),
            scale=torch.full((layers,), dim**-0.5),
        ),
    )
