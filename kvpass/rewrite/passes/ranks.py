"""Positions by rank: queries stand behind the held tokens, and the keys' rotary embedding waits until they are read.

    before   angles = cos(position * inv_freq)            after    ranks = rank_of_first + arange(q)
             query, key = rotate(query, angles), ...                 angles = cos(ranks * inv_freq)

Every layer's rotary embedding is cut out first, as a function of a rank, for the pass that attends.
"""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture.rotary import (
    ALIKE_IN_ALL_ROWS,
    BY_OTHER_TOKENS,
    ROTATED_APART,
    Rotary,
    find_rotary,
    positions_of,
    reshaped,
    rows_come_first,
    turns_each_token_alone,
)
from kvpass.errors import UnsupportedGraph
from kvpass.fx import shapes, walk
from kvpass.fx.walk import value
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.record import Record
from kvpass.rewrite.rotary_slice import cut_rotary

BOTH_WAYS = "a mask reads the positions through the same operation as the rotary embedding"


def rotate_at_read(step: StepContext) -> Record:
    """Let positions be ranks.

    Raises:
        UnsupportedGraph: a layer has no rotary embedding, or none whose positions can be replaced.
    """
    if not step.ranked:
        return Record(left={"keys": "they are stored as they are attended to"})
    found = [_rotary(step, layer) for layer in range(len(step.sites))]
    step.raw_keys = [rotary.raw for rotary in found]
    step.rotaries = [
        cut_rotary(step.gm, site, rotary, step.sizes) for site, rotary in zip(step.sites, found, strict=True)
    ]
    positions = list(dict.fromkeys(p for layer, rotary in enumerate(found) for p in _positions(step, layer, rotary)))
    first = _rank_of_first(step)
    for position in positions:
        _rank(step, position, first)
    return Record([position.name for position in positions])


def _rotary(step: StepContext, layer: int) -> Rotary:
    rotary = find_rotary(step.gm, step.sites[layer])
    if rotary is None:
        raise UnsupportedGraph(f"{step.line(layer)}: the keys had a rotary embedding in the prompt and have none here")
    if not turns_each_token_alone(rotary, step.sites[layer]):
        _refuse(step, layer, BY_OTHER_TOKENS)
    return rotary


def _positions(step: StepContext, layer: int, rotary: Rotary) -> list[fx.Node]:
    """What the layer's key and query are rotated by."""
    found = positions_of(rotary, step.sites[layer])
    if not found:
        _refuse(step, layer, ROTATED_APART)
    return found


def _refuse(step: StepContext, layer: int, why: str) -> NoReturn:
    raise UnsupportedGraph(f"{step.line(layer)}: {why}; use positions='absolute'")


def _rank_of_first(step: StepContext) -> fx.Node:
    """int64 [B]: the rank of the first new token; read before the first layer's step, which writes there."""
    decodes = step.decodes

    def function(position: Tensor, free: Tensor) -> list[Tensor]:
        live = position[:, 0] >= 0
        gone = live.gather(-1, free[:, :1])[:, 0].long()  # the token that will be overwritten
        return [live.sum(-1) - gone if decodes else live.sum(-1)]

    held = [step.slot(0, "position"), step.slot(0, "free")]
    first = step.compute(function, held, step.length.next, "kvpass_first_rank")[0]
    first.meta["example_value"] = step.of_shape((step.batch,), torch.int64)
    return first


def _rank(step: StepContext, position: fx.Node, first: fx.Node) -> None:
    """Put ranks, live slots + 0, 1, ..., in the place of positions, for what rotates queries and keys."""
    shape, rows, queries, dtype = step.shape(position), step.batch, step.queries, value(position).dtype
    given = reshaped(position)
    if given in step.placeholders:
        step.replaced_positions.append(step.placeholders.index(given))
    fits = [d for d, size in enumerate(shape) if shapes.expr(size) == shapes.expr(queries) and (d or len(shape) == 1)]
    along = fits[-1] if fits else len(shape) - 1
    padded = bool(step.padding_inputs.sites[0])
    if rows > 1 and padded and not _tells_rows_apart(step, position):
        _refuse(step, 0, ALIKE_IN_ALL_ROWS)
    users = _users_but_masks(step, position)
    valid = [step.inputs.valid(0)] if padded and not step.decodes else []  # only real tokens count

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


def _tells_rows_apart(step: StepContext, position: fx.Node) -> bool:
    """Whether positions have, or could have, a dimension for the rows of what they rotate."""
    rotated = [node for site in step.sites for each in site.all for node in (each.query, each.key)]
    return value(position).ndim > 1 and all(rows_come_first(position, node) for node in rotated)


def _users_but_masks(step: StepContext, position: fx.Node) -> list[fx.Node]:
    """What reads positions to rotate queries and keys with; a mask compares them with places, which stay."""
    sites = [each for site in step.sites for each in site.all]
    calls = {site.call for site in sites}
    masks = {node for site in sites if site.mask for node in walk.ancestors(site.mask, calls)}
    rotating = {node for site in sites for node in walk.ancestors(site.query, calls)}
    users = [user for user in step.graph.nodes if user in position.users]
    if any(user in masks and user in rotating for user in users):
        _refuse(step, 0, BOTH_WAYS)
    return [user for user in users if user not in masks]
