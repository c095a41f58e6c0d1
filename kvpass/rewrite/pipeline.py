"""Run the passes that turn a step graph into a graph on slots, in which no size grows."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.slots import AnySlots
from kvpass.errors import UnsupportedGraph
from kvpass.fx import alias, shapes, walk
from kvpass.rewrite.context import Pass, PassRecord, StepContext
from kvpass.rewrite.host_graph import build_host_graph
from kvpass.rewrite.inputs import GatheredInput
from kvpass.rewrite.passes import STEP_PASSES
from kvpass.rewrite.step_graph import has_loose_strides
from kvpass.torch_private import fx_nodes, symbolic_shapes


def new_columns(column: Tensor, length: int, query_len: int) -> Tensor:
    """Return the columns of the new tokens, [..., q], of an input with a column for every token, [..., S].

    They are usually the last columns.  An input with columns for later tokens has them at `length`.  A repeated step
    passes the input of an earlier step, whose last columns have the values of the new tokens.
    """
    return column.narrow(-1, min(length, column.shape[-1] - query_len), query_len)


@dataclasses.dataclass
class StepRewrite:
    """A step graph on slots.

    Attributes:
        rewritten_gm: takes the slots' tensors of every layer, the `policy_weights`, then `columns`, `entries`, the
            `host_inputs`, and the `inputs`; None after it is compiled.
        dynamic, examples: sizes that may differ between calls, and fake arguments with them; None if there are none.
        policy_weights: the policy's own tensors, on the device of the slots.
        inputs: indices of Dynamo's arguments that the graph still takes.
        dynamic_stride_inputs: the `inputs` whose strides may change from call to call.
        columns: indices of Dynamo's arguments; the graph takes the new tokens' columns of each.
        query_len: q; it and `lengths` may be dynamic sizes, see `with_numbers`.
        entries: inputs with an entry for each slot's token.
        outputs: for each output of the original graph, its index in the rewritten one; None for a cache.
        length_outputs: outputs of the original graph that are the tokens seen before plus a number, with that number.
        admitted_outputs: for each site of a chunk graph, the output indices of stored key, value, valid and statistics.
        host_graph: runs uncompiled on Dynamo's arguments and computes the values that need all tokens: the outputs
            `grown`, then the host inputs, then the tensors that entries are gathered from, then a None for each check.
        grown: outputs of the original graph that grow, such as a mask that another graph reads.
        host_input_count: the number of inputs that `host_graph` computes.
        dropped_outputs: outputs of the original graph that grow and that nothing reads on slots: the index of the
            argument that each extends, and the dimension.
        valid_output: the index of the output bool [B, 1], which tokens are real, if the graph leaves counting to its
            caller.
        positions: indices of Dynamo's arguments that are positions, which ranks replaced.
    """

    rewritten_gm: fx.GraphModule | None
    inputs: list[int]
    dynamic_stride_inputs: set[int]
    columns: list[int]
    query_len: Any
    admitted_outputs: list[list[int]]
    dynamic: symbolic_shapes.SymbolicSizes | None = None
    examples: list[Any] | None = None
    policy_weights: list[Tensor] = dataclasses.field(default_factory=list)
    entries: list[GatheredInput] = dataclasses.field(default_factory=list)
    outputs: list[int | None] = dataclasses.field(default_factory=list)
    length_outputs: dict[int, Any] = dataclasses.field(default_factory=dict)
    host_graph: fx.GraphModule | None = None
    grown: list[int] = dataclasses.field(default_factory=list)
    host_input_count: int = 0
    dropped_outputs: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    valid_output: int | None = None
    positions: tuple[int, ...] = ()

    def with_numbers(self, numbers: Sequence[int]) -> StepRewrite:
        """Return the rewrite with these numbers for its dynamic sizes."""
        if self.dynamic is None:
            return self
        known = dict(zip(self.dynamic.symbols, numbers, strict=True))
        lengths = {index: shapes.number(size, known) for index, size in self.length_outputs.items()}
        return dataclasses.replace(self, query_len=shapes.number(self.query_len, known), length_outputs=lengths)

    def count_tokens(self, slots: list[AnySlots], results: Sequence[Any]) -> None:
        """Count the tokens of a step if its graph leaves that to its caller, see `move_counters_to_caller`."""
        if self.valid_output is not None:
            new = results[self.valid_output][:, 0].long()
            torch._foreach_add_([layer.seen for layer in slots], [new] * len(slots))
            torch._foreach_add_([layer.length for layer in slots], 1)

    def run_host_graph(self, arguments: tuple[Any, ...]) -> list[Any]:
        """Return the results of `host_graph`."""
        return list(fx_nodes.code_of(self.host_graph)(*arguments)) if self.host_graph else []

    def flat_arguments(
        self, slots: list[AnySlots], arguments: tuple[Any, ...], host_inputs: list[Any], length: int
    ) -> list[Any]:
        """Return the rewritten graph's arguments, from slots, Dynamo's arguments and the results of `run_host_graph`.

        `length` is the number of tokens before this call.
        """
        return [*self.fixed_arguments(slots), *self.call_arguments(arguments, host_inputs, slots, length)]

    def fixed_arguments(self, slots: list[AnySlots]) -> list[Any]:
        """Return the arguments that all steps share: the slots' tensors and the policy's weights."""
        return [*(tensor for layer in slots for tensor in layer.tensors()), *self.policy_weights]

    def call_arguments(
        self, arguments: tuple[Any, ...], host_inputs: list[Any], slots: list[AnySlots], length: int
    ) -> list[Any]:
        """Return the arguments that change with the call, see `flat_arguments`."""
        dense, flat = torch.contiguous_format, list[Any]()
        for index in self.columns:
            flat.append(new_columns(arguments[index], length, self.query_len).clone(memory_format=dense))
        further = host_inputs[len(self.grown) :]
        gathered = further[self.host_input_count :]
        for entry in self.entries:
            tensor = arguments[entry.tensor_index] if entry.is_argument else gathered[entry.tensor_index]
            flat.append(entry.gather(tensor, slots[entry.layer], self.query_len))
        flat += further[: self.host_input_count]
        first = len(flat)
        flat += [arguments[index] for index in self.inputs]
        for offset, index in enumerate(self.inputs) if self.dynamic_stride_inputs else ():
            if index in self.dynamic_stride_inputs:
                flat[first + offset] = arguments[index].clone(memory_format=dense)
        return flat

    @property
    def is_repeatable(self) -> bool:
        """True if a later step of one token can reuse the same arguments."""
        return not (self.host_graph or self.entries)


def rewrite_step(
    step: StepContext,
    passes: Sequence[Pass] = STEP_PASSES,
    watch: Callable[[PassRecord, fx.Graph], None] = lambda record, graph: None,
) -> StepRewrite:
    """Rewrite a step graph in place by a sequence of passes, and describe the result.

    Args:
        passes: run in this order; each may read the values that earlier ones recorded in the context.
        watch: called after each pass with its record and the graph as the pass left it.

    Raises:
        UnsupportedGraph: a pass cannot express an operation on slots; the message names the line.
    """
    for each in passes:
        start = time.perf_counter()
        record = _with_line(each, step)
        record.name, record.milliseconds = each.__name__, 1000 * (time.perf_counter() - start)
        watch(record, step.graph)
        step.records.append(record)
    step.step_gm.recompile()
    return _result(step)


def _with_line(each: Pass, step: StepContext) -> PassRecord:
    """Run a pass; a refusal without a line of the user's code gets the line of the first attention call."""
    try:
        return each(step)
    except UnsupportedGraph as refusal:
        if _LINE.search(str(refusal)):
            raise
        raise type(refusal)(f"{step.line()}: {refusal}") from refusal


