"""Order inputs: slots, the policy's weights, columns, entries, host inputs, then Dynamo's arguments.

before   def step(ids, mask_now, slots_0_key, ...)    after    def step(slots_0_key, ..., mask_now, ..., ids)
"""

from __future__ import annotations

from kvpass.fx import splicing, walk
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.record import Record


def order_inputs(step: StepContext) -> Record:
    """Put the placeholders in the order in which `StepRewrite.flat` returns their values."""
    new_inputs = [*(node for nodes in step.slot_inputs for node in nodes), *step.weight_inputs, *step.inputs.nodes]
    remaining = set(walk.placeholders(step.graph))
    splicing.put_first(step.graph, [*new_inputs, *(node for node in step.placeholders if node in remaining)])
    return Record([node.name for node in walk.placeholders(step.graph)])
