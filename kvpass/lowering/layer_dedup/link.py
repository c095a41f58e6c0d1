"""Compile one segment of each kind, and run the segments in order.

    def call(*a):                                        a: the arguments of the graph
        operands = [a[9], a[40]]
        embed, cos, sin = run_0(operands)
        operands = [embed, a[41], cos, sin, a[0], a[1]]  a layer: weights and slots are operands like any other
        del embed                                        before the call: only the list keeps a value alive,
        x, = run_1(operands)                             and the compiled code empties the list
        operands = [x, a[52], cos, sin, a[8], a[9]]
        del x, cos, sin
        y, = run_1(operands)                             the same code for the next layer
        ...
        return (logits,)

A slot buffer is an operand that the compiled code writes to in place, as in a whole graph.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import operator
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from kvpass.fx import walk
from kvpass.lowering.layer_dedup import segments
from kvpass.lowering.layer_dedup.segments import Segment
from kvpass.torch_private import generated_code, inductor, symbolic_shapes, tensors

log = logging.getLogger("kvpass.layer_dedup")

Patches = Callable[[fx.GraphModule], dict[str, Any]]


def compile_deduplicated(
    gm: fx.GraphModule,
    examples: Sequence[Any],
    anchors: Sequence[fx.Node],
    patches: Patches,
    exchangeable: Collection[Any] = (),
) -> inductor.Compiled | None:
    """Compile a graph with shared code for its layers, or return None to compile it as a whole.

    Only CPU graphs are compiled in segments, because on a GPU a step is one CUDA graph.  Graphs of distributed tensors
    stay whole, as their parts may exchange tensors.

    Args:
        gm: a graph without gradients.
        anchors: one node of each layer.
        patches: returns the Inductor configuration of a part.
        exchangeable: symbols of sizes that share code, so that a guard on one of them applies to all; see
            `kvpass.torch_private.symbolic_shapes.SymbolicSizes.exchangeable`.
    """
    if (
        not inductor.on_cpu(examples)
        or any(map(tensors.is_distributed, examples))
        or not inductor.allows_parts(patches(gm))
    ):
        return None
    all_segments = segments.split(gm, anchors)
    if not all_segments:
        return None
    with inductor.compiling_parts(gm, examples) as part_compiler:
        kinds, program = _SegmentKinds(gm, part_compiler, patches, exchangeable), []
        for segment in all_segments:
            compiled = kinds.run_of(segment)
            if compiled is None:
                log.info("a graph is compiled whole: a part of it cannot be compiled alone")
                return None
            program.append(compiled)
    return _link(gm, program)


class _SegmentKinds:
    """The kinds of segments so far, with their code.

    Attributes:
        values: a fake tensor or a size for each node that a segment has read or may read.
    """

    def __init__(
        self, gm: fx.GraphModule, part_compiler: inductor.CompiledParts, patches: Patches, exchangeable: Collection[Any]
    ) -> None:
        self.part_compiler, self.patches, self.exchangeable = part_compiler, patches, exchangeable
        self.values: dict[fx.Node, Any] = dict(zip(walk.placeholders(gm.graph), part_compiler.examples, strict=True))
        self._sizes = {
            symbolic_shapes.expression(value): node
            for node, value in self.values.items()
            if isinstance(value, torch.SymInt)
        }
        self._code_by_key: dict[Any, tuple[inductor.Boxed, list[Any], set[Any]]] = {}

    def run_of(self, segment: Segment) -> tuple[Segment, inductor.Boxed] | None:
        """Return a segment with all its operands and its code, or None if it cannot be compiled alone."""
        segment = self._with_symbol_inputs(segment)
        operands = [self.values[node] for node in segment.operands]
        key, sizes = segment.key(operands, self.exchangeable), segments.symbols_among(operands, self.exchangeable)
        if key not in self._code_by_key:
            module = as_module(segment, operands)
            compiled = self.part_compiler.compile(module, operands, self.patches(module))
            if compiled is None:
                return None
            self._code_by_key[key] = (*compiled, sizes)
        run, results, compiled_sizes = self._code_by_key[key]
        renamed = dict(zip(compiled_sizes, sizes, strict=True)) if len(sizes) == 1 else {}
        self.values.update(zip(segment.returned, self.part_compiler.fresh_values(results, renamed), strict=True))
        return segment, run

    def _with_symbol_inputs(self, segment: Segment) -> Segment:
        """Return a segment whose operands include the graph inputs that define the symbols in their sizes."""
        free = {symbol for node in segment.operands for symbol in symbolic_shapes.symbols(self.values[node])}
        inputs = [self._sizes[symbol] for symbol in sorted(free, key=str) if symbol in self._sizes]
        return dataclasses.replace(segment, operands=tuple(dict.fromkeys((*segment.operands, *inputs))))


def as_module(segment: Segment, operands: Sequence[Any]) -> fx.GraphModule:
    """Return a segment as its own graph, with names that do not depend on its position.

    The compiler's caches on disk compare names, so they also serve a model of another depth.
    """
    graph, attributes, copy_of = fx.Graph(), {}, {}
    for number, (node, value) in enumerate(zip(segment.operands, operands, strict=True)):
        copy_of[node] = graph.placeholder(f"operand_{number}")
        inductor.as_operand(copy_of[node], node, value)
    for number, node in enumerate(segment.nodes):
        args, kwargs = map_arg((node.args, node.kwargs), lambda parent: copy_of[parent])
        target = node.target
        if node.op == "get_attr":
            target = f"attribute_{number}"
            attributes[target] = operator.attrgetter(str(node.target))(node.graph.owning_module)
        copy_of[node] = graph.create_node(node.op, target, args, kwargs, name=f"value_{number}")
        copy_of[node].meta = dict(node.meta)
    graph.output(tuple(copy_of[node] for node in segment.returned))
    return fx.GraphModule(attributes, graph)


def _link(gm: fx.GraphModule, program: list[tuple[Segment, inductor.Boxed]]) -> inductor.Compiled:
    """Generate the function that runs the segments in order, as in the module's docstring."""
    names = {node: f"a[{number}]" for number, node in enumerate(walk.placeholders(gm.graph))}
    inputs, outputs = set(names), walk.results(gm.graph)
    results = itertools.chain.from_iterable(segment.returned for segment, _ in program)
    names.update((node, f"v{number}") for number, node in enumerate(results))
    runs = {id(run): run for _, run in program}  # not all of them are hashable
    function_names = {key: f"run_{number}" for number, key in enumerate(runs)}
    last_use = {node: number for number, (segment, _) in enumerate(program) for node in segment.operands}
    kept_alive = inputs.union(out for out in outputs if isinstance(out, fx.Node))
    lines = []
    for number, (segment, run) in enumerate(program):
        lines.append(f"operands = [{_comma_list(names[node] for node in segment.operands)}]")
        lines += _delete(
            names[node] for node in segment.operands if last_use[node] == number and node not in kept_alive
        )
        assignment = f"{_comma_list(names[node] for node in segment.returned)} = " if segment.results else ""
        lines.append(f"{assignment}{function_names[id(run)]}(operands)")
        lines += _delete(names[node] for node in segment.returned if node not in last_use and node not in kept_alive)
    lines.append(f"return ({_comma_list(names[out] if isinstance(out, fx.Node) else repr(out) for out in outputs)})")
    read = {*last_use, *outputs}
    reads = [number for number, node in enumerate(walk.placeholders(gm.graph)) if node in read]
    return LinkedSegments("\n".join(lines), {name: runs[key] for key, name in function_names.items()}, reads)


class LinkedSegments:
    """The function that runs compiled segments in order, as in the module's docstring.

    Attributes:
        source: the body of the function, which takes the arguments of the graph as a tuple `a`.
        runs: the segments' code by its names in the source.
        reads: the indices of the arguments that the source reads; of code from a file there are none.
    """

    def __init__(self, source: str, runs: Mapping[str, inductor.Boxed], reads: Sequence[int] = ()) -> None:
        self.source, self.runs, self.reads = source, runs, reads
        scope: dict[str, Any] = dict(runs)
        exec("def call(*a):\n" + textwrap.indent(source, "    "), scope)
        self._call: inductor.Compiled = scope["call"]

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        with generated_code.without_modes():
            return self._call(*arguments)


def _delete(names: Iterable[str]) -> list[str]:
    deleted = ", ".join(names)
    return [f"del {deleted}"] if deleted else []


def _comma_list(names: Iterable[str]) -> str:
    return "".join(f"{name}, " for name in names)
