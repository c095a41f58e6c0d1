"""Read which tokens of a prompt to pin: a mask, or spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.arguments import require, short_text
from kvpass.errors import PolicyError

Pin = Tensor | Sequence[Any]
"""A mask, bool [B, T], or spans: lists of (start, stop), one list for each row, or one list for all rows."""


def pin_mask(pin: Pin | None, on_top: bool, valid: Tensor) -> Tensor | None:
    """Return the tokens of a prompt to pin, bool [B, T]; None for none.

    Args:
        pin: a mask, or spans.  Spans count the real tokens of their row, from 0.
        on_top: see `kvpass.prefill`.
        valid: [B, T], 0 for padding.

    Raises:
        PolicyError: a mask of another shape or dtype, a span outside of its row, or pins on padding.
    """
    if pin is None:
        require(not on_top, "on_top", on_top, "counts pinned tokens in addition to the budget: pass pin= to say which")
        return None
    real = valid.bool()
    mask = _check_mask(pin, real) if isinstance(pin, Tensor) else _mask_of_spans(pin, real)
    return mask if bool(mask.any()) else None


def _check_mask(pin: Tensor, real: Tensor) -> Tensor:
    fits = pin.dtype == torch.bool and pin.shape == real.shape
    require(fits, "pin", short_text(pin), f"must be bool {list(real.shape)}, true for the tokens that stay")
    mask = pin.to(real.device)
    on_padding = (mask & ~real).any(-1).tolist()
    if any(on_padding):
        raise PolicyError(f"pin: row {on_padding.index(True)} pins padding, which is not cached: pin real tokens only")
    return mask


def _mask_of_spans(pin: Sequence[Any], real: Tensor) -> Tensor:
    rows = [list(pin)] * len(real) if all(map(_is_span, pin)) else list(pin)
    right = len(rows) == len(real) and all(isinstance(spans, Iterable) and all(map(_is_span, spans)) for spans in rows)
    wanted = f"must be a list of spans (start, stop), or one such list for each of {len(real)} rows"
    require(right, "pin", short_text(pin), wanted)
    position, mask = real.cumsum(-1) - 1, torch.zeros_like(real)
    for row, spans in enumerate(rows):
        count = int(real[row].sum())
        for start, stop in spans:
            if not 0 <= start < stop <= count:
                raise PolicyError(
                    f"pin: span ({start}, {stop}) of row {row} is not within its {count} tokens: spans count the real "
                    "tokens of the row from 0, and `stop` is not included"
                )
            mask[row] |= (position[row] >= start) & (position[row] < stop)
    return mask & real


def _is_span(span: Any) -> bool:
    pair = isinstance(span, Sequence) and not isinstance(span, str) and len(span) == 2
    return pair and all(isinstance(end, int) and not isinstance(end, bool) for end in span)
