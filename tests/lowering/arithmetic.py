"""Count the arithmetic of a step: in the loops that Inductor generates, and in its input graph.

A compiler that fuses a value into its reader computes it for every element of the reader. The result is right, but may
take hundreds of times as long, as for the normalised inputs of a product with weights, once for each column. Results do
not show this, but counts do. Nothing is compiled or timed: Inductor is stopped when it has chosen its loops.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import sympy
import torch
import torch.fx as fx
from torch._inductor import config, ir
from torch._inductor.ops_handler import DefaultHandler
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.virtualized import V

import kvpass
from kvpass.backend import Backend
from kvpass.lowering.row_products import Processor
from kvpass.torch_private import fx_nodes

PRODUCTS = ("mm", "addmm", "bmm")
REDUCTIONS = ("sum", "amax", "amin", "mean", "argmax", "argmin", "any", "prod")
MOVES = ("convert_element_type", "iota", "full", "view", "permute", "expand", "slice", "select", "as_strided", "cat")
MOVES += ("unsqueeze", "squeeze", "clone", "copy_", "embedding", "index", "_unsafe_index", "gather")
MOVES += ("inductor_force_stride_order",)
"""Operators that move numbers or change their dtype, which do not count."""
FREE = ("load", "store", "store_reduction", "constant", "index_expr", "indirect_indexing", "to_dtype", "masked")
FREE += ("output", "check_bounds", "to_dtype_bitcast")
"""Loop operations that move numbers or change their dtype."""


@dataclasses.dataclass
class Arithmetic:
    """The operations of a step, each on one number.

    Attributes:
        loops: operations in Inductor's loops and in library products.
        graph: operations if each operator of the graph computes each of its results once.
        largest: the largest counts among the loops, with their ranges.
    """

    loops: int
    graph: int
    largest: list[tuple[int, Any]]

    @property
    def ratio(self) -> float:
        return self.loops / self.graph


@dataclasses.dataclass(frozen=True)
class StepGraphs(Backend):
    """A backend that keeps the step graphs for Inductor, and runs them uncompiled."""

    steps: list[tuple[Any, ...]] = dataclasses.field(default_factory=list, compare=False, repr=False)

    @property
    def compiles_at_once(self) -> bool:
        return True

    def compile_prompt(self, rewritten_gm: fx.GraphModule, *_: Any) -> Callable[..., Any]:
        return fx_nodes.code_of(rewritten_gm)

    def compile_step(
        self, rewritten_gm: fx.GraphModule, examples: Sequence[Any], layers: Sequence[fx.Node], *how: Any
    ) -> Callable[..., Any]:
        copy, copy_of = fx_nodes.copy_graph_module(rewritten_gm)
        self.steps.append((copy, list(examples), [copy_of[node] for node in layers], *how))
        return fx_nodes.code_of(rewritten_gm)


def keeping(policy: str, **settings: Any) -> StepGraphs:
    """Return a backend with the settings of `kvpass.backend` and no step graphs."""
    plain = kvpass.backend(policy, validate=False, **settings)
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    return StepGraphs(**fields)


@torch.no_grad()
def step_graphs(model: torch.nn.Module, policy: str, pieces: Sequence[int], **settings: Any) -> StepGraphs:
    """Return the step graphs of a conversation in pieces of these lengths; the first piece is the prompt."""
    torch._dynamo.reset()
    kept = keeping(policy, **settings)
    compiled, cache, ids = torch.compile(model, backend=kept), None, torch.arange(sum(pieces))[None] % 100
    for piece in ids.split(list(pieces), 1):
        cache = compiled(piece.contiguous(), cache=cache, use_cache=True).cache
    return kept


class _Chosen(BaseException):
    """Stops Inductor when it has chosen its loops."""


@torch.no_grad()
def count(graphs: StepGraphs, index: int, processor: Processor) -> Arithmetic:
    """Count the arithmetic of a step graph on a kind of processor."""
    rewritten_gm, examples, layers, *rest = graphs.steps[index]
    copy, copy_of = fx_nodes.copy_graph_module(rewritten_gm)
    found: list[Arithmetic] = []

    def read(nodes: list[BaseSchedulerNode]) -> None:
        loops = sorted((each for node in nodes for each in _loops(node)), key=lambda each: -each[0])
        graph = sum(map(_of_operator, V.graph.module.graph.nodes))
        found.append(Arithmetic(sum(work for work, _ in loops), graph, loops[:3]))
        raise _Chosen

    with (
        mock.patch.object(Processor, "here", staticmethod(lambda: processor)),
        torch._functorch.config.patch(enable_autograd_cache=False),
        config.patch(fx_graph_cache=False, _post_fusion_custom_pass=read),
        contextlib.suppress(_Chosen),
    ):
        Backend.compile_step(graphs, copy, examples, [copy_of[node] for node in layers], *rest)
    (arithmetic,) = found
    return arithmetic


def _numbers(sizes: Sequence[Any]) -> int:
    return math.prod(int(V.graph.sizevars.optimization_hint(size)) for size in sizes)


def _loops(node: BaseSchedulerNode) -> list[tuple[int, Any]]:
    """Return the work of each loop of a kernel; loops with equal ranges share expressions."""
    loops: dict[Any, _Expressions] = {}
    library = []
    for part in node.get_nodes():
        if (body := getattr(part, "_body", None)) is None:
            library.append((_of_call(part.node), part.node.get_name()))
            continue
        sizes = tuple(map(tuple, body.sizes))
        with V.set_ops_handler(loops.setdefault(sizes, _Expressions())):
            body(*(sympy.symbols(f"{kind}:{len(each)}", integer=True) for kind, each in zip("ir", sizes, strict=True)))
    return library + [(_numbers(sum(sizes, ())) * each.work, sizes) for sizes, each in loops.items()]


class _Expressions(DefaultHandler):
    """Numbers the distinct expressions of a loop by their operands."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}
        self.stored: dict[Any, Any] = {}
        self.work = 0

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = name, tuple(map(str, args)), tuple((word, str(value)) for word, value in kwargs.items())
        if key not in self.known:
            self.known[key] = len(self.known)
            self.work += name not in FREE
        return f"v{self.known[key]}"

    def load(self, name: str, index: Any) -> Any:
        return self.stored.get((name, index)) or self._default("load", (name, index), {})

    def store(self, name: str, index: Any, value: Any, mode: Any = None) -> None:
        self.stored[name, index] = value

    def indirect_indexing(self, *args: Any, **kwargs: Any) -> sympy.Symbol:
        return sympy.Symbol(self._default("indirect_indexing", args, kwargs), integer=True)

    def masked(self, mask: Any, body: Callable[[], Any], other: Any) -> Any:
        return self._default("masked", (mask, body(), other), {})

    def reduction(self, dtype: Any, src_dtype: Any, kind: Any, value: Any) -> Any:
        reduced = self._default("reduction", (dtype, src_dtype, kind, value), {})
        return (reduced,) * 3 if str(kind).startswith("welford") else reduced


def _of_call(node: ir.Operation) -> int:
    """Return the work of a library call: for products, one multiplication and one addition for each pair."""
    if not isinstance(node, ir.ExternKernel) or not isinstance(node.maybe_get_layout(), ir.Layout):
        return 0
    pairs = _numbers(node.inputs[-1].get_size()[-2:-1]) if str(node.python_kernel_name).endswith(PRODUCTS) else 0
    return _numbers(node.get_size()) * (2 * pairs or 1)


def _of_operator(node: fx.Node) -> int:
    """Return the work of a graph node: for reductions, one operation for each number read."""
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(node.meta["val"], torch.Tensor):
        return 0
    name = node.target.overloadpacket.__name__
    if name in PRODUCTS:
        return _numbers(_sizes(node)) * 2 * _numbers(_sizes(node.args[-1])[-2:-1])
    return 0 if name in MOVES else _numbers(_sizes(node.args[0] if name in REDUCTIONS else node))


def _sizes(node: Any) -> list[Any]:
    return [size.node.expr if isinstance(size, torch.SymInt) else size for size in node.meta["val"].shape]
