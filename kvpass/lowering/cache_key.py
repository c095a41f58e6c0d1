"""What compiled code depends on beside the graph: how we lower it, and the numbers in its constants.

Inductor's caches look at the graph and at torch's version.  Without this stamp, an edit of a lowering could be answered
with code compiled before it.  Of a tensor that the graph holds as a constant the outermost of these caches looks at the
shape and the dtype alone.

A policy is no part of it: what it does is operators of the graph by then.  So parts in which policies do the same, such
as all that is before the layers and behind them, are compiled once for all of them.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Iterator
from pathlib import Path

import torch.fx as fx
from torch import Tensor

from kvpass.fx.constants import tensor_bytes


@functools.cache
def _sources() -> bytes:
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.digest()


def digest(gm: fx.GraphModule | None = None) -> bytes:
    """Differs whenever the sources of `kvpass.lowering` or one of the graph's constants does."""
    found = hashlib.sha256(_sources())
    for name, constant in _constants(gm) if gm else ():
        found.update(f"{name} {tuple(constant.shape)} {constant.dtype}".encode() + tensor_bytes(constant))
    return found.digest()


def _constants(gm: fx.GraphModule) -> Iterator[tuple[str, Tensor]]:
    for node in gm.graph.find_nodes(op="get_attr"):
        constant = operator.attrgetter(str(node.target))(gm)
        if type(constant) is Tensor:  # neither a fake one nor the body of an operator
            yield str(node.target), constant
