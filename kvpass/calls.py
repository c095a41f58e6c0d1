"""What counts as an attention call: scaled_dot_product_attention, or the same spelled out.

Spelled out, attention is a product, a softmax and another product.  Between the first product and the
softmax there may be a factor, a soft cap (a scaled tanh), masks and biases that are added or filled in,
and a column of learned sinks; `find` reads them off the graph.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
from typing import Any

import torch
import torch.fx as fx

from kvpass import compat, graphs
from kvpass.graphs import expr, is_tensor, name_of, value


@dataclasses.dataclass(frozen=True)
class Call:
    """An attention call, however it is spelled.

    With scores s = scale * query key^T its logits are cap * tanh(s / cap), or s without a cap, plus the
    mask; the softmax also runs over the sink, to which no value belongs.

    Attributes:
        node: its output, [B, Hq, q, Dv].
        query: [B, Hq, q, D].
        key, value: where the walk to the cache starts; [..., S, D] and [..., S, Dv].
        mask: bool or additive, [B or 1, Hq or 1, q or 1, S], or None.
        scale: multiplies the products.
        cap: bounds the logits, or None.
        sink: the logits of what is attended to beside the keys, [B or 1, Hq, q or 1, 1], or None.
        lse: where the model asks for the log-sum-exp of the logits, [B, Hq, q] or [B, Hq, q, 1], or None.
        causal, dropout: as of scaled_dot_product_attention.
    """

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: fx.Node | None
    scale: float
    cap: float | None = None
    sink: fx.Node | None = None
    lse: fx.Node | None = None
    causal: bool = False
    dropout: float = 0.0


def find(gm: fx.GraphModule) -> list[Call]:
    """Every attention call, in order.

    A call that is spelled out may need nodes that the graph lacks, such as the sum of its masks: they are
    added to the graph, in which nothing else uses them.
    """
    found = []
    for node in list(gm.graph.nodes):
        if compat.is_sdpa(node):
            found.append(_sdpa_call(node))
        elif name_of(node) == "softmax" and is_tensor(node):
            spelled = _Spelled(gm, node).read()
            if spelled is not None:
                found.append(spelled)
    return found


def _sdpa_call(node: fx.Node) -> Call:
    bound = inspect.signature(_sdpa).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    scale = 1 / math.sqrt(value(given["query"]).shape[-1]) if given["scale"] is None else float(given["scale"])
    return Call(
        node, given["query"], given["key"], given["value"], given["attn_mask"], scale,
        causal=bool(given["is_causal"]), dropout=float(given["dropout_p"]),
    )  # fmt: skip


def _sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> None:
    """The signature of scaled_dot_product_attention."""


def is_boundary(node: fx.Node) -> bool:
    """Whether a node is part of an attention call, so that what comes before it is another matter."""
    return compat.is_sdpa(node) or name_of(node) in ("softmax", "logsumexp")


_SAME = frozenset({"to", "float", "half", "bfloat16", "type_as", "contiguous", "clone", "view", "reshape", "dropout"})
_CASTS = frozenset({"to", "float", "type_as"})
_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm"})
_NEGLIGIBLE = -1e4
"""A logit so low that its token is masked."""


class _Unreadable(Exception):
    """What stands between the products is no attention that we know."""


class _Spelled:
    """Reads a call off the graph, from its softmax to both sides."""

    def __init__(self, gm: fx.GraphModule, softmax: fx.Node) -> None:
        self.graph, self.softmax = gm.graph, softmax
        self.factor, self.cap = 1.0, 0.0
        self.masks: list[fx.Node] = []
        self.sink: fx.Node | None = None
        self.shifted = False

    def read(self) -> Call | None:
        """The call around the softmax, or None if it is no attention."""
        try:
            product, probabilities = self._first_product(), self._second_product()
            query, key, bias = _operands(product)
            self._scaled_by(_number(product.kwargs.get("alpha", 1.0)) if bias else 1.0)
            self.masks += [bias] if bias else []
            query, node = _with_heads(query), _output(probabilities)
            mask = self._mask(value(query).shape[:2])
        except _Unreadable:
            return None
        scale = self.factor * (self.cap or 1.0)
        cap, lse = self.cap or None, self._log_sum_exp()
        return Call(node, query, key, probabilities.args[1], mask, scale, cap, self.sink, lse)  # type: ignore[arg-type]

    # -- from the softmax back -------------------------------------------------------------------------

    def _first_product(self) -> fx.Node:
        node = self.softmax.args[0]
        while name_of(node) not in _PRODUCTS:  # type: ignore[arg-type]
            node = self._step_back(node)  # type: ignore[arg-type]
        return node  # type: ignore[return-value]

    def _step_back(self, node: fx.Node) -> fx.Node:
        """Take one operation on the logits into account; what it was done to."""
        name = name_of(node)
        if name in _SAME:
            _check_no_dropout(node)
            return _tensor(node.args[0])
        steps = {
            "add": self._added, "iadd": self._added, "sub": self._less_maximum, "mul": self._multiplied,
            "imul": self._multiplied, "truediv": self._divided, "div": self._divided, "itruediv": self._divided,
            "tanh": self._capped, "cat": self._joined, "masked_fill": self._filled, "masked_fill_": self._filled,
            "where": self._chosen, "max": self._bounded, "maximum": self._bounded, "clamp": self._bounded,
        }  # fmt: skip
        if name not in steps or node.op == "placeholder":
            raise _Unreadable
        return steps[name](node)

    def _scaled_by(self, factor: float) -> None:
        self.factor *= factor

    def _multiplied(self, node: fx.Node) -> fx.Node:
        logits, factor = sorted(node.args[:2], key=lambda arg: not isinstance(arg, fx.Node))
        self._scaled_by(_number(factor))
        return _tensor(logits)

    def _divided(self, node: fx.Node) -> fx.Node:
        self._scaled_by(1 / _number(node.args[1]))
        return _tensor(node.args[0])

    def _capped(self, node: fx.Node) -> fx.Node:
        if self.cap:
            raise _Unreadable
        self.cap, self.factor = self.factor, 1.0
        return _tensor(node.args[0])

    def _added(self, node: fx.Node) -> fx.Node:
        first, second = _tensor(node.args[0]), _tensor(node.args[1])
        logits, mask = (first, second) if _from_product(first) else (second, first)
        return self._masked(logits, mask)

    def _masked(self, logits: fx.Node, mask: fx.Node) -> fx.Node:
        if self.cap:
            raise _Unreadable  # the mask is inside the cap
        boolean = value(mask).dtype == torch.bool
        self.masks.append(mask if boolean or self.factor == 1.0 else self._scaled(mask))
        return logits

    def _scaled(self, mask: fx.Node) -> fx.Node:
        """A mask that is scaled with the logits; what it hides stays at the lowest number."""
        lowest = torch.finfo(value(mask).dtype).min
        hidden = self._emit(operator.le, mask, lowest / 2)
        return self._emit(torch.masked_fill, self._emit(operator.mul, mask, self.factor), hidden, lowest)

    def _less_maximum(self, node: fx.Node) -> fx.Node:
        """Softmax does not see that a row's maximum was taken off."""
        if not any(name_of(n) in ("max", "amax") and n.args[0] is node.args[0] for n in graphs.ancestors(node)):
            raise _Unreadable
        self.shifted = True
        return _tensor(node.args[0])

    def _joined(self, node: fx.Node) -> fx.Node:
        bound: dict[str, Any] = dict(zip(("tensors", "dim"), node.args, strict=False)) | dict(node.kwargs)
        logits, *sink = bound["tensors"]
        last = bound.get("dim", 0) in (-1, value(node).ndim - 1)
        if self.sink or self.factor != 1.0 or len(sink) != 1 or not last or value(sink[0]).shape[-1] != 1:
            raise _Unreadable
        self.sink = sink[0]
        return _tensor(logits)

    def _filled(self, node: fx.Node) -> fx.Node:
        logits, where, filling = node.args
        if _number(filling) > _NEGLIGIBLE:
            raise _Unreadable
        return self._masked(_tensor(logits), self._emit(torch.logical_not, _tensor(where)))

    def _chosen(self, node: fx.Node) -> fx.Node:
        where, logits, filling = node.args
        if isinstance(filling, fx.Node) and _from_product(filling):
            raise _Unreadable
        return self._masked(_tensor(logits), _tensor(where))

    def _bounded(self, node: fx.Node) -> fx.Node:
        """Logits are kept from falling below the lowest number."""
        if name_of(node) == "clamp" and node.kwargs.get("max") is not None:
            raise _Unreadable
        return _tensor(node.args[0])

    def _log_sum_exp(self) -> fx.Node | None:
        """Where the model sums up the very logits that the softmax takes, and nothing beside them."""
        if self.sink is not None or self.shifted:
            return None
        same = [_tensor(self.softmax.args[0])]
        while name_of(same[-1]) in _CASTS:
            same.append(_tensor(same[-1].args[0]))
        for node in same:  # grows
            same += [user for user in node.users if name_of(user) in _CASTS and user not in same]
        sums = [user for node in same for user in node.users if _sums_up_last(user)]
        return sums[0] if sums else None

    # -- from the softmax on ---------------------------------------------------------------------------

    def _second_product(self) -> fx.Node:
        node = self.softmax
        while True:
            following = [n for n in node.users if name_of(n) in _PRODUCTS or _continues(n, self.sink is not None)]
            if len(following) != 1:
                raise _Unreadable
            if name_of(following[0]) in _PRODUCTS:
                break
            node = following[0]
            _check_no_dropout(node)
        product = following[0]
        if product.args[0] is not node or not is_tensor(product.args[1]):
            raise _Unreadable
        return product

    # -- masks -----------------------------------------------------------------------------------------

    def _mask(self, sizes: Any) -> fx.Node | None:
        """All masks as one of four dimensions; `sizes` are B and Hq."""
        masks = [self._four_dimensional(mask, sizes) for mask in self.masks]
        if not masks:
            return None
        total = masks[0]
        for mask in masks[1:]:
            total = self._both(total, mask)
        return total

    def _four_dimensional(self, mask: fx.Node, sizes: Any) -> fx.Node:
        shape = value(mask).shape
        if len(shape) == 3 and expr(shape[0]) == expr(sizes[0] * sizes[1]):
            return self._emit(torch.unflatten, mask, 0, (-1, int(sizes[1])))
        if len(shape) < 4:
            return self._emit(operator.getitem, mask, (*[None] * (4 - len(shape)), Ellipsis))
        return mask

    def _both(self, one: fx.Node, other: fx.Node) -> fx.Node:
        booleans = [m for m in (one, other) if value(m).dtype == torch.bool]
        if len(booleans) == 2:
            return self._emit(torch.logical_and, one, other)
        if not booleans:
            return self._emit(operator.add, one, other)
        additive = other if booleans[0] is one else one
        hidden = self._emit(torch.logical_not, booleans[0])
        return self._emit(torch.masked_fill, additive, hidden, torch.finfo(value(additive).dtype).min)

    def _emit(self, target: Any, *args: Any) -> fx.Node:
        """A new node before the softmax."""
        with self.graph.inserting_before(self.softmax):
            node = self.graph.call_function(target, args)
        node.meta["example_value"] = compat.propagate(
            target, *(value(a) if isinstance(a, fx.Node) else a for a in args)
        )
        node.meta["stack_trace"] = self.softmax.meta.get("stack_trace")
        return node


