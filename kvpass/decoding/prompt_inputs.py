"""Check token ids, padding masks and pins of prompts and turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from kvpass.arguments import Condition, require, short_text
from kvpass.errors import PolicyError


def _has_values(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_meta


def are_token_ids(x: Tensor) -> bool:
    """Return whether a tensor has integers that can be read: it is strided, not on meta, and not bool."""
    return _has_values(x) and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


TokenIds = Annotated[
    Tensor,
    Condition(
        holds=lambda ids: ids.ndim == 2 and ids.numel() > 0 and are_token_ids(ids),
        message="must be an integer tensor of token ids, [rows, tokens], with one token at least",
    ),
]


PaddingMask = Annotated[
    Tensor,
    Condition(
        holds=lambda mask: mask.ndim == 2 and _has_values(mask) and bool(((mask == 0) | (mask == 1)).all()),
        message="must be a tensor [rows, tokens] of 1 for tokens and 0 for padding",
    ),
]


def padding_mask(ids: Tensor, mask: Tensor | None, length: int) -> Tensor:
    """Return the padding mask, int64 [B, length + T], of prompts [B, T] after `length` tokens.

    Raises:
        PolicyError: a mask of another shape, or padding that is not on the left of its row.
    """
    expected = (len(ids), length + ids.shape[1])
    if mask is None:
        return torch.ones(expected, dtype=torch.int64, device=ids.device)
    seen = f"for the {length} tokens before and the new ones" if length else "for the new tokens alone"
    require(tuple(mask.shape) == expected, "attention_mask", tuple(mask.shape), f"must be {expected}, {seen}")
    mask = mask.to(ids.device, torch.int64, copy=True)
    behind = (mask[:, length:].diff(dim=-1) < 0).any(-1).tolist()
    if any(behind):
        row = behind.index(True)
        raise PolicyError(f"attention_mask: row {row} has padding behind a token; pad prompts on the left")
    return mask


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
    fits = len(rows) == len(real) and all(isinstance(spans, Iterable) and all(map(_is_span, spans)) for spans in rows)
    message = f"must be a list of spans (start, stop), or one such list for each of {len(real)} rows"
    require(fits, "pin", short_text(pin), message)
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
