"""Running compiled code on a CPU again without the Python that was compiled around it.

What Inductor makes for a CPU are functions of machine code, and Python that allocates memory for what they write and
calls one after the other: some forty microseconds a layer, in which nothing is computed.  What a CUDA graph is on a GPU
is a `Program` here: the kernels that ran, with what each was given, so that one call launches them all.

    recording   runs compiled code once and notes each kernel, each operator between kernels, and whose memory they had
    program     runs what was noted on other arguments
    launcher    calls functions of machine code one after the other
    replayed    which arguments a program serves; is what stands for the compiled code

Nothing is taken from the source that Inductor writes.  What runs is seen while it runs: its kernels, as these are
exchanged for the time of the recording, and everything else that computes, as that goes through torch's dispatcher.

Chunks are not repeated, as their kernels take longer than their Python, and neither are steps on GPUs, which are CUDA
graphs in a `DecodeLoop`.
"""

from kvpass.lowering.replay.replayed import Replayed

__all__ = ["Replayed"]
