"""Use private operators of torch: collectives, autocast and attention with log-sum-exp."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor


def all_reduce(x: Tensor, how: str, group: str) -> Tensor:
    """Reduce a tensor over a process group, given by name, with "sum" or "max"; traceable, and runs eagerly."""
    operators = torch.ops._c10d_functional
    return cast(Tensor, operators.wait_tensor(operators.all_reduce(x, how, group)))


def autocast_state() -> list[tuple[str, bool, torch.dtype]]:
    """Return whether autocast is enabled, and its dtype, for each kind of device that has it."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.amp.is_autocast_available(kind)]
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


@contextlib.contextmanager
def preserving_autocast() -> Iterator[None]:
    """Return a context that restores autocast at its end, even if the code inside entered it and did not exit."""
    before, depth = autocast_state(), _autocast_depth()
    try:
        yield
    finally:
        for kind, enabled, dtype in before:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        for _ in range(_autocast_depth() - depth):
            torch.autocast_decrement_nesting()
        if depth == 0:
            torch.clear_autocast_cache()


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def attend_with_lse(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Call the kernel that torch.nn.functional.scaled_dot_product_attention calls on a CPU, on the same arguments.

    Args:
        query: [B, Hq, q, D]; key, value: [B, Hkv, S, D]; all in one dtype.
        mask: bool or additive, [B or 1, Hq, Hkv or 1, q or 1, S], or None.
        causal: query i sees the keys 0 .. i.

    Returns:
        The output [B, Hq, q, D], and the log-sum-exp of the logits, [B, Hq, q] in float32, or float64 for float64.
        For a query that sees no key, the log-sum-exp is not finite.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    if mask is not None and 1 < mask.shape[1] < query.shape[1]:
        mask = mask.repeat_interleave(groups, 1)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    if mask is not None and mask.dtype == torch.bfloat16:
        mask = mask.to(query.dtype)
    rows = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, log_sum_exp = attend(*rows, 0.0, causal, attn_mask=mask, scale=scale)
    return output, log_sum_exp
