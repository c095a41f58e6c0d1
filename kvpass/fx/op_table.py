"""Define the table of operators and their properties.

`tagged` returns the operators with a property, such as all views.  All facts about operators are here; a list in
another module is a decision of that module.  `kvpass.fx.propagation` follows axes through the operators.

A node counts as a call of an operator only if its target is torch's own function, or tensor method, of that name.

To add an operator, add its name to the row of its tags, and its arguments to `_SIGNATURES` if it works along
dimensions.  Its effect on intervals of a mask is a rule in `kvpass.capture.intervals`.
"""

from __future__ import annotations

import functools
import operator
import types
from typing import Any

import torch
import torch.fx as fx

from kvpass.fx.walk import example_value, is_tensor
from kvpass.torch_private import dynamo, fx_nodes

_LINEAR_ALGEBRA = types.SimpleNamespace(linalg_vector_norm=torch.linalg.vector_norm)  # `inv` there is another operator
_HOMES = (torch, operator, torch.nn.functional, fx_nodes.NEURAL, torch.special, _LINEAR_ALGEBRA)


def operator_name(node: fx.Node) -> str:
    """Return the name of the torch operator that a node calls, in one spelling, or "" for any other node."""
    name = _known(node.op, node.target)
    return _SPELLINGS.get(name, name)


@functools.lru_cache(maxsize=1024)
def _known(op: str, target: Any) -> str:
    if op == "call_method":
        return dynamo.COMPARISONS.get(target, target) if hasattr(torch.Tensor, target) else ""
    name = getattr(target, "__name__", "")
    known = target is not torch.embedding and any(getattr(home, name, None) is target for home in _HOMES)
    if op != "call_function" or not known:  # torch.embedding takes the arguments of F.embedding in another order
        return "getitem" if target is operator.getitem else ""
    return str(name)


_TABLE = {
    "pointwise": (
        "div fmod neg pos abs sign square pow exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan "
        "tanh sigmoid relu silu gelu softplus erf logical_and logical_or logical_xor logical_not bitwise_and "
        "bitwise_or bitwise_xor bitwise_not isnan isinf isfinite floor ceil round trunc nan_to_num lerp addcmul "
        "bitwise_left_shift bitwise_right_shift atan2 logit fill_ polar complex short bool"
    ),
    "pointwise multiplies": "mul",
    "pointwise divides": "floor_divide remainder",
    "pointwise bounds": "clamp clamp_min clamp_max maximum minimum",
    "pointwise selects": "where masked_fill",
    "pointwise adds": "add sub rsub",
    "pointwise compares": "eq ne lt le gt ge",
    "pointwise keeps casts view": "to float double half bfloat16 type type_as",
    "pointwise keeps view": "contiguous detach",
    "pointwise keeps": "clone",
    "pointwise keeps_integers": "int long",
    "pointwise creates": "zeros_like ones_like full_like",
    "moves view reshapes": "view reshape flatten unflatten unsqueeze squeeze",
    "moves view transposes": "transpose permute t",
    "moves view expands": "expand broadcast_to",
    "moves view expands like": "expand_as",
    "moves view like": "view_as",
    "moves view looks_up": "getitem",
    "moves view": (
        "movedim moveaxis swapaxes swapdims select narrow chunk split tensor_split unbind diagonal adjoint ravel"
    ),
    "moves": "repeat tile repeat_interleave flip",
    "reduces": (
        "sum mean prod amax amin any all argmax argmin max min logsumexp count_nonzero std var median nansum norm "
        "linalg_vector_norm"
    ),
    "along mixes": "softmax",
    "mixes": "scaled_dot_product_attention topk scatter",
    "along": "log_softmax cumprod cummax cummin logcumsumexp sort argsort normalize",
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
    "joins": "cat stack",
    "creates fills": "zeros ones full new_zeros new_ones new_full",
    "creates": "empty new_empty empty_like",
    "augments": "setitem iadd isub imul itruediv iand ior ixor",
}
"""The operators, by their tags.

- *pointwise*: computes each element from the operands' elements at the same index, with broadcasting.  `max` and `min`
  of two tensors do so too.  *adds*, *multiplies*, *divides*, *compares*, *bounds*, *selects*: which of these it does;
  division rounds to integers.
- *keeps*: returns its operand's values, perhaps in another dtype; *casts*: to change the dtype.  *keeps_integers*:
  returns the values of an operand of integers.
- *moves*: elements change position and keep their values, independently of any tensor's content.  The table has no rule
  for these: the operation runs on a tensor of coordinates, and the result shows the new axis of each slice.
  *reshapes*: splits and joins adjacent dimensions.  *transposes*: changes their order.  *expands*: repeats a dimension.
  *like*: in the shape of the second operand.
- *view*: the result may share memory with the first operand; `int`, `long`, `short` and `bool`, which share it where
  they change no dtype, count as copies.  *augments*: an operator of Python that writes to its
  first operand, as all methods do whose names end with an underscore.
- *reduces*, *along*: works along given dimensions, which a reduction may drop; other dimensions are independent.
- *features*: mixes the last dimension, or the last few; other dimensions are independent.  *normalizes*: makes a norm.
- *projects*: computes states by a weight or a table.  *contracts*: sums products of two tensors; *batched*: over the
  last dimension of one and the second to last of the other, independently of all others.  *mixes*: attends or selects.
- *looks_up*: an index picks elements; see `lookup`.  *counts*: counts, as positions are.
- *joins*: several tensors in one.  *creates*: a tensor without content, or that a number *fills*.
"""


