"""Test the means by which other tests damage files and fill the disk."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.changed_files import full_disk


def test_a_module_first_imported_on_a_full_disk_can_be_imported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "on_full_disk.py").write_text("VALUES = [1, 2, 3]\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.syspath_prepend(tmp_path)
    with full_disk():
        importlib.import_module("on_full_disk")
    del sys.modules["on_full_disk"]
    assert importlib.import_module("on_full_disk").VALUES == [1, 2, 3]
    assert list((tmp_path / "__pycache__").iterdir())
