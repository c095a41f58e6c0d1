"""Start on what the C++ compiler has to do in any case while Dynamo still traces the first call.

Before its first kernel Inductor compiles and loads a few small programs, to learn which vector instructions work.  That
takes about five seconds once for a cache folder, and half a second in later processes.  The loops over the attention of
a prompt (`kvpass.lowering.column_loops`) are independent of the model as well.
"""

from __future__ import annotations

import contextlib
import threading

import torch

from kvpass.lowering import column_loops
from kvpass.torch_private import inductor


def start(dtype: torch.dtype, sums_attention: bool) -> threading.Thread:
    """Start the builds in a thread, whose errors nobody needs: what is missing then is built where it is used.

    Args:
        dtype: of keys and values.
        sums_attention: whether the attention of prompts is summed.
    """
    inductor.import_compiler()  # before the thread starts: two threads must not import parts of it at the same time

    def build() -> None:
        with contextlib.suppress(Exception):
            inductor.probe_vector_instructions()
            if sums_attention:
                column_loops.dtype_of_products(dtype, dim=2)

    thread = threading.Thread(target=build, name="kvpass-early-builds", daemon=True)
    thread.start()
    return thread
