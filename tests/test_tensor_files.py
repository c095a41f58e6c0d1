"""Test files of tensors: what is written is read, damage is noticed, and a file appears when it is complete."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpass import tensor_files
from kvpass.errors import CacheFileError

KEY, WHAT = "kvpass.test", "a test of kvpass"
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool]
SHAPES = st.lists(st.integers(0, 3), max_size=3)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.text(st.characters(codec="utf-8"), max_size=6)


def written(path: Path, tensors: dict[str, Tensor] | None = None, metadata: object = None) -> Path:
    tensor_files.write(path, tensors or {"x": torch.arange(6.0)}, KEY, metadata, CacheFileError)
    return path


def contents(path: Path) -> tuple[Any, dict[str, Tensor]]:
    return tensor_files.read(path, KEY, WHAT, CacheFileError)


def random_tensor(shape: list[int], dtype: torch.dtype) -> Tensor:
    count = math.prod(shape)
    if dtype == torch.bool:
        return (torch.arange(count) % 2 == 0).view(shape)
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)  # NaNs too


@given(
    shapes=st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=4),
    metadata=PLAIN,
)
def test_what_is_written_is_read(tmp_path: Path, shapes: dict[str, Any], metadata: object) -> None:
    """Write all examples to one path."""
    tensors, path = {name: random_tensor(*each) for name, each in shapes.items()}, tmp_path / "file"
    tensor_files.write(path, tensors, KEY, metadata, CacheFileError)
    found, read = contents(path)
    assert found == metadata
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name].view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "view",
    [lambda x: x.T, lambda x: x[:, ::2], lambda x: x[1], lambda x: x[:1].expand(4, 3), lambda x: x.detach()],
    ids=["transposed", "stepped", "a row", "expanded", "all"],
)
def test_views_of_one_tensor_are_written_as_they_look(tmp_path: Path, view: Callable[[Tensor], Tensor]) -> None:
    x = torch.arange(12.0).view(4, 3).requires_grad_()
    _, read = contents(written(tmp_path / "file", {"view": view(x), "same": view(x), "all": x}))
    assert torch.equal(read["view"], view(x))
    assert torch.equal(read["same"], view(x))
    assert torch.equal(read["all"], x)


def test_every_changed_bit_is_noticed(tmp_path: Path) -> None:
    """Check all bytes but the digest's name: files of older versions have no digest."""
    path = written(tmp_path / "file", {"x": torch.arange(3.0), "n": torch.arange(2)}, {"a": [1, 2]})
    whole = path.read_bytes()
    name = whole.index(tensor_files.DIGEST.encode())
    for index in range(len(whole)):
        content = bytearray(whole)
        content[index] ^= 1 << index % 8
        path.write_bytes(content)
        if not name <= index < name + len(tensor_files.DIGEST):
            with pytest.raises(CacheFileError, match=str(path)):
                contents(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"0"),
        lambda path: path.write_bytes(b"\xff" * 100),
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: path.write_text("{}"),
    ],
    ids=["empty", "short", "long", "noise", "missing", "a folder", "text"],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    path = written(tmp_path / "file")
    damage(path)
    with pytest.raises(CacheFileError, match=f"cannot read a test of kvpass from {path}: "):
        contents(path)


def test_a_file_of_other_content_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for metadata in (None, {"other": "{}"}):
        safetensors.torch.save_file({"x": torch.zeros(1)}, path, metadata)
        with pytest.raises(CacheFileError, match=f"{path} holds no test of kvpass: its metadata lack '{KEY}'"):
            contents(path)
    for text in ("", "{", "[" * 100_000):
        safetensors.torch.save_file({"x": torch.zeros(1)}, path, {KEY: text})
        with pytest.raises(CacheFileError, match="the metadata of this test of kvpass cannot be read"):
            contents(path)


