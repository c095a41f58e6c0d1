"""Position ids that count held tokens, for policies that renumber (`Policy.renumbers`).

Two things read position ids: a lookup in a table of learned positions, and a rotary embedding.  Both keep
the ids that the model's own code makes, less the number of tokens of the row that are no longer held, so
whatever offset a model adds stays right, and nothing changes while nothing is gone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture.rotary import find_rotary
from kvpass.capture.sites import AttentionSite
from kvpass.errors import UnsupportedGraph
from kvpass.fx import shapes, walk
from kvpass.fx.walk import ancestors, is_tensor, name_of, value
from kvpass.policies.base import window_starts

_COUNTS = frozenset({"arange", "cumsum"})


@dataclasses.dataclass(frozen=True)
class Reader:
    """A node that reads position ids.

    Attributes:
        ids: the node that it reads them from, whose rows, if it tells them apart, come first.
        along: the dimension of `ids` that counts the new tokens.
    """

    node: fx.Node
    ids: fx.Node
    along: int


Plausible = Callable[[Tensor], bool]
"""Whether the value of an integer input can be the position ids of this call."""


def readers(
    gm: fx.GraphModule, sites: list[AttentionSite], actual: dict[fx.Node, Any], fits: Plausible
) -> list[Reader]:
    """Everything that reads position ids.

    A lookup reads them if its index is computed by counting, or comes from an input whose value can be
    nothing else.  Tables that also serve another purpose, or are as long as an output is wide, hold words.

    Args:
        actual: the value of each placeholder in this call.

    Raises:
        UnsupportedGraph: nothing does, as far as can be told.
    """
    rotated = _rotated(gm, sites)
    lookups = [n for n in gm.graph.nodes if n.target is torch.nn.functional.embedding]
    tables = [n for n in lookups if not _holds_words(gm, n)] or ([] if rotated else lookups)
    found = [_reader(n, _index(n), sites) for n in tables if _counts(_index(n), actual, fits)]
    if not found and not rotated:
        raise UnsupportedGraph(
            f"{walk.source_line(sites[0].call)}: this policy renumbers positions, and nothing here can be told to "
            "read them: no rotary embedding, and no lookup whose index counts tokens; let the model make its own "
            "position ids, or choose a policy that leaves them"
        )
    return [*found, *rotated]


def _reader(node: fx.Node, ids: fx.Node, sites: list[AttentionSite]) -> Reader:
    shape, queries = [shapes.expr(size) for size in value(ids).shape], shapes.expr(sites[0].queries)
    along = [d for d, size in enumerate(shape) if size == queries and (d or len(shape) == 1)]
    return Reader(node, ids, along[-1] if along else len(shape) - 1)


def _index(lookup: fx.Node) -> fx.Node:
    node = lookup.args[0] if lookup.args else lookup.kwargs["input"]
    assert isinstance(node, fx.Node)
    return node


def _holds_words(gm: fx.GraphModule, lookup: fx.Node) -> bool:
    table = lookup.args[1] if len(lookup.args) > 1 else lookup.kwargs["weight"]
    assert isinstance(table, fx.Node)
    widths = {value(out).shape[-1] for out in walk.results(gm.graph) if is_tensor(out) and value(out).ndim}
    return any(user.target is not lookup.target for user in table.users) or value(table).shape[0] in widths


def _counts(index: fx.Node, actual: dict[fx.Node, Any], fits: Plausible) -> bool:
    behind = ancestors(index)
    if any(name_of(node) in _COUNTS for node in behind):
        return True
    given = [actual[node] for node in behind if node.op == "placeholder" and is_tensor(node)]
    whole = [x for x in given if isinstance(x, Tensor) and not x.is_floating_point() and x.dtype != torch.bool]
    return len(given) == len(whole) == 1 and fits(whole[0])


def _rotated(gm: fx.GraphModule, sites: list[AttentionSite]) -> list[Reader]:
    """Where position ids become the angles of a rotary embedding."""
    rotaries = [find_rotary(gm, site) for site in sites]
    ids = dict.fromkeys(rotary.position for rotary in rotaries if rotary is not None)
    return [_reader(user, node, sites) for node in ids for user in node.users if _is_angle(user)]


def _is_angle(node: fx.Node) -> bool:
    return is_tensor(node) and value(node).is_floating_point()


def fits_prompt(ids: Tensor) -> bool:
    """Position ids of a prompt: every row ends in 0, 1, ..., n, with n above zero."""
    if ids.ndim == 0 or ids.shape[-1] < 2:
        return False
    rows = ids.reshape(-1, ids.shape[-1]).tolist()
    return all(0 < row[-1] < len(row) and row[-1 - row[-1] :] == list(range(row[-1] + 1)) for row in rows)


def fits_step(seen: Tensor, length: Tensor) -> Plausible:
    """Position ids of new tokens: rows that go on from `seen` or from `length` [B], or stand still at padding."""

    def fits(ids: Tensor) -> bool:
        if ids.ndim == 0 or ids.reshape(-1, ids.shape[-1]).shape[0] not in (1, len(seen)):
            return False
        rows = ids.reshape(-1, ids.shape[-1]).expand(len(seen), -1)
        moves = rows.diff(dim=-1)
        even = bool(((moves == 0) | (moves == 1)).all())
        return even and bool((rows[:, 0] >= seen - 1).all()) and bool((rows[:, 0] <= length).all())

    return fits


def on_held(ids: Tensor, along: int, position: Tensor, seen: Tensor, queries: int, last: int) -> Tensor:
    """Ids of new tokens, less the number of tokens that are gone; none goes beyond `last`.

    Args:
        ids, along: as the model's code makes them; see `Reader`.
        position: int64 [B, H', C], the held tokens; seen: int64 [B].
    """
    held = (position[:, 0] >= 0).sum(-1)  # [B]
    index = held[:, None] + torch.arange(queries, device=ids.device)
    shift = (seen - held)[:, None] + (index - last).clamp(min=0)  # [B, q]
    return _less(ids, along, shift)


def on_windows(ids: Tensor, along: int, valid: Tensor, room: int | Tensor) -> Tensor:
    """Ids of a prompt, counted from the start of each token's window; valid and room are as of `window_starts`."""
    return _less(ids, along, window_starts(valid, room))


def _less(ids: Tensor, along: int, shift: Tensor) -> Tensor:
    """The ids less [B, q], of row 0 where they do not tell rows apart."""
    if ids.ndim == 1:
        return ids - shift[0].to(ids.dtype)
    shape = [1] * ids.ndim
    shape[0], shape[along] = shift.shape
    return ids - shift.view(shape).to(ids.dtype)


def within_windows(mask: Tensor | None, causal: bool, valid: Tensor, room: int | Tensor) -> Tensor:
    """The mask of a prompt [B, Hq or 1, q, q] under which each token sees its own window only."""
    starts = window_starts(valid, room)
    same = (starts[:, :, None] == starts[:, None])[:, None]  # [B, 1, q, q]
    if causal:
        same = same & torch.ones_like(same[:1]).tril()
    if mask is None:
        return same
    if mask.dtype == torch.bool:
        return mask & same
    return torch.where(same, mask, torch.finfo(mask.dtype).min)
