"""Read the two products of decomposed attention: queries with keys, and probabilities with values."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from kvpass.fx import alias, op_table, propagation, splicing, walk
from kvpass.fx.op_table import has_tag, operator_name
from kvpass.fx.shapes import same_shape
from kvpass.fx.walk import example_value, is_tensor, operand_of


class NotAttention(Exception):
    """An operation around the softmax is not part of any known attention."""


def is_as_wide(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Return whether a floating-point dtype can represent every number of another."""
    return dtype.is_floating_point and (dtype == than or torch.promote_types(dtype, than) == dtype)


def same_last_two(node: fx.Node) -> bool:
    """Return whether a view keeps the last two dimensions."""
    before, after = example_value(operand_of(node)).shape, example_value(node).shape
    return len(after) > 2 and same_shape(before[-2:], after[-2:])


def only_splits_heads(node: fx.Node) -> bool:
    """Return whether a node only splits rows and heads into other dimensions."""
    return has_tag(node, "reshapes") and same_last_two(node)


def is_last(dim: object, tensor: torch.Tensor) -> bool:
    """Return whether an operation's `dim` is the last dimension of a tensor, and no other."""
    dims = list(dim) if isinstance(dim, (tuple, list)) else [dim]
    return len(dims) == 1 and isinstance(dims[0], int) and dims[0] % tensor.ndim == tensor.ndim - 1


def required_tensor(argument: object) -> fx.Node:
    """Return a node of a tensor, or refuse any other argument."""
    if not is_tensor(argument):
        raise NotAttention(f"{argument!r} is not a tensor")
    return argument


def logits_and_other(first: object, second: object) -> tuple[fx.Node, Any]:
    """Return the operand that comes from a product of queries and keys, and the other operand."""
    for logits, other in ((first, second), (second, first)):
        if is_tensor(logits) and is_from_product(logits):
            return logits, other
    raise NotAttention("no operand comes from a product of queries and keys that is read, as q @ k.transpose(-1, -2)")


def required_number(argument: object) -> float:
    """Return a number, or refuse any other argument."""
    if not isinstance(argument, (int, float)):
        raise NotAttention(f"{argument!r} is not a number")
    return float(argument)


def two_operands(node: fx.Node) -> tuple[fx.node.Argument, fx.node.Argument]:
    """Return both operands of an operation without other arguments."""
    if any(setting is not None for setting in node.kwargs.values()) or len(node.args) != 2:
        raise NotAttention("it has more than two operands, or a rounding mode")
    first, second = node.args
    return first, second


def sum_operands(node: fx.Node) -> tuple[fx.Node, fx.Node, float]:
    """Return both operands of a sum or difference, and the factor on the second."""
    if len(node.args) != 2 or node.kwargs.keys() - {"alpha"}:
        raise NotAttention("it is not a sum of two tensors")
    return required_tensor(node.args[0]), required_tensor(node.args[1]), required_number(node.kwargs.get("alpha", 1))


def is_from_product(node: fx.Node) -> bool:
    """Return whether a tensor is computed from a product of two tensors, as logits are, unlike a mask or bias."""
    products = op_table.tagged("batched")
    ends = products | {"linear"}

    def following(each: fx.Node) -> list[fx.Node]:
        if operator_name(each) in ends:
            return []
        return [arg for arg in each.all_input_nodes if is_tensor(arg) and example_value(arg).ndim >= 3]

    found = [each for each in walk.reach([node], following) if operator_name(each) in products]
    return any(all(example_value(arg).ndim >= 3 for arg in product.all_input_nodes) for product in found)


def logit_operands(product: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, float]:
    """Return the query, the key [..., S, D], the bias, and the factor of a product of queries and keys."""
    if operator_name(product) == "baddbmm":
        args = op_table.named_arguments(product)
        if required_number(args.get("beta", 1)) != 1:
            raise NotAttention("its bias is multiplied by a number")
        bias, alpha = required_tensor(args["input"]), required_number(args.get("alpha", 1.0))
        return required_tensor(args["batch1"]), _strip_transpose(args["batch2"]), bias, alpha
    query, key = two_operands(product)
    return required_tensor(query), _strip_transpose(key), None, 1.0


