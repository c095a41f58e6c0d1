"""Find the nodes that read position ids, for policies that renumber cached tokens (`Policy.renumbers`).

Lookups in tables of learned positions and rotary embeddings read position ids.  In a step both read the model's own ids
minus the number of evicted tokens of the row (`kvpass.rewrite.passes.positions`).  In a prompt they read positions in
windows (`kvpass.rewrite.prompt`).  So any offset that a model adds stays right, and ids change only after an eviction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.capture.canonical import AttentionSite
from kvpass.capture.rotary import find_rotary
from kvpass.fx import op_table, shapes, walk
from kvpass.fx.walk import ancestors, example_value, is_tensor
from kvpass.policies.budgets import window_starts


@dataclasses.dataclass(frozen=True)
class Reader:
    """A node that reads position ids.

    Attributes:
        ids: the node of the ids; if rows have their own ids, the first dimension counts rows.
        along: the dimension of `ids` that counts the new tokens.
    """

    node: fx.Node
    ids: fx.Node
    along: int


Plausible = Callable[[Tensor], bool]
"""Return whether the value of an integer input can be the position ids of this call."""


def find_readers(
    gm: fx.GraphModule, sites: list[AttentionSite], argument_of: dict[fx.Node, Any], fits: Plausible
) -> list[Reader]:
    """Return all nodes that read position ids.

    A lookup reads them if its index is computed by counting, or comes from a single integer input whose value fits
    position ids.  A table that other operations also read, or whose length is the width of an output, is a table of
    token embeddings.

    Args:
        argument_of: the value of each placeholder in this call.
        fits: checks whether an integer input can be position ids.

    Raises:
        UnsupportedGraph: no node can be shown to read position ids.
    """
    rotated = _angle_readers(sites)
    lookups = [n for n in gm.graph.nodes if n.target is torch.nn.functional.embedding]
    tables = [n for n in lookups if not _holds_words(gm, n)] or ([] if rotated else lookups)
    found = [_reader(n, _index(n), sites) for n in tables if _counts(_index(n), argument_of, fits)]
    if not found and not rotated:
        walk.refuse(
            sites[0].call,
            "this policy renumbers positions, and no operation can be shown to read them: no rotary embedding, and no "
            "lookup whose index counts tokens; let the model make its own position ids, or choose a policy that does "
            "not renumber",
        )
    return [*found, *rotated]


def _reader(node: fx.Node, ids: fx.Node, sites: list[AttentionSite]) -> Reader:
    return Reader(node, ids, shapes.token_dim(example_value(ids).shape, sites[0].query_len))


def _index(lookup: fx.Node) -> fx.Node:
    index: fx.Node = op_table.named_arguments(lookup)["input"]
    return index


def _holds_words(gm: fx.GraphModule, lookup: fx.Node) -> bool:
    table: fx.Node = op_table.named_arguments(lookup)["weight"]
    widths = {
        example_value(out).shape[-1] for out in walk.results(gm.graph) if is_tensor(out) and example_value(out).ndim
    }
    return any(user.target is not lookup.target for user in table.users) or example_value(table).shape[0] in widths


def _counts(index: fx.Node, argument_of: dict[fx.Node, Any], fits: Plausible) -> bool:
    subgraph = ancestors(index)
    if any(op_table.has_tag(node, "counts") for node in subgraph):
        return True
    inputs = [argument_of[node] for node in subgraph if node.op == "placeholder" and is_tensor(node)]
    integers = [x for x in inputs if walk.has_integers(x)]
    return len(inputs) == len(integers) == 1 and fits(integers[0])


def _angle_readers(sites: list[AttentionSite]) -> list[Reader]:
    """Return the nodes that turn position ids into the angles of a rotary embedding."""
    rotaries = [find_rotary(site) for site in sites]
    positions = dict.fromkeys(rotary.position for rotary in rotaries if rotary is not None)
    return [
        _reader(user, node, sites)
        for node in positions
        for user in node.users
        if is_tensor(user) and walk.is_inexact(example_value(user))
    ]


def fits_prompt(ids: Tensor) -> bool:
    """Return whether ids can be positions of a prompt: every row ends in 0, 1, ..., n."""
    if ids.ndim == 0 or ids.shape[-1] < 2:
        return False
    rows = ids.reshape(-1, ids.shape[-1]).tolist()
    return all(0 < row[-1] < len(row) and row[-1 - row[-1] :] == list(range(row[-1] + 1)) for row in rows)


def fits_step(seen: Tensor, length: Tensor) -> Plausible:
    """Return a check for position ids of new tokens, from `seen` and `length` [B].

    Each row must start between `seen` - 1 and `length`, and each entry equals the entry before or is one more.
    """

    def fits(ids: Tensor) -> bool:
        if ids.ndim == 0 or ids.reshape(-1, ids.shape[-1]).shape[0] not in (1, len(seen)):
            return False
        rows = ids.reshape(-1, ids.shape[-1]).expand(len(seen), -1)
        steps = rows.diff(dim=-1)
        counts = bool(((steps == 0) | (steps == 1)).all())
        return counts and bool((rows[:, 0] >= seen - 1).all()) and bool((rows[:, 0] <= length).all())

    return fits


def subtract_by_row(ids: Tensor, along: int, shift: Tensor) -> Tensor:
    """Subtract `shift` [B, q] from ids; ids without a dimension for rows use its row 0."""
    if ids.ndim == 1:
        return ids - shift[0].to(ids.dtype)
    shape = [1] * ids.ndim
    shape[0], shape[along] = shift.shape
    return ids - shift.view(shape).to(ids.dtype)


def window_mask(mask: Tensor | None, causal: bool, valid: Tensor, size: int | Tensor) -> Tensor:
    """Restrict a prompt's mask [B, Hq or 1, q, q] to each token's own window."""
    starts = window_starts(valid, size)
    same_window = (starts[:, :, None] == starts[:, None])[:, None]  # [B, 1, q, q]
    if causal:
        same_window = same_window & torch.ones_like(same_window[:1]).tril()
    if mask is None:
        return same_window
    if mask.dtype == torch.bool:
        return mask & same_window
    # the lowest number instead of -inf, because a row of only -inf becomes NaN in the softmax
    return torch.where(same_window, mask, torch.finfo(mask.dtype).min)
