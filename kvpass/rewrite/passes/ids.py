"""Make position ids count cached tokens, for a policy that renumbers.

before   h = embedding(ids_of_positions, table)       after    ids = ids_of_positions - evicted tokens
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
    """Replace position ids by those of cached tokens for all nodes that read them.

    Raises:
        UnsupportedGraph: no node can be shown to read position ids.
    """
    if not step.layouts[0].policy.renumbers:
        return Record(left={"position ids": "the policy does not renumber"})
    names, tensors = step.slots[0].names, step.slots[0].tensors()
    seen, length = (tensors[names.index(name)] for name in ("seen", "length"))
    readers = renumber.readers(step.gm, step.sites, step.argument_of, renumber.fits_step(seen, length))
    # The first layer's step writes to its slots.
    late = any(step.sites[0].call < reader.node for reader in readers)
    nodes = step.copied_slots(0) if late else step.slot_inputs[0]
    metadata = [nodes[names.index("position")], nodes[names.index("seen")]]
    for i, reader in enumerate(readers):
        inputs = [reader.ids, *metadata]
        ids = step.compute(_count_cached(step, reader.along), inputs, reader.node, f"kvpass_ids_{i}")[0]
        ids.meta["example_value"] = value(reader.ids)
        reader.node.replace_input_with(reader.ids, ids)
    return Record([reader.node.name for reader in readers])


def _count_cached(step: StepContext, along: int) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
    queries, last = step.queries, step.layouts[0].policy.last_position()

    def function(ids: Tensor, position: Tensor, seen: Tensor) -> list[Tensor]:
        return [renumber.count_cached(ids, along, position, seen, queries, last)]

    return function
