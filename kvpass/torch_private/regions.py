"""Use private names of nested compile regions: calls of a traced body, which this module inlines."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import importlib.util
import itertools
import operator
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from kvpass.torch_private import dynamo, fx_nodes

CALL = torch.ops.higher_order.invoke_subgraph
"""The operator of a region's call: its body, a name, and the inputs of the body."""


REUSE = "torch._dynamo.variables.invoke_subgraph"
"""The module of torch that reuses the traces of regions; older versions lack it."""


class RegionMismatch(Exception):
    """A layer cannot be a region, or Dynamo gave it another layer's weights."""


def are_supported() -> bool:
    """Return whether this version of torch reuses the trace of a region."""
    return importlib.util.find_spec(REUSE) is not None


def are_errors_suppressed() -> bool:
    """Return whether Dynamo runs code uncompiled where it cannot compile it, so that a call cannot be made again."""
    return bool(torch._dynamo.config.suppress_errors)


def is_region_error(error: Exception) -> bool:
    """Return whether an error may come from tracing a layer as a region."""
    from torch._dynamo.exc import TorchDynamoException

    frames = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__))
    known = isinstance(error, (RegionMismatch, TorchDynamoException)) or REUSE in frames
    return known and not dynamo.is_recompile_limit_error(error)


def inline_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of Dynamo's graph in which the body's nodes replace each call of a region.

    Dynamo still reads the original, and later removes the example values of its nodes and of its bodies.
    """
    copy, _ = fx_nodes.copy_graph_module(gm)
    _inline(copy)
    return copy


def _inline(gm: fx.GraphModule) -> None:
    while calls := _calls(gm):
        for call in calls:
            _inline_call(gm, call)
    for node in reversed(gm.graph.nodes):
        if not node.users and node.op != "placeholder" and _is_left_over(gm, node):
            gm.graph.erase_node(node)


def _is_left_over(gm: fx.GraphModule, node: Any) -> bool:
    """Return whether an unused node is a body or a size; Dynamo removes such sizes from all other graphs."""
    if node.op == "get_attr":
        return isinstance(getattr(gm, node.target, None), fx.GraphModule)
    return isinstance(node.meta.get("example_value"), (int, torch.SymInt, torch.Size))


def check_weights(gm: fx.GraphModule) -> None:
    """Check that each call of a body has its own weights.

    Dynamo finds the weights of a layer by the path of the layer in its guards.  torch 2.13 takes those of the first
    for all layers if it has met the layer under another path.

    Raises:
        RegionMismatch: two calls of a body share a weight.
    """
    calls_of_body = collections.defaultdict(list)
    for call in _calls(gm):
        calls_of_body[call.args[0].target].append(call)
    for body, calls in calls_of_body.items():
        weights = [[node for node in call.args[2:] if dynamo.is_of_module(node)] for call in calls]
        if not all(weights) or any(len(set(column)) < len(calls) for column in zip(*weights, strict=True)):
            raise RegionMismatch(f"calls of {body} share weights")


MARKS = types.SimpleNamespace()
"""An attribute for each call in which Dynamo has traced regions, on which its graphs depend; false once refused."""


@dataclasses.dataclass
class Tracing:
    """A call of a compiled model whose layers are traced as regions.

    Attributes:
        indices: the attributes that hold the index of a layer, such as "self_attn.layer_idx".
        ran: whether a graph has run in the call.
        mark: the name of this call's attribute of `MARKS`; "" if Dynamo has traced no region in it.
    """

    indices: frozenset[str]
    ran: bool = False
    mark: str = ""

    def run(self, call: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a function of torch.compile, in which layers are traced as regions."""
        token = _TRACING.set(self)
        try:
            return call(*arguments, **named)
        finally:
            _TRACING.reset(token)

    @property
    def may_run_again(self) -> bool:
        """True if regions were traced and no graph has run, so that the call can be made again without regions."""
        return bool(self.mark) and not self.ran

    def forget(self) -> None:
        """Keep Dynamo from using the graphs again that it has traced in the call."""
        setattr(MARKS, self.mark, False)


_TRACING: contextvars.ContextVar[Tracing | None] = contextvars.ContextVar("_TRACING", default=None)


def are_traced() -> bool:
    """Return whether layers are traced as regions in this context."""
    return _TRACING.get() is not None


def may_run_again() -> bool:
    """Return whether the call would be made again without regions if a graph were refused now."""
    now = _TRACING.get()
    return now is not None and now.may_run_again


