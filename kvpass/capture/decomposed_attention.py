"""Read attention calls: scaled_dot_product_attention, or attention that is decomposed into products and a softmax.

Decomposed attention is a product, a softmax and another product.  Between the first product and the softmax there may
be a factor and a soft cap (a scaled tanh).  There may also be masks and biases that are added or filled in, and a
column of learned sinks.

Every argument of every operation is accounted for, or the softmax is refused.  Masks apply in the model's order, each
aligned with the logits that it meets (`kvpass.capture.logit_changes`).  A column of sinks must be joined after all
masks and factors.

To add a spelling, add a step to `_DecompositionReader` that accounts for all arguments of an operation, and a row to
SPELLINGS in tests/capture/test_decomposed_attention.py.  Nothing after capture changes.
"""

from __future__ import annotations

import dataclasses
import math
import operator

import torch
import torch.fx as fx

from kvpass.capture import products
from kvpass.capture.logit_changes import LogitChanges
from kvpass.capture.products import NotAttention, is_from_product, required_number, required_tensor, strip_expansion
from kvpass.fx import alias, op_table, splicing, walk
from kvpass.fx.op_table import has_tag, operator_name
from kvpass.fx.walk import example_value, is_tensor, target_name
from kvpass.torch_private import fx_nodes


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """An attention call, in any spelling.

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
        causal, dropout: as in scaled_dot_product_attention.
        hidden_logit, dtypes: as `hidden_logit` and the three dtypes of `kvpass.capture.canonical.attention`.
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
    hidden_logit: float | None = None
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] | None = None

    @property
    def results(self) -> list[fx.Node]:
        """The nodes of its results: the output, and the log-sum-exp if there is one."""
        return [self.node] if self.lse is None else [self.node, self.lse]

    def with_operands(self, replacements: dict[fx.Node, fx.Node]) -> AttentionCall:
        """Return this call with some operands replaced by other nodes."""
        operands = {name: getattr(self, name) for name in ("query", "key", "value", "mask", "sink_logit")}
        return dataclasses.replace(self, **{name: replacements.get(node, node) for name, node in operands.items()})


def find_attention_calls(dynamo_gm: fx.GraphModule) -> tuple[list[AttentionCall], dict[fx.Node, str]]:
    """Return every attention call, in order, and every call and softmax not readable as attention, with the reason.

    Reading may add unused nodes to the graph, such as the sum of several masks.
    """
    found: list[AttentionCall] = []
    others: dict[fx.Node, str] = {}
    alias_sets = alias.AliasSets(dynamo_gm.graph)
    for node in list(dynamo_gm.graph.nodes):
        is_call = fx_nodes.is_sdpa(node)
        if not is_call and not (operator_name(node) == "softmax" and is_tensor(node)):
            continue
        reader = _DecompositionReader(dynamo_gm, node, alias_sets)
        try:
            found.append(_sdpa_call(node) if is_call else reader.read())
        except NotAttention as reason:
            others[node] = f"{target_name(reader.at)!r} at {walk.source_line(reader.at)}: {reason}"
    return found, others


def _sdpa_call(node: fx.Node) -> AttentionCall:
    args = op_table.named_arguments(node)
    if unknown := args.keys() - {*op_table.argument_names(operator_name(node)), "enable_gqa"}:
        raise NotAttention(f"kvpass does not know its argument {min(unknown)}")
    scale, mask = args.get("scale"), args.get("attn_mask")
    scale = 1 / math.sqrt(example_value(args["query"]).shape[-1]) if scale is None else float(scale)
    if mask is not None and example_value(mask).ndim < 4:  # aligned from the right, as in any broadcasting
        mask = splicing.emit_before(node, operator.getitem, mask, (*[None] * (4 - example_value(mask).ndim), Ellipsis))
    return AttentionCall(
        node, args["query"], args["key"], args["value"], mask, scale,
        causal=bool(args.get("is_causal", False)), dropout=float(args.get("dropout_p", 0.0)),
    )  # fmt: skip


def is_boundary(node: fx.Node) -> bool:
    """Return whether a node is part of an attention call, at which searches along the graph stop."""
    return fx_nodes.is_sdpa(node) or operator_name(node) in ("softmax", "logsumexp")


class _DecompositionReader:
    """Reader of one attention call, from its softmax to both products.

    It accounts for all arguments of every operation on the way, or the call is unreadable.
    """

    def __init__(self, dynamo_gm: fx.GraphModule, softmax: fx.Node, alias_sets: alias.AliasSets) -> None:
        self.softmax, self.alias_sets = softmax, alias_sets
        self.changes = LogitChanges(dynamo_gm, softmax)
        self.sink_logit: fx.Node | None = None
        self.shifted = False
        self.at = softmax  # the current operation

    def read(self) -> AttentionCall:
        """Read the call around the softmax; raise NotAttention if the operation `at` shows that it is not attention."""
        if not products.is_last(op_table.named_arguments(self.softmax).get("dim"), example_value(self.softmax)):
            raise NotAttention("it is not over the last dimension")
        self.at = product = self._first_product()
        products.check_groups(product)
        query, key, bias, alpha = products.logit_operands(product)
        if bias is not None:
            self.changes.add(bias, product, product)
        self.changes.factor *= alpha
        query = products.query_by_head(query)
        self.at = probabilities = self._second_product()
        products.check_groups(probabilities)
        node = products.output_by_head(probabilities)
        for operand in product.all_input_nodes:
            self._check_unmodified(operand, product, node)
        self.at = self.softmax
        self._check_casts(example_value(product).dtype)
        mask, hidden_logit = self.changes.combine(example_value(query).shape[:2])
        return AttentionCall(
            node, query, key, required_tensor(probabilities.args[1]), mask, self.changes.scale,
            self.changes.cap or None, self.sink_logit, self._log_sum_exp(), hidden_logit=hidden_logit,
            dtypes=(example_value(product).dtype, example_value(self.softmax).dtype, example_value(node).dtype),
        )  # fmt: skip

    def _check_casts(self, dtype: torch.dtype) -> None:
        """Refuse logits or probabilities in a narrower dtype than the product's."""
        dtypes = [dtype, example_value(self.softmax).dtype, *self.changes.casts]
        if not all(products.is_as_wide(cast, dtype) for cast in dtypes):
            raise NotAttention("logits or probabilities are converted to a narrower dtype than their product's")

    # -- from the softmax back to the first product ----------------------------------------------------

    def _first_product(self) -> fx.Node:
        node = self._last_write(required_tensor(op_table.named_arguments(self.softmax).get("input")), self.softmax)
        while not has_tag(node, "batched"):
            if node.op == "placeholder":
                self.at = self.softmax
                raise NotAttention("its logits are not computed from a product")
            logits = self._step_back(node)
            for operand in node.all_input_nodes:
                if operand is not logits:
                    self._check_unmodified(operand, node, self.softmax)
            node = self._last_write(logits, node)
        return node

    def _last_write(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """Return the last write in place to logits before `reader`, or the logits themselves without writes."""
        writers = self._writers_between(node, node, reader)
        if writers and any(products.written_tensor(writer) is not products.written_tensor(node) for writer in writers):
            self.at = writers[-1]
            raise NotAttention("it writes to the memory of the logits through another view")
        return writers[-1] if writers else node

    def _writers_between(self, node: fx.Node, since: fx.Node, until: fx.Node) -> list[fx.Node]:
        """Return the writes in place to a tensor's memory between two nodes."""
        return [writer for writer in self.alias_sets.writers(node) if since < writer < until]

    def _check_unmodified(self, node: fx.Node, since: fx.Node, until: fx.Node) -> None:
        """Refuse a tensor that is written to after it was read, because the canonical call reads it later."""
        if writers := self._writers_between(node, since, until):
            self.at = writers[0]
            raise NotAttention("it writes in place to an operand of attention during the computation")

    def _step_back(self, node: fx.Node) -> fx.Node:
        """Account for one operation on the logits, and return the logits before it."""
        name, self.at = operator_name(node), node
        if self._passes_through(node):
            return required_tensor(node.args[0])
        steps = {
            "add": self._read_add, "sub": self._read_sub, "mul": self._read_mul, "div": self._read_div,
            "tanh": self._read_tanh, "cat": self._read_cat, "masked_fill": self._read_masked_fill,
            "where": self._read_where, "max": self._read_clamp, "maximum": self._read_clamp, "clamp": self._read_clamp,
            "clamp_min": self._read_clamp,
        }  # fmt: skip
        if name not in steps:
            raise NotAttention("kvpass does not support this operation on attention logits")
        return steps[name](node)

    def _passes_through(self, node: fx.Node) -> bool:
        """Return whether an operation changes only the dtype, or how rows and heads are split into dimensions."""
        if has_tag(node, "keeps"):
            self.changes.casts.append(example_value(node).dtype)
            return True
        return products.only_splits_heads(node) or (operator_name(node) == "dropout" and op_table.is_pointwise(node))

    def _read_mul(self, node: fx.Node) -> fx.Node:
        first, second = products.two_operands(node)
        logits, factor = (first, second) if isinstance(first, fx.Node) else (second, first)
        self.changes.factor *= required_number(factor)
        return required_tensor(logits)

    def _read_div(self, node: fx.Node) -> fx.Node:
        logits, divisor = products.two_operands(node)
        self.changes.factor *= 1 / required_number(divisor)
        return required_tensor(logits)

    def _read_tanh(self, node: fx.Node) -> fx.Node:
        self.changes.apply_cap()
        return required_tensor(node.args[0])

    def _read_add(self, node: fx.Node) -> fx.Node:
        first, second, alpha = products.sum_operands(node)
        logits, mask = products.logits_and_other(first, second)
        if is_from_product(mask) or (logits is second and alpha != 1):
            raise NotAttention("both operands come from products, or the logits are multiplied by alpha")
        self.changes.add(mask, logits, node, alpha)
        return logits

    def _read_sub(self, node: fx.Node) -> fx.Node:
        """Account for a difference: the softmax ignores a row's maximum; any other operand is a bias.

        Subtracting one number from all columns of a row, sinks included, does not change its softmax, unless a cap
        follows.
        """
        logits, other, alpha = products.sum_operands(node)
        if alpha == 1 and products.is_maximum(other, logits):
            if self.sink_logit is not None or self.changes.cap:
                raise NotAttention(
                    "the maximum of each row is subtracted before a cap or sinks: subtract it afterwards"
                )
            self.shifted = True
            self.changes.shift()
            return logits
        if is_from_product(other):
            raise NotAttention("the tensor subtracted from the logits is neither the maximum of each row nor a mask")
        self.changes.add(other, logits, node, -alpha)
        return logits

    def _read_cat(self, node: fx.Node) -> fx.Node:
        args = op_table.named_arguments(node)
        logits, *sink_logit = args["tensors"]
        last = products.is_last(args.get("dim", 0), example_value(node))
        if self.sink_logit or len(sink_logit) != 1 or not last or example_value(sink_logit[0]).shape[-1] != 1:
            raise NotAttention("only one column of sinks can be concatenated to the logits, at their end")
        if not self.changes.empty:
            raise NotAttention("the column of sinks is masked or scaled with the logits: concatenate it afterwards")
        if example_value(sink_logit[0]).ndim != 4:
            raise NotAttention("sinks are not [B or 1, Hq, q or 1, 1]")
        self.sink_logit, self.changes.has_sink = sink_logit[0], True
        return required_tensor(logits)

    def _read_masked_fill(self, node: fx.Node) -> fx.Node:
        args = op_table.named_arguments(node)
        allowed = self.changes.emit(torch.logical_not, strip_expansion(required_tensor(args["mask"])))
        logits = required_tensor(args["input"])
        self.changes.fill(logits, allowed, args["value"], node)
        return logits

    def _read_where(self, node: fx.Node) -> fx.Node:
        args = op_table.named_arguments(node)
        condition = strip_expansion(required_tensor(args["condition"]))
        logits, filling = products.logits_and_other(args["input"], args["other"])
        if logits is not args["input"]:
            condition = self.changes.emit(torch.logical_not, condition)
        if isinstance(filling, fx.Node) and is_from_product(filling):
            raise NotAttention("both branches come from products")
        self.changes.fill(logits, condition, filling, node)
        return logits

    def _read_clamp(self, node: fx.Node) -> fx.Node:
        """Account for a lower bound of the logits that is low enough to hide a token."""
        if operator_name(node) in ("max", "maximum"):
            logits, bound = products.logits_and_other(*products.two_operands(node))
        else:
            args = op_table.named_arguments(node)
            logits, bound = args["input"], args.get("min")
            if args.get("max") is not None:
                raise NotAttention("the logits have an upper bound")
        self.changes.clamp(bound, node)
        return required_tensor(logits)

    def _log_sum_exp(self) -> fx.Node | None:
        """Return the model's log-sum-exp of the logits that the softmax takes, or None."""
        if self.sink_logit is not None or self.shifted:
            return None
        casts = walk.chain(
            required_tensor(op_table.named_arguments(self.softmax)["input"]), lambda node: has_tag(node, "casts")
        )
        first = casts[0]
        for node in casts:  # the list grows while it is read
            casts += [user for user in node.users if has_tag(user, "casts") and user not in casts]
        sums = [user for node in casts for user in node.users if products.is_log_sum_exp(user)]
        return next((node for node in sums if not self._writers_between(first, *sorted((node, self.softmax)))), None)

    # -- from the softmax to the second product --------------------------------------------------------

    def _second_product(self) -> fx.Node:
        node = self.softmax
        while True:
            following = [n for n in node.users if has_tag(n, "batched") or self._passes_on_probs(n)]
            self.at = node
            if len(following) != 1:
                raise NotAttention(f"{len(following)} matrix products read it, instead of exactly one, with the values")
            self._check_unmodified(node, node, following[0])
            if has_tag(following[0], "batched"):
                break
            node = following[0]
        product = self.at = following[0]
        if operator_name(product) == "baddbmm" or product.kwargs or len(product.args) != 2:
            raise NotAttention("a term is added to the product with the values")
        if product.args[0] is not node or not is_tensor(product.args[1]):
            raise NotAttention("the probabilities are not its first operand")
        return product

    def _passes_on_probs(self, node: fx.Node) -> bool:
        """Return whether a user of the probabilities passes them through, or cuts off the sink's column."""
        if not is_tensor(node):
            return False
        cuts_sink = operator_name(node) == "getitem" and node.args[1] == (Ellipsis, slice(None, -1, None))
        return (self.sink_logit is not None and cuts_sink) or self._passes_through(node)
