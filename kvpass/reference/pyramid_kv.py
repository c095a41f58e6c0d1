"""Transcribe `pyramid_kv`: `snapkv`, because only the budgets of layers differ."""

from __future__ import annotations

from kvpass.reference.snapkv import SnapKVReference


class PyramidKVReference(SnapKVReference):
    pass
