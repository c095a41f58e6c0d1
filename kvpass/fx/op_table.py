"""The one table of operators: what is true of each operator, and how it maps the axes of its operands to its result's.

`tagged` gives the operators with a property, such as all views.  A fact about operators has no other place; a list in
another module is a decision of that module.

Reading a model keeps asking whether a tensor is computed slice by slice along one axis: whether the mask of a key
depends on that key alone, or the keys of a head on that head alone.  `propagate_dim` answers for one operation: given
an axis of an operand, it returns the axis of the result whose slice k is computed from slice k of the operand and from
no other slice.  An operator outside the table has no such axis; its callers refuse the graph or use another method, and
never assume an axis.

A node counts as a call of an operator only if its target is torch's own function, or tensor method, of that name.

To add an operator, add its name to the row of its tags, and its arguments to `_SIGNATURES` if it works along
dimensions.  Its effect on intervals of a mask is a rule in `kvpass.capture.padding_analysis`.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
from typing import Any

import torch
import torch.fx as fx

from kvpass.fx.shapes import expr, number
from kvpass.fx.walk import is_size, is_tensor, value
from kvpass.torch_private import dynamo, fx_nodes, tensors

_LINEAR_ALGEBRA = types.SimpleNamespace(linalg_vector_norm=torch.linalg.vector_norm)  # `inv` there is another operator
_HOMES = (torch, operator, torch.nn.functional, fx_nodes.NEURAL, torch.special, _LINEAR_ALGEBRA)


def known_name(node: fx.Node) -> str:
    """Return the name of the torch operator that a node calls, or "" for any other node."""
    return _known(node.op, node.target)


@functools.lru_cache(maxsize=1024)
def _known(op: str, target: Any) -> str:
    if op == "call_method":
        return dynamo.COMPARISONS.get(target, target) if hasattr(torch.Tensor, target) else ""
    name = getattr(target, "__name__", "")
    if op != "call_function" or not any(getattr(home, name, None) is target for home in _HOMES):
        return "getitem" if target is operator.getitem else ""
    return str(name)


_TABLE = {
    "pointwise": (
        "mul multiply truediv div divide true_divide floordiv floor_divide mod remainder fmod neg negative pos abs "
        "absolute sign square pow exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan tanh sigmoid "
        "relu silu gelu softplus erf clamp clamp_min clamp_max clip maximum minimum where masked_fill logical_and "
        "logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not and_ or_ xor inv invert "
        "__and__ __or__ __xor__ __invert__ isnan isinf isfinite floor ceil round trunc nan_to_num lerp addcmul mul_ "
        "div_ masked_fill_ clamp_ __rmul__ bitwise_left_shift bitwise_right_shift lshift rshift atan2 logit fill_ "
        "polar complex short bool"
    ),
    "pointwise adds": "add sub subtract rsub add_ sub_ __radd__ __rsub__",
    "pointwise adds augments": "iadd isub",
    "pointwise augments": "imul itruediv iand ior ixor",
    "pointwise compares": "eq ne lt le gt ge greater less",
    "pointwise keeps casts view": "to float double half bfloat16 type type_as",
    "pointwise keeps view": "contiguous detach",
    "pointwise keeps": "clone",
    "pointwise keeps_integers": "int long",
    "pointwise creates": "zeros_like ones_like full_like",
    "moves view reshapes": "view reshape flatten unflatten unsqueeze squeeze",
    "moves view transposes": "transpose permute t",
    "moves view expands": "expand expand_as broadcast_to",
    "moves view looks_up": "getitem",
    "moves view": (
        "view_as movedim moveaxis swapaxes swapdims select narrow chunk split tensor_split unbind diagonal adjoint "
        "ravel"
    ),
    "moves": "repeat tile repeat_interleave flip",
    "reduces": (
        "sum mean prod amax amin any all argmax argmin max min logsumexp count_nonzero std var median nansum norm "
        "linalg_vector_norm"
    ),
    "along": "softmax log_softmax cumprod cummax cummin logcumsumexp sort argsort normalize",
    "along counts": "cumsum",
    "counts": "arange",
    "features projects": "linear",
    "features normalizes": "layer_norm rms_norm",
    "features": "view_as_complex view_as_real",
    "projects": "addmm conv1d conv2d",
    "projects looks_up": "embedding",
    "looks_up": "index_select gather take_along_dim",
    "contracts batched": "matmul bmm baddbmm",
    "contracts": "mm einsum",
    "joins": "cat concat stack",
    "creates fills": "zeros ones full new_zeros new_ones new_full",
    "creates": "empty new_empty empty_like",
    "augments": "setitem",
}
"""The operators, by their tags.

