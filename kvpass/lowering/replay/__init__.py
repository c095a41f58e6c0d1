"""Repeat compiled code on a CPU without Inductor's Python wrapper.

For a CPU, Inductor generates functions of machine code, and Python that allocates their outputs and calls them one
after the other: about forty microseconds per layer in which nothing is computed.  A `Program` does what a CUDA graph
does on a GPU: it holds the kernels that ran with their arguments, so that one call launches them all.

    recording   runs compiled code once and records each kernel, each operator between kernels, and their memory
    program     runs a recording on other arguments
    launcher    calls functions of machine code one after the other
    replayed    decides which arguments a program serves, and replaces the compiled code

The recording does not use the source that Inductor writes.  It watches the code while it runs: recording functions
replace the kernels, and all other computation goes through torch's dispatcher.

Chunks are not repeated, because their kernels take longer than their Python.  Neither are steps on GPUs, which are CUDA
graphs in a `DecodeLoop`.
"""

from kvpass.lowering.replay.replayed import Replayed

__all__ = ["Replayed"]
