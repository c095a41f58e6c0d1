"""Run the passes that turn a step graph into a graph on slots, in which no size grows."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch import Tensor

from kvpass.cache.slots import AnySlots
from kvpass.errors import UnsupportedGraph
from kvpass.fx import alias, walk
from kvpass.rewrite.context import DynamoOutputs, Pass, PassRecord, StepContext
from kvpass.rewrite.host_graph import build_host_graph
from kvpass.rewrite.inputs import GatheredInput
from kvpass.rewrite.passes import STEP_PASSES
from kvpass.rewrite.step_graph import strides_may_change
from kvpass.torch_private import fx_nodes, symbolic_shapes


def new_columns(column: Tensor, length: int, query_len: int) -> Tensor:
    """Return the columns of the new tokens, [..., q], of an input with a column for every token, [..., S].

    They are usually the last columns.  An input with columns for later tokens has them at `length`.  A repeated step
    passes the input of an earlier step, whose last columns have the values of the new tokens.
    """
    return column.narrow(-1, min(length, column.shape[-1] - query_len), query_len)


class HostValues(NamedTuple):
    """What the host graph of a step computes from all tokens; nothing without a host graph.

    Attributes:
        outputs: Dynamo's outputs `DynamoOutputs.grown`.
        inputs: inputs of the step's code.
        sources: the tensors that entries are gathered from.
    """

    outputs: Sequence[Any] = ()
    inputs: Sequence[Any] = ()
    sources: Sequence[Any] = ()


@dataclasses.dataclass(frozen=True)
class StepSignature:
    """The arguments of a step's code, and the use of its results by the caller.

    The code takes the slots' tensors of every layer, the `policy_weights`, then `columns`, `entries`, the host inputs,
    and the `inputs`.

    Attributes:
        inputs: indices of Dynamo's arguments that the code still takes.
        dynamic_stride_inputs: the `inputs` whose strides may change from call to call.
        columns: indices of Dynamo's arguments; the code takes the new tokens' columns of each.
        query_len: q, which may be a dynamic size, see `with_numbers`.
        admitted_outputs: for each site of a chunk, the output indices of stored key, value, valid and statistics.
        valid_output: the index of the output bool [B, 1], which tokens are real, if the code leaves counting to its
            caller.
        policy_weights: the policy's own tensors, on the device of the slots.
        entries: inputs with an entry for each slot's token.
        host_graph: runs uncompiled on Dynamo's arguments, computes the `HostValues` in their order, and checks.
        host_input_count: the number of `HostValues.inputs`.
        dynamo_outputs: how Dynamo's outputs are made; an artifact's caller needs none.
    """

    inputs: list[int]
    dynamic_stride_inputs: list[int]
    columns: list[int]
    query_len: Any
    admitted_outputs: list[list[int]]
    valid_output: int | None
    policy_weights: list[Tensor] = dataclasses.field(default_factory=list)
    entries: list[GatheredInput] = dataclasses.field(default_factory=list)
    host_graph: fx.GraphModule | None = None
    host_input_count: int = 0
    dynamo_outputs: DynamoOutputs = dataclasses.field(default_factory=DynamoOutputs)

    def with_numbers(self, number: Callable[[Any], int]) -> StepSignature:
        """Return the signature with numbers for dynamic sizes; `number` returns the number of a size."""
        lengths = {index: number(size) for index, size in self.dynamo_outputs.lengths.items()}
        outputs = dataclasses.replace(self.dynamo_outputs, lengths=lengths)
        return dataclasses.replace(self, query_len=number(self.query_len), dynamo_outputs=outputs)

    def count_tokens(self, slots: list[AnySlots], results: Sequence[Any]) -> None:
        """Count the tokens of a step if its graph leaves that to its caller, see `move_counters_to_caller`."""
        if self.valid_output is not None:
            new = results[self.valid_output][:, 0].long()
            torch._foreach_add_([layer.seen for layer in slots], [new] * len(slots))
            torch._foreach_add_([layer.length for layer in slots], 1)

    def run_host_graph(self, arguments: tuple[Any, ...]) -> HostValues:
        """Run `host_graph`, if there is one, on Dynamo's arguments."""
        if self.host_graph is None:
            return HostValues()
        values = fx_nodes.code_of(self.host_graph)(*arguments)
        inputs = len(self.dynamo_outputs.grown)
        sources = inputs + self.host_input_count
        return HostValues(values[:inputs], values[inputs:sources], values[sources:])

    def flat_arguments(
        self, slots: list[AnySlots], arguments: tuple[Any, ...], host_values: HostValues, length: int
    ) -> list[Any]:
        """Return the code's arguments, from slots, Dynamo's arguments and the values of `run_host_graph`.

        `length` is the number of tokens before this call.
        """
        return [*self.fixed_arguments(slots), *self.call_arguments(arguments, host_values, slots, length)]

    def fixed_arguments(self, slots: list[AnySlots]) -> list[Any]:
        """Return the arguments that all steps share: the slots' tensors and the policy's weights."""
        return [*(tensor for layer in slots for tensor in layer.tensors()), *self.policy_weights]

    def call_arguments(
        self, arguments: tuple[Any, ...], host_values: HostValues, slots: list[AnySlots], length: int
    ) -> list[Any]:
        """Return the arguments that change with the call, see `flat_arguments`."""
        dense, flat = torch.contiguous_format, list[Any]()
        for index in self.columns:
            flat.append(new_columns(arguments[index], length, self.query_len).clone(memory_format=dense))
        for entry in self.entries:
            source = (arguments if entry.is_argument else host_values.sources)[entry.tensor_index]
            flat.append(entry.gather(source, slots[entry.layer], self.query_len))
        flat += host_values.inputs
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


