"""Compile the parts of a graph one by one with Inductor, and call them without its wrappers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.torch_private.exported_code import WithLeading
from kvpass.torch_private.inductor import Boxed, _tracing
from kvpass.torch_private.symbolic_shapes import expression, symbols
from kvpass.torch_private.tensor_types import share_memory

NEEDS_THE_WHOLE = ("cpp_wrapper", "fx_wrapper", "freezing", "aot_inductor_mode", "triton.cudagraphs")
"""Inductor settings under which a graph is compiled whole: parts are untested under them, or do not pay."""


def allows_parts(patches: dict[str, Any]) -> bool:
    """Check that no setting of `NEEDS_THE_WHOLE` is enabled, in the configuration or by these patches."""
    from torch._inductor import config

    now = config.get_config_copy()
    return not any(patches.get(name, now.get(name)) for name in NEEDS_THE_WHOLE)


@dataclasses.dataclass(frozen=True)
class CompiledParts:
    """The compiler of parts of one graph, each as a graph of its own.

    Attributes:
        examples: the graph's arguments, as fake tensors and symbolic sizes.
        mode: the fake tensor mode of the examples.
    """

    examples: list[Any]
    mode: Any

    def compile(
        self, module: fx.GraphModule, operands: Sequence[Any], patches: dict[str, Any]
    ) -> tuple[Boxed, list[Any]] | None:
        """Compile a part with Inductor.

        Returns:
            The compiled function, which empties the list of arguments that it gets, and fakes of its results, with the
            strides that Inductor chose.  None if the part returns anything but tensors and sizes, or if the code or its
            wrappers are of an unknown kind.
        """
        from torch._guards import TracingContext, tracing
        from torch._inductor.compile_fx import compile_fx

        made, views = self._results(module, operands)
        if not all(isinstance(value, (Tensor, torch.SymInt)) for value in made):
            return None
        with tracing(TracingContext(self.mode)):  # AOTAutograd writes to it
            run: Any = compile_fx(module, operands, config_patches=patches)
        wrappers, code = _unwrapped(run)
        if code is None or len(code.output_strides or ()) != len(made):
            return None
        laid_out = [None if view else strides for view, strides in zip(views, code.output_strides, strict=True)]
        given = [self._strided(value, strides) for value, strides in zip(made, laid_out, strict=True)]
        leading = [*module.parameters(), *module.buffers()]
        if leading:  # compile_fx puts these before the arguments
            return WithLeading(run, leading), given
        if any(views) or any(map(symbols, made)):  # the wrapper marks sizes of results as dynamic
            return cast(Boxed, next(wrapper for wrapper in wrappers if _name(wrapper) != "forward")), given
        return cast(Boxed, code.current_callable), given

    def _results(self, module: fx.GraphModule, operands: Sequence[Any]) -> tuple[list[Any], list[bool]]:
        """Return fakes of a part's results, and for each whether it shares memory with an operand or another result.

        Dynamo and AOTAutograd run operators on fakes under Python's dispatcher.  Without it a few operators read the
        numbers behind symbolic sizes, and the code would serve these numbers alone.
        """
        from torch._dispatch.python import enable_python_dispatcher

        with torch.inference_mode(False), torch.no_grad(), self.mode, enable_python_dispatcher():
            made = list(module(*operands))
        tensors = [value for value in (*operands, *made) if isinstance(value, Tensor)]
        return made, [
            isinstance(value, Tensor) and sum(share_memory(value, other) for other in tensors) > 1 for value in made
        ]

    def _strided(self, value: Any, strides: Sequence[str] | None) -> Any:
        """Return a fake without shared memory, with the strides that Inductor recorded if there are any."""
        if not isinstance(value, Tensor) or strides is None:
            return value
        chosen = [self.mode.shape_env.deserialize_symexpr(stride) for stride in strides]
        return self._like(value.shape, chosen, value)

    def fresh(self, values: Sequence[Any], renamed: Mapping[Any, Any]) -> list[Any]:
        """Return fake tensors and sizes like the given ones, without shared memory and with some symbols renamed."""
        return [
            self._like(self._sizes(value.shape, renamed), self._sizes(value.stride(), renamed), value)
            if isinstance(value, Tensor)
            else self._sizes([value], renamed)[0]
            for value in values
        ]

    def _sizes(self, sizes: Sequence[Any], renamed: Mapping[Any, Any]) -> list[Any]:
        from torch.fx.experimental.symbolic_shapes import SymExprPrinter

        def said(size: Any) -> Any:
            if symbols(size).isdisjoint(renamed):
                return size
            told = SymExprPrinter().doprint(expression(size).xreplace(renamed))
            return self.mode.shape_env.deserialize_symexpr(told)

        return [said(size) for size in sizes]

    def _like(self, shape: Sequence[Any], strides: Sequence[Any], value: Tensor) -> Tensor:
        with torch.inference_mode(False), self.mode:
            return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def on_cpu(values: Iterable[Any]) -> bool:
    """Check whether all tensors among the values are on a CPU."""
    return all(value.device.type == "cpu" for value in values if isinstance(value, Tensor))


def as_operand(placeholder: fx.Node, node: fx.Node, value: Any) -> None:
    """Describe a placeholder that stands for a node of another graph."""
    placeholder.meta = {"example_value": value}
    if "tensor_dict" in node.meta:
        placeholder.meta["tensor_dict"] = node.meta["tensor_dict"]
    placeholder._dynamo_source = getattr(node, "_dynamo_source", None)


def _unwrapped(run: Any) -> tuple[list[Any], Any]:
    """Return the wrappers around Inductor's code, outermost first, and the code, or None for unknown wrappers.

    Each wrapper has the function that it wraps as `__wrapped__`.  The outer ones, named forward, take the arguments one
    by one and so keep them alive; the others take a list, which they empty.
    """
    from torch._inductor.output_code import CompiledFxGraph

    chain = [run]
    while hasattr(chain[-1], "__wrapped__"):
        chain.append(chain[-1].__wrapped__)
    *wrappers, code = chain
    known = all(
        _name(wrapper) in ("forward", "runtime_wrapper", "SerializableCompiledFunction") for wrapper in wrappers
    )
    return wrappers, code if known and isinstance(code, CompiledFxGraph) and code.current_callable else None


def _name(wrapper: Any) -> str:
    return str(getattr(wrapper, "__name__", type(wrapper).__name__))


@contextlib.contextmanager
def in_parts(gm: fx.GraphModule, examples: Sequence[Any]) -> Iterator[CompiledParts]:
    """Yield the compiler of parts of a graph with these examples.

    Within Dynamo the examples are real tensors, and their fakes in the graph have another mode than the context's; the
    two modes share their shape environment.
    """
    from torch._guards import TracingContext
    from torch._subclasses.fake_tensor import FakeTensor

    traced = TracingContext.try_get() is not None
    with _tracing(examples) as inputs:
        holders = gm.graph.find_nodes(op="placeholder")
        fakes = [node.meta["example_value"] for node in holders] if traced else inputs
        yield CompiledParts(fakes, next(value.fake_mode for value in fakes if isinstance(value, FakeTensor)))
