"""What arguments say of tokens: which are padding, and whether positions count the others."""

from __future__ import annotations

import torch
import torch.fx as fx
from torch import Tensor

from kvpass import graphs
from kvpass.capture.hiding import telling
from kvpass.capture.rotary import find_rotary, given_positions
from kvpass.capture.sites import AttentionSite
from kvpass.policies.base import LATE
from kvpass.runtime.handle import LayerCache

OWN_POSITIONS = (
    "the position ids are not 0, 1, 2, ... over the real tokens of a row, and held tokens are numbered by their rank "
    "instead: leave position_ids out, or pass positions='absolute'"
)
SHOWN_AGAIN = (
    "a token that the mask hid when it came, and that was left out of the cache for that, is no longer hidden; give "
    "the whole conversation anew, or leave its mask as it was"
)

HIDDEN_BEFORE = (
    "padding was hidden when it came, and left out of the cache for that, and nothing proves that the mask of this "
    "call hides it too; give rows of one length, or one row at a time"
)


def told_by(gm: fx.GraphModule, sites: list[AttentionSite], step: bool) -> list[tuple[fx.Node, ...]]:
    """For each site the inputs that tell padding in all masks on its cache; layers mostly share their masks."""
    masks = [tuple(each.mask for each in site.all) for site in sites]
    known = {among: telling(gm, list(among), step) for among in dict.fromkeys(masks)}
    return [known[among] for among in masks]


def positions_among(gm: fx.GraphModule, sites: list[AttentionSite]) -> list[int]:
    """Which of a graph's arguments are positions that rotate queries and keys."""
    holders = graphs.placeholders(gm.graph)
    rotaries = [(find_rotary(gm, site), site) for site in sites]
    given = [node for rotary, site in rotaries if rotary for node in given_positions(rotary, site)]
    return [holders.index(node) for node in dict.fromkeys(given)]


def count_tokens(ids: Tensor, queries: int, rows: int, columns: list[Tensor], seen: Tensor | int = 0) -> Tensor:
    """Whether position ids [..., q] of real tokens go on from `seen` [B], one by one; a bool on the device.

    Args:
        columns: zero for padding, each [B or 1, q] or [q].
    """
    valid = ~padding_of(columns, rows, queries, ids.device)
    before = seen[:, None].to(ids.device) if isinstance(seen, Tensor) else seen
    wanted = before + valid.long().cumsum(-1) - 1
    given = ids.reshape(-1, queries) if ids.shape[-1] == queries else ids.reshape(queries, -1).T
    return ((given == wanted) | ~valid).all()


def places_of(chosen: Tensor, start: int = 0) -> Tensor:
    """Where bool [B, n] is true: int64 [B, P], counted from `start`, -1 after the last of a row."""
    most = int(chosen.sum(-1).max())
    places = torch.arange(start, start + chosen.shape[1], device=chosen.device)
    ordered = torch.where(chosen, places, LATE).sort(-1).values[:, :most]
    return torch.where(ordered == LATE, -1, ordered)


def agreement(cache: LayerCache, column: Tensor) -> tuple[Tensor, Tensor]:
    """What an input that tells padding says now of the tokens that went before, as bools on the device.

    Returns:
        Whether it has one for every real token and zero for all others, and whether it has zero for every token that
        was left out of the cache as padding.
    """
    before, absent = column.reshape(-1, column.shape[-1])[:, : cache.seen], cache.absent
    shown = torch.zeros((), dtype=torch.bool, device=absent.device)
    if absent.shape[1]:
        row = torch.arange(absent.shape[0], device=absent.device)[:, None].clamp(max=before.shape[0] - 1)
        shown = ((before[row, absent.clamp(min=0)] != 0) & (absent >= 0)).any()
    same = ((before == 1).sum(-1) == cache.valid_seen) & ((before != 0).sum(-1) == cache.valid_seen)
    return same.all(), ~shown


def padding_of(columns: list[Tensor], rows: int, queries: int, device: torch.device) -> Tensor:
    """bool [B, q]: which tokens are zero in any of the columns, each [B or 1, q] or [q]."""
    none = torch.zeros(rows, queries, dtype=torch.bool, device=device)
    return torch.stack([none, *((column == 0).expand(rows, -1) for column in columns)]).any(0)
