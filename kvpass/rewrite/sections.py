"""Run a traced function on a tensor that is kept in sections along its last dimension.

Rotary embeddings split a key into halves and concatenate them again, rotated.  A compiler for CPUs writes every
concatenation to memory, a copy of the whole slot buffer at every step.  Attention only sums over that dimension, so
sections never have to be joined: slices select sections, concatenations list them, and pointwise operations run on
each.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch.fx as fx
from torch import Tensor

from kvpass.fx import op_table
from kvpass.lowering.formats import Sections


class SectionInterpreter(fx.Interpreter):
    """Interpret a graph whose first input is kept in sections; return sections."""

    def run_on(self, first: Sections, *others: Any) -> tuple[Tensor, ...]:
        result = self.run(first, *others)
        return result.tensors if isinstance(result, Sections) else (result,)

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_method"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if not any(isinstance(arg, Sections) for arg in op_table.leaves(args)):
            return super().run_node(n)
        name = op_table.operator_name(n)
        apply = getattr(self, n.op)

        def call(new: Any) -> Any:
            return apply(n.target, tuple(new), kwargs)

        if op_table.is_pointwise(n):
            return _pointwise(call, args)
        if n.target is operator.getitem and _slices_last(args):
            start, stop, _ = args[1][-1].indices(args[0].width)
            return args[0].slice(start, stop)
        if name == "cat" and _along_last(args, kwargs):
            return Sections(tuple(section for whole in args[0] for section in _sections(whole).tensors))
        if name in ("chunk", "split") and _along_last(args, kwargs):
            return _divide_sections(args[0], args[1], name == "chunk")
        if name == "transpose" and args[1:] == (1, 2):
            return Sections(tuple(call([section, 1, 2]) for section in args[0].tensors))
        if n.target is operator.getitem and isinstance(args[0], tuple):
            return args[0][args[1]]
        return call(fx.node.map_aggregate(args, lambda arg: arg.join() if isinstance(arg, Sections) else arg))


class PaddedSections(fx.Interpreter):
    """Interpret a graph with sums of padded tensors instead of concatenations.

    The rule of torch.vmap for concatenation reads sizes as numbers, which dynamic sizes do not have.
    """

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or op_table.operator_name(n) != "cat":
            return super().run_node(n)
        (sections, *rest), kwargs = self.fetch_args_kwargs_from_env(n)
        dim = kwargs.get("dim", rest[0] if rest else 0) % sections[0].ndim
        if dim == sections[0].ndim - 1:
            return Sections(tuple(sections)).join()
        moved = Sections(tuple(section.movedim(dim, -1) for section in sections))
        return moved.join().movedim(-1, dim)


def _sections(x: Any) -> Sections:
    return x if isinstance(x, Sections) else Sections((x,))


def _pointwise(call: Callable[[Any], Any], args: tuple[Any, ...]) -> Sections:
    """Apply an operation to each section, and cut the other operands alike; operands that broadcast stay whole."""
    width = max(arg.width for arg in args if isinstance(arg, Sections))
    args = tuple(arg.join() if isinstance(arg, Sections) and arg.width < width else arg for arg in args)
    operands = [_sections(a) if _has_width(a, width) else None for a in args]
    ends = {end for s in operands if s is not None for end in s.ends}
    pieces = [None if s is None else s.cut_at(ends) for s in operands]
    count = max(len(c.tensors) for c in pieces if c is not None)
    return Sections(
        tuple(call([a if c is None else c.tensors[i] for a, c in zip(args, pieces, strict=True)]) for i in range(count))
    )


def _has_width(arg: Any, width: int) -> bool:
    if isinstance(arg, Sections):
        return arg.width == width
    return isinstance(arg, Tensor) and arg.ndim > 0 and arg.shape[-1] == width and width > 1


def _slices_last(args: tuple[Any, ...]) -> bool:
    """Return whether x[..., a:b] cuts only the last dimension, without a step."""
    if not isinstance(args[0], Sections) or not isinstance(args[1], tuple):
        return False
    *others, last = args[1]
    reaches_last = Ellipsis in others or len(args[1]) == args[0].tensors[0].ndim
    whole = all(part is Ellipsis or part == slice(None) for part in others)
    return reaches_last and whole and isinstance(last, slice) and last.step in (None, 1)


def _along_last(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    index = 1 if isinstance(args[0], (list, tuple)) else 2
    dim = kwargs.get("dim", args[index] if len(args) > index else 0)
    sample = _sections(op_table.leaves(args)[0]).tensors[0]
    return isinstance(dim, int) and dim in (-1, sample.ndim - 1)


def _divide_sections(x: Sections, size: Any, chunk: bool) -> tuple[Sections, ...]:
    if isinstance(size, int):
        step = -(-x.width // size) if chunk else size
        sizes = [min(step, x.width - start) for start in range(0, x.width, step)]
    else:
        sizes = list(size)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(x.slice(end - width, end) for end, width in zip(ends, sizes, strict=True))
