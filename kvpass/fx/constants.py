"""Read the constants of an FX graph."""

from __future__ import annotations

import ctypes

from torch import Tensor


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return a tensor's elements as they lie in memory, for any dtype."""
    here = tensor.detach().cpu().contiguous()
    return ctypes.string_at(here.data_ptr(), here.nbytes)
