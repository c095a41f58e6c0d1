"""What counts as an attention call: scaled_dot_product_attention, or the same spelled out.

Spelled out, attention is a product, a softmax and another product.  Between the first product and the
softmax there may be a factor, a soft cap (a scaled tanh), masks and biases that are added or filled in,
and a column of learned sinks; `find` reads them off the graph.

Every argument of every operation is read, or the softmax is refused.  Masks apply in the model's order, each aligned
with the logits that it meets.  A number that is filled in hides a token only if it is at most -1e4 after all later
factors.  A bool mask keeps its one number; of several masks a bias is made, in which -1e4 beside another number is
refused, as logits are added to it.  Nothing may be done to a column of sinks after it is joined.

To add a spelling, add a step to `_DecompositionReader` that takes all of an operation's arguments into account, and a
row to SPELLINGS in tests/capture/test_decomposed_attention.py.  Nothing behind capture changes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from typing import Any

import torch
import torch.fx as fx

from kvpass.fx import alias, op_table, walk
from kvpass.fx.op_table import known_name
from kvpass.fx.precision import FILLED, HIDDEN, accumulate_dtype
from kvpass.fx.shapes import expr
from kvpass.fx.walk import is_tensor, name_of, value
from kvpass.torch_private import fake_tensors, fx_nodes


@dataclasses.dataclass(frozen=True)
class AttentionCall:
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
        sink_logit: the logits of what is attended to beside the keys, [B or 1, Hq, q or 1, 1], or None.
        lse: where the model asks for the log-sum-exp of the logits, [B, Hq, q] or [B, Hq, q, 1], or None.
        causal, dropout: as of scaled_dot_product_attention.
        hidden, dtypes: see `kvpass.capture.canonical.attention`; the three dtypes of attention that is spelled out.
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

    def moved(self, to: dict[fx.Node, fx.Node]) -> AttentionCall:
        """The same with other nodes as operands, where these have taken the place of the graph's own."""
        operands = {name: getattr(self, name) for name in ("query", "key", "value", "mask", "sink_logit")}
        return dataclasses.replace(self, **{name: to.get(node, node) for name, node in operands.items()})


@dataclasses.dataclass(frozen=True)
class UnreadSoftmax:
    """A softmax around which no attention call can be read.

    Attributes:
        softmax: the node.
        at: the operation that was not understood.
        why: what about it.
    """

    softmax: fx.Node
    at: fx.Node
    why: str

    def __str__(self) -> str:
        return f"{name_of(self.at)!r} at {walk.source_line(self.at)}: {self.why}"


def find(gm: fx.GraphModule) -> tuple[list[AttentionCall], list[UnreadSoftmax]]:
    """Every attention call, in order, and every softmax that is none as far as can be told.

    A call that is spelled out may need nodes that the graph lacks, such as the sum of its masks: they are
    added to the graph, in which nothing else uses them.
    """
    found: list[AttentionCall] = []
    unread: list[UnreadSoftmax] = []
    writers = alias.Writers.of(gm.graph)
    for node in list(gm.graph.nodes):
        if fx_nodes.is_sdpa(node):
            found.append(_sdpa_call(gm.graph, node))
        elif known_name(node) == "softmax" and is_tensor(node):
            spelled = _DecompositionReader(gm, node, writers)
            try:
                found.append(spelled.read())
            except _Unreadable as why:
                unread.append(UnreadSoftmax(node, spelled.at, str(why)))
    return found, unread


