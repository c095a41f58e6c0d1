"""Padding and position ids, read from the arguments of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.handle import LayerCache
from kvpass.capture.canonical import AttentionSite
from kvpass.capture.padding_analysis import padding_inputs
from kvpass.capture.rotary import find_rotary, unreshaped
from kvpass.errors import UnsupportedGraph
from kvpass.fx import splicing, walk
from kvpass.policies.ranking import LATE

OWN_POSITIONS = (
    "the position ids are not 0, 1, 2, ... over the real tokens of a row, and held tokens are numbered by their rank "
    "instead: leave position_ids out, or pass positions='absolute'"
)
PADDING_BETWEEN = (
    "the position ids that the model makes do not go on one by one over the real tokens of a row, as where padding "
    "between these counts, and held tokens are numbered by their rank instead: pad on the left, give position_ids that "
    "count real tokens, or pass positions='absolute'"
)
OTHER_ANGLES = (
    "this call rotates keys by other angles than the calls before, as where the length decides on the frequencies, and "
    "all held keys are rotated when they are read: use positions='absolute'"
)
SHOWN_AGAIN = (
    "a token that the mask hid when it came, and that was left out of the cache for that, is no longer hidden; give "
    "the whole conversation anew, or leave its mask as it was"
)

HIDDEN_BEFORE = (
    "padding was hidden when it came, and left out of the cache for that, and nothing proves that the mask of this "
    "call hides it too; give rows of one length, or one row at a time"
)


def wrong_mask(gm: fx.GraphModule, arguments: Sequence[Any], tokens: int) -> str | None:
    """Describe what is wrong with an attention mask that does not have `tokens` columns; None if none is wrong."""
    for node, given in zip(walk.placeholders(gm.graph), arguments, strict=True):
        if "attention_mask" in node.name and isinstance(given, Tensor) and given.ndim == 2 and given.shape[1] != tokens:
            return (
                f"attention_mask has {given.shape[1]} columns, {tokens} are needed: one for each token that the cache "
                "has seen and for each new one"
            )
    return None


def told_by(gm: fx.GraphModule, sites: list[AttentionSite], step: bool) -> list[tuple[fx.Node, ...]]:
    """Return for each site the inputs that mark padding in all masks on its cache."""
    masks = [tuple(each.mask for each in site.all) for site in sites]
    known = {among: padding_inputs(gm, list(among), step) for among in dict.fromkeys(masks)}
    return [known[among] for among in masks]


class PositionCheck:
    """A check that the position ids which rotate the keys of a graph are consecutive.

    The ids are computed from the arguments of each call.  The check is for layers with
    cache positions, which replace position ids by the rank among cached tokens.  This keeps the distances between
    real tokens only if the ids of a row increase by one, from any first id.
    """

    def __init__(self, gm: fx.GraphModule, sites: list[AttentionSite]) -> None:
        rotaries = [find_rotary(gm, site) for site in sites]
        nodes = list(dict.fromkeys(unreshaped(rotary.position) for rotary in rotaries if rotary))
        self._given = [node.op == "placeholder" for node in nodes]
        self._module = splicing.computing(gm, nodes)

    def first(self, arguments: tuple[Any, ...], valid: Tensor) -> Tensor | None:
        """Return the position id of each row's first real token, int64 [B]; None if no ids rotate keys.

        Args:
            valid: bool [B, q], False for padding.

        Raises:
            UnsupportedGraph: the ids of a row do not increase by one, or ids from the caller begin above 0.
        """
        first = None
        for ids, given in zip(self._ids(arguments, valid), self._given, strict=True):
            offsets = _offsets(ids, valid)
            first = torch.where(valid.any(-1), offsets.gather(-1, valid.long().argmax(-1, keepdim=True))[:, 0], 0)
            if not bool(_is_constant(offsets, valid, torch.zeros_like(first) if given else first)):
                raise UnsupportedGraph(self.refusal)
        return first

    def go_on(self, arguments: tuple[Any, ...], valid: Tensor, first: Tensor | None, seen: Tensor) -> Tensor:
        """Return whether the ids of a step continue those of each row's earlier real tokens; a bool on the device.

        Args:
            valid: bool [B, q], False for padding.
            first: the result of the method `first`; None if the rows come from several prompts.
            seen: the number of earlier real tokens, int64 [B].
        """
        fits = torch.ones((), dtype=torch.bool, device=valid.device)
        for ids, given in zip(self._ids(arguments, valid), self._given, strict=True):
            begin = torch.zeros_like(seen) if given else first
            if begin is not None:
                fits = fits & _is_constant(_offsets(ids, valid), valid, begin + seen)
        return fits

    @property
    def refusal(self) -> str:
        """Error message for ids that are not consecutive."""
        return OWN_POSITIONS if any(self._given) else PADDING_BETWEEN

    def _ids(self, arguments: tuple[Any, ...], valid: Tensor) -> list[Tensor]:
        """Return the position ids of each distinct rotary embedding, as [B or 1, q]."""
        queries = valid.shape[1]
        made = [ids if ids.shape[-1] == queries or ids.ndim != 2 else ids.T for ids in self._module(*arguments)]
        return [ids.reshape(-1, queries).to(valid.device) for ids in made]


def _offsets(ids: Tensor, valid: Tensor) -> Tensor:
    """Return by how much ids [B or 1, q] exceed the rank among the real tokens of the call, int64 [B, q]."""
    return ids - (valid.long().cumsum(-1) - 1)


def _is_constant(offsets: Tensor, valid: Tensor, wanted: Tensor) -> Tensor:
    """Return whether the offsets [B, q] of real tokens equal the wanted offset of their row [B]."""
    return ((offsets == wanted.to(offsets.device)[:, None]) | ~valid).all()


def alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two graphs rotate keys by the same angles, up to rounding; see `RotarySlice.probe`."""
    other = other.to(one.device)
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-2, atol=1e-2)