- *pointwise*: computes each element from the operands' elements at the same index, with broadcasting.  `max` and `min`
  of two tensors do so too.  *adds*, *compares*: adds or subtracts, compares.
- *keeps*: returns its operand's values, perhaps in another dtype; *casts*: to change the dtype.  *keeps_integers*:
  returns the values of an operand of integers.
- *moves*: elements change position and keep their values, independently of any tensor's content.  The table has no rule
  for these: the operation runs on a tensor of coordinates, and the result shows the new axis of each slice.
  *reshapes*: splits and joins adjacent dimensions.  *transposes*: changes their order.  *expands*: repeats a dimension.
- *view*: the result may share memory with the first operand; `int`, `long`, `short` and `bool`, which share it where
  they change no dtype, count as copies.  *augments*: an operator of Python that writes to its
  first operand, as all methods do whose names end with an underscore.
- *reduces*, *along*: works along given dimensions, which a reduction may drop; other dimensions are independent.
- *features*: mixes the last dimension, or the last few; other dimensions are independent.  *normalizes*: makes a norm.
- *projects*: computes states by a weight or a table.  *contracts*: sums products of two tensors; *batched*: over the
  last dimension of one and the second to last of the other, independently of all others.
- *looks_up*: an index picks elements; see `lookup`.  *counts*: counts, as positions are.
- *joins*: several tensors in one.  *creates*: a tensor without content, or that a number *fills*.
"""


@functools.cache
def tagged(*tags: str) -> frozenset[str]:
    """Return the names of the operators with any of some tags."""
    rows = [names.split() for row, names in _TABLE.items() if not set(tags).isdisjoint(row.split())]
    return frozenset(name for names in rows for name in names)


def is_a(node: fx.Node, *tags: str) -> bool:
    """Check whether a node calls an operator with any of some tags."""
    return known_name(node) in tagged(*tags)


_LIKE = frozenset({"expand_as", "view_as"})  # the second operand gives only its shape

_SIGNATURES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(tagged("reduces", "along"), ("input", "dim", "keepdim")),
    **dict.fromkeys(("norm", "linalg_vector_norm"), ("input", "p", "dim", "keepdim")),
    **dict.fromkeys(("masked_fill", "masked_fill_"), ("input", "mask", "value")),
    **dict.fromkeys(("clamp", "clamp_", "clip"), ("input", "min", "max")),
    **dict.fromkeys(tagged("joins"), ("tensors", "dim")),
    **dict.fromkeys(("layer_norm", "rms_norm"), ("input", "normalized_shape")),
    "normalize": ("input", "p", "dim", "eps"),
    "index_select": ("input", "dim", "index"),
    "gather": ("input", "dim", "index"),
    "take_along_dim": ("input", "indices", "dim"),
    "embedding": ("input", "weight"),
    "topk": ("input", "k", "dim"),
    "where": ("condition", "input", "other"),
    "clamp_min": ("input", "min"),
    "clamp_max": ("input", "max"),
    "softmax": ("input", "dim", "_stacklevel", "dtype"),
    "dropout": ("input", "p", "training", "inplace"),
    "baddbmm": ("input", "batch1", "batch2"),
    "pad": ("input", "pad", "mode", "value"),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"),
}


_ALL_LEAD = ("masked_fill", "clamp", "clip", "where", "baddbmm")
_LEADING: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(tagged("moves", "reduces", "along", "keeps", "features") | {"dropout"}, ("input",)),
    **dict.fromkeys(tagged("pointwise") | {"max", "min", "matmul"}, ("input", "other")),
    **{name: _SIGNATURES[name] for name in _SIGNATURES if name.startswith(_ALL_LEAD)},
    **dict.fromkeys(("full_like", "zeros_like", "ones_like"), ("input", "fill_value")),
    "bmm": ("input", "mat2"),
}
"""The arguments that `bind` makes positional."""


def bind(graph: fx.Graph) -> None:
    """Rewrite calls in one form, in which an argument's index identifies it.

    Leading keyword arguments become positional; `x.where(condition, other)` becomes `where(condition, x, other)`.  The
    remaining keywords change the operation: `alpha`, `rounding_mode`, `dtype`.
    """
    for node in list(graph.nodes):
        name = known_name(node)
        names = _LEADING.get(name, ())
        given = {{"self": "input"}.get(key, key): argument for key, argument in node.kwargs.items()}
        if name == "where" and node.op == "call_method":
            given |= dict(zip(("input", "condition", "other"), node.args, strict=False))
            with graph.inserting_before(node):
                function = graph.call_function(torch.where, tuple(given[each] for each in names if each in given))
            function.meta = dict(node.meta)
            node.replace_all_uses_with(function)
            graph.erase_node(node)
        elif given:
            args = list(node.args)
            while len(args) < len(names) and names[len(args)] in given:
                args.append(given.pop(names[len(args)]))
            if len(args) > len(node.args):
                node.args, node.kwargs = tuple(args), given


def bound(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a node by name: of a library's operator with defaults, of others that the table names."""
    names, defaults = _SIGNATURES.get(known_name(node), ()), dict[str, Any]()
    if fx_nodes.is_operator(node):
        names, defaults = fx_nodes.schema(node)
    given = defaults | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if "axis" in given:
        given["dim"] = given.pop("axis")
    return given


