"""Position ids count held tokens, for a policy that renumbers.

before   h = embedding(ids_of_positions, table)       after    ids = ids_of_positions - tokens that are gone
                                                               h = embedding(ids, table)
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvpass.fx.walk import value
from kvpass.rewrite import renumber
from kvpass.rewrite.context import StepContext
from kvpass.rewrite.record import Record


def renumber_ids(step: StepContext) -> Record:
    """Let everything that reads position ids read those of held tokens.

    Raises:
        UnsupportedGraph: nothing can be told to read them.
    """
    if not step.layouts[0].policy.renumbers:
        return Record(left={"position ids": "the policy does not renumber"})
    names, tensors = step.slots[0].names, step.slots[0].tensors()
    seen, length = (tensors[names.index(name)] for name in ("seen", "length"))
    found = renumber.readers(step.gm, step.sites, step.argument_of, renumber.fits_step(seen, length))
    late = any(step.sites[0].call < reader.node for reader in found)  # the first layer's step writes to its slots
    nodes = step.copied_slots(0) if late else step.slot_inputs[0]
    held = [nodes[names.index("position")], nodes[names.index("seen")]]
    for i, reader in enumerate(found):
        given = [reader.ids, *held]
        ids = step.compute(_on_held(step, reader.along), given, reader.node, f"kvpass_ids_{i}")[0]
        ids.meta["example_value"] = value(reader.ids)
        reader.node.replace_input_with(reader.ids, ids)
    return Record([reader.node.name for reader in found])


def _on_held(step: StepContext, along: int) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
    queries, last = step.queries, step.layouts[0].policy.last_position()

    def function(ids: Tensor, position: Tensor, seen: Tensor) -> list[Tensor]:
        return [renumber.on_held(ids, along, position, seen, queries, last)]

    return function
