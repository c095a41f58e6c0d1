"""Read the constants of an FX graph."""

from __future__ import annotations

import ctypes

from torch import Tensor


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's elements in row-major order, for any dtype."""
    here = tensor.detach().cpu().contiguous()
    return ctypes.string_at(here.data_ptr(), here.nbytes)
