"""Write an FX graph as text that a refactoring does not change.

The text has every operator with its arguments, and the shapes and dtypes of its values. Names of nodes, symbols,
inputs and constants are numbered in order of appearance. Modules, files and lines of kvpass and addresses are omitted.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

SHOWN = 16
"""Integer constants of up to this many elements are written with their values."""
SYMBOL = re.compile(r"\b(?:s|u|f|zf|zuf)\d+\b")
ADDRESS = re.compile(r" at 0x[0-9a-f]+|0x[0-9a-f]{6,}")
OWN_MODULE = re.compile(r"\bkvpass(?:\.\w+)*\.(?=\w)")
RECORDED_KEYWORDS = {
    "hidden_logit": "hidden",
    "product_dtype": "scores",
    "logit_dtype": "weights",
    "output_dtype": "output",
}
"""Names of arguments of `kvpass::attention`, and the names in the recorded texts."""


def text(graph: fx.Graph) -> str:
    """Return a graph as text, one line for each node."""
    return "\n".join(_Writer(graph, {}).lines())


class _Writer:
    """Writes one graph; nested graphs continue its numbering of symbols."""

    def __init__(self, graph: fx.Graph, symbols: dict[str, str]) -> None:
        self.graph, self.symbols = graph, symbols
        self.names: dict[fx.Node, str] = {}
        self.counts: collections.Counter[str] = collections.Counter()

    def lines(self) -> Iterator[str]:
        for node in self.graph.nodes:
            yield from self._node(node)

    def _node(self, node: fx.Node) -> Iterator[str]:
        if node.op == "output":
            yield f"return {self.argument(node.args[0])}"
            return
        expression, nested = self._expression(node)
        yield f"{self._assign_name(node)}{self._value_annotation(node)} = {expression}"
        for line in nested:
            yield f"    {line}"

    def _expression(self, node: fx.Node) -> tuple[str, Iterator[str]]:
        """Return the expression that computes a node, and the lines of a nested graph if the value is one."""
        if node.op == "placeholder":
            return "input", iter(())
        if node.op == "get_attr":
            return self._constant(node)
        target = str(node.target) if node.op in ("call_method", "call_module") else operator(node.target)
        arguments = [self.argument(argument) for argument in node.args]
        keywords = {RECORDED_KEYWORDS.get(name, name): argument for name, argument in node.kwargs.items()}
        arguments += [f"{name}={self.argument(argument)}" for name, argument in sorted(keywords.items())]
        prefix = {"call_method": "method ", "call_module": "module "}.get(node.op, "")
        return f"{prefix}{target}({', '.join(arguments)})", iter(())

    def _constant(self, node: fx.Node) -> tuple[str, Iterator[str]]:
        constant: Any = self.graph.owning_module
        for part in str(node.target).split("."):
            constant = getattr(constant, part, None)
        if isinstance(constant, fx.GraphModule):
            return "graph", _Writer(constant.graph, self.symbols).lines()
        if not isinstance(constant, Tensor):
            return f"constant {type(constant).__name__}", iter(())
        is_plain = type(constant) in (Tensor, torch.nn.Parameter) and constant.device.type != "meta"
        has_values = is_plain and not constant.is_floating_point() and constant.numel() <= SHOWN
        return f"constant {self.value(constant)}{' ' + str(constant.tolist()) if has_values else ''}", iter(())

    def _assign_name(self, node: fx.Node) -> str:
        """Number a node among those with the same operator, so that an additional operator renames few others."""
        is_call = node.op.startswith("call_")
        base = operator(node.target).split(".default")[0].rpartition(".")[2] if is_call else node.op
        base = {"placeholder": "input", "get_attr": "constant"}.get(base, base.rpartition("::")[2])
        self.names[node] = f"{base}_{self.counts[base]}"
        self.counts[base] += 1
        return self.names[node]

    def _value_annotation(self, node: fx.Node) -> str:
        value = node.meta.get("example_value", node.meta.get("val"))
        return "" if value is None else f": {self.value(value)}"

    def value(self, value: Any) -> str:
        """Return the dtype and shape of a tensor, or a number or an expression unchanged."""
        if isinstance(value, Tensor):
            sizes = ", ".join(self._size(size) for size in value.shape)
            return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(self.value(item) for item in value)})"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)):
            return self._size(value)
        return type(value).__name__

    def _size(self, size: Any) -> str:
        if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return repr(size)
        return SYMBOL.sub(lambda match: self.symbols.setdefault(match[0], f"s{len(self.symbols)}"), str(size))

    def argument(self, value: Any) -> str:
        """Return an argument as text."""
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._size(value)
        if isinstance(value, (tuple, list)):
            items = ", ".join(self.argument(item) for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items},)"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self.argument(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({', '.join(self.argument(item) for item in (value.start, value.stop, value.step))})"
        if isinstance(value, Tensor):
            return self.value(value)
        if callable(value) and hasattr(value, "__name__"):
            return operator(value)
        return OWN_MODULE.sub("", ADDRESS.sub("", repr(value)))


def operator(target: Any) -> str:
    """Return the name of an operator or function, without the module for those of kvpass."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        namespace, _, name = str(target).partition(".")
        return f"{namespace}::{name}"
    if isinstance(target, str):
        return target
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", type(target).__name__)
    return name if module.split(".")[0] in ("", "kvpass") else f"{module}.{name}"
