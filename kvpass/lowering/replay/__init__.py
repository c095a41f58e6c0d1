"""Repeat compiled code on a CPU without Inductor's Python wrapper.

For a CPU, Inductor generates functions of machine code, and Python that allocates their outputs and calls them one
after the other: about forty microseconds per layer in which nothing is computed.  A `Program` does what a CUDA graph
does on a GPU: it holds the kernels that ran with their arguments, so that one call launches them all.

    recording   runs compiled code once, records each kernel, each operator between kernels, and their memory, and
                decides which arguments the program serves
    program     runs a recording on other arguments, by calling functions of machine code one after the other

The recording does not use the source that Inductor writes.  It watches the code while it runs: recording functions
replace the kernels, and all other computation goes through torch's dispatcher.

Chunks are not repeated, because their kernels take longer than their Python.  Neither are steps on GPUs, which are CUDA
graphs in a `DecodeLoop`.
"""

from kvpass.lowering.replay.recording import Replayed

__all__ = ["Replayed"]
