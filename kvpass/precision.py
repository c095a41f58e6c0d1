"""The dtype that sums are computed in."""

from __future__ import annotations

import torch
from torch import Tensor


def widest(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return dtype if dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    """A tensor in the dtype that its sums are computed in."""
    return x.to(widest(x.dtype))
