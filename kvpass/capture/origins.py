"""Follow keys and values back to the concatenation with the past that grew them.

The operations on the way run on numbered elements at small sizes, which shows where each row, token and head ends up.
Small sizes cannot reveal a subscript such as `[:, :, -64:]`.  So the recorded size of each operation must also be a
multiple of the cache's size, as a symbolic expression.

`cat_parts` and `origin_of` decide which updates grow a past.  With each new case, add a test of a graph that it must
not match.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.fx as fx

from kvpass.capture.products import is_as_wide
from kvpass.fx import op_table, propagation, walk
from kvpass.fx.op_table import is_a, known_name
from kvpass.fx.shapes import expr
from kvpass.fx.walk import is_tensor, value
from kvpass.torch_private import symbolic_shapes


@dataclasses.dataclass(frozen=True)
class Origin:
    """A cache's past (None if empty), its new tokens and their concatenation, each [B, H, tokens, D]."""

    grown: fx.Node
    past: fx.Node | None
    new: fx.Node


class CacheRefused(Exception):
    """Keys or values do not come from a cache as kvpass reads it; the message says why."""


def cat_parts(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the past and the new tokens of a concatenation that grows a cache, or None."""
    if known_name(node) not in ("cat", "concat") or not is_tensor(node):
        return None
    args = op_table.bound(node)
    tensors, dim = args["tensors"], args.get("dim", 0)
    if len(tensors) != 2 or value(node).ndim != 4 or dim not in (-2, 2):
        return None
    past, new = tensors
    is_past = past.op == "placeholder" or value(past).ndim == 1
    return (past, new) if is_past else None


def origin_of(attended: fx.Node, outputs: dict[fx.Node, int]) -> Origin:
    """Follow a key or value back to its cache, and check that heads, tokens and features are the cache's."""
    chain = walk.chain(attended, lambda each: is_a(each, "moves", "keeps"))
    parts, node = cat_parts(chain[-1]), chain[-1]
    if parts is None:
        returned = [each for each in chain if each in outputs and value(each).ndim == 4]
        if not returned:
            raise CacheRefused(
                f"its key or value comes from {walk.name_of(node)!r} ({walk.source_line(node)}), which is no "
                "concatenation with the past, and is not computed from one cached pair"
            )
        node = returned[-1]
    _check_heads(attended, node, chain[: chain.index(node)])
    if parts is None:
        return Origin(node, None, node)
    past, new = parts
    if value(node).dtype != value(new).dtype and not is_as_wide(value(node).dtype, value(new).dtype):
        raise CacheRefused(f"{value(new).dtype} is cached as {value(node).dtype}, which loses digits")
    empty = value(past).ndim != 4 or expr(value(past).shape[2]) == 0
    return Origin(node, None if empty or past.op != "placeholder" else past, new)


def _check_takes_all(node: fx.Node, grown: fx.Node, copies: float) -> None:
    """Refuse an operation that selects a part of the cache at the recorded size, though not at small sizes.

    Which elements a subscript selects depends on how a length compares with its bounds.  Dynamo has decided this
    comparison, so the recorded size tells it for all lengths that the graph serves.

    Args:
        node: the operation.
        grown: the cache.
        copies: the number of elements of the result per element of the cache, at small sizes.
    """
    size, whole = value(node).numel(), value(grown).numel()
    if copies.is_integer() and symbolic_shapes.known_equal(size, whole * int(copies)):
        return
    raise CacheRefused(f"{known_name(node)!r} at {walk.source_line(node)} selects a part of the cached keys or values")


def _check_heads(attended: fx.Node, grown: fx.Node, chain: list[fx.Node]) -> None:
    """Check that each query head reads the rows of its group, by running the operations on numbered elements.

    Args:
        attended: the keys or values that attention reads.
        grown: the cache.
        chain: the operations from the cache to `attended`, the last one first.
    """
    shape = propagation.concrete(value(grown).shape)
    numbered = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    dtype, moved = value(grown).dtype, numbered
    for node in reversed(chain):
        if not value(node).dtype == dtype and not is_as_wide(value(node).dtype, dtype):
            raise CacheRefused(f"attention reads the {dtype} cache in {value(node).dtype}, which loses digits")
        try:
            moved = propagation.run_on(node, {node.all_input_nodes[0]: moved}) if is_a(node, "moves") else moved
        except (RuntimeError, TypeError, IndexError):
            line = walk.source_line(node)
            raise CacheRefused(f"{line}: {known_name(node)!r} on keys or values is not supported") from None
        _check_takes_all(node, grown, moved.numel() / numbered.numel())
    rows, _, tokens, features = shape
    if moved.shape[-2:] != (tokens, features) or moved.numel() % numbered.numel():
        raise CacheRefused(f"keys or values of shape {tuple(value(grown).shape)} are cached, attention reads others")
    groups = moved.numel() // numbered.numel()
    if not torch.equal(moved.reshape(rows, -1, tokens, features), numbered.repeat_interleave(groups, 1)):
        raise CacheRefused(
            "a query head does not read the keys or values of its group's KV head: rows, heads, "
            f"tokens or features are moved between the cache and {walk.source_line(attended)}"
        )
