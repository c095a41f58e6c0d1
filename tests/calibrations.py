"""Make random calibrations and gates for tests of policies that need them."""

from __future__ import annotations

import torch

from kvpass.policies.calibration import CalibratedModel, Calibration
from kvpass.policies.head_gates import HeadGates

CALIBRATED = ("expected_attention", "tri_attention")


def random_calibration(
    layers: int = 2, query_heads: int = 4, heads: int = 2, dim: int = 8, seed: int = 0
) -> Calibration:
    """Return statistics of normal queries for a model with these sizes, whose rotation pairs the halves of a row."""
    generator = torch.Generator().manual_seed(seed)
    half, mean = dim // 2, torch.randn(layers, query_heads, dim, generator=generator)
    factor = torch.randn(layers, query_heads, dim, dim, generator=generator) / dim**0.5
    size = (mean[..., :half].square() + mean[..., half:].square()).sqrt()
    return Calibration(
        CalibratedModel("random", layers, query_heads, heads, dim),
        dict(
            mean=mean,
            second=factor @ factor.mT,
            size=size + torch.rand(layers, query_heads, half, generator=generator),
            frequency=(100.0 ** -(torch.arange(half).double() / half)).repeat(layers, 1),
            pairs=torch.arange(dim).view(2, half).repeat(layers, 1, 1),
            scale=torch.full((layers,), dim**-0.5),
        ),
    )


def random_gates(layers: int = 2, heads: int = 2, seed: int = 0) -> HeadGates:
    """Return random gates, all different, for a model with these sizes."""
    return HeadGates("random", torch.rand(layers, heads, generator=torch.Generator().manual_seed(seed)))


def made_for_model(
    name: str, layers: int = 2, query_heads: int = 4, heads: int = 2, dim: int = 8
) -> dict[str, Calibration | HeadGates]:
    """Return the options that a policy needs for one model, except the aligners of `kv_align`."""
    if name in CALIBRATED:
        return {"calibration": random_calibration(layers, query_heads, heads, dim)}
    return {"gates": random_gates(layers, heads)} if name == "duo_attention" else {}
