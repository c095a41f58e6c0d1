"""Move counters out of the graph on a GPU: two launches per step and not two per layer.

before   slots_0_seen.copy_(...); slots_0_length.add_(1)      after    return ..., valid

Counting for all layers by `_foreach_copy_` inside the graph is wrong: Inductor may run a kernel that reads a counter
after the kernel that overwrites it.
"""

from __future__ import annotations

import torch.fx as fx

from kvpass.rewrite.context import StepContext
from kvpass.rewrite.record import Record
from kvpass.torch_private import fx_nodes


def leave_counting(step: StepContext) -> Record:
    """Remove the updates of token counters from every layer; `StepRewrite.count` does them."""
    if not step.decodes_on_gpu:
        return Record(left={"counters": "they are in the step's own kernels, or a chunk's"})
    counters = [step.slot(layer, name) for layer in range(len(step.sites)) for name in ("seen", "length")]
    for counter in counters:
        for user in [user for user in counter.users if _writes(user, counter)]:
            assert not user.users
            step.graph.erase_node(user)
    step.valid_output = step.inputs.some_valid
    return Record([counter.name for counter in counters])


def _writes(node: fx.Node, counter: fx.Node) -> bool:
    return fx_nodes.mutates(node) and node.args[0] is counter
