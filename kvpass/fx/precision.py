"""The dtype that sums are computed in, and the numbers that hide tokens in them."""

from __future__ import annotations

import torch
from torch import Tensor

HIDDEN = -1e3
"""A logit from here on down hides a token: nothing of it is left after a softmax beside logits of ordinary size.

Masks use -10000 and lower numbers.  Logits are added to it, factors divide it, and bfloat16 rounds it to -9984.
"""
ABSORBING = -64 / torch.finfo(torch.float32).eps
"""From here on down a number stays what it is in float32 when logits of ordinary size are added to it."""
FILLED = -1e32
"""Stands for the one number that a mask fills in: logits and biases that are added to it leave it as it is."""


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return dtype if dtype == torch.float64 else torch.float32


def upcast(x: Tensor) -> Tensor:
    """A tensor in the dtype that its sums are computed in."""
    return x.to(accumulate_dtype(x.dtype))