def check_groups(product: fx.Node) -> None:
    """Check that heads in two dimensions have the queries of one KV head along the second."""
    if example_value(product).ndim != 5:
        return
    first, second = (example_value(required_tensor(each)).shape for each in product.args[:2])
    if len(first) != 5 or len(second) != 5 or not same_shape(first[:2], second[:2]):
        raise NotAttention("keys or values must be [B, Hkv, 1, ...] for queries [B, Hkv, Hq / Hkv, ...]")


def _strip_transpose(keys: object) -> fx.Node:
    """Return x of x.transpose(-1, -2), or x.permute(0, 2, 1, 3) of x.permute(0, 2, 3, 1)."""
    node = required_tensor(keys)
    node = walk.chain(node, lambda each: operator_name(each) in ("contiguous", "clone") or only_splits_heads(each))[-1]
    if is_tensor(node.args[0]) and operator_name(node) == "permute" and not propagation.swaps_last_two(node):
        *dims, dim, last = op_table.leaves(node.args[1:])
        return splicing.emit_before(node, torch.permute, node.args[0], (*dims, last, dim))
    if not is_tensor(node.args[0]) or not propagation.swaps_last_two(node):
        raise NotAttention("its second operand is not a transpose of the keys")
    return required_tensor(node.args[0])


def query_by_head(query: fx.Node) -> fx.Node:
    """Return the query [B, Hq, q, D] before its rows and heads were joined."""
    while example_value(query).ndim != 4:
        widens = has_tag(query, "casts") and is_as_wide(
            example_value(query).dtype, example_value(operand_of(query)).dtype
        )
        if not (widens or only_splits_heads(query) or operator_name(query) in ("contiguous", "clone")):
            raise NotAttention("its queries must be [B, Hq, q, D], possibly with rows and heads joined")
        query = required_tensor(query.args[0])
    return query


def output_by_head(product: fx.Node) -> fx.Node:
    """Return the output [B, Hq, q, Dv], with separate dimensions of rows and heads."""
    if example_value(product).ndim == 4:
        return product
    views = [user for user in product.users if has_tag(user, "reshapes") and example_value(user).ndim == 4]
    if len(views) != 1 or len(product.users) != 1 or not same_last_two(views[0]):
        raise NotAttention("its rows and heads are not split to [B, Hq, q, Dv]")
    return views[0]


def is_maximum(node: fx.Node, logits: fx.Node) -> bool:
    """Return whether a node is the maximum of each row of the logits."""
    node = walk.chain(node, lambda each: operator_name(each) in ("detach", "contiguous"))[-1]
    if operator_name(node) == "getitem" and node.args[1] == 0 and operator_name(operand_of(node)) == "max":
        node = operand_of(node)
    args = op_table.named_arguments(node)
    of_row = operator_name(node) in ("max", "amax") and args.get("input") is logits and args.get("keepdim")
    return bool(of_row) and is_last(args.get("dim"), example_value(logits))


def strip_expansion(mask: fx.Node) -> fx.Node:
    """Return a mask without its expansion to the shape of logits, which broadcasting repeats."""

    def is_expansion(node: fx.Node) -> bool:
        return operator_name(node) == "expand_as" and is_from_product(required_tensor(node.args[1]))

    return walk.chain(mask, is_expansion)[-1]


def written_tensor(node: fx.Node) -> fx.Node:
    """Return the tensor that a chain of writes in place started from."""
    return walk.chain(node, alias.writes)[-1]


def is_log_sum_exp(node: fx.Node) -> bool:
    """Return whether a node is the log-sum-exp of [B, Hq, q, S] over its last dimension."""
    args = op_table.named_arguments(node)
    if operator_name(node) != "logsumexp" or example_value(args["input"]).ndim != 4:
        return False
    return is_last(args.get("dim"), example_value(args["input"]))
