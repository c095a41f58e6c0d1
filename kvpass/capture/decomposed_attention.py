"""Read attention calls: scaled_dot_product_attention, or attention that is decomposed into products and a softmax.

Decomposed attention is a product, a softmax and another product.  Between the first product and the softmax there may
be a factor, a soft cap (a scaled tanh), masks and biases that are added or filled in, and a column of learned sinks.

Every argument of every operation is accounted for, or the softmax is refused.  Masks apply in the model's order, each
aligned with the logits that it meets.  A filled-in number hides a token only if it is at most -1e4 after all later
factors.  A bool mask keeps its one number.  Several masks are combined to one bias; a -1e4 beside another number is
then refused, because logits are added to it.  A column of sinks must be joined after all masks and factors.

To add a spelling, add a step to `_DecompositionReader` that accounts for all arguments of an operation, and a row to
SPELLINGS in tests/capture/test_decomposed_attention.py.  Nothing after capture changes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from typing import Any

import torch
import torch.fx as fx

from kvpass.fx import alias, op_table, splicing, walk
from kvpass.fx.op_table import is_a, known_name
from kvpass.fx.precision import FILLED, HIDDEN, accumulate_dtype
from kvpass.fx.shapes import expr, same
from kvpass.fx.walk import is_tensor, name_of, value
from kvpass.torch_private import fx_nodes


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """An attention call, however it is spelled.

    With scores s = scale * query key^T, the logits are cap * tanh(s / cap), or s without a cap, plus the mask.  The
    softmax also runs over the sink, which has no value.

    Attributes:
        node: its output, [B, Hq, q, Dv].
        query: [B, Hq, q, D].
        key, value: [..., S, D] and [..., S, Dv], from which the search for the cache starts.
        mask: bool or additive, [B or 1, Hq or 1, q or 1, S], or None.
        scale: the factor on the products.
        cap: the bound of the logits, or None.
        sink_logit: the logits of the attention sink, [B or 1, Hq, q or 1, 1], or None.
        lse: the model's log-sum-exp of the logits, [B, Hq, q] or [B, Hq, q, 1], or None.
        causal, dropout: as of scaled_dot_product_attention.
        hidden, dtypes: as `hidden` and the three dtypes of `kvpass.capture.canonical.attention`.
    """

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: fx.Node | None
    scale: float
    cap: float | None = None
    sink_logit: fx.Node | None = None
    lse: fx.Node | None = None
    causal: bool = False
    dropout: float = 0.0
    hidden: float | None = None
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] | None = None

    def with_operands(self, replacements: dict[fx.Node, fx.Node]) -> AttentionCall:
        """Return this call with some operands replaced by other nodes."""
        operands = {name: getattr(self, name) for name in ("query", "key", "value", "mask", "sink_logit")}
        return dataclasses.replace(self, **{name: replacements.get(node, node) for name, node in operands.items()})


@dataclasses.dataclass(frozen=True)
class UnreadSoftmax:
    """A softmax around which no attention call can be read.

    Attributes:
        softmax: the node.
        at: the operation that was not understood.
        why: the reason.
    """

    softmax: fx.Node
    at: fx.Node
    why: str

    def __str__(self) -> str:
        return f"{name_of(self.at)!r} at {walk.source_line(self.at)}: {self.why}"


def find(gm: fx.GraphModule) -> tuple[list[AttentionCall], list[UnreadSoftmax]]:
    """Return every attention call, in order, and every softmax that cannot be read as one.

    Reading may add unused nodes to the graph, such as the sum of several masks.
    """
    found: list[AttentionCall] = []
    unread: list[UnreadSoftmax] = []
    memory = alias.Memory(gm.graph)
    for node in list(gm.graph.nodes):
        if fx_nodes.is_sdpa(node):
            found.append(_sdpa_call(gm.graph, node))
        elif known_name(node) == "softmax" and is_tensor(node):
            reader = _DecompositionReader(gm, node, memory)
            try:
                found.append(reader.read())
            except _Unreadable as reason:
                unread.append(UnreadSoftmax(node, reader.at, str(reason)))
    return found, unread


def _sdpa_call(graph: fx.Graph, node: fx.Node) -> AttentionCall:
    args = op_table.bound(node)
    scale, mask = args.get("scale"), args.get("attn_mask")
    scale = 1 / math.sqrt(value(args["query"]).shape[-1]) if scale is None else float(scale)
    if mask is not None and value(mask).ndim < 4:  # aligned from the right, as in any broadcasting
        mask = _emit(graph, node, operator.getitem, mask, (*[None] * (4 - value(mask).ndim), Ellipsis))
    return AttentionCall(
        node, args["query"], args["key"], args["value"], mask, scale,
        causal=bool(args.get("is_causal", False)), dropout=float(args.get("dropout_p", 0.0)),
    )  # fmt: skip


def is_boundary(node: fx.Node) -> bool:
    """Return whether a node is part of an attention call, at which searches along the graph stop."""
    return fx_nodes.is_sdpa(node) or name_of(node) in ("softmax", "logsumexp")


_HALF = frozenset({torch.float16, torch.bfloat16})
_SUBSTITUTES = (FILLED, 1e3 * FILLED, 1e6 * FILLED)
"""Substitutes for filled-in numbers, from the highest to the lowest; all of them absorb logits."""


@dataclasses.dataclass(frozen=True)
class _Added:
    """A mask or bias that is added to logits, with the shape and dtype of the sum."""

    mask: fx.Node
    shape: Any
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class _Filled:
    """A number that replaces the logits that are not allowed, with the logits' shape and dtype."""

    allowed: fx.Node
    number: float
    shape: Any
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class _Floor:
    """A lower bound of the logits that is low enough to hide a token, with the logits' dtype."""

    number: float
    dtype: torch.dtype


