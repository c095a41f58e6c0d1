"""A layer is compiled once: the layers of a graph that are alike share the compiler's work.

`segments` cuts a graph into a prologue, its layers and an epilogue, `stitch` compiles one of each kind and runs them
one after the other.
"""

from kvpass.once.segments import readers_of_slots
from kvpass.once.stitch import compile_once

__all__ = ["compile_once", "readers_of_slots"]
