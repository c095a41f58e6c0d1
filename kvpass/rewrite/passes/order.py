"""Inputs in order: slots, the policy's weights, columns, entries, what is computed beside, then Dynamo's.

before   def step(ids, mask_now, slots_0_key, ...)    after    def step(slots_0_key, ..., mask_now, ..., ids)
"""

from __future__ import annotations

from kvpass.fx import splicing, walk
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.record import Record


def order_inputs(step: StepContext) -> Record:
    """Put the placeholders in the order in which `StepRewrite.flat` gives their values."""
    ours = [*(node for nodes in step.slot_inputs for node in nodes), *step.weight_inputs, *step.inputs.nodes]
    left = set(walk.placeholders(step.graph))
    splicing.put_first(step.graph, [*ours, *(holder for holder in step.placeholders if holder in left)])
    return Record([node.name for node in walk.placeholders(step.graph)])
