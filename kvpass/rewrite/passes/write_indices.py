"""Read the write indices of all layers before any write: on a GPU, for policies that merge.

    before   (nothing)                                    after    place_0, place_1 = copies of slots_0_free, ...

Such a policy writes to K and V twice, and for the compiler the second write depends on all that the first has read.
Without the copies, a kernel of its own would overwrite the index of the free slot after the second write.
"""

from __future__ import annotations

from torch import Tensor

from kvpass.rewrite.context import StepContext
from kvpass.rewrite.record import Record
from kvpass.torch_private.inductor import materialized


def copy_places(step: StepContext) -> Record:
    """Copy the indices of all layers' free slots, in one kernel."""
    if not step.decodes_on_gpu or not any(layout.policy.merges for layout in step.layouts):
        return Record(left={"free": "nothing merges on a GPU"})
    free = [step.slot(layer, "free") for layer in range(len(step.sites))]
    step.write_indices = step.compute(_write_indices, free, step.sites[0].call, "kvpass_places")
    return Record([node.name for node in free])


def _write_indices(*free_slots: Tensor) -> list[Tensor]:
    return [materialized(index.clamp(min=0)) for index in free_slots]  # a plain copy would be optimized away