@dynamo.constant_in_traces
def begins_call() -> bool:
    """Return whether layers that Dynamo traces now may be regions: no other code of the call has run before.

    Dynamo does not guard on the answer: a graph computes the same whether its layers were regions or not, so a graph
    traced with regions serves calls without them, and vice versa.
    """
    now = _TRACING.get()
    return now is not None and not now.ran and _is_outermost_frame()


_OF_TORCH = ("torch", "contextlib", "functools")


def _is_outermost_frame() -> bool:
    """Return whether the frame that Dynamo compiles is the one that `Tracing.run` calls.

    Between them are frames of torch alone.  A frame of the model in between means that its code has already run: after
    a graph break, or below a function that Dynamo skips.
    """
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code is Tracing.run.__code__:
            return True
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in _OF_TORCH and name not in (__name__, dynamo.__name__):
            return False
    return False


@dynamo.constant_in_traces
def mark() -> str:
    """Return the name of the mark of the call that is being traced, on which its graphs will depend."""
    now = _TRACING.get()
    assert now is not None
    if not now.mark:
        now.mark = f"call_{len(vars(MARKS))}"
        setattr(MARKS, now.mark, True)
    return now.mark


def note_run() -> None:
    """Note that a graph has run, so that the call cannot be made again."""
    now = _TRACING.get()
    if now is not None:
        now.ran = True


def without_breaks() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a graph break is an error, in code that Dynamo traces."""
    context: contextlib.AbstractContextManager[Any] = torch._dynamo.error_on_graph_break(True)
    return context


def require_own_index(layer_idx: int | None) -> None:
    """Require, in a function that Dynamo traces, that a number is the index of the layer that is traced.

    Dynamo does not guard on a number that a region only passes on, so a reused trace could get any layer's index.  The
    number is accepted only if its source is an attribute that holds each layer's own index.

    Args:
        layer_idx: the number; ignored outside of tracing.

    Raises:
        RegionMismatch: it is another number.  Dynamo wraps the error.
    """
    torch._dynamo.comptime.comptime(_check_layer_idx)


def refuse_attribute(name: str) -> None:
    """Raise RegionMismatch, in a function that Dynamo traces, because a layer reads this attribute of a cache."""
    torch._dynamo.comptime.comptime(_raise_layers_differ)


def _raise_layers_differ(context: Any) -> None:
    name = context.get_local("name").as_python_constant()
    raise RegionMismatch(f"a layer reads {name!r} of the model's cache")


def _check_layer_idx(context: Any) -> None:
    source = context.get_local("layer_idx")._i_will_not_complain_if_bc_breaks_VariableTracker().source
    path = "" if source is None else source.name.replace("._modules['", ".").replace("']", "")
    now = _TRACING.get()
    if now is None or not any(path.endswith(f".{own}") for own in now.indices):
        raise RegionMismatch(f"the index of a layer's cache is {path or 'computed'}")


def _calls(gm: fx.GraphModule) -> list[Any]:
    return [node for node in gm.graph.nodes if node.op == "call_function" and node.target is CALL]


def _inline_call(gm: fx.GraphModule, call: Any) -> None:
    body = getattr(gm, call.args[0].target)
    placeholders, result = body.graph.find_nodes(op="placeholder"), body.graph.output_node()
    copy_of = dict(zip(placeholders, call.args[2:], strict=True))
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op not in ("placeholder", "output"):
                copied = gm.graph.node_copy(node, copy_of.__getitem__)
                copied.meta = {**copied.meta, "nn_module_stack": _stack_of_call(node, call)}
                if node.op == "get_attr":
                    copied.target = _constant(gm, getattr(body, node.target))
                copy_of[node] = copied
    results = map_arg(result.args[0], copy_of.__getitem__)
    for user in list(call.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(call)


def _constant(gm: fx.GraphModule, constant: Any) -> str:
    """Return the name of an attribute of the graph module that holds a constant of a body."""
    names = (f"constant_of_region_{number}" for number in itertools.count())
    name = next(name for name in names if not hasattr(gm, name))
    setattr(gm, name, constant)
    return name


def _stack_of_call(node: fx.Node, call: fx.Node) -> dict[str, Any]:
    """Return the modules around a node of a body, with the path of the layer that is called."""
    around, own = call.meta.get("nn_module_stack") or {}, node.meta.get("nn_module_stack") or {}
    if not around or len(own) < len(around):
        return own
    traced, called = (str([*stack.values()][len(around) - 1][0]) for stack in (own, around))
    return {
        key: (called + str(path).removeprefix(traced) if str(path).startswith(traced) else path, kind)
        for key, (path, kind) in own.items()
    }
