"""Combine everything that happens to logits between their product and the softmax into one mask.

Changes are recorded from the softmax back to the product, as the graph is read, so a recorded mask or number is
multiplied by the factors of later operations.  `LogitChanges.combine` applies them in the model's order.  A filled-in
number hides a token only if it is at most `precision.HIDDEN` after all later factors.  A bool mask keeps its one
number.  Several masks are combined to one bias; a hiding number together with another number is then refused, because
logits are added to it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Sequence

import torch
import torch.fx as fx

from kvpass.capture.products import NotAttention, strip_expansion
from kvpass.fx import op_table, splicing, walk
from kvpass.fx.precision import FILLED, HIDDEN, accumulate_dtype
from kvpass.fx.shapes import expr, same_shape
from kvpass.fx.walk import example_value, is_tensor
from kvpass.torch_private import symbolic_shapes

IntLike = int | torch.SymInt
Target = Callable[..., torch.Tensor] | str
"""A function, or the name of a tensor method."""
HALF = frozenset({torch.float16, torch.bfloat16})
_SUBSTITUTES = (FILLED, 1e3 * FILLED, 1e6 * FILLED)
"""Substitutes for filled-in numbers, from the highest to the lowest; all of them absorb logits."""


@dataclasses.dataclass(frozen=True)
class AddedMask:
    """A mask or bias that is added to logits, with the shape and dtype of the sum."""

    mask: fx.Node
    shape: torch.Size
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class FilledNumber:
    """A number that replaces logits where a bool mask is false, with the logits' shape and dtype."""

    mask: fx.Node
    number: float
    shape: torch.Size
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class LowerBound:
    """A lower bound of the logits that is low enough to hide a token, with the logits' dtype."""

    number: float
    dtype: torch.dtype


Change = AddedMask | FilledNumber | LowerBound


