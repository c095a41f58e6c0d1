"""Read and write tensors with plain metadata in safetensors files, from which nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from kvpass.errors import KVPassError
from kvpass.fx.walk import tensor_bytes
from kvpass.versions import needing_extra


class Weights:
    """Immutable weights of a policy, equal to weights of the same class and digest."""

    digest: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __deepcopy__(self, memo: dict[int, object]) -> Weights:
        return self


def load_option(
    policy: Any, option: str, kind: type[Weights], load: Callable[[Any], Weights], error: type[KVPassError], how: str
) -> None:
    """Replace the path in a policy's option by the weights of the file; weights stay.

    Args:
        how: what the option holds and how to make it, for the error.

    Raises:
        KVPassError: of the class `error`, the option is None.
    """
    value = getattr(policy, option)
    if value is None:
        raise error(f"{policy.name} needs {option}=..., {how}")
    if not isinstance(value, kind):
        object.__setattr__(policy, option, load(value))


def digest_of(description: str, tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of a description and of all tensors."""
    digest = hashlib.sha256(description.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)}".encode() + tensor_bytes(tensors[name]))
    return digest.hexdigest()[:16]


def write(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], key: str, metadata: object, error: type[KVPassError]
) -> None:
    """Write copies of tensors to a file, with plain metadata under a key; the file appears when it is complete.

    Raises:
        KVPassError: of the class `error`, the file cannot be written.
    """
    safetensors = library()
    name, unfinished = os.fspath(path), f"{os.fspath(path)}.{os.getpid()}.unfinished"
    stored = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    try:
        safetensors.torch.save_file(stored, unfinished, metadata={key: json.dumps(metadata)})
        finish(unfinished, name)
    except (OSError, safetensors.SafetensorError) as found:
        raise error(f"{name} cannot be written: {found}") from found
    finally:
        if os.path.exists(unfinished):
            os.remove(unfinished)


def finish(unfinished: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Give a written file its name once its content is on the disk.

    After a power failure either the whole file or the one before it has the name.
    """
    with open(unfinished, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def read(path: str | os.PathLike[str], key: str, what: str, error: type[KVPassError]) -> tuple[Any, dict[str, Tensor]]:
    """Return the metadata and the tensors that `write` has written.

    Args:
        what: the kind of content, for messages: "an aligner".
        error: the class of errors.

    Raises:
        KVPassError: of the class `error`, the file does not exist, is damaged or has other content.
    """
    safetensors, name, noun = library(), os.fspath(path), what.partition(" ")[2]
    try:
        with safetensors.safe_open(name, "pt") as file:
            text = (file.metadata() or {}).get(key)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dictionary
    except OSError as found:
        raise error(f"cannot read {what} from {name}: {found}") from found
    except safetensors.SafetensorError as found:
        raise error(f"cannot read {what} from {name}: the file is damaged: {found}") from found
    if text is None:
        raise error(f"{name} holds no {noun}: its metadata lack {key!r}")
    try:
        return json.loads(text), tensors
    except ValueError as found:
        raise error(f"{name}: the metadata of this {noun} cannot be read: {found}") from found


def library() -> Any:
    """Import safetensors, which is an optional dependency."""
    with needing_extra("save", "reading and writing tensors"):
        import safetensors
        import safetensors.torch
    return safetensors
