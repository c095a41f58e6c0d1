"""Define the passes that rewrite a step graph, in the order in which they run over one `StepContext`.

    interface.py    take_slots               adds the slots' tensors as inputs
    positions.py    put_length_on_device     replaces arithmetic on the cache's length by arithmetic on a counter
    positions.py    rank_positions           positions="cache": replaces positions by ranks; keys are rotated at read
    positions.py    renumber_ids             policies that renumber: makes position ids count cached tokens
    gpu.py          copy_write_indices       policies that merge: copies the write indices before any write
    attention.py    attend_on_slots          replaces each attention call by the policy's step on slots
    gpu.py          move_counters_to_caller  leaves the token counters to the caller
    interface.py    drop_growing_outputs     removes outputs that grow with the cache, and dead code
    interface.py    precompute_on_host       makes inputs of values that are counted in masks of all tokens
    interface.py    resolve_sizes            inserts numbers for sizes, refuses sizes that still grow
    interface.py    order_inputs             sorts the inputs: slots, policy weights, other inputs, Dynamo's arguments

To add a pass, write a function from a context to a `PassRecord`, a line in `STEP_PASSES`, and a case in
tests/rewrite/test_passes.py.  A pass may read the results of earlier passes, see `StepContext`.
"""

from __future__ import annotations

from kvpass.rewrite.context import Pass
from kvpass.rewrite.passes.attention import attend_on_slots
from kvpass.rewrite.passes.gpu import copy_write_indices, move_counters_to_caller
from kvpass.rewrite.passes.interface import (
    drop_growing_outputs,
    order_inputs,
    precompute_on_host,
    resolve_sizes,
    take_slots,
)
from kvpass.rewrite.passes.positions import put_length_on_device, rank_positions, renumber_ids

STEP_PASSES: tuple[Pass, ...] = (
    take_slots,
    put_length_on_device,
    rank_positions,
    renumber_ids,
    copy_write_indices,
    attend_on_slots,
    move_counters_to_caller,
    drop_growing_outputs,
    precompute_on_host,
    resolve_sizes,
    order_inputs,
)
