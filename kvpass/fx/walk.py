"""Read an FX graph: values, names, source lines and ancestors of nodes."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.node import map_arg

from kvpass.errors import OUT_OF_MEMORY, KVPassError, UnreadableGraph, UnsupportedGraph

_PACKAGE = f"{Path(__file__).parents[1]}/"


def example_value(node: fx.Node) -> Any:
    """Return the fake tensor, symbolic size or constant that Dynamo recorded for a node."""
    return node.meta.get("example_value")


def operand_of(node: fx.Node) -> fx.Node:
    """Return the first argument of a node, which must be a node too."""
    argument = node.args[0]
    assert isinstance(argument, fx.Node)
    return argument


def is_tensor(node: object) -> TypeGuard[fx.Node]:
    """Return whether an argument is a node that stands for a tensor."""
    return isinstance(node, fx.Node) and isinstance(example_value(node), torch.Tensor)


def is_inexact(tensor: Tensor) -> bool:
    """Return whether a tensor has floating-point or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def has_integers(value: object) -> bool:
    """Return whether a value is a tensor of integers, and not of bools."""
    return isinstance(value, Tensor) and not is_inexact(value) and value.dtype != torch.bool


def is_size(node: object) -> TypeGuard[fx.Node]:
    """Return whether a node stands for a size and not for a tensor."""
    recorded = example_value(node) if isinstance(node, fx.Node) else None
    return isinstance(recorded, (torch.SymInt, int)) and not isinstance(recorded, bool)


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def results(graph: fx.Graph) -> list[Any]:
    """Return the outputs of a graph, in order."""
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def reach(
    nodes: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]], stop: Iterable[fx.Node] = ()
) -> Iterator[fx.Node]:
    """Yield nodes, and all nodes that are reached from them, each once.

    Args:
        following: returns the nodes to which the walk continues from a node, such as its operands or its users.
        stop: nodes at which the walk ends, and that are not yielded.
    """
    seen, todo = set(stop), list(nodes)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo.extend(following(node))


def ancestors(
    node: fx.Node, stop: Iterable[fx.Node] = (), until: Callable[[fx.Node], bool] | None = None
) -> set[fx.Node]:
    """Return the node and all nodes that it is computed from.

    Args:
        stop: nodes at which the walk ends, and that are left out.
        until: returns whether the walk ends at a node, which is included.
    """
    operands: Callable[[fx.Node], list[fx.Node]] = operator.attrgetter("all_input_nodes")
    return set(reach([node], operands if until is None else lambda each: [] if until(each) else operands(each), stop))


def chain(node: fx.Node, through: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Follow first operands from a node while `through(node)` is true, and return the path."""
    nodes = [node]
    while nodes[-1].args and is_tensor(first := nodes[-1].args[0]) and through(nodes[-1]):
        nodes.append(first)
    return nodes


def move_before(node: fx.Node, needed: fx.Node) -> None:
    """Move `needed` and its ancestors before a node that it must not depend on.

    Raises:
        UnsupportedGraph: `needed` depends on the node.
    """
    behind = ancestors(needed)
    if node in behind:
        refuse(needed, f"{target_name(needed)!r} depends on {target_name(node)!r}")
    order = list(node.graph.nodes)
    for later in order[order.index(node) :]:
        if later in behind:
            node.prepend(later)


def target_name(node: fx.Node) -> str:
    """Return the bare name of a node's target."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def function_of(target: Any) -> Callable[..., Any]:
    """Return the function that the target of a call stands for; a name stands for a method."""
    return target if callable(target) else lambda x, *others, **named: getattr(x, target)(*others, **named)


def arguments_text(node: fx.Node, name_of_parent: Callable[[fx.Node], Any]) -> str:
    """Return the arguments of a node as text, with names instead of nodes; 1, 1.0 and True differ."""
    return repr(map_arg((node.args, node.kwargs), name_of_parent))


_FRAME = re.compile(r'\s*File "(.*)", line (\d+)')


def source_line(node: fx.Node) -> str:
    """Return `known_line`, or words for a line that is unknown."""
    return known_line(node) or "an unknown line"


def refuse(node: fx.Node, why: str, kind: type[UnsupportedGraph] = UnsupportedGraph) -> NoReturn:
    """Raise an error about the line of the model that made a node."""
    raise kind(why, line=known_line(node))


def known_line(node: fx.Node) -> str | None:
    """Return the innermost line outside of kvpass that made a node, as `file:line: code`; None if it is unknown."""
    trace = (node.meta.get("stack_trace") or node.stack_trace or "").strip().splitlines()
    for index, code in zip(reversed(trace[:-1]), reversed(trace[1:]), strict=True):
        frame = _FRAME.match(index)
        if frame:
            file, line = frame.groups()
            if file.startswith(_PACKAGE):
                continue  # Dynamo traces into the handles of caches
            return f"{file}:{line}: {code.strip()}"
    return None


@contextlib.contextmanager
def converting_errors(calls: Iterable[fx.Node]) -> Iterator[None]:
    """Turn unexpected errors while a graph is read and rewritten into refusals.

    Args:
        calls: the graph's attention calls; the message names the source line of the first call.

    Raises:
        UnreadableGraph: any error that is neither a KVPassError nor a lack of memory was raised inside.
    """
    try:
        yield
    except (KVPassError, *OUT_OF_MEMORY):
        raise
    except Exception as error:
        first = next(iter(calls), None)
        where = "" if first else "a graph without attention: "
        raise UnreadableGraph(
            f"{where}reading the graph failed with {type(error).__name__}: {error}. The model is written in a way that "
            "kvpass does not know; run it uncompiled, or report that line of code",
            line=known_line(first) if first else None,
        ) from error


def module_of(node: fx.Node) -> str:
    """Return the path of the module whose code made a node, or "" if it is unknown."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.replace("L['self'].", "").replace("L['fn'].", "").replace("_modules['", "").replace("']", "")
