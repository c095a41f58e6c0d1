"""Compute what Inductor's cache key lacks: a digest of the sources of lowering and of the graph's constants.

Inductor's caches read the graph and torch's version.  Without this digest they could return code that was compiled
before an edit of a lowering.  For a constant tensor, the outermost of them reads shape and dtype only.

The policy is not part of the key: its work is operators of the graph by now.  Segments in which policies agree, such as
those before the first and after the last layer, compile once for all policies.
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
    """Return a digest of the sources of `kvpass.lowering` and of the graph's constants."""
    hashed = hashlib.sha256(_sources())
    for name, constant in _constants(gm) if gm else ():
        hashed.update(f"{name} {tuple(constant.shape)} {constant.dtype}".encode() + tensor_bytes(constant))
    return hashed.digest()


def _constants(gm: fx.GraphModule) -> Iterator[tuple[str, Tensor]]:
    for node in gm.graph.find_nodes(op="get_attr"):
        constant = operator.attrgetter(str(node.target))(gm)
        if type(constant) is Tensor:  # neither a fake tensor nor the body of an operator
            yield str(node.target), constant
