"""Define the dtype of accumulations, and the logits that mask tokens."""

from __future__ import annotations

import torch
from torch import Tensor

HIDDEN = -1e3
"""A logit of this value or less masks a token: its softmax weight is zero next to logits of ordinary size.

Masks use -10000 and lower numbers.  Logits are added to it, factors divide it, and bfloat16 rounds it to -9984.
"""
ABSORBING = -64 / torch.finfo(torch.float32).eps
"""A number of this value or less does not change in float32 when logits of ordinary size are added."""
FILLED = -1e32
"""The value of masked logits; adding a logit or a bias does not change it."""


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are computed: float64 for float64, else float32."""
    return dtype if dtype == torch.float64 else torch.float32


def upcast(x: Tensor) -> Tensor:
    """Convert a tensor to the dtype of its sums."""
    return x.to(accumulate_dtype(x.dtype))