class LogitChanges:
    """The changes of logits between their product and a softmax.

    Attributes:
        factor: the product of all factors after the operation that is read now.
        cap: the bound of a soft cap, 0 without one.
        casts: the dtypes that logits and probabilities are converted to.
        has_sink: whether a column of sinks is concatenated to the logits.
    """

    def __init__(self, dynamo_gm: fx.GraphModule, softmax: fx.Node) -> None:
        self.dynamo_gm, self.softmax = dynamo_gm, softmax
        self.factor, self.cap, self.has_sink = 1.0, 0.0, False
        self.casts: list[torch.dtype] = []
        self._changes: list[Change] = []  # from the softmax back
        self._follow_shift = False  # whether changes by a mask follow the subtraction of a row's maximum

    @property
    def empty(self) -> bool:
        """True if logits are neither masked, scaled nor capped."""
        return not (self._changes or self.factor != 1.0 or self.cap)

    @property
    def scale(self) -> float:
        """The factor on the products, with a cap included."""
        return self.factor * (self.cap or 1.0)

    def apply_cap(self) -> None:
        """Record a tanh of the logits."""
        if self.cap:
            raise NotAttention("logits are capped twice")
        self.cap, self.factor = self.factor, 1.0

    def shift(self) -> None:
        """Record the subtraction of each row's maximum, which shows all keys to a query that sees none."""
        self._follow_shift |= any(not isinstance(change, LowerBound) for change in self._changes)

    def add(self, mask: fx.Node, logits: fx.Node, node: fx.Node, alpha: float = 1.0) -> None:
        """Record a mask that a node adds to logits, times `alpha`."""
        factor = alpha * self.factor
        if example_value(mask).dtype == torch.bool:
            mask = self.emit(operator.mul, mask, 1.0)
        mask = strip_expansion(mask)
        mask = mask if factor == 1.0 else self.emit(operator.mul, mask, factor)
        dtype = self._rounding_dtype(example_value(node).dtype)
        if example_value(mask).dtype != dtype and HALF & {example_value(mask).dtype, dtype}:
            mask = self.emit("to", mask, dtype)
        self._record(AddedMask(mask, example_value(node).shape, dtype), logits)

    def fill(self, logits: fx.Node, allowed: fx.Node, filling: object, node: fx.Node) -> None:
        """Record a number that a node fills in where logits are not allowed."""
        number, dtype = self._hiding_number(filling, node), self._rounding_dtype(example_value(node).dtype)
        self._record(FilledNumber(allowed, number, example_value(node).shape, dtype), logits)

    def clamp(self, bound: object, node: fx.Node) -> None:
        """Record a lower bound of the logits that is low enough to hide a token."""
        self._changes.append(
            LowerBound(self._hiding_number(bound, node), self._rounding_dtype(example_value(node).dtype))
        )

    def _rounding_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the half-precision dtype to which a sum is cast before the softmax, else the sum's own dtype.

        A mask is in half precision if and only if the model's sums with it are; see `CachedAttention.unknown_queries`
        of `kvpass.cache.cached_attention`.
        """
        later = [each for each in (*self.casts, example_value(self.softmax).dtype) if each in HALF]
        return later[-1] if later and dtype not in HALF else dtype

    def _record(self, change: AddedMask | FilledNumber, logits: fx.Node) -> None:
        """Record a change by a mask, of logits that must keep their shape."""
        if self.cap:
            raise NotAttention("the mask is applied before the cap")
        sizes = example_value(logits).shape
        # The lengths of several layers may be symbols that only a guard makes equal.
        if len(sizes) != len(change.shape) or not all(map(symbolic_shapes.known_equal, sizes, change.shape)):
            raise NotAttention("the mask has dimensions that the logits do not have")
        if self.has_sink and expr(example_value(change.mask).shape[-1]) != expr(change.shape[-1]):
            raise NotAttention("the mask and the logits without the sink differ in width")
        if self._follow_shift and (isinstance(change, FilledNumber) or _may_hide(change.mask)):
            raise NotAttention("the maximum of each row is subtracted between two masks: subtract it after both")
        self._changes.append(change)

    def _hiding_number(self, filling: object, node: fx.Node) -> float:
        """Return a filled-in number as the softmax sees it, and check that it hides its token."""
        literal, dtype = op_table.constant(filling, self.dynamo_gm), example_value(node).dtype
        if literal is None or (is_tensor(filling) and example_value(filling).numel() != 1):
            raise NotAttention("the fill value must be a literal number in the code")
        filled = torch.tensor(literal, dtype=torch.float64).to(dtype)
        number = float((filled.double() * self.factor).to(dtype))
        if self.cap or not number <= HIDDEN:
            raise NotAttention(f"{number:g} does not hide a token after all factors: it must be at most {HIDDEN:g}")
        return number

    # -- one mask --------------------------------------------------------------------------------------

    def combine(self, sizes: Sequence[IntLike]) -> tuple[fx.Node | None, float | None]:
        """Combine all changes to one mask of four dimensions, and the number that a bool mask fills in.

        `sizes` are B and Hq.
        """
        changes = [self._align(change, sizes) for change in reversed(self._changes)]  # in the model's order
        fills = [change for change in changes if isinstance(change, FilledNumber)]
        if any(isinstance(change, AddedMask) for change in changes) or len({fill.number for fill in fills}) > 1:
            return self._as_bias(changes, fills), None
        allowed, hidden_logit = None, None
        for change in changes:
            if isinstance(change, FilledNumber):
                allowed = change.mask if allowed is None else self.emit(torch.logical_and, allowed, change.mask)
                hidden_logit = change.number
            elif isinstance(change, LowerBound) and hidden_logit is not None:
                hidden_logit = max(hidden_logit, change.number)
        return allowed, hidden_logit

    def _as_bias(self, changes: list[Change], fills: list[FilledNumber]) -> fx.Node | None:
        """Combine changes to one bias.

        A query that sees no key attends by the filled-in numbers alone, which logits must not change when they are
        added.  If only fills hide, substitutes in the same order can replace the numbers.
        """
        if substitutes := self._substitutes(changes, fills):
            changes = [
                dataclasses.replace(c, number=substitutes[c.number]) if isinstance(c, FilledNumber) else c
                for c in changes
                if not isinstance(c, LowerBound)
            ]
        dtypes = {change.dtype for change in changes}
        half = dtypes.pop() if len(dtypes) == 1 and dtypes <= HALF else None
        total: fx.Node | None = None
        for change in changes:
            if isinstance(change, AddedMask):
                total = change.mask if total is None else self.emit(operator.add, total, change.mask)
                continue
            number = self._check_absorbs(change.number, half)
            if isinstance(change, FilledNumber):
                if total is None:
                    total = self.emit(operator.mul, change.mask, 0.0)
                    total = total if half is None else self.emit("to", total, half)
                hidden = self.emit(torch.logical_not, change.mask)
                total = self.emit(torch.masked_fill, self._in_holding_dtype(total, number), hidden, number)
            elif total is not None:
                total = self.emit(torch.clamp_min, self._in_holding_dtype(total, number), number)
        return total

    def _substitutes(self, changes: list[Change], fills: list[FilledNumber]) -> dict[float, float]:
        """Return a number that absorbs logits for each filled-in number; {} if that is not needed or not proven equal.

        A query without visible keys attends in equal shares to the keys with the highest of the numbers.  The numbers
        are so far apart that the weights of the other keys are zero, so only the order of the numbers counts.
        """
        numbers = sorted({fill.number for fill in fills}, reverse=True)
        if all(map(self._absorbs, numbers)) or not _only_hide(changes):
            return {}
        if any(isinstance(change, LowerBound) for change in changes) and len(numbers) > 1:
            return {}
        finite = [number for number in numbers if number != -math.inf]
        apart = all(high - low >= 128 for high, low in itertools.pairwise(finite))
        if not apart or len(finite) > len(_SUBSTITUTES):
            return {}
        return dict(zip(finite, _SUBSTITUTES[: len(finite)], strict=True)) | {-math.inf: -math.inf}

    def _absorbs(self, number: float, dtype: torch.dtype | None = None) -> bool:
        """Return whether adding ordinary logits leaves a number unchanged in a dtype, by default the softmax's."""
        eps = torch.finfo(dtype or accumulate_dtype(example_value(self.softmax).dtype)).eps
        return number * eps <= -63 if dtype else number * eps <= -64  # the lowest number of float16 absorbs

    def _check_absorbs(self, number: float, half: torch.dtype | None) -> float:
        if not (self._absorbs(number) or (half is not None and self._absorbs(number, half))):
            raise NotAttention(f"{number:g} is filled in together with other masks: use the lowest number of the dtype")
        return number

    def _in_holding_dtype(self, mask: fx.Node, number: float) -> fx.Node:
        """Return a mask in a dtype that can hold a number."""
        dtype = example_value(mask).dtype
        holds = dtype.is_floating_point and (number == -math.inf or number >= torch.finfo(dtype).min)
        return mask if holds else self.emit("float", mask)

    def _align(self, change: Change, sizes: Sequence[IntLike]) -> Change:
        """Return a change with its mask in four dimensions."""
        if isinstance(change, LowerBound):
            return change
        return dataclasses.replace(change, mask=self._as_four_dimensional(change.mask, change.shape, sizes))

    def _as_four_dimensional(self, mask: fx.Node, shape: torch.Size, sizes: Sequence[IntLike]) -> fx.Node:
        """Reshape a mask on logits to [B or 1, Hq or 1, q or 1, S or 1].

        `sizes` are B and Hq.
        """
        ndim = example_value(mask).ndim
        if ndim < len(shape):  # aligned from the right, as in any broadcasting
            mask = self.emit(operator.getitem, mask, (*[None] * (len(shape) - ndim), Ellipsis))
        mask_sizes, logit_sizes = example_value(mask).shape[:-2], shape[:-2]
        if all(expr(size) == 1 for size in mask_sizes):
            subscript = (*[0] * len(mask_sizes), None, None, Ellipsis)
            return mask if len(mask_sizes) == 2 else self.emit(operator.getitem, mask, subscript)
        if same_shape(logit_sizes, sizes):
            return mask
        if len(mask_sizes) == 1 and expr(mask_sizes[0]) == expr(sizes[0] * sizes[1]):
            return self.emit(torch.unflatten, mask, 0, (-1, int(sizes[1])))
        if len(mask_sizes) == 3 and same_shape((logit_sizes[0], logit_sizes[1] * logit_sizes[2]), sizes):
            heads = [int(size) for size in logit_sizes[1:]]
            expanded = self.emit("expand", mask, -1, *heads, -1, -1)
            return self.emit(torch.flatten, expanded, 1, 2)
        raise NotAttention(
            f"a mask of shape {list(example_value(mask).shape)} does not match the rows and heads of the logits"
        )

    def emit(self, target: Target, *args: object) -> fx.Node:
        """Add a node before the softmax."""
        return splicing.emit_before(self.softmax, target, *args)


def _only_hide(changes: list[Change]) -> bool:
    """Return whether only fills hide: nothing is added after a fill, and nothing added before may be a mask."""
    first = next((index for index, change in enumerate(changes) if isinstance(change, FilledNumber)), len(changes))
    if any(isinstance(change, AddedMask) for change in changes[first:]):
        return False
    return not any(_may_hide(change.mask) for change in changes[:first] if isinstance(change, AddedMask))


def _may_hide(mask: fx.Node) -> bool:
    """Return whether a bias may be a mask: made with a large number, or from an input of attention's size."""
    sizes = [node for node in mask.graph.nodes if walk.is_size(node) or isinstance(example_value(node), torch.Size)]
    sources = walk.ancestors(mask, sizes)
    arguments = op_table.leaves([[node.args, node.kwargs] for node in sources])
    numbers = [each for each in arguments if isinstance(each, (int, float)) and not isinstance(each, bool)]
    has_large = any(abs(number) >= -HIDDEN for number in numbers)
    return has_large or any(
        node.op == "placeholder" and is_tensor(node) and example_value(node).ndim > 2 for node in sources
    )
