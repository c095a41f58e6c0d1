"""Replace positions by ranks: queries follow the cached tokens, and keys get their rotary embedding when they are read.

    before   angles = cos(position * inv_freq)            after    ranks = rank_of_first + arange(q)
             query, key = rotate(query, angles), ...                 angles = cos(ranks * inv_freq)

First, every layer's rotary embedding is cut out as a function of a rank, for the pass that attends.
"""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture.rotary import (
    KEY_ROTATED_BY_OTHERS,
    QUERY_ROTATED_BY_OTHERS,
    ROWS_SHARE_POSITIONS,
    Rotary,
    find_rotary,
    positions_of,
    rotates_each_token_alone,
    rows_come_first,
    unreshaped,
)
from kvpass.errors import UnsupportedGraph
from kvpass.fx import alias, shapes, walk
from kvpass.fx.walk import value
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.logs import Record
from kvpass.rewrite.rotary_slice import cut_rotary

BOTH_WAYS = "a mask reads the positions through the same operation as the rotary embedding"


def rotate_at_read(step: StepContext) -> Record:
    """Replace positions by ranks, and record keys before their rotation.

    Raises:
        UnsupportedGraph: a layer has no rotary embedding, or its positions cannot be replaced.
    """
    if not step.ranked:
        return Record(left={"keys": "they are stored as they are attended to"})
    memory = alias.Memory(step.gm.graph)
    found = [_rotary(step, layer, memory) for layer in range(len(step.sites))]
    step.raw_keys = [rotary.raw for rotary in found]
    step.rotaries = [
        cut_rotary(step.gm, site, rotary, step.sizes, memory) for site, rotary in zip(step.sites, found, strict=True)
    ]
    positions = list(dict.fromkeys(p for layer, rotary in enumerate(found) for p in _positions(step, layer, rotary)))
    first = _rank_of_first(step)
    for position in positions:
        _replace_by_ranks(step, position, first)
    return Record([position.name for position in positions])


def _rotary(step: StepContext, layer: int, memory: alias.Memory) -> Rotary:
    rotary = find_rotary(step.sites[layer])
    if rotary is None:
        raise UnsupportedGraph(
            f"{step.line(layer)}: the keys have a rotary embedding in the prompt, but not in this step"
        )
    if not rotates_each_token_alone(rotary, step.sites[layer], memory):
        _refuse(step, layer, KEY_ROTATED_BY_OTHERS)
    return rotary


def _positions(step: StepContext, layer: int, rotary: Rotary) -> list[fx.Node]:
    """Return the positions that rotate the layer's key and query."""
    found = positions_of(rotary, step.sites[layer])
    if not found:
        _refuse(step, layer, QUERY_ROTATED_BY_OTHERS)
    return found


def _refuse(step: StepContext, layer: int, why: str) -> NoReturn:
    raise UnsupportedGraph(f"{step.line(layer)}: {why}; use positions='absolute'")


def _rank_of_first(step: StepContext) -> fx.Node:
    """Return the node int64 [B] of the first new token's rank, computed before the first layer's step writes."""
    decodes = step.decodes

    def function(position: Tensor, free: Tensor) -> list[Tensor]:
        live = position[:, 0] >= 0
        overwritten = live.gather(-1, free[:, :1])[:, 0].long()  # 1 if the new token overwrites a token
        return [live.sum(-1) - overwritten if decodes else live.sum(-1)]

    metadata = [step.slot(0, "position"), step.slot(0, "free")]
    rank = step.compute(function, metadata, step.length.next, "kvpass_first_rank")[0]
    rank.meta["example_value"] = step.of_shape((step.batch,), torch.int64)
    return rank


def _replace_by_ranks(step: StepContext, position: fx.Node, first: fx.Node) -> None:
    """Replace positions by ranks, live slots + 0, 1, ..., for the nodes that rotate queries and keys."""
    shape, rows, queries, dtype = step.shape(position), step.batch, step.queries, value(position).dtype
    origin = unreshaped(position)
    if origin in step.placeholders:
        step.replaced_positions.append(step.placeholders.index(origin))
    along = shapes.token_dim(shape, queries)
    padded = bool(step.padding_inputs.sites[0])
    if rows > 1 and padded and not _may_differ_by_row(step, position):
        _refuse(step, 0, ROWS_SHARE_POSITIONS)
    users = _rotating_users(step, position)
    valid = [step.inputs.valid(0)] if padded and not step.decodes else []  # padding has no rank of its own

    def function(first: Tensor, *valid: Tensor) -> list[Tensor]:
        steps = [(new.cumsum(-1) - 1).clamp(min=0) for new in valid] or [torch.arange(queries, device=first.device)]
        ranks = first[:, None] + steps[0]  # [B, q]
        if len(shape) == 1:
            return [ranks[0]]
        full = [1] * len(shape)
        full[0], full[along] = rows, queries
        return [ranks.view(full).to(dtype)]

    before = step.length.next if position.op == "placeholder" else position.next
    ranks = step.compute(function, [first, *valid], before, f"kvpass_rank_{position.name}")[0]
    ranks.meta["example_value"] = value(position)
    for user in users:
        user.replace_input_with(position, ranks)


def _may_differ_by_row(step: StepContext, position: fx.Node) -> bool:
    """Return whether positions have, or may have, a dimension for the rows of what they rotate."""
    rotated = [node for site in step.sites for each in site.all for node in (each.query, each.key)]
    return value(position).ndim > 1 and all(rows_come_first(position, node) for node in rotated)


def _rotating_users(step: StepContext, position: fx.Node) -> list[fx.Node]:
    """Return the nodes that read positions to rotate queries and keys; masks still compare positions with indices."""
    sites = [each for site in step.sites for each in site.all]
    calls = {site.call for site in sites}
    masks = {node for site in sites if site.mask for node in walk.ancestors(site.mask, calls)}
    rotating = {node for site in sites for node in walk.ancestors(site.query, calls)}
    users = [user for user in step.graph.nodes if user in position.users]
    if any(user in masks and user in rotating for user in users):
        _refuse(step, 0, BOTH_WAYS)
    return [user for user in users if user not in masks]