def holds_indices(dtype: torch.dtype) -> bool:
    """Check whether a dtype holds every position exactly and can index, unlike int8 and bfloat16."""
    return dtype in (torch.int32, torch.int64)


def counts_exactly(dtype: torch.dtype) -> bool:
    """Check whether arange in a dtype equals the converted index.

    In half precision, the values of arange depend on its size.
    """
    return not dtype.is_floating_point or dtype in (torch.float32, torch.float64)


def is_pointwise(node: fx.Node) -> bool:
    """Check whether a node computes each element from its operands' elements at the same index."""
    name = known_name(node)
    two = len([arg for arg in node.args if is_tensor(arg)]) == 2
    return name in tagged("pointwise") or (name in ("max", "min") and two and not node.kwargs) or _drops_nothing(node)


def _drops_nothing(node: fx.Node) -> bool:
    given = bound(node)
    return known_name(node) == "dropout" and not (given.get("p", 0.5) and given.get("training", True))


def propagate_dim(node: fx.Node, operand: fx.Node, dim: int) -> int | None:
    """Return the result's dimension whose slice k is computed from slice k of the operand's `dim`, or None.

    The answer holds for this operand alone: a caller asks about each operand that has the axis.
    """
    if not isinstance(value(operand), (torch.Tensor, tuple, list)) or value(node) is None:
        return None
    name = known_name(node)
    if is_pointwise(node):
        return _aligned(node, operand, dim)
    if name in tagged("moves") and not _by_tensor(node):
        return _moved(node, operand, dim)
    if name in tagged("reduces", "along"):
        return _beside_dims(node, dim, goes=name in tagged("reduces"))
    if name in tagged("features") and node.args[0] is operand:
        return _beside_features(node, operand, dim)
    if name in ("matmul", "bmm") and not node.kwargs:
        return _outside_product(node, operand, dim)
    if name in tagged("joins"):
        return _beside_joined(node, dim)
    if name in ("outer", "ger") and node.args[0] is not node.args[1]:
        return 0 if operand is node.args[0] else 1
    if name == "einsum":
        return _in_equation(node, operand, dim)
    return None


def _aligned(node: fx.Node, operand: fx.Node, dim: int) -> int | None:
    shape, source = value(node).shape, value(operand).shape
    index = dim + len(shape) - len(source)
    return index if 0 <= index < len(shape) and expr(shape[index]) == expr(source[dim]) else None


def _by_tensor(node: fx.Node) -> bool:
    """Check whether the positions of elements in the result depend on a tensor's content."""
    if known_name(node) in _LIKE:
        return False
    return any(is_tensor(leaf) for leaf in leaves((node.args[1:], *node.kwargs.values())))


def leaves(argument: Any) -> list[Any]:
    """Return what is in an argument, or several, with tuples, dicts and slices flattened."""
    if isinstance(argument, (tuple, list)):
        return [leaf for part in argument for leaf in leaves(part)]
    if isinstance(argument, dict):
        return leaves(list(argument.values()))
    if isinstance(argument, slice):
        return leaves([argument.start, argument.stop, argument.step])
    return [argument]


