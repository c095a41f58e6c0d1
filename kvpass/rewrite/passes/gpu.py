"""Move writes of small tensors out of the layers of a decode step on a GPU."""

from __future__ import annotations

from torch import Tensor

from kvpass.rewrite.context import PassRecord, StepContext
from kvpass.torch_private import fx_nodes
from kvpass.torch_private.inductor import materialize


def copy_write_indices(context: StepContext) -> PassRecord:
    """Copy the indices of all layers' free slots before any write, in one kernel.

    A policy that merges writes to K and V twice, and for the compiler the second write depends on all the reads
    of the first write.  Without copies, a separate kernel would overwrite the index of the free slot after the second.
    """
    if not context.decodes_on_gpu or not any(layout.policy.merges for layout in context.layouts):
        context.write_indices = []
        return PassRecord(left={"free": "nothing merges on a GPU"})

    def function(*free_slots: Tensor) -> list[Tensor]:
        return [materialize(index.clamp(min=0)) for index in free_slots]  # a plain copy would be optimized away

    free = [context.slot(layer, "free") for layer in range(len(context.sites))]
    context.write_indices = context.compute(function, free, context.sites[0].call, "kvpass_write_indices")
    return PassRecord([node.name for node in free])


def move_counters_to_caller(context: StepContext) -> PassRecord:
    """Remove the updates of token counters from every layer; `StepSignature.count_tokens` does them in two launches.

    Counting for all layers by `_foreach_copy_` inside the graph is wrong: Inductor may run a kernel that reads a
    counter after the kernel that overwrites it.
    """
    if not context.decodes_on_gpu:
        context.valid_node = None
        return PassRecord(left={"counters": "they are in the step's own kernels, or this is a chunk"})
    counters = [context.slot(layer, name) for layer in range(len(context.sites)) for name in ("seen", "length")]
    for counter in counters:
        for user in [user for user in counter.users if fx_nodes.mutates(user) and user.args[0] is counter]:
            assert not user.users
            context.graph.erase_node(user)
    context.valid_node = context.inputs.valid(0)
    return PassRecord([counter.name for counter in counters])
