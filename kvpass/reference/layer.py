"""A model's attention layers on the eager reference: `inner="reference"`.

The graph is rewritten as for slots, so masks, positions and rotary embeddings are the model's own, but
every attention call becomes a Python call that works on lists of tokens.  Slow, and right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.expansion import Expansion, cut_expansion
from kvpass.instantiate import RotarySlice
from kvpass.match import AttentionSite
from kvpass.policies.base import Attention
from kvpass.reference import ReferenceLayer, reference_of
from kvpass.reference.base import attention_logits
from kvpass.rewrite.masks import MaskOnSlots
from kvpass.rewrite.step import StepRewriter
from kvpass.slots import Chunk, Layout

if TYPE_CHECKING:
    from kvpass.runtime import PromptLayer


def take_prompt(layout: Layout, layer: PromptLayer, site: AttentionSite, limit: int) -> ReferenceLayer:
    """The reference's layer after a prompt."""
    assert layer.extras is not None
    query, keys, mask, sink = layer.extras
    new, total = query.shape[2], keys.shape[2]
    seen = torch.arange(total, device=query.device) <= torch.arange(total - new, total, device=query.device)[:, None]
    allowed = seen.expand(query.shape[0], 1, -1, -1) & layer.chunk.real[:, None, None]
    bias = None
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        bias = mask.expand(query.shape[0], -1, new, -1)
    store = ReferenceLayer(layout, reference_of(layout.policy), limit)
    logits = attention_logits(query * store.temper(layer.chunk.real), keys, allowed, bias, site.scale, site.cap)
    padded = torch.nn.functional.pad(logits, (0, 0, total - new, 0), value=-torch.inf)
    rows = _softmax(logits, sink)
    store.take(layer.chunk, torch.nn.functional.pad(rows, (0, 0, total - new, 0)), padded)
    return store


class ReferenceRewriter(StepRewriter):
    """Puts a call on the reference in place of every attention call."""

    def _replace(self, layer: int) -> list[fx.Node]:
        site = self.sites[layer]
        mask, _ = self._mask(layer)
        rotary = self.pieces[layer] if self.pieces else None
        real = self._real_now(site, mask)
        stored = self._rotary(layer).raw if self.ranked else site.key
        angles, turn = (list(rotary.angles.bound), list(rotary.turn.bound)) if rotary else ([], [])
        expansion = cut_expansion(self.gm, site, self.sizes)
        function = _call(site, self.layouts[layer], mask, rotary, len(angles), expansion)
        beside = () if site.sink is None else (site.sink,)
        nodes = (self.inputs[layer][0], site.query, site.key, stored, site.value, real)
        making = list(expansion.slice.bound) if expansion else []
        arguments = (*nodes, mask.nodes if mask else [], angles + turn, making, *beside)
        with self.graph.inserting_before(site.call):
            out = self.graph.call_function(function, arguments)
        out.meta["example_value"] = site.call.meta["example_value"]
        site.call.replace_all_uses_with(out)
        return []


def _call(
    site: AttentionSite,
    layout: Layout,
    mask: MaskOnSlots | None,
    rotary: RotarySlice | None,
    angles: int,
    expansion: Expansion | None,
) -> Callable[..., Tensor]:
    """What runs in place of one attention call."""

    def attend(
        store: ReferenceLayer,
        query: Tensor,
        key: Tensor,
        stored: Tensor,
        value: Tensor,
        real: Tensor,
        on_mask: list[Any],
        on_rotary: list[Any],
        on_expansion: list[Any],
        sink: Tensor | None = None,
    ) -> Tensor:
        held, index = store.positions(), store.index()  # [B, H', N]
        keys = store.rows("key")
        if rotary is not None and keys.shape[2]:
            table = rotary.table(keys.shape[2], on_rotary[:angles], keys.device)
            ranks = store.ranks().clamp(min=0)
            keys = torch.cat(rotary.on_slots(keys, ranks, table, on_rotary[angles:]), -1)
        new = store.length + torch.arange(query.shape[2], device=query.device).expand(layout.rows, layout.groups, -1)
        arriving = (store.seen()[:, None] + real.cumsum(-1) - 1)[:, None].expand(-1, layout.groups, -1)
        places, position = torch.cat([index, new], -1), torch.cat([held, arriving], -1)
        own = None if mask is None else mask.on_slots(places, position, layout.heads, on_mask)
        allowed, bias = _allowed(layout, held >= 0, real, own, query.shape[1])
        attended = torch.cat([keys, key.to(keys.dtype)], 2)
        values = torch.cat([store.rows("value"), value.to(keys.dtype)], 2)
        if expansion is not None:
            attended, values = expansion.on_slots(attended, values, on_expansion)
        logits = attention_logits(query * store.temper(real), attended, allowed, bias, site.scale, site.cap)
        rows = _softmax(_plus(logits, store, layout.heads), sink)  # [B, Hq, q, N + q]
        output = rows.to(values.dtype) @ values.repeat_interleave(query.shape[1] // values.shape[1], 1)
        store.take(Chunk(stored, value, real, Attention()), rows, logits)
        return output

    return attend


def _softmax(logits: Tensor, sink: Tensor | None) -> Tensor:
    """Probabilities of logits [B, Hq, q, N] beside a sink [B or 1, Hq, q or 1, 1]; zero where nothing may be seen."""
    if sink is None:
        return torch.nan_to_num(logits.softmax(-1))
    beside = sink.float().expand(*logits.shape[:3], 1)
    return torch.nan_to_num(torch.cat([logits, beside], -1).softmax(-1)[..., :-1])


def _allowed(
    layout: Layout, live: Tensor, real: Tensor, own: Tensor | None, query_heads: int
) -> tuple[Tensor, Tensor | None]:
    """Mask bool and the model's bias, [B, Hq, q, N + q], of queries over [held, new]."""
    count = real.shape[1]
    causal = torch.ones(count, count, dtype=torch.bool, device=real.device).tril() & real[:, None]  # [B, q, q]
    groups = layout.groups
    held = live[:, :, None].expand(-1, -1, count, -1)  # [B, H', q, N]
    seen = torch.cat([held, causal[:, None].expand(-1, groups, -1, -1)], -1)
    seen = seen.repeat_interleave(query_heads // groups, 1)
    if own is None:
        return seen, None
    own = own.expand(layout.rows, layout.heads, query_heads // layout.heads, count, -1).flatten(1, 2)
    return (seen & own, None) if own.dtype == torch.bool else (seen, own)


def _plus(logits: Tensor, store: ReferenceLayer, heads: int) -> Tensor:
    """Logits [B, Hq, q, N + q] with the policy's own bias on the held tokens [B, Hq, 1, N]."""
    own = store.bias(logits.shape[1] // heads)
    return logits if own is None else logits + torch.nn.functional.pad(own, (0, logits.shape[-1] - own.shape[-1]))