_LINE = re.compile(r"\.py:\d+")


def _loose_inputs(step: StepContext, inputs: Sequence[int]) -> set[int]:
    """Return the inputs whose strides may change, or refuse a graph that writes to one of them."""
    result = {index for index in inputs if has_loose_strides(walk.example_value(step.placeholders[index]))}
    writers = alias.writers_to({step.placeholders[index] for index in result})
    if writers:
        raise UnsupportedGraph(
            f"{walk.source_line(writers[0])}: writes in place to an input whose sizes change from call to call; "
            "a step gets a copy of it, so return the new values instead"
        )
    return result


def _result(step: StepContext) -> StepRewrite:
    entries, precomputed = step.inputs.gathered_inputs()
    remaining = set(walk.placeholders(step.graph))
    inputs = [index for index, argument in enumerate(step.placeholders) if argument in remaining]
    return StepRewrite(
        rewritten_gm=step.step_gm,
        dynamic=step.sizes.dynamic,
        examples=[step.example(node) for node in walk.placeholders(step.graph)] if step.sizes.dynamic else None,
        policy_weights=step.policy_weights.tensors,
        inputs=inputs,
        dynamic_stride_inputs=_loose_inputs(step, inputs),
        columns=[step.placeholders.index(argument) for argument in step.inputs.columns],
        entries=entries,
        query_len=step.query_len,
        host_graph=build_host_graph(step, precomputed),
        host_input_count=len(step.inputs.host_inputs),
        dropped_outputs=step.attention.dropped_outputs,
        positions=step.rotations.positions,
        **vars(step.outputs),
    )