def _tensor(argument: Any) -> fx.Node:
    if not is_tensor(argument):
        raise _Unreadable
    node: fx.Node = argument
    return node


def _number(argument: Any) -> float:
    if not isinstance(argument, (int, float)):
        raise _Unreadable
    return float(argument)


def _check_no_dropout(node: fx.Node) -> None:
    bound: dict[str, Any] = dict(zip(("input", "p", "training"), node.args, strict=False)) | dict(node.kwargs)
    if name_of(node) == "dropout" and bound.get("p", 0.5) and bound.get("training", True):
        raise _Unreadable


def _sums_up_last(node: fx.Node) -> bool:
    """The log-sum-exp of [B, Hq, q, S] over its last dimension."""
    if name_of(node) != "logsumexp" or value(node.args[0]).ndim != 4:  # type: ignore[arg-type]
        return False
    dim = node.args[1] if len(node.args) > 1 else node.kwargs["dim"]
    return dim in (-1, 3, [-1], [3], (-1,), (3,))


def _from_product(node: fx.Node) -> bool:
    """Whether a tensor of logits is made from a product of two tensors, and not a mask or bias."""
    if name_of(node) in _PRODUCTS:
        return all(value(arg).ndim >= 3 for arg in node.all_input_nodes)
    parents = [arg for arg in node.all_input_nodes if is_tensor(arg) and value(arg).ndim >= 3]
    return name_of(node) != "linear" and any(_from_product(parent) for parent in parents)