def places_of(chosen: Tensor, start: int = 0) -> Tensor:
    """Return the positions where bool [B, n] is true: int64 [B, P], counted from `start`, -1 after a row's last one."""
    most = int(chosen.sum(-1).max())
    indices = torch.arange(start, start + chosen.shape[1], device=chosen.device)
    ordered = torch.where(chosen, indices, LATE).sort(-1).values[:, :most]
    return torch.where(ordered == LATE, -1, ordered)


def agreement(cache: LayerCache, column: Tensor) -> tuple[Tensor, Tensor]:
    """Compare the earlier tokens' entries in an input that marks padding with the contents of the cache.

    Args:
        column: the input, [B or 1, S] or [S].

    Returns:
        Two bools on the device: whether the input has one for every real token and zero for all others, and whether it
        has zero for every token that was left out of the cache as padding.
    """
    before, absent = column.reshape(-1, column.shape[-1])[:, : cache.seen], cache.absent
    shown = torch.zeros((), dtype=torch.bool, device=absent.device)
    if absent.shape[1]:
        row = torch.arange(absent.shape[0], device=absent.device)[:, None].clamp(max=before.shape[0] - 1)
        shown = ((before[row, absent.clamp(min=0)] != 0) & (absent >= 0)).any()
    same = ((before == 1).sum(-1) == cache.valid_seen) & ((before != 0).sum(-1) == cache.valid_seen)
    return same.all(), ~shown


def padding_of(columns: list[Tensor], rows: int, queries: int, device: torch.device) -> Tensor:
    """Return bool [B, q], true for tokens that are zero in any of the columns, each [B or 1, q] or [q]."""
    none = torch.zeros(rows, queries, dtype=torch.bool, device=device)
    return torch.stack([none, *((column == 0).expand(rows, -1) for column in columns)]).any(0)
