"""Change aten graphs before Inductor lowers them, and compute a digest that its cache keys lack.

`look_up_unchecked` drops bounds checks for indices that are an arange over the indexed dimension, as masks use them in
`padding[rows, positions]`: the compiler cannot always prove this for a dynamic size.

`check_table_indices` checks token ids and positions outside of compiled loops.  Inductor checks an index inside the
loop that reads the table, and if several threads share the loop, the exception cannot leave its thread and ends the
process.

`materialize_sums` writes the residual stream of a decode step to memory once per layer.  The compiler would otherwise
add up the terms of several layers wherever the stream is read, and so make another kernel for every layer.

`pass_digest` covers the sources that the changes run and the values of the graph's constants; the outermost of
Inductor's caches reads only their shape and dtype.  The policy is not a part: its work is operators of the graph, so
segments in which policies agree compile once for all policies.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.node import map_arg

from kvpass import versions
from kvpass.errors import LookupRangeError
from kvpass.fx.shapes import expr
from kvpass.torch_private import inductor, symbolic_shapes
from kvpass.torch_private.tensors import tensor_bytes

aten, prims = torch.ops.aten, torch.ops.prims


def materialize_node(graph: fx.Graph, node: fx.Node, shape: Sequence[Any], strides: Sequence[Any]) -> None:
    """Make the readers of a dense aten node read its value from memory.

    The compiler allocates a buffer for the value under a strided view.
    """
    with graph.inserting_after(node):
        view = graph.call_function(aten.as_strided.default, (node, list(shape), list(strides)))
    sizes = map_arg(tuple(shape), lambda size: size.meta["val"])
    view.meta["val"] = node.meta["val"].as_strided(sizes, strides)
    node.replace_all_uses_with(view, delete_user_cb=lambda user: user is not view)


REARRANGING = (
    aten.unsqueeze.default, aten.view.default, aten.expand.default, aten.slice.Tensor, aten.clone.default
)  # fmt: skip
"""Operators whose results contain only elements of their first operand."""


def look_up_unchecked(graph: fx.Graph) -> None:
    """Drop the bounds checks of indices that are in range, in an aten graph."""
    for node in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        table, indices = node.args
        sizes = table.meta["val"].shape
        aranges = [
            (_arange_of(index), size)
            for index, size in zip(indices, sizes[: len(indices)], strict=True)
            if index is not None
        ]
        if all(arange and expr(arange.meta["val"].shape[0]) == expr(size) for arange, size in aranges):
            node.target = aten._unsafe_index.Tensor
        elif inductor.CHECKS_TOO_EARLY:
            for arange in dict.fromkeys(arange for arange, _ in aranges if arange):
                materialize_node(graph, arange, arange.args, [1])  # the check then follows the load of the index


def _arange_of(index: fx.Node) -> fx.Node | None:
    """Return the node 0, 1, 2, ... whose elements an index consists of, or None."""
    while index.target in REARRANGING or _adds_zero(index):
        index = index.args[0]  # type: ignore[assignment]
    is_arange = index.target is prims.iota.default and (index.kwargs["start"], index.kwargs["step"]) == (0, 1)
    return index if is_arange else None


def _adds_zero(node: fx.Node) -> bool:
    number = node.args[1] if node.target is aten.add.Tensor else None
    return isinstance(number, int) and number == 0


torch.library.define("kvpass::checked_table_index", "(Tensor index, int least, int rows) -> Tensor")


@torch.library.impl("kvpass::checked_table_index", "CPU")
def checked_table_index(index: Tensor, least: int, rows: int) -> Tensor:
    """Return row indices of a table with negative ones counted from the end, and check their range.

    It runs in every step, so it is not a `custom_op`, whose wrapper takes as long as the check.

    Args:
        least: the lowest index allowed: 0, or -rows if negative indices count from the end.

    Raises:
        LookupRangeError: an index is outside of the table.
    """
    if count := index.numel():
        low, high = [int(index)] * 2 if count == 1 else map(int, index.aminmax())  # one row decodes one token
        if low < least or high >= rows:
            wrong = low if low < least else high
            raise LookupRangeError(
                f"index {wrong} is looked up in a table of {rows} rows: a token id outside of the vocabulary, or a "
                "position past the model's last; check the ids, and keep the conversation within the model's positions"
            )
    # a copy, because an operator must not return its own input
    return index.clone() if least == 0 else torch.where(index < 0, index + rows, index)


def _fake(index: Tensor, least: int, rows: int) -> Tensor:
    return torch.empty_like(index)


torch.library.register_fake("kvpass::checked_table_index", _fake)


def check_table_indices(graph: fx.Graph) -> None:
    """Insert range checks before CPU lookups of table rows, in an aten graph."""
    for node in list(graph.nodes):
        lookup = _lookup(node)
        if lookup is None:
            continue
        table, index, least = lookup
        rows = table.meta["val"].shape[0]
        with graph.inserting_before(node):
            checked = graph.call_function(torch.ops.kvpass.checked_table_index.default, (index, least, rows))
        checked.meta["val"] = torch.empty_like(index.meta["val"])
        node.target, node.args, node.kwargs = aten._unsafe_index.Tensor, (table, [checked]), {}


def _lookup(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """Return the table, the index and the lowest index allowed of a lookup in floating-point rows, or None."""
    args: Any = node.args
    if node.target is aten.embedding.default:
        table, index, least = args[0], args[1], 0
    elif node.target is aten.index.Tensor and len(args[1]) == 1:
        (table, (index,)), least = args, -1
    else:
        return None
    val = table.meta["val"]
    rows = val.shape[0]
    is_checked = val.is_floating_point() and val.device.type == "cpu" and val.ndim <= 2 and isinstance(rows, int)
    if not is_checked or index is None or index.meta["val"].dtype not in (torch.int32, torch.int64):
        return None
    return table, index, least * rows


def materialize_sums(graph: fx.Graph) -> None:
    """Write sums [B, T, D] with several readers to buffers, in an aten graph with fixed sizes."""
    for node in list(graph.nodes):
        if node.target is aten.add.Tensor and len(node.users) > 1 and is_residual_sum(node):
            materialize_node(graph, node, node.meta["val"].shape, node.meta["val"].stride())


def is_residual_sum(node: fx.Node) -> bool:
    """Return whether a sum is dense and has two floating-point operands of its three-dimensional shape."""
    values = [node.meta["val"], *(parent.meta["val"] for parent in node.args if isinstance(parent, fx.Node))]
    if any(map(symbolic_shapes.symbols, values)):
        return False
    shapes = {value.shape for value in values}
    total = values[0]
    return (
        len(values) == 3
        and len(shapes) == 1
        and total.ndim == 3
        and total.is_floating_point()
        and total.is_contiguous()
    )


HASHED = ("fx", "lowering", "torch_private")
"""The packages of kvpass whose code changes of a graph may run; each is hashed whole."""


def pass_digest(change: Callable[[fx.Graph], None], gm: fx.GraphModule | None = None) -> bytes:
    """Return a digest of the sources that a change of a graph runs, and of the graph's constants.

    Args:
        change: the function; the code of kvpass that it runs must be in its own module or in `HASHED`.
        gm: the graph; None for a digest of the sources alone.
    """
    hashed = hashlib.sha256(change.__qualname__.encode() + versions.digest_of_sources(*HASHED))
    with contextlib.suppress(OSError):  # of a package in an archive, which has no such files
        hashed.update(Path(getattr(sys.modules[change.__module__], "__file__", None) or "").read_bytes())
    for name, constant in _constants(gm) if gm else ():
        hashed.update(f"{name} {tuple(constant.shape)} {constant.dtype}".encode() + tensor_bytes(constant))
    return hashed.digest()


def _constants(gm: fx.GraphModule) -> Iterator[tuple[str, Tensor]]:
    for node in gm.graph.find_nodes(op="get_attr"):
        constant = operator.attrgetter(str(node.target))(gm)
        if type(constant) is Tensor:  # neither a fake tensor nor the body of an operator
            yield str(node.target), constant