def _operands(product: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """The query, the key [..., S, D], and the bias of a product of queries and keys."""
    bound: dict[str, Any] = dict(zip(("input", "batch1", "batch2"), product.args, strict=False)) | dict(product.kwargs)
    if name_of(product) == "baddbmm":
        if bound.get("beta", 1) != 1:
            raise _Unreadable
        return _tensor(bound["batch1"]), _untransposed(_tensor(bound["batch2"])), _tensor(bound["input"])
    return _tensor(product.args[0]), _untransposed(_tensor(product.args[1])), None


def _untransposed(node: fx.Node) -> fx.Node:
    """x of x.transpose(-1, -2)."""
    while name_of(node) in _SAME:
        node = _tensor(node.args[0])
    ndim = value(node).ndim
    if name_of(node) not in ("transpose", "swapaxes", "permute") or not is_tensor(node.args[0]):
        raise _Unreadable
    order = [arg for arg in node.args[1:] if isinstance(arg, int)]
    swaps = {dim % ndim for dim in order} == {ndim - 1, ndim - 2}
    if name_of(node) == "permute":
        swaps = [dim % ndim for dim in order] == [*range(ndim - 2), ndim - 1, ndim - 2]
    if not swaps:
        raise _Unreadable
    return _tensor(node.args[0])


def _with_heads(query: fx.Node) -> fx.Node:
    """The query as it was before its rows and heads were joined, [B, Hq, q, D]."""
    shape = value(query).shape
    while value(query).ndim != 4:
        if name_of(query) not in _SAME:
            raise _Unreadable
        query = _tensor(query.args[0])
    if [expr(size) for size in value(query).shape[2:]] != [expr(size) for size in shape[-2:]]:
        raise _Unreadable
    return query


def _output(product: fx.Node) -> fx.Node:
    """The output with its rows and heads apart, [B, Hq, q, Dv]."""
    if value(product).ndim == 4:
        return product
    apart = [user for user in product.users if name_of(user) in ("view", "reshape") and value(user).ndim == 4]
    if len(apart) != 1 or len(product.users) != 1:
        raise _Unreadable
    if [expr(s) for s in value(apart[0]).shape[2:]] != [expr(s) for s in value(product).shape[1:]]:
        raise _Unreadable
    return apart[0]


def _continues(node: fx.Node, sink: bool) -> bool:
    """Whether a user of the probabilities hands them on; with a sink its column is cut off."""
    if name_of(node) in _SAME and is_tensor(node):
        return True
    return sink and name_of(node) == "getitem" and node.args[1] == (Ellipsis, slice(None, -1, None))
