"""Write and read safetensors files, without pickles; a file appears when it is complete."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kvpass.errors import KVPassError
from kvpass.torch_private.tensors import tensor_bytes
from kvpass.versions import needing_extra

DIGEST = "kvpass.digest"
"""The entry of the metadata that shows damage to a file; older files have none."""


def write(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], key: str, metadata: object, error: type[KVPassError]
) -> None:
    """Write copies of tensors to a file, with plain metadata under a key; the file appears when it is complete.

    Raises:
        KVPassError: of the class `error`, the file cannot be written.
    """
    safetensors = library()
    with whole_file(path, error) as unfinished:
        stored = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        text = json.dumps(metadata)
        try:
            safetensors.torch.save_file(stored, unfinished, metadata={key: text, DIGEST: _digest(text, stored)})
        except safetensors.SafetensorError as found:
            raise OSError(str(found)) from found


def write_text(path: str | os.PathLike[str], text: str, error: type[KVPassError], remedy: str = "") -> None:
    """Write a text to a file, which appears when it is complete; see `whole_file`."""
    with whole_file(path, error, remedy) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], error: type[KVPassError], remedy: str = "") -> Iterator[Path]:
    """Yield the path of an unfinished file, which replaces the file at `path` if no error is raised inside.

    A symbolic link at `path` stays, and the file that it leads to is replaced.

    Args:
        remedy: what to do if the file cannot be written, to end the message.

    Raises:
        KVPassError: of the class `error`, the file cannot be written.
    """
    check_writable(path, error)
    target = without_link(path)
    unfinished = Path(f"{target}.{os.getpid()}.{threading.get_ident()}.unfinished")
    try:
        yield unfinished
        finish(unfinished, target)
    except OSError as found:
        raise error(f"{os.fspath(path)} cannot be written: {found}{remedy}") from found
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def without_link(path: str | os.PathLike[str]) -> str:
    """Return the path that a symbolic link leads to, or the path itself."""
    return os.path.realpath(path) if os.path.islink(path) else os.fspath(path)


def check_writable(path: str | os.PathLike[str], error: type[KVPassError]) -> None:
    """Raise an error of the class `error` if no file can be written to a path."""
    name = os.fspath(path)
    check_folder(path, error)
    if os.path.exists(name) and not os.path.isfile(name):  # a folder, or a device, which the file would replace
        raise error(f"{name} cannot be written: it exists and is not a regular file")


def check_folder(path: str | os.PathLike[str], error: type[KVPassError]) -> None:
    """Raise an error of the class `error` if the folder of a path takes no new files or folders."""
    folder = os.path.dirname(os.path.abspath(without_link(path)))
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        raise error(f"{os.fspath(path)} cannot be written: there is no folder {folder}, or it takes no new files")


def finish(unfinished: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Give a written file its name once its content is on the disk.

    After a power failure the name leads to the whole new file or to the whole old one.
    """
    with open(unfinished, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Let one process at a time run the block for a folder, where the system has advisory locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):  # not on every platform, nor on every network file system
            import fcntl

            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def read(path: str | os.PathLike[str], key: str, what: str, error: type[KVPassError]) -> tuple[Any, dict[str, Tensor]]:
    """Return the metadata and the tensors that `write` has written.

    Args:
        what: the kind of content, for messages: "an aligner".
        error: the class of errors.

    Raises:
        KVPassError: of the class `error`, the file does not exist, is damaged or has other content.
    """
    safetensors, name, noun = library(), os.fspath(path), what.partition(" ")[2]
    if os.path.isdir(name):  # the system calls a folder a missing device
        raise error(f"cannot read {what} from {name}: it is a folder; give the path of a file")
    try:
        with safetensors.safe_open(name, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dictionary
    except OSError as found:
        raise error(f"cannot read {what} from {name}: {found}") from found
    except safetensors.SafetensorError as found:
        raise error(f"cannot read {what} from {name}: the file is damaged: {found}") from found
    text = metadata.get(key)
    if text is None:
        raise error(f"{name} holds no {noun}: its metadata lack {key!r}")
    if DIGEST in metadata and metadata[DIGEST] != _digest(text, tensors):
        raise error(f"cannot read {what} from {name}: the file is damaged: its content was changed")
    try:
        return json.loads(text), tensors
    except (ValueError, RecursionError) as found:
        raise error(f"{name}: the metadata of this {noun} cannot be read: {found}") from found


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of a file's metadata and tensors."""
    return tensors_digest(f"{text} {[str(tensors[name].dtype) for name in sorted(tensors)]}", tensors)


def tensors_digest(description: str, tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of a description and of all tensors, but for their dtypes."""
    digest = hashlib.sha256(description.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)}".encode() + tensor_bytes(tensors[name]))
    return digest.hexdigest()


def check_version(found: object, version: int, remedy: str, error: type[KVPassError]) -> None:
    """Raise an error of the class `error` unless a format's version in a file, `found`, is this kvpass's `version`.

    Args:
        remedy: what to do with a file of an older version.
    """
    if type(found) is not int or found < 1:
        raise error(f"has the format version {found!r}, which no kvpass writes: it was changed or is damaged")
    if found != version:
        age, do = "was written by an older kvpass", remedy
        if found > version:
            age, do = "was written by a newer kvpass", "update kvpass"
        raise error(f"{age}, in format {found}, and this one reads format {version}: {do}")


def library() -> Any:
    """Import safetensors, which is an optional dependency."""
    with needing_extra("save", "reading and writing tensors"):
        import safetensors
        import safetensors.torch
    return safetensors