@dataclasses.dataclass(frozen=True)
class StepRewrite:
    """A step graph on slots, which is dropped after it is compiled, and the signature of its code.

    Attributes:
        layers: one node of each layer, the first reader of its keys; in decoding this is the write of the new key.
        dynamic, examples: sizes that may differ between calls, and fake arguments with them; empty if there are none.
    """

    rewritten_gm: fx.GraphModule
    signature: StepSignature
    layers: list[fx.Node]
    dynamic: symbolic_shapes.SymbolicSizes | None
    examples: list[Any]


def rewrite_step(
    context: StepContext,
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
        try:
            record = each(context)
        except UnsupportedGraph as refusal:
            refusal.line = refusal.line or walk.known_line(context.sites[0].call)
            raise
        record.name, record.milliseconds = each.__name__, 1000 * (time.perf_counter() - start)
        watch(record, context.graph)
        context.records.append(record)
    context.step_gm.recompile()
    return _result(context)


def _inputs_of_changing_strides(context: StepContext, inputs: Sequence[int]) -> list[int]:
    """Return the inputs whose strides may change, or refuse a graph that writes to one of them."""
    result = [index for index in inputs if strides_may_change(walk.example_value(context.placeholders[index]))]
    writers = alias.writers_to({context.placeholders[index] for index in result})
    if writers:
        why = "writes in place to an input whose sizes change from call to call; a step gets a copy of it"
        walk.refuse(writers[0], f"{why}, so return the new values instead")
    return result


def _result(context: StepContext) -> StepRewrite:
    entries, precomputed = context.inputs.gathered_inputs()
    remaining = set(walk.placeholders(context.graph))
    inputs = [index for index, argument in enumerate(context.placeholders) if argument in remaining]
    signature = StepSignature(
        inputs=inputs,
        dynamic_stride_inputs=_inputs_of_changing_strides(context, inputs),
        columns=[context.placeholders.index(argument) for argument in context.inputs.columns],
        query_len=context.query_len,
        policy_weights=context.policy_weights.tensors,
        entries=entries,
        host_graph=build_host_graph(context, precomputed),
        host_input_count=len(context.inputs.host_inputs),
        **vars(context.outputs),
    )
    examples = [context.example(node) for node in walk.placeholders(context.graph)] if context.sizes.dynamic else []
    keys = [context.slot(layer, "key") for layer in range(len(context.slots))]
    layers = [min(key.users) for key in keys if key.users]
    return StepRewrite(context.step_gm, signature, layers, context.sizes.dynamic, examples)