_OTHER_SPELLINGS = {
    "add": "iadd add_ __radd__", "sub": "subtract isub sub_", "rsub": "__rsub__", "mul": "multiply imul mul_ __rmul__",
    "div": "divide true_divide truediv itruediv div_", "floor_divide": "floordiv floor_divide_",
    "remainder": "mod remainder_", "neg": "negative", "abs": "absolute", "clamp": "clip clamp_", "lt": "less",
    "gt": "greater", "masked_fill": "masked_fill_", "bitwise_and": "and_ iand __and__", "bitwise_or": "or_ ior __or__",
    "bitwise_xor": "xor ixor __xor__", "bitwise_not": "inv invert __invert__", "bitwise_left_shift": "lshift",
    "bitwise_right_shift": "rshift", "cat": "concat concatenate",
}  # fmt: skip
"""Other names of operators that compute the same; some also write in place, see `kvpass.fx.alias`."""
_SPELLINGS = {spelling: name for name, others in _OTHER_SPELLINGS.items() for spelling in others.split()}


@functools.cache
def tagged(*tags: str) -> frozenset[str]:
    """Return the names of the operators with any of some tags."""
    rows = [names.split() for row, names in _TABLE.items() if not set(tags).isdisjoint(row.split())]
    return frozenset(name for names in rows for name in names)


def has_tag(node: fx.Node, *tags: str) -> bool:
    """Return whether a node calls an operator with any of some tags."""
    return operator_name(node) in tagged(*tags)


_SIGNATURES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(tagged("reduces", "along"), ("input", "dim", "keepdim")),
    **dict.fromkeys(("norm", "linalg_vector_norm"), ("input", "p", "dim", "keepdim")),
    **dict.fromkeys(("std", "var"), ("input", "dim", "unbiased", "keepdim")),
    "count_nonzero": ("input", "dim"),
    "masked_fill": ("input", "mask", "value"),
    "clamp": ("input", "min", "max"),
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
    "full": ("size", "fill_value"),
    "full_like": ("input", "fill_value"),
    "new_full": ("input", "size", "fill_value"),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"),
}


