"""Test the dictionary that drops the least recently used entry."""

from __future__ import annotations

import pytest

from kvpass.runtime import lru_cache
from kvpass.runtime.lru_cache import LruCache


def test_the_least_recently_used_entry_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lru_cache, "MAX_ENTRIES", 2)
    cache = LruCache[str, int]()
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.find("a") == 1
    cache.put("c", 3)
    assert [cache.find(key) for key in "abc"] == [1, None, 3]


class Dropped(LruCache[str, int]):
    """A dictionary from which another thread drops an entry just before it counts as used."""

    def move_to_end(self, key: str, last: bool = True) -> None:
        del self[key]
        super().move_to_end(key, last)


def test_an_entry_that_another_thread_drops_while_it_is_found() -> None:
    cache = Dropped()
    cache.put("a", 1)
    assert cache.find("a") == 1
    assert not cache
