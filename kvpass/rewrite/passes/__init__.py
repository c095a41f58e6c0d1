"""The rewrite of a step graph: passes in this order over one `StepContext`, each in a file of its own.

    slots.py       take_slots             slots come in as inputs
    lengths.py     put_length_on_device   arithmetic on the cache's length becomes arithmetic on a counter
    ranks.py       rotate_at_read         positions="cache": positions become ranks, keys are rotated when they are read
    ids.py         renumber_ids           for policies that renumber: position ids count held tokens
    places.py      copy_places            on GPUs, for policies that merge: where layers write, read before they do
    attention.py   attend_on_slots        every attention call becomes the policy's step on slots
    counting.py    leave_counting         on GPUs: counters are left to the caller
    outputs.py     bound_outputs          what grows leaves the outputs
    sizes.py       settle_sizes           what is dead goes, sizes become numbers
    order.py       order_inputs           inputs in the order in which they are given

To add one: a function from a context to a `Record`, a line in `STEP_PASSES`, and tests in tests/rewrite.
"""

from __future__ import annotations

from kvpass.rewrite.context import Pass
from kvpass.rewrite.passes.attention import attend_on_slots
from kvpass.rewrite.passes.counting import leave_counting
from kvpass.rewrite.passes.ids import renumber_ids
from kvpass.rewrite.passes.lengths import put_length_on_device
from kvpass.rewrite.passes.order import order_inputs
from kvpass.rewrite.passes.outputs import bound_outputs
from kvpass.rewrite.passes.places import copy_places
from kvpass.rewrite.passes.ranks import rotate_at_read
from kvpass.rewrite.passes.sizes import settle_sizes
from kvpass.rewrite.passes.slots import take_slots

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