def test_a_file_without_a_digest_is_read(tmp_path: Path) -> None:
    safetensors.torch.save_file({"x": torch.ones(1)}, tmp_path / "file", {KEY: "[3]"})
    metadata, tensors = contents(tmp_path / "file")
    assert metadata == [3]
    assert torch.equal(tensors["x"], torch.ones(1))


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt."""


def write_half(path: Path, error: BaseException) -> None:
    """Raise an error when half of a file is written."""
    before = path.read_text()
    with tensor_files.whole_file(path, CacheFileError, ": buy a disk") as unfinished:
        unfinished.write_text("half")
        assert path.read_text() == before
        raise error


@pytest.mark.parametrize("error", [ValueError, OSError, Interrupted])
def test_a_file_that_is_not_completed_leaves_the_one_before(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(CacheFileError if error is OSError else error, match="no more"):
        write_half(path, error("no more"))
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_of_the_system_ends_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(CacheFileError, match=f"{path} cannot be written: the disk is full: buy a disk"):
        write_half(path, OSError("the disk is full"))


def test_a_text_replaces_the_one_before(tmp_path: Path) -> None:
    for text in ("ä" * 1000, "b", ""):
        tensor_files.write_text(tmp_path / "file", text, CacheFileError)
        assert (tmp_path / "file").read_text(encoding="utf-8") == text


def test_threads_that_write_the_same_file_leave_one_of_their_texts(tmp_path: Path) -> None:
    path, texts = tmp_path / "file", [letter * 10_000 for letter in "abcd"]

    def write_often(text: str) -> None:
        for _ in range(5):
            tensor_files.write_text(path, text, CacheFileError)

    threads = [threading.Thread(target=write_often, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "it exists and is not a regular file"),
        (lambda path: os.mkfifo(path), "it exists and is not a regular file"),
    ],
    ids=["a folder", "a pipe"],
)
def test_nothing_but_a_file_is_replaced(tmp_path: Path, make: Callable[[Path], Any], message: str) -> None:
    path = tmp_path / "there"
    make(path)
    with pytest.raises(CacheFileError, match=f"{path} cannot be written: {message}"):
        written(path)
    assert not path.is_file()


def test_a_folder_that_takes_no_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("")
    for folder in ("none", "text"):
        path = tmp_path / folder / "file"
        with pytest.raises(CacheFileError, match=f"{path} cannot be written: there is no folder {path.parent}, or it"):
            written(path)
        with pytest.raises(CacheFileError, match=f"{path} cannot be written: there is no folder {path.parent}, or it"):
            tensor_files.check_folder(path, CacheFileError)


def test_one_at_a_time_works_in_a_locked_folder(tmp_path: Path) -> None:
    inside: list[str] = []

    def work(name: str) -> None:
        with tensor_files.locked(tmp_path):
            inside.append(name)
            waiting.wait(0.05)
            inside.append(name)

    waiting = threading.Event()
    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside[::2] == inside[1::2]
    assert sorted(inside[::2]) == ["a", "b", "c"]


def test_a_folder_that_cannot_be_locked_is_no_error(tmp_path: Path) -> None:
    with tensor_files.locked(tmp_path / "none"):
        pass


@given(seed=st.integers(0, 100), changes=st.sampled_from(["name", "shape", "number", "text"]))
def test_a_digest_depends_on_names_shapes_numbers_and_the_description(seed: int, changes: str) -> None:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
    tensors = {"a": x, "b": x + 1}
    digest = tensor_files.tensors_digest("text", tensors)
    assert tensor_files.tensors_digest("text", {"b": x + 1, "a": x.T.contiguous().T}) == digest
    others = {
        "name": ("text", {"a": x, "c": x + 1}),
        "shape": ("text", {"a": x.view(3, 2), "b": x + 1}),
        "number": ("text", {"a": x, "b": torch.nextafter(x, x + 1) + 1e-3}),
        "text": ("text ", tensors),
    }
    assert tensor_files.tensors_digest(*others[changes]) != digest


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (2, "was written by an older kvpass, in format 2, and this one reads format 3: write it again"),
        (4, "was written by a newer kvpass, in format 4, and this one reads format 3: update kvpass"),
        *[(odd, "which no kvpass writes: it was changed") for odd in (0, -1, "3", 3.0, True, None, [3])],
    ],
)
def test_a_format_of_another_version_is_refused(found: object, message: str) -> None:
    with pytest.raises(CacheFileError, match=message):
        tensor_files.check_version(found, 3, "write it again", CacheFileError)


def test_a_format_of_this_version_is_read() -> None:
    tensor_files.check_version(3, 3, "write it again", CacheFileError)
