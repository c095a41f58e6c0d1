"""Read and write weights of policies in safetensors files, from which nothing is unpickled, and compare weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvpass.errors import KVPassError
from kvpass.fx.walk import tensor_bytes


class Weights:
    """Immutable weights of a policy, equal to weights of the same class and digest."""

    digest: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __deepcopy__(self, memo: dict[int, object]) -> Weights:
        return self


def digest_of(description: str, tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of a description and of all tensors."""
    digest = hashlib.sha256(description.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)}".encode() + tensor_bytes(tensors[name]))
    return digest.hexdigest()[:16]


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], key: str, metadata: object) -> None:
    """Write tensors to a file, with plain metadata under a key."""
    _safetensors().torch.save_file(dict(tensors), os.fspath(path), metadata={key: json.dumps(metadata)})


def read(path: str | os.PathLike[str], key: str, what: str, error: type[KVPassError]) -> tuple[Any, dict[str, Tensor]]:
    """Return the metadata and the tensors that `write` has written.

    Args:
        what: the kind of content, for messages: "an aligner".
        error: the class of errors.

    Raises:
        KVPassError: the file does not exist, is damaged or has other content.
    """
    name = os.fspath(path)
    try:
        with _safetensors().safe_open(name, "pt") as file:
            text = (file.metadata() or {}).get(key)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dictionary
    except (OSError, _safetensors().SafetensorError) as found:
        raise error(f"cannot read {what} from {name}: {found}") from found
    if text is None:
        raise error(f"{name} holds no {what.split()[-1]}: its metadata lack {key!r}")
    try:
        return json.loads(text), tensors
    except ValueError as found:
        raise error(f"{name}: the metadata of this {what.split()[-1]} cannot be read: {found}") from found


def _safetensors() -> Any:
    """Import safetensors, which is an optional dependency."""
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise KVPassError("weights of policies are stored as safetensors: pip install 'kvpass[align]'") from error
    return safetensors