def _moved(node: fx.Node, operand: fx.Node, dim: int) -> int | None:
    """Run the operation on coordinates along `dim`, and return the dimension of the result along which they lie."""
    if isinstance(value(operand), (tuple, list)):  # an item of a split tensor
        return dim if known_name(node) == "getitem" and isinstance(node.args[1], int) else None
    size, shape = value(operand).shape[dim], list(concrete(value(operand).shape))
    alone = isinstance(size, int) and size == 1
    if alone and known_name(node) == "expand":
        return _aligned(node, operand, dim)
    if alone:  # one element does not reveal its new axis; an operation that names the size fails on two
        shape[dim] = 2
    try:
        made = run_on(node, {operand: coordinates(tuple(shape), dim)})
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None
    parts = list(zip(made, value(node), strict=True)) if isinstance(made, (tuple, list)) else [(made, value(node))]
    found = {_where(part, known, shape[dim], size) for part, known in parts}
    return found.pop() if len(found) == 1 else None


def _where(made: Any, known: Any, count: int, size: Any) -> int | None:
    """Return the dimension along which coordinates lie, if its size is `size` for all values of the symbols."""
    index = lies_along(made, count)
    return None if index is None or expr(known.shape[index]) != expr(size) else index


def swaps_last_two(node: fx.Node) -> bool:
    """Check whether a node transposes its operand's last two dimensions, by whatever operator."""
    if not is_a(node, "moves") or _by_tensor(node):
        return False
    given = torch.empty(concrete(value(node.args[0]).shape), device="meta")  # type: ignore[arg-type]
    try:
        made = run_on(node, {node.args[0]: given})  # type: ignore[dict-item]
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    return isinstance(made, torch.Tensor) and given.ndim > 1 and _lies_like(made, given.transpose(-1, -2))


def _lies_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Check whether two views of one tensor have the same shape, strides and offset."""
    return (one.shape, one.stride(), one.storage_offset()) == (other.shape, other.stride(), other.storage_offset())


def coordinates(shape: tuple[int, ...], dim: int) -> torch.Tensor:
    """Return an int64 tensor of the given shape whose elements are their index along `dim`."""
    line = torch.arange(shape[dim]).view([-1 if d == dim else 1 for d in range(len(shape))])
    return line.expand(shape)


def lies_along(made: Any, count: int) -> int | None:
    """Return the one dimension along which a tensor counts 0 .. count - 1 and is constant elsewhere, or None."""
    if not isinstance(made, torch.Tensor) or count < 2 or not made.numel():
        return None
    along = [d for d, size in enumerate(made.shape) if size == count]
    along = [d for d in along if torch.equal(made, coordinates(tuple(made.shape), d))]
    return along[0] if len(along) == 1 else None


def _dims(node: fx.Node, ndim: int) -> set[int] | None:
    """Return the dimensions that an operation works along, or None if they are unknown or all."""
    dim = bound(node).get("dim", 1 if known_name(node) == "normalize" else None)
    dims: list[Any] = list(dim) if isinstance(dim, (tuple, list)) else [dim]
    known = bool(dims) and all(isinstance(d, int) and not isinstance(d, bool) for d in dims)
    return {d % ndim for d in dims} if known else None


def _beside_dims(node: fx.Node, dim: int, goes: bool) -> int | None:
    source = bound(node).get("input")
    if not isinstance(source, fx.Node) or not is_tensor(source):
        return None
    dims = _dims(node, value(source).ndim)
    if dims is None or dim in dims:
        return None
    keeps = not goes or bool(bound(node).get("keepdim", False))
    return dim if keeps else dim - sum(d < dim for d in dims)


def _beside_features(node: fx.Node, operand: fx.Node, dim: int) -> int | None:
    shape = bound(node).get("normalized_shape", 1)
    mixed = len(shape) if isinstance(shape, (tuple, list)) else int(known_name(node) != "view_as_real")
    return dim if dim < value(operand).ndim - mixed else None


def _outside_product(node: fx.Node, operand: fx.Node, dim: int) -> int | None:
    """Return the result's dimension for the rows of the first factor or the columns of the second.

    The dimension that is summed over has none.
    """
    first, second = node.args[:2]
    ndim, width = value(node).ndim, value(operand).ndim
    if first is second or width < 2 or value(first).ndim < 2 or value(second).ndim < 2:  # type: ignore[arg-type]
        return None
    if dim >= width - 2:
        summed = width - 1 if operand is first else width - 2
        return None if dim == summed else ndim - width + dim
    return _aligned(node, operand, dim)


def _beside_joined(node: fx.Node, dim: int) -> int | None:
    along = bound(node).get("dim", 0) % value(node).ndim
    if known_name(node) == "stack":
        return int(dim + (along <= dim))
    return None if along == dim else dim


def _in_equation(node: fx.Node, operand: fx.Node, dim: int) -> int | None:
    """Return the dimension of einsum's result that has the letter of an operand's dimension, or None."""
    equation, *operands = node.args
    tensors = leaves(operands)
    left, arrow, right = str(equation).replace(" ", "").partition("->")
    if not arrow or "." in left or tensors.count(operand) != 1:
        return None
    letters = left.split(",")[tensors.index(operand)]
    return right.index(letters[dim]) if letters[dim] in right and letters.count(letters[dim]) == 1 else None


# -- running an operation on small tensors ----------------------------------------------------------------------------


def concrete(shape: Any) -> tuple[int, ...]:
    """Return a shape with a small number in place of each symbol."""
    return tuple(_number(size) for size in shape)


def _number(size: Any) -> int:
    """Return a size with a small number in place of each symbol; a symbol always gets the same number."""
    return number(size, {symbol: _stands_for(symbol) for symbol in expr(size).free_symbols})


def _stands_for(symbol: Any) -> int:
    digits = "".join(letter for letter in str(symbol) if letter.isdigit()) or "0"
    return 3 + int(digits) % 5


def run_on(node: fx.Node, given: dict[fx.Node, Any]) -> Any:
    """Run a node's operation on the given operands, with `concrete` sizes."""

    def replace(argument: fx.Node) -> Any:
        if argument in given:
            return given[argument]
        if is_size(argument):
            return _number(argument)
        if known_name(node) in _LIKE:
            return torch.empty(()).expand(concrete(value(argument).shape))
        raise TypeError(f"{argument} is no size")

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), replace)
    with tensors.real_tensors():
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