_ALL_LEAD = ("masked_fill", "clamp", "where", "baddbmm")
_LEADING: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(tagged("moves", "reduces", "along", "keeps", "features") | {"dropout"}, ("input",)),
    **dict.fromkeys(tagged("pointwise") | {"max", "min", "matmul"}, ("input", "other")),
    **{name: _SIGNATURES[name] for name in _SIGNATURES if name.startswith(_ALL_LEAD)},
    **dict.fromkeys(("full_like", "zeros_like", "ones_like"), ("input", "fill_value")),
    "bmm": ("input", "mat2"),
}
"""The arguments that `normalize_calls` makes positional."""
_BOUNDS = ("start", "end", "step")
"""The arguments of `arange`; a single positional one is the end."""


def normalize_calls(graph: fx.Graph) -> None:
    """Rewrite calls in one form, in which an argument's index identifies it.

    Leading keyword arguments become positional; `x.where(condition, other)` becomes `where(condition, x, other)`, and
    `arange(0, end)` becomes `arange(end)`.  The remaining keywords change the operation: `alpha`, `rounding_mode`,
    `dtype`.
    """
    for node in list(graph.nodes):
        name = operator_name(node)
        if name == "arange":
            _normalize_arange(node)
            continue
        arguments = {{"self": "input"}.get(key, key): argument for key, argument in node.kwargs.items()}
        if name == "where" and node.op == "call_method":
            arguments |= dict(zip(("input", "condition", "other"), node.args, strict=False))  # others are keywords
            node.op, node.target, node.args = "call_function", torch.where, ()
        names, args = _LEADING.get(name, ()), list(node.args)
        while len(args) < len(names) and names[len(args)] in arguments:
            args.append(arguments.pop(names[len(args)]))
        if len(args) > len(node.args):
            node.args, node.kwargs = tuple(args), arguments


def _normalize_arange(node: fx.Node) -> None:
    """Make the bounds of an arange positional, without a start of 0 and a step of 1."""
    end_alone = len(node.args) == 1 and "end" not in node.kwargs
    bounds = dict(zip(("end",) if end_alone else _BOUNDS, node.args, strict=False))
    bounds |= {name: bound for name, bound in node.kwargs.items() if name in _BOUNDS}
    if _is_int(bounds.get("step"), 1):
        del bounds["step"]
    if _is_int(bounds.get("start"), 0) and "step" not in bounds:
        del bounds["start"]
    node.args = tuple(bounds[name] for name in _BOUNDS if name in bounds)
    node.kwargs = {name: argument for name, argument in node.kwargs.items() if name not in _BOUNDS}


def _is_int(argument: object, number: int) -> bool:
    """Return whether an argument is a number that changes no dtype."""
    return type(argument) is int and argument == number


def argument_names(name: str) -> tuple[str, ...]:
    """Return the names of an operator's positional arguments, if the table has them."""
    return _SIGNATURES.get(name, ())


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a node by name: for a library's operator with defaults, else if the table names them."""
    names, defaults = argument_names(operator_name(node)), dict[str, Any]()
    if fx_nodes.is_operator(node):
        names, defaults = fx_nodes.schema(node)
    arguments = defaults | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)  # keywords follow
    if "axis" in arguments:
        arguments["dim"] = arguments.pop("axis")
    return arguments


_FILLS = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}


def constant(argument: Any, gm: fx.GraphModule | None = None) -> float | None:
    """Return the number that an argument is or that fills a tensor, as its dtype stores it, or None.

    `gm` has the literal tensors, whose numbers are unknown without it.
    """
    if isinstance(argument, (bool, int, float)):
        return float(argument)
    if not is_tensor(argument):
        return None
    name = operator_name(argument)
    number: Any = None
    if argument.op == "get_attr":
        literal = getattr(gm, str(argument.target), None)
        number = literal.item() if type(literal) is torch.Tensor and literal.numel() == 1 else None
    elif name in ("tensor", "scalar_tensor"):
        number = [*argument.args, *argument.kwargs.values()][0]
    elif has_tag(argument, "moves", "keeps"):
        number = constant(argument.args[0], gm)
    elif name in tagged("creates"):
        number = named_arguments(argument).get("fill_value", _FILLS.get(name))
    if not isinstance(number, (bool, int, float)):
        return None
    dtype = example_value(argument).dtype
    held = float(torch.tensor(number, dtype=torch.float64).to(dtype))
    exact = dtype.is_floating_point or dtype == torch.bool or abs(held - number) < 1  # integers wrap around
    return held if exact else None


