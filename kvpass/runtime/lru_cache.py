"""Provide a dictionary that drops its least recently used entries."""

from __future__ import annotations

import collections
import contextlib
from typing import TypeVar

MAX_ENTRIES = 512
"""The most kinds of calls, such as lengths of chunks, whose rewrites and sizes are kept for later calls."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class LruCache(collections.OrderedDict[Key, Value]):
    """A dictionary that drops the least recently used entry beyond a number of them."""

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self.most = MAX_ENTRIES if most is None else most

    def find(self, key: Key) -> Value | None:
        """Return the value of a key, which counts as used; None for an unknown key."""
        value = self.get(key)
        with contextlib.suppress(KeyError):  # unknown, or another thread has just dropped it
            self.move_to_end(key)
        return value

    def put(self, key: Key, value: Value) -> Value:
        """Set the value of a key, and return it."""
        self[key] = value
        if len(self) > self.most:
            self.popitem(last=False)
        return value
