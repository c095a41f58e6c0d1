"""What a step graph becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.slots import Slots
from kvpass.fx import shapes
from kvpass.rewrite.inputs import GatheredInput
from kvpass.torch_private import symbolic_shapes


def of_new(column: Tensor, seen: int, queries: int) -> Tensor:
    """What an input that has an entry for every token [..., S] has for the new ones: [..., q].

    It ends with the new tokens, or has room for more; that of a step that is repeated ends with an earlier one.
    """
    return column.narrow(-1, min(seen, column.shape[-1] - queries), queries)


@dataclasses.dataclass
class Outputs:
    """Where a rewritten graph has what; see `StepRewrite`, which has the same names."""

    outputs: list[int | None]
    lengths: dict[int, Any]
    grown: list[int]
    chunks: list[list[int]]
    valid: int | None


@dataclasses.dataclass
class StepRewrite:
    """A step graph on slots.

    Attributes:
        gm: takes the slots' tensors of every layer, the `weights`, then `columns`, `entries`,
            what is computed `beside`, and the `inputs`.
        open: sizes that calls may differ in, and fakes of its arguments, which have them; None if there are none.
        weights: the policy's own, on the device of the slots.
        inputs: which of Dynamo's arguments it still takes.
        loose: which of those came with strides that may change from call to call.
        columns: which of Dynamo's arguments it takes the new tokens' columns of.
        queries: q; it and `lengths` may be open sizes, see `at`.
        entries: what it looks up for the token of each slot.
        outputs: for each output of the original graph its place in the rewritten one's, None for a cache.
        lengths: outputs of the original graph that are the tokens seen before, plus a number.
        chunks: for each site of an extend graph the places of stored key, value, valid and statistics.
        beside: computes, from Dynamo's arguments and uncompiled, what takes all tokens to compute: first the `grown`
            outputs of the original graph, such as a mask that another graph goes on with, then `host_inputs` further
            inputs, then what entries are looked up in.
        unread: outputs of the original graph that grow and that nothing reads on slots: the argument that each is
            longer than, and the dimension.
        valid: the place of bool [B, 1], which of the tokens were real, if the graph leaves counting to its caller.
        positions: which of Dynamo's arguments are positions that ranks have taken the place of.
    """

    gm: fx.GraphModule
    open: symbolic_shapes.SymbolicSizes | None
    examples: list[Any] | None
    weights: list[Tensor]
    inputs: list[int]
    loose: set[int]
    columns: list[int]
    entries: list[GatheredInput]
    queries: Any
    outputs: list[int | None]
    lengths: dict[int, Any]
    chunks: list[list[int]]
    beside: fx.GraphModule | None
    grown: list[int]
    host_inputs: int = 0
    unread: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    valid: int | None = None
    positions: tuple[int, ...] = ()

    def at(self, numbers: Sequence[int]) -> StepRewrite:
        """The same for a call, in which the open sizes are these numbers."""
        if self.open is None:
            return self
        known = dict(zip(self.open.symbols, numbers, strict=True))
        lengths = {index: int(shapes.expr(size).subs(known)) for index, size in self.lengths.items()}
        return dataclasses.replace(self, queries=int(shapes.expr(self.queries).subs(known)), lengths=lengths)

    def count(self, slots: list[Slots], results: Sequence[Any]) -> None:
        """Count the tokens of a step, if its graph leaves that to its caller: see `rewrite.passes.counting`."""
        if self.valid is not None:
            new = results[self.valid][:, 0].long()
            torch._foreach_add_([layer.seen for layer in slots], [new] * len(slots))
            torch._foreach_add_([layer.length for layer in slots], 1)

    def host_precomputed(self, arguments: tuple[Any, ...]) -> list[Any]:
        """What `beside` gives."""
        return list(self.beside(*arguments)) if self.beside else []

    def flat(self, slots: list[Slots], arguments: tuple[Any, ...], host_input: list[Any], seen: int) -> list[Any]:
        """The rewritten graph's arguments: from the slots, Dynamo's arguments, and `host_precomputed`.

        Args:
            seen: the tokens before these.
        """
        return [*self.held(slots), *self.given(arguments, host_input, slots, seen)]

    def held(self, slots: list[Slots]) -> list[Any]:
        """Those arguments that a step leaves where they are: the slots' tensors and the policy's weights."""
        return [*(tensor for layer in slots for tensor in layer.tensors()), *self.weights]

    def given(self, arguments: tuple[Any, ...], host_input: list[Any], slots: list[Slots], seen: int) -> list[Any]:
        """The others, see `flat`."""
        dense, flat = torch.contiguous_format, list[Any]()
        for index in self.columns:
            flat.append(of_new(arguments[index], seen, self.queries).clone(memory_format=dense))
        further = host_input[len(self.grown) :]
        for entry in self.entries:
            full = arguments[entry.arg_index] if entry.given else further[self.host_inputs + entry.arg_index]
            flat.append(full if entry.layer is None else entry.of(full, slots[entry.layer], self.queries))
        flat += further[: self.host_inputs]
        first = len(flat)
        flat += [arguments[index] for index in self.inputs]
        for at, index in enumerate(self.inputs) if self.loose else ():
            if index in self.loose:
                flat[first + at] = arguments[index].clone(memory_format=dense)
        return flat

    @property
    def repeats(self) -> bool:
        """Whether a later step of one token can do with the same arguments."""
        return not (self.beside or self.entries)
