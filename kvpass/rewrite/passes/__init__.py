"""Define the passes that rewrite a step graph, in the order in which they run over one `StepContext`.

    signature.py    take_slots            adds the slots' tensors as inputs
    positions.py    put_length_on_device  replaces arithmetic on the cache's length by arithmetic on a device counter
    positions.py    rotate_at_read        positions="cache": replaces positions by ranks; keys are rotated at read
    positions.py    renumber_ids          policies that renumber: makes position ids count cached tokens
    signature.py    copy_write_indices    GPUs and policies that merge: copies the write indices before any write
    attention.py    attend_on_slots       replaces each attention call by the policy's step on slots
    signature.py    leave_counting        GPUs: leaves the token counters to the caller
    signature.py    bound_outputs         removes outputs that grow with the cache
    signature.py    settle_sizes          removes dead code, inserts numbers for sizes, refuses sizes that still grow
    signature.py    order_inputs          sorts the inputs: slots, policy weights, further inputs, Dynamo's arguments

To add a pass, write a function from a context to a `PassRecord`, a line in `STEP_PASSES`, and a case in
tests/rewrite/test_passes.py.  A pass may read the results of earlier passes, see `StepContext`.
"""

from __future__ import annotations

from kvpass.rewrite.context import Pass
from kvpass.rewrite.passes.attention import attend_on_slots
from kvpass.rewrite.passes.positions import put_length_on_device, renumber_ids, rotate_at_read
from kvpass.rewrite.passes.signature import (
    bound_outputs,
    copy_write_indices,
    leave_counting,
    order_inputs,
    settle_sizes,
    take_slots,
)

STEP_PASSES: tuple[Pass, ...] = (
    take_slots,
    put_length_on_device,
    rotate_at_read,
    renumber_ids,
    copy_write_indices,
    attend_on_slots,
    leave_counting,
    bound_outputs,
    settle_sizes,
    order_inputs,
)