def holds_indices(dtype: torch.dtype) -> bool:
    """Return whether a dtype represents every position exactly and can index, unlike int8 and bfloat16."""
    return dtype in (torch.int32, torch.int64)


def counts_exactly(dtype: torch.dtype) -> bool:
    """Return whether arange in a dtype equals the converted index.

    In half precision, the values of arange depend on its size.
    """
    return not dtype.is_floating_point or dtype in (torch.float32, torch.float64)


def is_pointwise(node: fx.Node) -> bool:
    """Return whether a node computes each element from its operands' elements at the same index."""
    name = operator_name(node)
    two = len([arg for arg in node.args if is_tensor(arg)]) == 2
    return name in tagged("pointwise") or (name in ("max", "min") and two and not node.kwargs) or _drops_nothing(node)


def _drops_nothing(node: fx.Node) -> bool:
    arguments = named_arguments(node)
    return operator_name(node) == "dropout" and not (arguments.get("p", 0.5) and arguments.get("training", True))


def leaves(argument: Any) -> list[Any]:
    """Return the values in one or several arguments, with tuples, dicts and slices flattened."""
    if isinstance(argument, (tuple, list)):
        return [leaf for part in argument for leaf in leaves(part)]
    if isinstance(argument, dict):
        return leaves(list(argument.values()))
    if isinstance(argument, slice):
        return leaves([argument.start, argument.stop, argument.step])
    return [argument]


def subscript(node: fx.Node) -> tuple[Any, ...]:
    """Return the parts of the subscript x[...] of an index or of a write to it."""
    parts = node.args[1]
    return parts if isinstance(parts, tuple) else (parts,)


def equation(node: fx.Node) -> tuple[list[fx.Node], list[str], str]:
    """Return an einsum's tensors, the letters of each and of its result; all empty if the result is not stated."""
    text, *operands = node.args if operator_name(node) == "einsum" else [""]
    left, arrow, result = str(text).replace(" ", "").partition("->")
    tensors = leaves(operands)  # they may be in a list
    stated = arrow and "." not in left and all(map(is_tensor, tensors))
    return (tensors, left.split(","), result) if stated else ([], [], "")


def uses_only_as_size(node: fx.Node, size: fx.Node) -> bool:
    """Return whether a node reads a number only as the size of a dimension, as in x.expand(-1, size) or x[:size].

    Elsewhere the same number may be a value, as in x / size.
    """
    name = operator_name(node)
    if name in ("getitem", "setitem"):
        bounds = [part.stop for part in subscript(node) if isinstance(part, slice)]
        return leaves([node.args, node.kwargs]).count(size) == leaves(bounds).count(size)
    if name in ("full", "new_full"):
        return named_arguments(node).get("fill_value") is not size
    return name in _TAKE_SIZES


_TAKE_SIZES = tagged("reshapes", "expands", "creates") - tagged("pointwise") | {"repeat", "split"}
"""The operators whose numbers are all sizes or dimensions."""


def takes_all(node: fx.Node) -> bool:
    """Return whether a node, if it is an index, takes every element."""
    if operator_name(node) != "getitem":
        return True
    return all(part is None or keeps_whole_dimension(part) for part in subscript(node))


def keeps_whole_dimension(part: Any) -> bool:
    """Return whether a part of a subscript keeps a whole dimension."""
    return part is Ellipsis or (isinstance(part, slice) and part == slice(None))