# -- lookups ----------------------------------------------------------------------------------------------------------


def lookup(node: fx.Node) -> tuple[fx.Node, dict[int, Any]] | None:
    """Return the table of a lookup by tensors and the index for each dimension, or None.

    An index may be a node, or for `getitem` any part of the subscript.
    """
    name, given = known_name(node), bound(node)
    if name == "getitem" and is_tensor(node.args[0]) and _by_tensor(node):
        return node.args[0], dict(_subscripts(subscript(node), value(node.args[0]).ndim))  # type: ignore[return-value, arg-type]
    if is_a(node, "looks_up") and isinstance(given.get("dim"), int):
        index = given["indices" if name == "take_along_dim" else "index"]
        return given["input"], {given["dim"] % value(given["input"]).ndim: index}
    if name == "embedding" and is_tensor(given.get("weight")):
        return given["weight"], {0: given["input"]}
    return None


def _subscripts(parts: tuple[Any, ...], ndim: int) -> Any:
    """Yield each part of a subscript with the dimension that it applies to."""
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    dim = 0
    for part in parts:
        if part is Ellipsis:
            dim += ndim - taken
        elif part is not None:
            yield dim, part
            dim += 1


def index_axis(node: fx.Node, index: fx.Node, dim: int) -> int | None:
    """Return the dimension of a lookup's result that follows `dim` of its index, or None."""
    name = known_name(node)
    if name == "embedding":
        return dim
    if name == "index_select":
        return int(bound(node)["dim"] % value(node).ndim)
    if name in ("gather", "take_along_dim"):
        along = bound(node)["dim"] % value(node).ndim
        return dim if along == dim else None
    return _among_subscripts(node, index, dim)


def _among_subscripts(node: fx.Node, index: fx.Node, dim: int) -> int | None:
    """Return that dimension for x[..., index, ...].

    Index tensors are broadcast together.  Their dimensions replace the first one if the indices are adjacent, and come
    first otherwise.
    """
    parts = subscript(node)
    tensors = [i for i, part in enumerate(parts) if is_tensor(part)]
    if any(value(parts[i]).dtype == torch.bool for i in tensors):
        return None
    rank = int(max(value(parts[i]).ndim for i in tensors))
    together = tensors == list(range(tensors[0], tensors[-1] + 1))
    base = value(node.args[0]).ndim  # type: ignore[arg-type]
    named = sum(part is not None and part is not Ellipsis for part in parts)
    before = 0
    for part in itertools.takewhile(lambda p: not is_tensor(p), parts):
        before += base - named if part is Ellipsis else 0 if isinstance(part, int) else 1
    return int((before if together else 0) + rank - value(index).ndim + dim)


def subscript(node: fx.Node) -> tuple[Any, ...]:
    """Return the parts of the subscript x[...] of an index or of a write to it."""
    parts = node.args[1]
    return parts if isinstance(parts, tuple) else (parts,)


def keeps_whole(part: Any) -> bool:
    """Check whether a part of a subscript keeps a whole dimension."""
    return part is Ellipsis or (isinstance(part, slice) and part == slice(None))
