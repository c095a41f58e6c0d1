"""Run the passes that turn a step graph into one on slots, in which no size grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.fx as fx

from kvpass.fx import walk
from kvpass.rewrite.context import Pass, StepContext
from kvpass.rewrite.passes import STEP_PASSES
from kvpass.rewrite.passes.outputs import host_precomputed
from kvpass.rewrite.record import Record
from kvpass.rewrite.result import StepRewrite
from kvpass.rewrite.step_graph import has_loose_strides

Watch = Callable[[Record, fx.Graph], None]
"""Called after each pass with its record and the graph as the pass remaining it."""


def rewrite_step(step: StepContext, passes: Sequence[Pass] = STEP_PASSES, watch: Watch | None = None) -> StepRewrite:
    """Rewrite a step graph by a sequence of passes, and describe the result.

    Args:
        step: the context with the graph, which is rewritten in place.
        passes: run in this order; each may read what earlier ones remaining in the context.
        watch: called after each pass.

    Raises:
        UnsupportedGraph: a pass cannot express an operation on slots; the message names the line.
    """
    for each in passes:
        start = time.perf_counter()
        record = each(step)
        record.name, record.milliseconds = each.__name__, 1000 * (time.perf_counter() - start)
        if watch is not None:
            watch(record, step.graph)
        step.records.append(record)
    step.gm.recompile()
    return _result(step)


def _result(step: StepContext) -> StepRewrite:
    entries, precomputed = step.inputs.gathered()
    remaining = set(walk.placeholders(step.graph))
    inputs = [index for index, argument in enumerate(step.placeholders) if argument in remaining]
    found = step.outputs
    return StepRewrite(
        gm=step.gm,
        open=step.sizes.open,
        examples=[step.example(node) for node in walk.placeholders(step.graph)] if step.sizes.open else None,
        weights=step.weights,
        inputs=inputs,
        loose_inputs={index for index in inputs if has_loose_strides(walk.value(step.placeholders[index]))},
        columns=[step.placeholders.index(argument) for argument in step.inputs.columns],
        entries=entries,
        queries=step.queries,
        outputs=found.outputs,
        lengths=found.lengths,
        chunks=found.chunks,
        host_graph=host_precomputed(step, precomputed),
        grown=found.grown,
        host_inputs=len(step.inputs.host_inputs),
        unread=step.unread,
        valid=found.valid,
        positions=tuple(dict.fromkeys(step.replaced_positions)),
    )
