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
KEYWORDS = {"hidden_logit": "hidden", "product_dtype": "scores", "logit_dtype": "weights", "output_dtype": "output"}
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
        made, nested = self._made(node)
        yield f"{self._named(node)}{self._kind(node)} = {made}"
        for line in nested:
            yield f"    {line}"

    def _made(self, node: fx.Node) -> tuple[str, Iterator[str]]:
        """Return the expression that computes a node, and the lines of a nested graph if the value is one."""
        if node.op == "placeholder":
            return "input", iter(())
        if node.op == "get_attr":
            return self._constant(node)
        target = str(node.target) if node.op in ("call_method", "call_module") else operator(node.target)
        given = [self.argument(each) for each in node.args]
        named = {KEYWORDS.get(name, name): each for name, each in node.kwargs.items()}
        given += [f"{name}={self.argument(each)}" for name, each in sorted(named.items())]
        prefix = {"call_method": "method ", "call_module": "module "}.get(node.op, "")
        return f"{prefix}{target}({', '.join(given)})", iter(())

    def _constant(self, node: fx.Node) -> tuple[str, Iterator[str]]:
        held: Any = self.graph.owning_module
        for part in str(node.target).split("."):
            held = getattr(held, part, None)
        if isinstance(held, fx.GraphModule):
            return "graph", _Writer(held.graph, self.symbols).lines()
        if not isinstance(held, Tensor):
            return f"constant {type(held).__name__}", iter(())
        known = type(held) in (Tensor, torch.nn.Parameter) and held.device.type != "meta"
        shown = known and not held.is_floating_point() and held.numel() <= SHOWN
        return f"constant {self.value(held)}{' ' + str(held.tolist()) if shown else ''}", iter(())

    def _named(self, node: fx.Node) -> str:
        """Number a node among those with the same operator, so that an additional operator renames few others."""
        called = node.op.startswith("call_")
        base = operator(node.target).split(".default")[0].rpartition(".")[2] if called else node.op
        base = {"placeholder": "input", "get_attr": "constant"}.get(base, base.rpartition("::")[2])
        self.names[node] = f"{base}_{self.counts[base]}"
        self.counts[base] += 1
        return self.names[node]

    def _kind(self, node: fx.Node) -> str:
        found = node.meta.get("example_value", node.meta.get("val"))
        return "" if found is None else f": {self.value(found)}"

    def value(self, value: Any) -> str:
        """Return the dtype and shape of a tensor, or a number or an expression unchanged."""
        if isinstance(value, Tensor):
            sizes = ", ".join(self._size(size) for size in value.shape)
            return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(self.value(each) for each in value)})"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)):
            return self._size(value)
        return type(value).__name__

    def _size(self, size: Any) -> str:
        if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return repr(size)
        return SYMBOL.sub(lambda found: self.symbols.setdefault(found[0], f"s{len(self.symbols)}"), str(size))

    def argument(self, given: Any) -> str:
        """Return an argument as text."""
        if isinstance(given, fx.Node):
            return self.names[given]
        if isinstance(given, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._size(given)
        if isinstance(given, (tuple, list)):
            inside = ", ".join(self.argument(each) for each in given)
            return f"[{inside}]" if isinstance(given, list) else f"({inside},)"
        if isinstance(given, dict):
            return "{" + ", ".join(f"{key!r}: {self.argument(each)}" for key, each in given.items()) + "}"
        if isinstance(given, slice):
            return f"slice({', '.join(self.argument(each) for each in (given.start, given.stop, given.step))})"
        if isinstance(given, Tensor):
            return self.value(given)
        if callable(given) and hasattr(given, "__name__"):
            return operator(given)
        return OWN_MODULE.sub("", ADDRESS.sub("", repr(given)))


def operator(target: Any) -> str:
    """Return the name of an operator or function, without the module for those of kvpass."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        namespace, _, name = str(target).partition(".")
        return f"{namespace}::{name}"
    if isinstance(target, str):
        return target
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", type(target).__name__)
    return name if module.split(".")[0] in ("", "kvpass") else f"{module}.{name}"
