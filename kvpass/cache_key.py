"""What compiled code depends on beside the graph: our own sources, the policy and its options.

Inductor's caches look at the graph and at torch's version.  Without this stamp, an edit of a policy or of
a lowering could be answered with code compiled before it.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from pathlib import Path

from kvpass.policies.base import Policy


@functools.cache
def _sources() -> bytes:
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.digest()


def digest(policy: Policy | None) -> bytes:
    """Differs whenever our sources, the policy's source, or one of its options differs."""
    if policy is None:
        return _sources()
    try:
        source = inspect.getsource(type(policy))
    except (OSError, TypeError):
        source = ""  # a policy typed at a prompt: its options and the graph are all there is
    return hashlib.sha256(_sources() + source.encode() + repr(policy).encode()).digest()
