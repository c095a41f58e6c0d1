"""Where the layers write, read before they do: on a GPU, for policies that merge.

    before   (nothing)                                    after    place_0, place_1 = copies of slots_0_free, ...

Such a policy writes to K and V twice, and to the compiler the second write has read all that the first one did: the
number of the free slot would be overwritten after it, by a kernel of its own.
"""

from __future__ import annotations

from torch import Tensor

from kvpass.rewrite.context import StepContext
from kvpass.rewrite.record import Record
from kvpass.torch_private.inductor import materialized


def copy_places(step: StepContext) -> Record:
    """Copy the numbers of all layers' free slots, in one kernel."""
    if not step.decodes_on_gpu or not any(layout.policy.merges for layout in step.layouts):
        return Record(left={"free": "nothing merges on a GPU"})
    free = [step.slot(layer, "free") for layer in range(len(step.sites))]
    step.write_indices = step.compute(_written, free, step.sites[0].call, "kvpass_places")
    return Record([node.name for node in free])


def _written(*numbers: Tensor) -> list[Tensor]:
    return [materialized(number.clamp(min=0)) for number in numbers]  # a plain copy would be optimized away