def _sdpa_call(graph: fx.Graph, node: fx.Node) -> AttentionCall:
    given = op_table.signature(_sdpa, node)
    scale = 1 / math.sqrt(value(given["query"]).shape[-1]) if given["scale"] is None else float(given["scale"])
    mask = given["attn_mask"]
    if mask is not None and value(mask).ndim < 4:  # aligned from the right, as in any broadcasting
        mask = _emit(graph, node, operator.getitem, mask, (*[None] * (4 - value(mask).ndim), Ellipsis))
    return AttentionCall(
        node, given["query"], given["key"], given["value"], mask, scale,
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
    return fx_nodes.is_sdpa(node) or name_of(node) in ("softmax", "logsumexp")


_CASTS = frozenset({"to", "float", "double", "half", "bfloat16", "type_as"})
_VIEWS = frozenset({"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"})
_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm"})
_HALF = frozenset({torch.float16, torch.bfloat16})
_STAND_INS = (FILLED, 1e3 * FILLED, 1e6 * FILLED)
"""Stand for numbers that are filled in, from the highest to the lowest; all of them absorb logits."""


@dataclasses.dataclass(frozen=True)
class _Added:
    """A mask or bias that is added to logits, and the shape and the dtype of the sum."""

    mask: fx.Node
    shape: Any
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class _Filled:
    """A number that takes the place of the logits that are not allowed, and the shape and the dtype of these."""

    allowed: fx.Node
    number: float
    shape: Any
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class _Floor:
    """A number so low that it hides, below which no logit falls, and the dtype of the logits."""

    number: float
    dtype: torch.dtype


_Change = _Added | _Filled | _Floor


class _Unreadable(Exception):
    """What stands between the products is no attention that we know; says what about the operation at hand."""


class _DecompositionReader:
    """Reads a call off the graph, from its softmax to both sides.

    Every operation on the way is taken into account with all of its arguments, or the call is unreadable.
    """

    def __init__(self, gm: fx.GraphModule, softmax: fx.Node, writers: alias.Writers) -> None:
        self.gm, self.graph, self.softmax, self.writers = gm, gm.graph, softmax, writers
        self.factor, self.cap = 1.0, 0.0
        self.changes: list[_Change] = []  # from the softmax back; numbers and masks include all later factors
        self.casts: list[torch.dtype] = []
        self.sink_logit: fx.Node | None = None
        self.shifted = False
        self.at = softmax  # the operation that is looked at

    def read(self) -> AttentionCall:
        """The call around the softmax.

        Raises:
            _Unreadable: it is no attention; `at` is the operation that says so.
        """
        if not _is_last(op_table.bound(self.softmax).get("dim"), value(self.softmax)):
            raise _Unreadable("it is not over the last dimension")
        self.at = product = self._first_product()
        _check_groups(product)
        query, key, bias, alpha = _operands(product)
        if bias is not None:
            self._add(bias, product, product)
        self._scaled_by(alpha)
        query = _with_heads(query)
        self.at = probabilities = self._second_product()
        _check_groups(probabilities)
        node = _output(probabilities)
        for operand in product.all_input_nodes:
            self._check_left_alone(operand, product, node)
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
        """Logits and probabilities may be computed in a wider dtype than the product's, and not in a narrower one."""
        given = [dtype, value(self.softmax).dtype, *self.casts]
        if not all(is_as_wide(each, dtype) for each in given):
            raise _Unreadable("logits or probabilities are made narrower than their product is")

    # -- from the softmax back -------------------------------------------------------------------------

    def _first_product(self) -> fx.Node:
        node = self._as_read(_tensor(op_table.bound(self.softmax).get("input")), self.softmax)
        while known_name(node) not in _PRODUCTS:
            if node.op == "placeholder":
                self.at = self.softmax
                raise _Unreadable("its logits are made of no product")
            logits = self._step_back(node)
            for operand in node.all_input_nodes:
                if operand is not logits:
                    self._check_left_alone(operand, node, self.softmax)
            node = self._as_read(logits, node)
        return node

    def _as_read(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """The last write in place to logits before a node that reads them; the logits themselves if there is none."""
        written = self._written(node, node, reader)
        if written and any(_written_tensor(writer) is not _written_tensor(node) for writer in written):
            self.at = written[-1]
            raise _Unreadable("it writes to the memory of logits by another view of them")
        return written[-1] if written else node

    def _written(self, node: fx.Node, since: fx.Node, until: fx.Node) -> list[fx.Node]:
        """What writes in place to the memory of a tensor between two nodes."""
        return [writer for writer in self.writers.to_memory_of(node) if since < writer < until]

    def _check_left_alone(self, node: fx.Node, since: fx.Node, until: fx.Node) -> None:
        """Refuse a tensor that is written to after it was read, as the canonical call reads it again later."""
        if written := self._written(node, since, until):
            self.at = written[0]
            raise _Unreadable("it writes in place to what attention is computed from, amid the computation")

    def _step_back(self, node: fx.Node) -> fx.Node:
        """Take one operation on the logits into account; what it was done to."""
        name, self.at = known_name(node), node
        if self._hands_on(node):
            return _tensor(node.args[0])
        steps = {
            "add": self._added, "iadd": self._added, "add_": self._added, "sub": self._subtracted,
            "isub": self._subtracted, "sub_": self._subtracted, "mul": self._multiplied, "imul": self._multiplied,
            "mul_": self._multiplied, "truediv": self._divided, "div": self._divided, "itruediv": self._divided,
            "div_": self._divided,
            "tanh": self._capped, "cat": self._joined, "concat": self._joined, "masked_fill": self._filled,
            "masked_fill_": self._filled, "where": self._chosen, "max": self._bounded, "maximum": self._bounded,
            "clamp": self._bounded, "clip": self._bounded, "clamp_min": self._bounded,
        }  # fmt: skip
        if name not in steps:
            raise _Unreadable("it is no operation on logits that is known")
        return steps[name](node)

    def _hands_on(self, node: fx.Node) -> bool:
        """Whether an operation changes nothing but the dtype, or how rows and heads are written in dimensions."""
        name = known_name(node)
        if name in _CASTS:
            self.casts.append(value(node).dtype)
            return True
        if name in _VIEWS:
            return same_last_two(node)
        return name in ("contiguous", "clone", "detach") or (name == "dropout" and op_table.is_pointwise(node))

    def _scaled_by(self, factor: float) -> None:
        self.factor *= factor

    def _multiplied(self, node: fx.Node) -> fx.Node:
        first, second = _two(node)
        logits, factor = (first, second) if isinstance(first, fx.Node) else (second, first)
        self._scaled_by(_number(factor))
        return _tensor(logits)

    def _divided(self, node: fx.Node) -> fx.Node:
        logits, divisor = _two(node)
        self._scaled_by(1 / _number(divisor))
        return _tensor(logits)

    def _capped(self, node: fx.Node) -> fx.Node:
        if self.cap:
            raise _Unreadable("logits are capped twice")
        self.cap, self.factor = self.factor, 1.0
        return _tensor(node.args[0])

    def _added(self, node: fx.Node) -> fx.Node:
        first, second, alpha = _sum(node)
        logits, mask = (first, second) if _from_product(first) else (second, first)
        if _from_product(mask) or (logits is second and alpha != 1):
            raise _Unreadable("both of its operands are made of products, or the logits are multiplied by alpha")
        return self._add(mask, logits, node, alpha)

    def _subtracted(self, node: fx.Node) -> fx.Node:
        """Softmax does not see that a row's maximum is subtracted; anything else is a bias."""
        logits, other, alpha = _sum(node)
        if alpha == 1 and _is_maximum(other, logits):
            self.shifted = True
            return logits
        if _from_product(other):
            raise _Unreadable("what is subtracted from the logits is neither the maximum of each row nor a mask")
        return self._add(other, logits, node, -alpha)

    def _add(self, mask: fx.Node, logits: fx.Node, node: fx.Node, alpha: float = 1.0) -> fx.Node:
        """Record a mask that a node adds to logits; gives these."""
        factor = alpha * self.factor
        if value(mask).dtype == torch.bool:
            mask = self._emit(operator.mul, mask, 1.0)
        mask = _narrow(mask)
        mask = mask if factor == 1.0 else self._emit(operator.mul, mask, factor)
        dtype = self._rounded_to(value(node).dtype)
        if value(mask).dtype != dtype and _HALF & {value(mask).dtype, dtype}:
            mask = self._emit("to", mask, dtype)
        return self._change(_Added(mask, value(node).shape, dtype), logits)

    def _rounded_to(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype to which a sum in this one is rounded on the way to the softmax, which decides what it absorbs.

        A mask is in half precision if and only if the model's sums with it are: see `kvpass.cache.step.Site.blank`.
        """
        later = [each for each in (*self.casts, value(self.softmax).dtype) if each in _HALF]
        return later[-1] if later and dtype not in _HALF else dtype

    def _change(self, change: _Added | _Filled, logits: fx.Node) -> fx.Node:
        """Record what is done to logits, which must stay as many as they are; gives these."""
        if self.cap:
            raise _Unreadable("the mask is inside of the cap")
        if not _same_sizes(value(logits).shape, change.shape):
            raise _Unreadable("the mask has dimensions that the logits do not have")
        width = value(change.mask if isinstance(change, _Added) else change.allowed).shape[-1]
        if self.sink_logit is not None and expr(width) != expr(change.shape[-1]):
            raise _Unreadable("the mask is not as wide as the logits beside the sink")
        self.changes.append(change)
        return logits

    def _joined(self, node: fx.Node) -> fx.Node:
        given = op_table.bound(node)
        logits, *sink_logit = given["tensors"]
        last = _is_last(given.get("dim", 0), value(node))
        if self.sink_logit or len(sink_logit) != 1 or not last or value(sink_logit[0]).shape[-1] != 1:
            raise _Unreadable("what is joined to the logits is not one column of sinks at their end")
        if self.changes or self.factor != 1.0 or self.cap:
            raise _Unreadable("the column of sinks is masked or scaled with the logits: join it to them afterwards")
        if value(sink_logit[0]).ndim != 4:
            raise _Unreadable("sinks are not [B or 1, Hq, q or 1, 1]")
        self.sink_logit = sink_logit[0]
        return _tensor(logits)

    def _filled(self, node: fx.Node) -> fx.Node:
        given = op_table.bound(node)
        allowed = self._emit(torch.logical_not, _narrow(_tensor(given["mask"])))
        return self._fill(_tensor(given["input"]), allowed, given["value"], node)

    def _chosen(self, node: fx.Node) -> fx.Node:
        given = op_table.bound(node)
        condition, logits, filling = _narrow(_tensor(given["condition"])), given["input"], given["other"]
        if not (isinstance(logits, fx.Node) and is_tensor(logits) and _from_product(logits)):
            logits, filling, condition = filling, logits, self._emit(torch.logical_not, condition)
        if isinstance(filling, fx.Node) and _from_product(filling):
            raise _Unreadable("both of its branches are made of products")
        return self._fill(_tensor(logits), condition, filling, node)

    def _fill(self, logits: fx.Node, allowed: fx.Node, filling: Any, node: fx.Node) -> fx.Node:
        number, dtype = self._low_enough(filling, node), self._rounded_to(value(node).dtype)
        return self._change(_Filled(allowed, number, value(node).shape, dtype), logits)

    def _low_enough(self, filling: Any, node: fx.Node) -> float:
        """The number that is filled in, as the softmax sees it: so low that its token is hidden."""
        dtype = value(node).dtype
        filled = torch.tensor(self._spelled_out(filling), dtype=torch.float64).to(dtype)
        number = float((filled.double() * self.factor).to(dtype))
        if self.cap or not number <= HIDDEN:
            raise _Unreadable(f"{number:g} hides nothing after all factors: it would have to be at most {HIDDEN:g}")
        return number

    def _spelled_out(self, argument: Any) -> float:
        number = walk.constant(self.gm, argument)
        if number is None:
            raise _Unreadable("what is filled in is no number that the code spells out")
        return number

    def _bounded(self, node: fx.Node) -> fx.Node:
        """Logits are kept from falling below a number so low that it hides."""
        if known_name(node) in ("max", "maximum"):
            first, second = _two(node)
            logits, least = (first, second) if _from_product(_tensor(first)) else (second, first)
        else:
            given = op_table.bound(node)
            logits, least = given["input"], given.get("min")
            if given.get("max") is not None:
                raise _Unreadable("logits are kept from rising")
        self.changes.append(_Floor(self._low_enough(least, node), self._rounded_to(value(node).dtype)))
        return _tensor(logits)

    def _log_sum_exp(self) -> fx.Node | None:
        """Where the model sums up the very logits that the softmax takes, and nothing beside them."""
        if self.sink_logit is not None or self.shifted:
            return None
        same = [_tensor(op_table.bound(self.softmax)["input"])]
        first = same[0]
        while known_name(same[-1]) in _CASTS:
            same.append(_tensor(same[-1].args[0]))
        for node in same:  # grows
            same += [user for user in node.users if known_name(user) in _CASTS and user not in same]
        sums = [user for node in same for user in node.users if _sums_up_last(user)]
        return next((each for each in sums if not self._written(first, *sorted((each, self.softmax)))), None)

    # -- from the softmax on ---------------------------------------------------------------------------

    def _second_product(self) -> fx.Node:
        node = self.softmax
        while True:
            following = [n for n in node.users if known_name(n) in _PRODUCTS or self._continues(n)]
            self.at = node
            if len(following) != 1:
                raise _Unreadable(f"{len(following)} products are made of it, and not the one with the values")
            self._check_left_alone(node, node, following[0])
            if known_name(following[0]) in _PRODUCTS:
                break
            node = following[0]
        product = self.at = following[0]
        if known_name(product) == "baddbmm" or product.kwargs or len(product.args) != 2:
            raise _Unreadable("something is added to the product with the values")
        if product.args[0] is not node or not is_tensor(product.args[1]):
            raise _Unreadable("the probabilities are not its first operand")
        return product

    def _continues(self, node: fx.Node) -> bool:
        """Whether a user of the probabilities hands them on; with a sink its column is cut off."""
        if not is_tensor(node):
            return False
        cuts_sink = known_name(node) == "getitem" and node.args[1] == (Ellipsis, slice(None, -1, None))
        return (self.sink_logit is not None and cuts_sink) or self._hands_on(node)

    # -- masks -----------------------------------------------------------------------------------------

    def _mask(self, sizes: Any) -> tuple[fx.Node | None, float | None]:
        """All changes as one mask of four dimensions, and the number that a bool one fills in; `sizes` are B and Hq."""
        changes = [self._aligned(change, sizes) for change in reversed(self.changes)]  # as the model makes them
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
        """Changes as one bias.  A query that sees no key attends by what is filled in alone, which logits must not
        change when they are added to it.  Where only fills hide, other numbers in the same order can stand for them."""
        if stand_ins := self._stand_ins(changes, fills):
            changes = [
                dataclasses.replace(each, number=stand_ins[each.number]) if isinstance(each, _Filled) else each
                for each in changes
                if not isinstance(each, _Floor)
            ]
        dtypes = {change.dtype for change in changes}
        half = dtypes.pop() if len(dtypes) == 1 and dtypes <= _HALF else None
        total: fx.Node | None = None
        for change in changes:
            if isinstance(change, _Added):
                total = change.mask if total is None else self._emit(operator.add, total, change.mask)
                continue
            number = self._absorbing(change.number, half)
            if isinstance(change, _Filled):
                if total is None:
                    total = self._emit(operator.mul, change.allowed, 0.0)
                    total = total if half is None else self._emit("to", total, half)
                hidden = self._emit(torch.logical_not, change.allowed)
                total = self._emit(torch.masked_fill, self._wide(total, number), hidden, number)
            elif total is not None:
                total = self._emit(torch.clamp_min, self._wide(total, number), number)
        return total

    def _stand_ins(self, changes: list[_Change], fills: list[_Filled]) -> dict[float, float]:
        """For each number that is filled in one that absorbs logits; none where that is not needed, or not proven.

        A query that sees nothing attends, in equal shares, to the keys with the highest of the numbers: they are so far
        apart that nothing is left of the others.  So only their order counts.
        """
        numbers = sorted({fill.number for fill in fills}, reverse=True)
        if all(map(self._absorbs, numbers)) or not _only_hide(changes):
            return {}
        if any(isinstance(change, _Floor) for change in changes) and len(numbers) > 1:
            return {}
        finite = [number for number in numbers if number != -math.inf]
        apart = all(one - other >= 128 for one, other in itertools.pairwise(finite))
        if not apart or len(finite) > len(_STAND_INS):
            return {}
        return dict(zip(finite, _STAND_INS, strict=False)) | {-math.inf: -math.inf}

    def _absorbs(self, number: float, dtype: torch.dtype | None = None) -> bool:
        """Whether logits of ordinary size can be added to a number without changing it, in a dtype or the softmax's."""
        eps = torch.finfo(dtype or accumulate_dtype(value(self.softmax).dtype)).eps
        return number * eps <= -63 if dtype else number * eps <= -64  # the lowest number of float16 does

    def _absorbing(self, number: float, half: torch.dtype | None) -> float:
        if not (self._absorbs(number) or (half is not None and self._absorbs(number, half))):
            raise _Unreadable(f"{number:g} is filled in beside other masks: use the lowest number of the dtype")
        return number

    def _wide(self, mask: fx.Node, number: float) -> fx.Node:
        """A mask in a dtype that holds a number."""
        dtype = value(mask).dtype
        holds = dtype.is_floating_point and (number == -math.inf or number >= torch.finfo(dtype).min)
        return mask if holds else self._emit("float", mask)

    def _aligned(self, change: _Change, sizes: Any) -> _Change:
        """The same with a mask of four dimensions."""
        if isinstance(change, _Added):
            return dataclasses.replace(change, mask=self._four_dimensional(change.mask, change.shape, sizes))
        if isinstance(change, _Filled):
            return dataclasses.replace(change, allowed=self._four_dimensional(change.allowed, change.shape, sizes))
        return change

    def _four_dimensional(self, mask: fx.Node, shape: Any, sizes: Any) -> fx.Node:
        """A mask on logits of that shape as [B or 1, Hq or 1, q or 1, S or 1]; `sizes` are B and Hq."""
        ndim = value(mask).ndim
        if ndim < len(shape):  # aligned from the right, as in any broadcasting
            mask = self._emit(operator.getitem, mask, (*[None] * (len(shape) - ndim), Ellipsis))
        own, leading = value(mask).shape[:-2], shape[:-2]
        if all(expr(size) == 1 for size in own):
            part = (*[0] * len(own), None, None, Ellipsis)
            return mask if len(own) == 2 else self._emit(operator.getitem, mask, part)
        if _same_sizes(leading, sizes):
            return mask
        if len(own) == 1 and expr(own[0]) == expr(sizes[0] * sizes[1]):
            return self._emit(torch.unflatten, mask, 0, (-1, int(sizes[1])))
        if len(own) == 3 and _same_sizes((leading[0], leading[1] * leading[2]), sizes):
            heads = [int(size) for size in leading[1:]]
            each = self._emit("expand", mask, -1, *heads, -1, -1)
            return self._emit(torch.flatten, each, 1, 2)
        raise _Unreadable(f"a mask of {list(value(mask).shape)} is not along the rows and heads of the logits")

    def _emit(self, target: Any, *args: Any) -> fx.Node:
        """A new node before the softmax."""
        return _emit(self.graph, self.softmax, target, *args)


def _emit(graph: fx.Graph, before: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A new node that calls a function, or the method of that name."""
    method = isinstance(target, str)
    with graph.inserting_before(before):
        node = graph.call_method(target, args) if method else graph.call_function(target, args)
    called = operator.methodcaller(target, *args[1:]) if method else target
    given = args[:1] if method else args
    node.meta["example_value"] = fake_tensors.propagate(
        called, *(value(a) if isinstance(a, fx.Node) else a for a in given)
    )
    node.meta["stack_trace"] = before.meta.get("stack_trace")
    return node


def is_as_wide(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Whether a floating-point dtype keeps every number of another."""
    return dtype.is_floating_point and (dtype == than or torch.promote_types(dtype, than) == dtype)


def same_last_two(node: fx.Node) -> bool:
    """Whether a view leaves the last two dimensions as they are."""
    before, after = value(node.args[0]).shape, value(node).shape  # type: ignore[arg-type]
    return len(after) > 2 and _same_sizes(before[-2:], after[-2:])


def _same_sizes(one: Any, other: Any) -> bool:
    return [expr(size) for size in one] == [expr(size) for size in other]


def _rejoins(node: fx.Node) -> bool:
    """Whether a node writes rows and heads in other dimensions, and changes nothing else."""
    return known_name(node) in _VIEWS and same_last_two(node)


def _is_last(dim: Any, tensor: Any) -> bool:
    dims = list(dim) if isinstance(dim, (tuple, list)) else [dim]
    return len(dims) == 1 and isinstance(dims[0], int) and dims[0] % tensor.ndim == tensor.ndim - 1


def _any(argument: Any) -> fx.Node:
    if not isinstance(argument, fx.Node):
        raise _Unreadable(f"{argument!r} is a constant")
    return argument


def _tensor(argument: Any) -> fx.Node:
    if not is_tensor(argument):
        raise _Unreadable(f"{argument!r} is no tensor")
    node: fx.Node = argument
    return node


def _two(node: fx.Node) -> tuple[Any, Any]:
    """Both operands of an operation that has two, and nothing else."""
    if any(setting is not None for setting in node.kwargs.values()) or len(node.args) != 2:
        raise _Unreadable("it has more than two operands, or is rounded")
    return node.args


def _sum(node: fx.Node) -> tuple[fx.Node, fx.Node, float]:
    """Both operands of a sum or a difference, and what the second is multiplied with."""
    if len(node.args) != 2 or node.kwargs.keys() - {"alpha"}:
        raise _Unreadable("it is no sum of two tensors")
    return _tensor(node.args[0]), _tensor(node.args[1]), _number(node.kwargs.get("alpha", 1))


def _is_maximum(most: fx.Node, logits: fx.Node) -> bool:
    """Whether a tensor is the maximum of each row of logits."""
    while known_name(most) in ("detach", "contiguous"):
        most = _tensor(most.args[0])
    if known_name(most) == "getitem" and most.args[1] == 0 and known_name(_any(most.args[0])) == "max":
        most = _any(most.args[0])
    given = op_table.bound(most)
    of_row = known_name(most) in ("max", "amax") and given.get("input") is logits and given.get("keepdim")
    return bool(of_row) and _is_last(given.get("dim"), value(logits))


def _only_hide(changes: list[_Change]) -> bool:
    """Whether nothing is added after a fill, and what is added before hides nothing as far as it can be seen."""
    first = next((number for number, change in enumerate(changes) if isinstance(change, _Filled)), len(changes))
    if any(isinstance(change, _Added) for change in changes[first:]):
        return False
    return not any(_may_hide(change.mask) for change in changes[:first] if isinstance(change, _Added))


def _may_hide(mask: fx.Node) -> bool:
    """Whether a bias is a mask: made with a large number, or of an input as large as attention."""
    sizes = [node for node in mask.graph.nodes if walk.is_size(node) or isinstance(value(node), torch.Size)]
    behind = walk.ancestors(mask, sizes)
    large = any(abs(leaf) >= -HIDDEN for node in behind for leaf in op_table.leaves(node) if _is_number(leaf))
    return large or any(node.op == "placeholder" and is_tensor(node) and value(node).ndim > 2 for node in behind)


def _narrow(mask: fx.Node) -> fx.Node:
    """A mask as it was before it was expanded to the shape of logits, which broadcasting does as well."""
    while known_name(mask) == "expand_as" and _from_product(_any(mask.args[1])):
        mask = _tensor(mask.args[0])
    return mask


def _written_tensor(node: fx.Node) -> Any:
    """The tensor that operations in place, one after the other, have written to and given back."""
    while alias.writes(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _is_number(argument: Any) -> bool:
    return isinstance(argument, (int, float)) and not isinstance(argument, bool)


def _number(argument: Any) -> float:
    if not isinstance(argument, (int, float)):
        raise _Unreadable(f"{argument!r} is no number")
    return float(argument)


def _sums_up_last(node: fx.Node) -> bool:
    """The log-sum-exp of [B, Hq, q, S] over its last dimension."""
    given = op_table.bound(node)
    if known_name(node) != "logsumexp" or value(given["input"]).ndim != 4:
        return False
    return _is_last(given.get("dim"), value(given["input"]))


def _from_product(node: fx.Node) -> bool:
    """Whether a tensor of logits is made from a product of two tensors, and not a mask or bias."""
    if name_of(node) in _PRODUCTS:
        return all(value(arg).ndim >= 3 for arg in node.all_input_nodes)
    parents = [arg for arg in node.all_input_nodes if is_tensor(arg) and value(arg).ndim >= 3]
    return name_of(node) != "linear" and any(_from_product(parent) for parent in parents)


def _operands(product: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, float]:
    """The query, the key [..., S, D], the bias of a product of queries and keys, and what it is multiplied with."""
    if known_name(product) == "baddbmm":
        bound: dict[str, Any] = dict(zip(("input", "batch1", "batch2"), product.args, strict=False)) | product.kwargs
        if _number(bound.get("beta", 1)) != 1:
            raise _Unreadable("its bias is multiplied with a number")
        alpha = _number(bound.get("alpha", 1.0))
        return _tensor(bound["batch1"]), _untransposed(_tensor(bound["batch2"])), _tensor(bound["input"]), alpha
    query, key = _two(product)
    return _tensor(query), _untransposed(_tensor(key)), None, 1.0


def _check_groups(product: fx.Node) -> None:
    """Where heads are written in two dimensions, the queries of one KV head must be those along the second."""
    if value(product).ndim != 5:
        return
    first, second = (value(_tensor(operand)).shape for operand in product.args[:2])
    if len(first) != 5 or len(second) != 5 or not _same_sizes(first[:2], second[:2]):
        raise _Unreadable("keys or values are not [B, Hkv, 1, ...] where queries are [B, Hkv, Hq / Hkv, ...]")


def _untransposed(node: fx.Node) -> fx.Node:
    """x of x.transpose(-1, -2)."""
    while known_name(node) in ("contiguous", "clone") or _rejoins(node):
        node = _tensor(node.args[0])
    if not is_tensor(node.args[0]) or not op_table.swaps_last_two(node):
        raise _Unreadable("its second operand is not a transpose of keys")
    return _tensor(node.args[0])


def _with_heads(query: fx.Node) -> fx.Node:
    """The query as it was before its rows and heads were joined, [B, Hq, q, D]."""
    while value(query).ndim != 4:
        wider = known_name(query) in _CASTS and is_as_wide(value(query).dtype, value(query.args[0]).dtype)  # type: ignore[arg-type]
        if not (wider or _rejoins(query) or known_name(query) in ("contiguous", "clone")):
            raise _Unreadable("its queries are not [B, Hq, q, D] with rows and heads joined")
        query = _tensor(query.args[0])
    return query


def _output(product: fx.Node) -> fx.Node:
    """The output with its rows and heads apart, [B, Hq, q, Dv]."""
    if value(product).ndim == 4:
        return product
    apart = [user for user in product.users if known_name(user) in _VIEWS and value(user).ndim == 4]
    if len(apart) != 1 or len(product.users) != 1 or not same_last_two(apart[0]):
        raise _Unreadable("its rows and heads are not taken apart to [B, Hq, q, D]")
    return apart[0]
