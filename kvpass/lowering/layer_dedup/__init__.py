"""Compile a layer once: identical layers of a graph share compiled code.

`segments` cuts a graph into a prologue, its layers and an epilogue.  `link` compiles one segment of each kind and runs
all segments in order.
"""

from kvpass.lowering.layer_dedup.link import compile_deduplicated
from kvpass.lowering.layer_dedup.segments import readers_of_slots

__all__ = ["compile_deduplicated", "readers_of_slots"]
