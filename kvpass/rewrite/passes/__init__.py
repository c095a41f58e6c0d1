"""Define the passes that rewrite a step graph, in the order in which they run over one `StepContext`.

    slots.py          take_slots            adds the slots' tensors as inputs
    lengths.py        put_length_on_device  replaces arithmetic on the cache's length by arithmetic on a device counter
    ranks.py          rotate_at_read        positions="cache": replaces positions by ranks; keys are rotated at read
    ids.py            renumber_ids          policies that renumber: makes position ids count cached tokens
    write_indices.py  copy_places           GPUs and policies that merge: copies the write indices before any write
    attention.py      attend_on_slots       replaces each attention call by the policy's step on slots
    counting.py       leave_counting        GPUs: leaves the token counters to the caller
    outputs.py        bound_outputs         removes outputs that grow with the cache
    sizes.py          settle_sizes          removes dead code, inserts numbers for sizes, refuses sizes that still grow
    order.py          order_inputs          sorts the inputs: slots, weights, further inputs, Dynamo's arguments

To add a pass, write a function from a context to a `Record`, a line in `STEP_PASSES`, and a case in
tests/rewrite/test_passes.py.  A pass may read what earlier passes recorded in the context, see `StepContext`.
"""

from __future__ import annotations

from kvpass.rewrite.context import Pass
from kvpass.rewrite.passes.attention import attend_on_slots
from kvpass.rewrite.passes.counting import leave_counting
from kvpass.rewrite.passes.ids import renumber_ids
from kvpass.rewrite.passes.lengths import put_length_on_device
from kvpass.rewrite.passes.order import order_inputs
from kvpass.rewrite.passes.outputs import bound_outputs
from kvpass.rewrite.passes.ranks import rotate_at_read
from kvpass.rewrite.passes.sizes import settle_sizes
from kvpass.rewrite.passes.slots import take_slots
from kvpass.rewrite.passes.write_indices import copy_places

STEP_PASSES: tuple[Pass, ...] = (
    take_slots,
    put_length_on_device,
    rotate_at_read,
    renumber_ids,
    copy_places,
    attend_on_slots,
    leave_counting,
    bound_outputs,
    settle_sizes,
    order_inputs,
)