_Change = _Added | _Filled | _Floor


class _Unreadable(Exception):
    """An operation around the softmax is not part of any known attention."""


class _DecompositionReader:
    """Reader of one attention call, from its softmax to both products.

    It accounts for every operation on the way with all arguments, or the call is unreadable.
    """

    def __init__(self, gm: fx.GraphModule, softmax: fx.Node, memory: alias.Memory) -> None:
        self.gm, self.graph, self.softmax, self.memory = gm, gm.graph, softmax, memory
        self.factor, self.cap = 1.0, 0.0
        self.changes: list[_Change] = []  # from the softmax back; numbers and masks are multiplied by later factors
        self.casts: list[torch.dtype] = []
        self.sink_logit: fx.Node | None = None
        self.shifted = False
        self.at = softmax  # the current operation

    def read(self) -> AttentionCall:
        """Read the call around the softmax.

        Raises:
            _Unreadable: it is not attention; `at` is the operation that is not.
        """
        if not _is_last(op_table.bound(self.softmax).get("dim"), value(self.softmax)):
            raise _Unreadable("it is not over the last dimension")
        self.at = product = self._first_product()
        _check_groups(product)
        query, key, bias, alpha = _operands(product)
        if bias is not None:
            self._record_added(bias, product, product)
        self._scale(alpha)
        query = _with_heads(query)
        self.at = probabilities = self._second_product()
        _check_groups(probabilities)
        node = _output(probabilities)
        for operand in product.all_input_nodes:
            self._check_unmodified(operand, product, node)
        self.at = self.softmax
        self._check_casts(value(product).dtype)
        mask, hidden = self._mask(value(query).shape[:2])
        scale = self.factor * (self.cap or 1.0)
        return AttentionCall(
            node, query, key, _tensor(probabilities.args[1]), mask, scale, self.cap or None, self.sink_logit,
            self._log_sum_exp(), hidden=hidden,
            dtypes=(value(product).dtype, value(self.softmax).dtype, value(node).dtype),
        )  # fmt: skip

    def _check_casts(self, dtype: torch.dtype) -> None:
        """Refuse logits or probabilities in a narrower dtype than the product's."""
        dtypes = [dtype, value(self.softmax).dtype, *self.casts]
        if not all(is_as_wide(cast, dtype) for cast in dtypes):
            raise _Unreadable("logits or probabilities are converted to a narrower dtype than their product's")

    # -- from the softmax back to the first product ----------------------------------------------------

    def _first_product(self) -> fx.Node:
        node = self._last_write(_tensor(op_table.bound(self.softmax).get("input")), self.softmax)
        while not is_a(node, "batched"):
            if node.op == "placeholder":
                self.at = self.softmax
                raise _Unreadable("its logits are not computed from a product")
            logits = self._step_back(node)
            for operand in node.all_input_nodes:
                if operand is not logits:
                    self._check_unmodified(operand, node, self.softmax)
            node = self._last_write(logits, node)
        return node

    def _last_write(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """Return the last write in place to logits before `reader`, or the logits themselves without writes."""
        writers = self._writers_between(node, node, reader)
        if writers and any(_written_tensor(writer) is not _written_tensor(node) for writer in writers):
            self.at = writers[-1]
            raise _Unreadable("it writes to the memory of the logits through another view")
        return writers[-1] if writers else node

    def _writers_between(self, node: fx.Node, since: fx.Node, until: fx.Node) -> list[fx.Node]:
        """Return the writes in place to a tensor's memory between two nodes."""
        return [writer for writer in self.memory.writers(node) if since < writer < until]

    def _check_unmodified(self, node: fx.Node, since: fx.Node, until: fx.Node) -> None:
        """Refuse a tensor that is written to after it was read, because the canonical call reads it later."""
        if writers := self._writers_between(node, since, until):
            self.at = writers[0]
            raise _Unreadable("it writes in place to what attention is computed from, amid the computation")

    def _step_back(self, node: fx.Node) -> fx.Node:
        """Account for one operation on the logits, and return the logits before it."""
        name, self.at = known_name(node), node
        if self._passes_through(node):
            return _tensor(node.args[0])
        steps = {
            "add": self._read_add, "iadd": self._read_add, "add_": self._read_add, "sub": self._read_sub,
            "isub": self._read_sub, "sub_": self._read_sub, "mul": self._read_mul, "imul": self._read_mul,
            "mul_": self._read_mul, "truediv": self._read_div, "div": self._read_div, "itruediv": self._read_div,
            "div_": self._read_div, "tanh": self._read_tanh, "cat": self._read_cat, "concat": self._read_cat,
            "masked_fill": self._read_masked_fill, "masked_fill_": self._read_masked_fill, "where": self._read_where,
            "max": self._read_clamp, "maximum": self._read_clamp, "clamp": self._read_clamp, "clip": self._read_clamp,
            "clamp_min": self._read_clamp,
        }  # fmt: skip
        if name not in steps:
            raise _Unreadable("this is no operation on logits that kvpass knows")
        return steps[name](node)

    def _passes_through(self, node: fx.Node) -> bool:
        """Return whether an operation changes only the dtype, or how rows and heads are split into dimensions."""
        if is_a(node, "keeps"):
            self.casts.append(value(node).dtype)
            return True
        return _only_splits_heads(node) or (known_name(node) == "dropout" and op_table.is_pointwise(node))

    def _scale(self, factor: float) -> None:
        self.factor *= factor

    def _read_mul(self, node: fx.Node) -> fx.Node:
        first, second = _two_operands(node)
        logits, factor = (first, second) if isinstance(first, fx.Node) else (second, first)
        self._scale(_number(factor))
        return _tensor(logits)

    def _read_div(self, node: fx.Node) -> fx.Node:
        logits, divisor = _two_operands(node)
        self._scale(1 / _number(divisor))
        return _tensor(logits)

    def _read_tanh(self, node: fx.Node) -> fx.Node:
        if self.cap:
            raise _Unreadable("logits are capped twice")
        self.cap, self.factor = self.factor, 1.0
        return _tensor(node.args[0])

    def _read_add(self, node: fx.Node) -> fx.Node:
        first, second, alpha = _sum_operands(node)
        logits, mask = (first, second) if _from_product(first) else (second, first)
        if _from_product(mask) or (logits is second and alpha != 1):
            raise _Unreadable("both operands come from products, or the logits are multiplied by alpha")
        return self._record_added(mask, logits, node, alpha)

    def _read_sub(self, node: fx.Node) -> fx.Node:
        """Account for a difference: the softmax ignores a row's maximum; any other operand is a bias."""
        logits, other, alpha = _sum_operands(node)
        if alpha == 1 and _is_maximum(other, logits):
            self.shifted = True
            return logits
        if _from_product(other):
            raise _Unreadable("the tensor subtracted from the logits is neither the maximum of each row nor a mask")
        return self._record_added(other, logits, node, -alpha)

    def _record_added(self, mask: fx.Node, logits: fx.Node, node: fx.Node, alpha: float = 1.0) -> fx.Node:
        """Record a mask that a node adds to logits, and return the logits."""
        factor = alpha * self.factor
        if value(mask).dtype == torch.bool:
            mask = self._emit(operator.mul, mask, 1.0)
        mask = _unexpanded(mask)
        mask = mask if factor == 1.0 else self._emit(operator.mul, mask, factor)
        dtype = self._rounded_to(value(node).dtype)
        if value(mask).dtype != dtype and _HALF & {value(mask).dtype, dtype}:
            mask = self._emit("to", mask, dtype)
        return self._record(_Added(mask, value(node).shape, dtype), logits)

    def _rounded_to(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype to which a sum is rounded on the way to the softmax, which decides what it absorbs.

        A mask is in half precision if and only if the model's sums with it are; see `Site.unknown_queries` of
        `kvpass.cache.step`.
        """
        later = [each for each in (*self.casts, value(self.softmax).dtype) if each in _HALF]
        return later[-1] if later and dtype not in _HALF else dtype

    def _record(self, change: _Added | _Filled, logits: fx.Node) -> fx.Node:
        """Record a change of the logits, which must keep their shape, and return the logits."""
        if self.cap:
            raise _Unreadable("the mask is applied before the cap")
        if not same(value(logits).shape, change.shape):
            raise _Unreadable("the mask has dimensions that the logits do not have")
        width = value(change.mask if isinstance(change, _Added) else change.allowed).shape[-1]
        if self.sink_logit is not None and expr(width) != expr(change.shape[-1]):
            raise _Unreadable("the mask and the logits without the sink differ in width")
        self.changes.append(change)
        return logits

    def _read_cat(self, node: fx.Node) -> fx.Node:
        args = op_table.bound(node)
        logits, *sink_logit = args["tensors"]
        last = _is_last(args.get("dim", 0), value(node))
        if self.sink_logit or len(sink_logit) != 1 or not last or value(sink_logit[0]).shape[-1] != 1:
            raise _Unreadable("only one column of sinks can be concatenated to the logits, at their end")
        if self.changes or self.factor != 1.0 or self.cap:
            raise _Unreadable("the column of sinks is masked or scaled with the logits: concatenate it afterwards")
        if value(sink_logit[0]).ndim != 4:
            raise _Unreadable("sinks are not [B or 1, Hq, q or 1, 1]")
        self.sink_logit = sink_logit[0]
        return _tensor(logits)

    def _read_masked_fill(self, node: fx.Node) -> fx.Node:
        args = op_table.bound(node)
        allowed = self._emit(torch.logical_not, _unexpanded(_tensor(args["mask"])))
        return self._record_filled(_tensor(args["input"]), allowed, args["value"], node)

    def _read_where(self, node: fx.Node) -> fx.Node:
        args = op_table.bound(node)
        condition, logits, filling = _unexpanded(_tensor(args["condition"])), args["input"], args["other"]
        if not (isinstance(logits, fx.Node) and is_tensor(logits) and _from_product(logits)):
            logits, filling, condition = filling, logits, self._emit(torch.logical_not, condition)
        if isinstance(filling, fx.Node) and _from_product(filling):
            raise _Unreadable("both branches come from products")
        return self._record_filled(_tensor(logits), condition, filling, node)

    def _record_filled(self, logits: fx.Node, allowed: fx.Node, filling: Any, node: fx.Node) -> fx.Node:
        number, dtype = self._hiding_number(filling, node), self._rounded_to(value(node).dtype)
        return self._record(_Filled(allowed, number, value(node).shape, dtype), logits)

    def _hiding_number(self, filling: Any, node: fx.Node) -> float:
        """Return a filled-in number as the softmax sees it, and check that it hides its token."""
        dtype = value(node).dtype
        filled = torch.tensor(self._literal(filling), dtype=torch.float64).to(dtype)
        number = float((filled.double() * self.factor).to(dtype))
        if self.cap or not number <= HIDDEN:
            raise _Unreadable(f"{number:g} does not hide a token after all factors: it must be at most {HIDDEN:g}")
        return number

    def _literal(self, argument: Any) -> float:
        number = walk.constant(self.gm, argument)
        if number is None:
            raise _Unreadable("the fill value must be a literal number in the code")
        return number

    def _read_clamp(self, node: fx.Node) -> fx.Node:
        """Account for a lower bound of the logits that is low enough to hide a token."""
        if known_name(node) in ("max", "maximum"):
            first, second = _two_operands(node)
            logits, bound = (first, second) if _from_product(_tensor(first)) else (second, first)
        else:
            args = op_table.bound(node)
            logits, bound = args["input"], args.get("min")
            if args.get("max") is not None:
                raise _Unreadable("the logits have an upper bound")
        self.changes.append(_Floor(self._hiding_number(bound, node), self._rounded_to(value(node).dtype)))
        return _tensor(logits)

    def _log_sum_exp(self) -> fx.Node | None:
        """Return the model's log-sum-exp of the logits that the softmax takes, or None."""
        if self.sink_logit is not None or self.shifted:
            return None
        casts = walk.chain(_tensor(op_table.bound(self.softmax)["input"]), lambda node: is_a(node, "casts"))
        first = casts[0]
        for node in casts:  # the list grows while it is read
            casts += [user for user in node.users if is_a(user, "casts") and user not in casts]
        sums = [user for node in casts for user in node.users if _is_log_sum_exp(user)]
        return next((node for node in sums if not self._writers_between(first, *sorted((node, self.softmax)))), None)

    # -- from the softmax to the second product --------------------------------------------------------

    def _second_product(self) -> fx.Node:
        node = self.softmax
        while True:
            following = [n for n in node.users if is_a(n, "batched") or self._passes_on_probs(n)]
            self.at = node
            if len(following) != 1:
                raise _Unreadable(f"{len(following)} products are made of it, and not the one with the values")
            self._check_unmodified(node, node, following[0])
            if is_a(following[0], "batched"):
                break
            node = following[0]
        product = self.at = following[0]
        if known_name(product) == "baddbmm" or product.kwargs or len(product.args) != 2:
            raise _Unreadable("a term is added to the product with the values")
        if product.args[0] is not node or not is_tensor(product.args[1]):
            raise _Unreadable("the probabilities are not its first operand")
        return product

    def _passes_on_probs(self, node: fx.Node) -> bool:
        """Return whether a user of the probabilities passes them through, or cuts off the sink's column."""
        if not is_tensor(node):
            return False
        cuts_sink = known_name(node) == "getitem" and node.args[1] == (Ellipsis, slice(None, -1, None))
        return (self.sink_logit is not None and cuts_sink) or self._passes_through(node)

    # -- masks -----------------------------------------------------------------------------------------

    def _mask(self, sizes: Any) -> tuple[fx.Node | None, float | None]:
        """Combine all changes to one mask of four dimensions; also return the number that a bool mask fills in.

        Args:
            sizes: B and Hq.
        """
        changes = [self._aligned(change, sizes) for change in reversed(self.changes)]  # in the model's order
        fills = [change for change in changes if isinstance(change, _Filled)]
        if any(isinstance(change, _Added) for change in changes) or len({fill.number for fill in fills}) > 1:
            return self._as_bias(changes, fills), None
        allowed, hidden = None, None
        for change in changes:
            if isinstance(change, _Filled):
                allowed = change.allowed if allowed is None else self._emit(torch.logical_and, allowed, change.allowed)
                hidden = change.number
            elif isinstance(change, _Floor) and hidden is not None:
                hidden = max(hidden, change.number)
        return allowed, hidden

    def _as_bias(self, changes: list[_Change], fills: list[_Filled]) -> fx.Node | None:
        """Combine changes to one bias.

        A query that sees no key attends by the filled-in numbers alone, which logits must not change when they are
        added.  If only fills hide, substitutes in the same order can replace the numbers.
        """
        if substitutes := self._substitutes(changes, fills):
            changes = [
                dataclasses.replace(c, number=substitutes[c.number]) if isinstance(c, _Filled) else c
                for c in changes
                if not isinstance(c, _Floor)
            ]
        dtypes = {change.dtype for change in changes}
        half = dtypes.pop() if len(dtypes) == 1 and dtypes <= _HALF else None
        total: fx.Node | None = None
        for change in changes:
            if isinstance(change, _Added):
                total = change.mask if total is None else self._emit(operator.add, total, change.mask)
                continue
            number = self._check_absorbs(change.number, half)
            if isinstance(change, _Filled):
                if total is None:
                    total = self._emit(operator.mul, change.allowed, 0.0)
                    total = total if half is None else self._emit("to", total, half)
                hidden = self._emit(torch.logical_not, change.allowed)
                total = self._emit(torch.masked_fill, self._in_holding_dtype(total, number), hidden, number)
            elif total is not None:
                total = self._emit(torch.clamp_min, self._in_holding_dtype(total, number), number)
        return total

    def _substitutes(self, changes: list[_Change], fills: list[_Filled]) -> dict[float, float]:
        """Return a number that absorbs logits for each filled-in number; {} if that is not needed or not proven equal.

        A query that sees nothing attends in equal shares to the keys with the highest of the numbers.  The numbers are
        so far apart that the other keys get nothing, so only the order of the numbers counts.
        """
        numbers = sorted({fill.number for fill in fills}, reverse=True)
        if all(map(self._absorbs, numbers)) or not _only_hide(changes):
            return {}
        if any(isinstance(change, _Floor) for change in changes) and len(numbers) > 1:
            return {}
        finite = [number for number in numbers if number != -math.inf]
        apart = all(high - low >= 128 for high, low in itertools.pairwise(finite))
        if not apart or len(finite) > len(_SUBSTITUTES):
            return {}
        return dict(zip(finite, _SUBSTITUTES, strict=False)) | {-math.inf: -math.inf}

    def _absorbs(self, number: float, dtype: torch.dtype | None = None) -> bool:
        """Return whether adding ordinary logits leaves a number unchanged in a dtype, by default the softmax's."""
        eps = torch.finfo(dtype or accumulate_dtype(value(self.softmax).dtype)).eps
        return number * eps <= -63 if dtype else number * eps <= -64  # the lowest number of float16 absorbs

    def _check_absorbs(self, number: float, half: torch.dtype | None) -> float:
        if not (self._absorbs(number) or (half is not None and self._absorbs(number, half))):
            raise _Unreadable(f"{number:g} is filled in together with other masks: use the lowest number of the dtype")
        return number

    def _in_holding_dtype(self, mask: fx.Node, number: float) -> fx.Node:
        """Return a mask in a dtype that can hold a number."""
        dtype = value(mask).dtype
        holds = dtype.is_floating_point and (number == -math.inf or number >= torch.finfo(dtype).min)
        return mask if holds else self._emit("float", mask)

    def _aligned(self, change: _Change, sizes: Any) -> _Change:
        """Return a change with its mask in four dimensions."""
        if isinstance(change, _Added):
            return dataclasses.replace(change, mask=self._four_dimensional(change.mask, change.shape, sizes))
        if isinstance(change, _Filled):
            return dataclasses.replace(change, allowed=self._four_dimensional(change.allowed, change.shape, sizes))
        return change

    def _four_dimensional(self, mask: fx.Node, shape: Any, sizes: Any) -> fx.Node:
        """Return a mask on logits of a shape as [B or 1, Hq or 1, q or 1, S or 1]; sizes: B, Hq."""
        ndim = value(mask).ndim
        if ndim < len(shape):  # aligned from the right, as in any broadcasting
            mask = self._emit(operator.getitem, mask, (*[None] * (len(shape) - ndim), Ellipsis))
        mask_sizes, logit_sizes = value(mask).shape[:-2], shape[:-2]
        if all(expr(size) == 1 for size in mask_sizes):
            subscript = (*[0] * len(mask_sizes), None, None, Ellipsis)
            return mask if len(mask_sizes) == 2 else self._emit(operator.getitem, mask, subscript)
        if same(logit_sizes, sizes):
            return mask
        if len(mask_sizes) == 1 and expr(mask_sizes[0]) == expr(sizes[0] * sizes[1]):
            return self._emit(torch.unflatten, mask, 0, (-1, int(sizes[1])))
        if len(mask_sizes) == 3 and same((logit_sizes[0], logit_sizes[1] * logit_sizes[2]), sizes):
            heads = [int(size) for size in logit_sizes[1:]]
            expanded = self._emit("expand", mask, -1, *heads, -1, -1)
            return self._emit(torch.flatten, expanded, 1, 2)
        raise _Unreadable(f"a mask of shape {list(value(mask).shape)} does not match the rows and heads of the logits")

    def _emit(self, target: Any, *args: Any) -> fx.Node:
        return _emit(self.graph, self.softmax, target, *args)


def _emit(graph: fx.Graph, before: fx.Node, target: Any, *args: Any) -> fx.Node:
    with graph.inserting_before(before):
        node = splicing.emit(graph, target, *args)
    node.meta["stack_trace"] = before.meta.get("stack_trace")
    return node


def is_as_wide(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Return whether a floating-point dtype can represent every number of another."""
    return dtype.is_floating_point and (dtype == than or torch.promote_types(dtype, than) == dtype)


def same_last_two(node: fx.Node) -> bool:
    """Return whether a view keeps the last two dimensions."""
    before, after = value(node.args[0]).shape, value(node).shape  # type: ignore[arg-type]
    return len(after) > 2 and same(before[-2:], after[-2:])


def _only_splits_heads(node: fx.Node) -> bool:
    """Return whether a node only splits rows and heads into other dimensions."""
    return is_a(node, "reshapes") and same_last_two(node)


def _is_last(dim: Any, tensor: Any) -> bool:
    dims = list(dim) if isinstance(dim, (tuple, list)) else [dim]
    return len(dims) == 1 and isinstance(dims[0], int) and dims[0] % tensor.ndim == tensor.ndim - 1


def _node(argument: Any) -> fx.Node:
    if not isinstance(argument, fx.Node):
        raise _Unreadable(f"{argument!r} is a constant")
    return argument


def _tensor(argument: Any) -> fx.Node:
    if not is_tensor(argument):
        raise _Unreadable(f"{argument!r} is not a tensor")
    node: fx.Node = argument
    return node


def _two_operands(node: fx.Node) -> tuple[Any, Any]:
    """Return both operands of an operation that has nothing else."""
    if any(setting is not None for setting in node.kwargs.values()) or len(node.args) != 2:
        raise _Unreadable("it has more than two operands, or a rounding mode")
    return node.args


def _sum_operands(node: fx.Node) -> tuple[fx.Node, fx.Node, float]:
    """Return both operands of a sum or difference, and the factor on the second."""
    if len(node.args) != 2 or node.kwargs.keys() - {"alpha"}:
        raise _Unreadable("it is not a sum of two tensors")
    return _tensor(node.args[0]), _tensor(node.args[1]), _number(node.kwargs.get("alpha", 1))


def _is_maximum(node: fx.Node, logits: fx.Node) -> bool:
    node = walk.chain(node, lambda each: known_name(each) in ("detach", "contiguous"))[-1]
    if known_name(node) == "getitem" and node.args[1] == 0 and known_name(_node(node.args[0])) == "max":
        node = _node(node.args[0])
    args = op_table.bound(node)
    of_row = known_name(node) in ("max", "amax") and args.get("input") is logits and args.get("keepdim")
    return bool(of_row) and _is_last(args.get("dim"), value(logits))


def _only_hide(changes: list[_Change]) -> bool:
    """Return whether only fills hide: nothing is added after a fill, and nothing added before may be a mask."""
    first = next((index for index, change in enumerate(changes) if isinstance(change, _Filled)), len(changes))
    if any(isinstance(change, _Added) for change in changes[first:]):
        return False
    return not any(_may_hide(change.mask) for change in changes[:first] if isinstance(change, _Added))


def _may_hide(mask: fx.Node) -> bool:
    """Return whether a bias may be a mask: made with a large number, or from an input of attention's size."""
    sizes = [node for node in mask.graph.nodes if walk.is_size(node) or isinstance(value(node), torch.Size)]
    sources = walk.ancestors(mask, sizes)
    arguments = op_table.leaves([[node.args, node.kwargs] for node in sources])
    numbers = [each for each in arguments if isinstance(each, (int, float)) and not isinstance(each, bool)]
    has_large = any(abs(number) >= -HIDDEN for number in numbers)
    return has_large or any(node.op == "placeholder" and is_tensor(node) and value(node).ndim > 2 for node in sources)


def _unexpanded(mask: fx.Node) -> fx.Node:
    """Return a mask without its expansion to the shape of logits, which broadcasting repeats."""
    return walk.chain(mask, lambda node: known_name(node) == "expand_as" and _from_product(_node(node.args[1])))[-1]


def _written_tensor(node: fx.Node) -> Any:
    """Return the tensor that a chain of writes in place started from."""
    return walk.chain(node, alias.writes)[-1]


def _number(argument: Any) -> float:
    if not isinstance(argument, (int, float)):
        raise _Unreadable(f"{argument!r} is not a number")
    return float(argument)


def _is_log_sum_exp(node: fx.Node) -> bool:
    """Return whether a node is the log-sum-exp of [B, Hq, q, S] over its last dimension."""
    args = op_table.bound(node)
    if known_name(node) != "logsumexp" or value(args["input"]).ndim != 4:
        return False
    return _is_last(args.get("dim"), value(args["input"]))


def _from_product(node: fx.Node) -> bool:
    """Return whether a tensor is computed from a product of two tensors, as logits are, unlike a mask or bias."""
    products = op_table.tagged("batched")

    def following(each: fx.Node) -> list[fx.Node]:
        ends = name_of(each) in products or name_of(each) == "linear"
        return [] if ends else [arg for arg in each.all_input_nodes if is_tensor(arg) and value(arg).ndim >= 3]

    found = [each for each in walk.reach([node], following) if name_of(each) in products]
    return any(all(value(arg).ndim >= 3 for arg in product.all_input_nodes) for product in found)


def _operands(product: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, float]:
    """Return the query, the key [..., S, D], the bias, and the factor of a product of queries and keys."""
    if known_name(product) == "baddbmm":
        args = op_table.bound(product)
        if _number(args.get("beta", 1)) != 1:
            raise _Unreadable("its bias is multiplied by a number")
        alpha = _number(args.get("alpha", 1.0))
        return _tensor(args["batch1"]), _untransposed(_tensor(args["batch2"])), _tensor(args["input"]), alpha
    query, key = _two_operands(product)
    return _tensor(query), _untransposed(_tensor(key)), None, 1.0


def _check_groups(product: fx.Node) -> None:
    """Check that heads in two dimensions have the queries of one KV head along the second."""
    if value(product).ndim != 5:
        return
    first, second = (value(_tensor(operand)).shape for operand in product.args[:2])
    if len(first) != 5 or len(second) != 5 or not same(first[:2], second[:2]):
        raise _Unreadable("keys or values must be [B, Hkv, 1, ...] for queries [B, Hkv, Hq / Hkv, ...]")


def _untransposed(node: fx.Node) -> fx.Node:
    """Return x of x.transpose(-1, -2)."""
    node = walk.chain(node, lambda each: known_name(each) in ("contiguous", "clone") or _only_splits_heads(each))[-1]
    if not is_tensor(node.args[0]) or not op_table.swaps_last_two(node):
        raise _Unreadable("its second operand is not a transpose of the keys")
    return _tensor(node.args[0])


def _with_heads(query: fx.Node) -> fx.Node:
    """Return the query [B, Hq, q, D] before its rows and heads were joined."""
    while value(query).ndim != 4:
        widens = is_a(query, "casts") and is_as_wide(value(query).dtype, value(query.args[0]).dtype)  # type: ignore[arg-type]
        if not (widens or _only_splits_heads(query) or known_name(query) in ("contiguous", "clone")):
            raise _Unreadable("its queries must be [B, Hq, q, D], possibly with rows and heads joined")
        query = _tensor(query.args[0])
    return query


def _output(product: fx.Node) -> fx.Node:
    """Return the output [B, Hq, q, Dv], with rows and heads apart."""
    if value(product).ndim == 4:
        return product
    views = [user for user in product.users if is_a(user, "reshapes") and value(user).ndim == 4]
    if len(views) != 1 or len(product.users) != 1 or not same_last_two(views[0]):
        raise _Unreadable("its rows and heads are not split to [B, Hq, q, Dv]")
    return views[0]
