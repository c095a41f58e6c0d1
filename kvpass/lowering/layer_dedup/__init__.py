"""A layer is compiled once: the layers of a graph that are alike share the compiler's work.

`segments` cuts a graph into a prologue, its layers and an epilogue, `stitch` compiles one of each kind and runs them
one after the other.
"""

from kvpass.lowering.layer_dedup.link import compile_deduplicated
from kvpass.lowering.layer_dedup.segments import readers_of_slots

__all__ = ["compile_deduplicated", "readers_of_slots"]
