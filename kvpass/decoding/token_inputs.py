"""Check token ids and padding masks of prompts and turns."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from kvpass.arguments import Condition, require
from kvpass.errors import PolicyError


def _has_values(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_meta


def are_token_ids(x: Tensor) -> bool:
    """Return whether a tensor holds readable integers: it is strided, not on meta, and not bool."""
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
    wanted = (len(ids), length + ids.shape[1])
    if mask is None:
        return torch.ones(wanted, dtype=torch.int64, device=ids.device)
    require(tuple(mask.shape) == wanted, "attention_mask", tuple(mask.shape), f"must be {wanted}: all tokens so far")
    mask = mask.to(ids.device, torch.int64, copy=True)
    behind = (mask[:, length:].diff(dim=-1) < 0).any(-1).tolist()
    if any(behind):
        row = behind.index(True)
        raise PolicyError(f"attention_mask: row {row} has padding behind a token; pad prompts on the left")
    return mask
